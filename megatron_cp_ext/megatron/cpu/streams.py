"""Streams, events and synchronisation: work on a CPU is done when the call returns.

Classes and functions here stand in for those of `torch.cuda`, with the methods Megatron calls.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from megatron_cp_ext.megatron.cpu.device import OWNER
from megatron_cp_ext.patching.patch import Patch, replace


class Stream:
    """A queue that is always empty."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, _stream: Any) -> None:
        """Return at once: the other stream's work is done."""

    def wait_event(self, _event: Any) -> None:
        """Return at once: the event has happened."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, and return it."""
        event = Event() if event is None else event
        event.record()
        return event

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether all work is done: it is."""
        return True


class Event:
    """The time at which it was recorded."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._seconds: float | None = None

    def record(self, _stream: Any = None) -> None:
        """Remember the present time."""
        self._seconds = time.perf_counter()

    def wait(self, _stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether the event has happened: it has."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between this event and `end`.

        Raises:
            RuntimeError: one of the two was not recorded.
        """
        if self._seconds is None or end._seconds is None:
            raise RuntimeError("both events must be recorded before their distance is asked for")
        return (end._seconds - self._seconds) * 1000.0


_CURRENT = Stream()


def patches() -> list[Patch]:
    """Replace the parts of `torch.cuda` that order work on a device."""
    return [
        replace("torch.cuda:Stream", Stream, owner=OWNER),
        replace("torch.cuda:Event", Event, owner=OWNER),
        replace("torch.cuda:current_stream", lambda device=None: _CURRENT, owner=OWNER),
        replace("torch.cuda:default_stream", lambda device=None: _CURRENT, owner=OWNER),
        replace("torch.cuda:set_stream", lambda stream: None, owner=OWNER),
        replace("torch.cuda:stream", lambda stream: contextlib.nullcontext(stream), owner=OWNER),
        replace("torch.cuda:synchronize", lambda device=None: None, owner=OWNER),
        replace("torch.cuda.nvtx:range_push", lambda message: 0, owner=OWNER),
        replace("torch.cuda.nvtx:range_pop", lambda: 0, owner=OWNER),
    ]
