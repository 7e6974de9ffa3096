"""Runs a training on this machine's CPUs with Megatron imported once for all ranks.

    python -m megatron_cp_ext.verification.forked RANKS LOGS [script.py] ARGS

torchrun starts a Python for itself and for every rank, and each imports torch and Megatron, which
for a training of seconds is most of the work. Here one process imports them and forks the ranks.
What the ranks run is the same, and so is what they see of torchrun: its environment variables and
a store kept by the parent. Not for accelerators, which must not be forked.
"""

from __future__ import annotations

import datetime
import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from megatron_cp_ext.run import prepare

GRACE_S = 5.0


def main() -> int:
    """Fork the ranks and wait for them; the first one that fails ends the others."""
    ranks, logs = int(sys.argv[1]), Path(sys.argv[2])
    sys.argv = [sys.argv[0], *sys.argv[3:]]
    run = prepare()
    importlib.import_module("megatron.training")
    ready_read, ready_write = os.pipe()
    pids = [_fork(rank, ranks, logs, run=run, ready=ready_read) for rank in range(ranks)]

    # Only now, because the store has threads, which do not survive a fork.
    from torch.distributed import TCPStore

    store = TCPStore(
        "localhost",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(minutes=5),
    )
    os.write(ready_write, str(store.port).encode().ljust(8) * ranks)
    return _wait(pids)


def _fork(rank: int, ranks: int, logs: Path, *, run: Callable[[], None], ready: int) -> int:
    """Start one rank; its process id."""
    folder = logs / "0" / str(rank)
    folder.mkdir(parents=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for descriptor, name in ((1, "stdout.log"), (2, "stderr.log")):
            target = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(target, descriptor)
            os.close(target)
        port = os.read(ready, 8).decode().strip()
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            # The parent keeps the store; rank 0 must not open a second one.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        run()
        status = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the interpreter's clean-up, which belongs to the parent.
        os._exit(status)


def _wait(pids: list[int]) -> int:
    """Wait for all ranks; on the first failure stop the others and name it as torchrun does."""
    running = dict(enumerate(pids))
    failed: tuple[int, int] | None = None
    while running:
        pid, status = os.wait()
        rank = pids.index(pid)
        del running[rank]
        code = os.waitstatus_to_exitcode(status)
        if code and failed is None:
            failed = rank, code
            _stop(list(running.values()))
    if failed is None:
        return 0
    print(f"Root Cause (first observed failure):\n  rank : {failed[0]}\n  exitcode : {failed[1]}")
    return 1


def _stop(pids: list[int]) -> None:
    """End processes: first politely, then for certain."""
    handles = {os.pidfd_open(pid): pid for pid in pids}
    for handle in handles:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    waiting = set(handles)
    while waiting:
        ended, _, _ = select.select(list(waiting), [], [], GRACE_S)
        if not ended:
            break
        waiting -= set(ended)
    for handle in waiting:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    for handle in handles:
        os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
