"""Streams of an accelerator, on which transfers run beside the kernels.

A transfer that is started runs on a stream of its own. It begins when what the current stream
had been given by then is done, because that is what made the data it sends and what last used
the memory it fills. Kernels that are launched afterwards run beside it. Waiting for the transfer
makes the current stream wait, and never the host.

    current stream   make data | kernel of step 1 ............ | kernel of step 2
    side stream                | wait, transfer of step 2, mark |
                     start_transfer                            Transfer.wait

A CPU has no streams: there the operations themselves are asynchronous.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

# Devices whose torch module (torch.cuda, torch.npu) has Stream, Event, stream and current_stream.
_WITH_STREAMS = ("cuda", "npu")


class Waitable(Protocol):
    """Something under way; after `wait`, the work that follows on this thread comes after it."""

    def wait(self) -> Any:
        """Wait for it."""


class _Mark:
    """A point of a stream that other streams can wait for."""

    def __init__(self, module: Any, stream: Any) -> None:
        self._module = module
        self._event = module.Event()
        self._event.record(stream)

    def wait(self) -> None:
        """Make the current stream wait for it; the host goes on."""
        self._module.current_stream().wait_event(self._event)


class SideStream:
    """A stream beside the current one.

    Args:
        device: where.
        module: the device's torch module, `torch.cuda` or one that mirrors it.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._module = module
        self._stream = module.Stream(device=device)

    @contextlib.contextmanager
    def after_current(self) -> Iterator[None]:
        """Work of this block is queued here, behind what the current stream has now."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def mark(self) -> Waitable:
        """The end of what has been queued here."""
        return _Mark(self._module, self._stream)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Let the allocator give away these tensors' memory only when this stream is done too."""
        for tensor in tensors:
            tensor.record_stream(self._stream)


def side_stream(device: torch.device, purpose: object) -> SideStream | None:
    """The stream for a purpose on a device, the same one at every call; None without streams.

    Args:
        device: where the tensors are.
        purpose: equal purposes share a stream.
    """
    return _side_stream(device, purpose) if device.type in _WITH_STREAMS else None


@functools.lru_cache(maxsize=32)
def _side_stream(device: torch.device, purpose: object) -> SideStream:
    return SideStream(device, getattr(torch, device.type))
