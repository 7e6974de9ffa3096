"""Runs a command that starts processes of its own, and leaves none of them behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.2
GRACE_S = 5.0
# torchrun gives its workers 30 s; waiting longer leaves the killing to it.
GRACE_WITHOUT_PROC_S = 35.0
ROUNDS = 10
TAG = "MEGATRON_CP_VERIFY_RUN"


@dataclass(frozen=True)
class Finished:
    """How a command ended.

    Args:
        returncode: its exit status, negative for a signal.
        timed_out: the command was stopped because its time was over.
        wall_s: seconds from start to end.
    """

    returncode: int
    timed_out: bool
    wall_s: float


class Cancelled(Exception):
    """The run was stopped from outside."""


def run_command(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str],
    timeout_s: float,
    on_poll: Callable[[], None] = lambda: None,
    cancel: threading.Event | None = None,
) -> Finished:
    """Run `command` to its end; however it ends, no process it started outlives the call.

    Args:
        command: program and arguments.
        log: file for the command's stdout and stderr together.
        env: the whole environment.
        timeout_s: seconds after which everything is stopped.
        on_poll: called several times a second while the command runs.
        cancel: stops everything once it is set.

    Raises:
        Cancelled: `cancel` was set.
    """
    tag = uuid.uuid4().hex
    start = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**env, TAG: f"{env.get(TAG, '')} {tag}"},
            start_new_session=True,
        )
        timed_out = False
        try:
            while process.poll() is None:
                if cancel is not None and cancel.is_set():
                    raise Cancelled
                if time.monotonic() - start > timeout_s:
                    timed_out = True
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                on_poll()
        finally:
            _stop(process, tag)
    return Finished(process.returncode, timed_out, time.monotonic() - start)


def _stop(process: subprocess.Popen[bytes], tag: str) -> None:
    """End `process` and everything that descends from it.

    torchrun puts each worker into a session of its own, so that a process group does not
    reach them, and a worker whose torchrun is gone has no parent to be found by. What all of
    them keep is the environment they were started with, and the tag in it.
    """
    tagged_is_visible = Path("/proc/self/environ").exists() and hasattr(os, "pidfd_open")
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S if tagged_is_visible else GRACE_WITHOUT_PROC_S)
    if tagged_is_visible:
        for _ in range(ROUNDS):  # one may start another while it is being killed
            strays = _tagged(tag)
            if not strays:
                break
            for pid in strays:
                _kill_and_wait(pid)
            process.poll()
    else:
        _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the group that `process` leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _tagged(tag: str) -> list[int]:
    """The live processes whose starting environment holds the tag."""
    wanted = tag.encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        # Processes of other users, ended ones and zombies cannot be read, or read empty.
        with contextlib.suppress(OSError):
            if wanted in Path(entry.path, "environ").read_bytes():
                found.append(int(entry.name))
    return found


def _kill_and_wait(pid: int) -> None:
    """Kill a process and wait until it is gone; being gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], GRACE_S)
        finally:
            os.close(handle)
