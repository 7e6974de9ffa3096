"""How a run ends when one of its ranks fails: soon, and with words for where each rank was.

The launcher stops all ranks once one has ended. That needs ranks that end: those that wait for
a rank that does not answer, those that fail but are held up on their way out, and those that are
told to stop. The last ones say what they were waiting for, which is all that can be known of a
rank that was killed.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from megatron_cp_ext.comm.places import during, here

# From an uncaught error to the certain end of the process.
EXIT_S = 30.0
# What shells say of a process that SIGTERM ended.
TERMINATED = 128 + signal.SIGTERM
# No signal has this number.
_LEAVE = b"\0"


def named_block(name: Callable[[dict[str, Any]], str]) -> Callable[..., Any]:
    """A wrapper by which the errors of a function of Megatron's say that they arose in it.

    Args:
        name: what the function does, from its arguments by name.
    """

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        with during(name(given)):
            return original(*args, **kwargs)

    return call


def training_step(given: dict[str, Any]) -> str:
    """The name of a call of `train_step`, which counts from 0 where the log counts from 1."""
    iteration = given.get("iteration")
    return "training step" if iteration is None else f"iteration {iteration + 1}"


def bounded_group(seconds: float) -> Callable[..., Any]:
    """A wrapper of `create_group` that sets how long context-parallel transfers may take.

    Args:
        seconds: until a rank that waits for another gives up.
    """
    timeout = datetime.timedelta(seconds=seconds)

    def create(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        description = call.arguments.get("group_desc") or ""
        if description.removeprefix("HIERARCHICAL_").startswith("CONTEXT_PARALLEL_GROUP"):
            call.arguments["timeout"] = timeout
        return original(*call.args, **call.kwargs)

    return create


def train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrapper of Megatron's training loop."""
    with certain_end(), report_of_termination():
        return original(*args, **kwargs)


@contextlib.contextmanager
def certain_end(limit_s: float = EXIT_S) -> Iterator[None]:
    """After an error that nobody catches the process ends, whatever its threads still do.

    Python waits for threads, and process groups for their peers, before a process ends. The
    watchdog is not a thread of Python's, so nothing can hold it up.

    Args:
        limit_s: how long the end may take; then all stacks are shown and it is forced.
    """
    before, trapped = sys.excepthook, faulthandler.is_enabled()
    if not trapped:
        faulthandler.enable()  # NCCL ends a process by SIGABRT when a transfer takes too long

    def hook(*error: Any) -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        before(*error)

    sys.excepthook = hook
    yield
    # Not after an error: it is still on its way to the hook.
    if sys.excepthook is hook:
        sys.excepthook = before
    if not trapped:
        faulthandler.disable()


@contextlib.contextmanager
def report_of_termination() -> Iterator[None]:
    """A rank that is told to stop by SIGTERM says where it was, and stops.

    Python's own handlers run only when the main thread is back from what it waits for, which may
    be never. A second thread is woken by the signal instead. Where somebody else handles the
    signal nothing is changed.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _leave_to_the_thread)
    watcher = threading.Thread(target=_watch, args=(reading,), daemon=True)
    watcher.start()
    owner = os.getpid()

    def forget() -> None:
        """A forked child has no such thread, and must not wake the parent's."""
        if signal.getsignal(signal.SIGTERM) is _leave_to_the_thread:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget)
    try:
        yield
    finally:
        if os.getpid() == owner:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(before)
            # Closing it would wake nobody while a forked child has it, too.
            os.write(writing, _LEAVE)
            watcher.join()
            os.close(writing)
            os.close(reading)


def _leave_to_the_thread(_number: int, _frame: Any) -> None:
    """Python tells of a signal through the wake-up descriptor only if it has a handler."""


def _watch(reading: int) -> None:
    """Wait for SIGTERM, or until there is nothing more to wait for."""
    while _LEAVE not in (numbers := os.read(reading, 64)):
        if signal.SIGTERM in numbers:
            where = here() or "outside of training steps"
            os.write(sys.stderr.fileno(), f"stopped by SIGTERM; {where}\n".encode())
            os._exit(TERMINATED)
