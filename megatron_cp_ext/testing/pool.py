"""Worker processes joined by gloo, started once and used for many calls.

Importing torch costs seconds, so a test matrix cannot afford new processes for every case. The pool
forks its workers from a server process that has torch imported and nothing else running, and lets
every call start in clean surroundings: a new default process group (and with it no left-over
sub-group) and the same random seed. After a failure the workers are thrown away, because a rank
may be stuck in a collective and the ranks may disagree on what they have exchanged; the next call
starts new ones, which takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_cp_ext.errors import UsageError

_HOST = "127.0.0.1"
_START_TIMEOUT = 120.0
# How long the other ranks may take to answer once one has failed: enough for ranks that fail alike.
_GRACE = 2.0
_STACK_TIMEOUT = 1.0
# A signal that comes just before a wait does not end it: Python sees it when the wait is over.
_LONGEST_WAIT = 1.0
# The parent's deadline must come first, so that a hang is always reported as one.
_COLLECTIVE_MARGIN = 60.0


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank.

    Attributes:
        kind: name of the exception's class, or "died" for a process that ended by itself.
        message: `str` of the exception.
        traceback: the traceback as text, ending in the exception.
    """

    kind: str
    message: str
    traceback: str


class WorkerError(RuntimeError):
    """A call failed on at least one rank.

    Attributes:
        rank: the rank that failed first.
        failures: every failure that was reported, by rank.
    """

    def __init__(self, message: str, *, rank: int, failures: Mapping[int, Failure]) -> None:
        super().__init__(message)
        self.rank = rank
        self.failures = dict(failures)


class WorkerTimeout(WorkerError):
    """At least one rank did not finish in time; `rank` is the lowest of them."""


class GlooPool:
    """`world_size` processes with an initialised gloo default process group.

    The processes start at the first call. They end with `close`, at the end of a `with` block, when
    the pool is no longer referenced, and when this process ends in whatever way.

    A script that makes a pool needs multiprocessing's usual `if __name__ == "__main__":` guard.

    Args:
        world_size: number of ranks, at least 1.

    Raises:
        UsageError: if `world_size` is less than 1.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise UsageError(
                option="world_size",
                value=world_size,
                reason="a pool needs at least one rank",
                remedy="use world_size=1 or more",
            )
        self.world_size = world_size
        self._store: dist.TCPStore | None = None
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    @property
    def running(self) -> bool:
        """Whether the workers exist; they do not before the first call or after a failure."""
        return bool(self._processes)

    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank and return the results by rank.

        The function runs with `torch.distributed` initialised, `torch.manual_seed(0)`, one thread,
        and the parent's import path and working directory.

        Args:
            function: a picklable callable: defined at the top level of a module, or a
                `functools.partial` of one.
            *args: passed on by value, like the results; tensors are copied.
            timeout: seconds after which the call is given up and the workers are killed. Starting
                the workers does not count.
            **kwargs: passed on by value.

        Raises:
            WorkerError: if a rank raised or died; it names the rank that did so first and shows the
                remote traceback.
            WorkerTimeout: if a rank did not finish in time; it shows where each such rank was.
        """
        # Two layers, because unpickling the function imports its module and needs the path first.
        work = pickle.dumps((function, args, kwargs))
        message = pickle.dumps((tuple(sys.path), os.getcwd(), timeout, work))
        try:
            if not self.running:
                self._start()
            for connection in self._connections:
                # A worker that died while idle is noticed when its answer is read.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.send_bytes(message)
            answers = self._collect(timeout)
        except BaseException:
            self.close()
            raise
        return [pickle.loads(answers[rank]) for rank in range(self.world_size)]

    def close(self) -> None:
        """Kill the workers. A later call starts new ones."""
        processes, connections = self._processes, self._connections
        self._processes, self._connections, self._store = [], [], None
        for process in processes:
            process.kill()
        for connection in connections:
            connection.close()
        for process in processes:
            process.join()
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        # The parent owns the store and lets the system choose its port, so no port can be taken
        # between choosing and using it.
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        context = _context()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(rank, self.world_size, self._store.port, theirs),
                name=f"gloo-pool-rank-{rank}",
                daemon=True,
            )
            self._connections.append(ours)
            process.start()
            self._processes.append(process)
            # Only the worker may hold its end: its death must show as end of file here.
            theirs.close()
        self._collect(_START_TIMEOUT)

    def _collect(self, timeout: float) -> dict[int, bytes]:
        """Wait for one answer from every rank; return the pickled results by rank."""
        results: dict[int, bytes] = {}
        failures: dict[int, Failure] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        while pending:
            remaining = deadline - time.monotonic()
            ready = wait(list(pending), timeout=min(max(0.0, remaining), _LONGEST_WAIT))
            if not ready and remaining <= 0:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                answer = self._receive(rank)
                if isinstance(answer, Failure):
                    if not failures:
                        deadline = min(deadline, time.monotonic() + _GRACE)
                    failures[rank] = answer
                else:
                    results[rank] = answer
        if failures:
            raise _worker_error(failures, stuck=sorted(pending.values()))
        if pending:
            raise self._timeout_error(timeout, sorted(pending.values()))
        return results

    def _receive(self, rank: int) -> bytes | Failure:
        try:
            answer = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(_GRACE)
            code = process.exitcode
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code is not None and code < 0
                else f"ended with exit code {code}"
            )
            return Failure("died", how, f"(no traceback: the process {how})")
        assert isinstance(answer, bytes | Failure)
        return answer

    def _timeout_error(self, timeout: float, stuck: list[int]) -> WorkerTimeout:
        places: dict[int, str] = {}
        for rank in stuck:
            connection = self._connections[rank]
            place = "(gave no answer)\n"
            with contextlib.suppress(EOFError, OSError):
                connection.send_bytes(b"")
                if connection.poll(_STACK_TIMEOUT):
                    answer = pickle.loads(connection.recv_bytes())
                    # Anything else is the result, come a moment too late.
                    place = answer if isinstance(answer, str) else "(finished just now)\n"
            places[rank] = place
        details = "\n".join(f"rank {rank} was here:\n{place}" for rank, place in places.items())
        return WorkerTimeout(
            f"rank(s) {stuck} of {self.world_size} did not finish within {timeout:g} s\n{details}",
            rank=stuck[0],
            failures={rank: Failure("timeout", "", place) for rank, place in places.items()},
        )


def _context() -> Any:
    """The multiprocessing context: forkserver with torch imported, or spawn where that is missing.

    Forking after the import is safe because importing torch starts no thread.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    return context


def _worker_error(failures: Mapping[int, Failure], *, stuck: list[int]) -> WorkerError:
    # When a process dies, the errors of its peers may be noticed before its death is.
    dead = [rank for rank, failure in failures.items() if failure.kind == "died"]
    rank = dead[0] if dead else next(iter(failures))
    first = failures[rank]
    lines = [f"rank {rank} failed: {first.kind}: {first.message}", first.traceback.rstrip()]
    for other, failure in sorted(failures.items()):
        if other != rank:
            lines.append(f"rank {other} failed too: {failure.kind}: {failure.message}")
    if stuck:
        lines.append(f"rank(s) {stuck} were still running and have been killed")
    return WorkerError("\n".join(lines), rank=rank, failures=failures)


class _Mailbox:
    """The worker's end of the pipe, read by a thread of its own.

    The thread ends the process when the parent is gone, and answers an empty message with the main
    thread's stack, both also while the main thread hangs in a collective.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def receive(self) -> bytes:
        """Wait for the next call."""
        return self._calls.get()

    def send(self, answer: bytes | str | Failure) -> None:
        """Send one answer to the parent."""
        with self._sending:
            self._connection.send_bytes(pickle.dumps(answer))

    def _listen(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            try:
                message = self._connection.recv_bytes()
                if message:
                    self._calls.put(message)
                else:
                    self.send("".join(traceback.format_stack(sys._current_frames()[main])))
            except (EOFError, OSError):
                # Without a parent there is nobody to clean up for, and the main thread may never
                # return: leave at once.
                os._exit(1)


def _work(rank: int, world_size: int, port: int, connection: Connection) -> None:
    # Ctrl-C reaches the whole process group; what to do about it is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    os.environ["OMP_NUM_THREADS"] = "1"
    # gloo looks up the host's name by default, which need not resolve to a usable address.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    torch.set_num_threads(1)
    mailbox = _Mailbox(connection)
    store = dist.TCPStore(_HOST, port, is_master=False)
    mailbox.send(b"")
    number = 0
    while True:
        message = mailbox.receive()
        number += 1
        try:
            mailbox.send(
                _call(message, dist.PrefixStore(str(number), store), rank, world_size=world_size)
            )
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            mailbox.send(Failure(type(error).__name__, str(error), text))
        sys.stdout.flush()


def _call(message: bytes, store: dist.Store, rank: int, *, world_size: int) -> bytes:
    path, directory, timeout, work = pickle.loads(message)
    sys.path[:] = path
    importlib.invalidate_caches()
    os.chdir(directory)
    function, args, kwargs = pickle.loads(work)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout + _COLLECTIVE_MARGIN),
    )
    torch.manual_seed(0)
    return pickle.dumps(function(*args, **kwargs))
