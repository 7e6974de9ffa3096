"""What carries bytes between ranks: process groups, straight or by way of host memory.

`transfer.py` and `collectives.py` say what goes where, count it and order it with the kernels.
A wire only carries it. Which one carries is decided in `wire_for`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_ext.comm.streams import Waitable
from megatron_cp_ext.comm.topology import CommGroup

# torch 2.13 renames these two and warns at every use of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A contiguous buffer, and the member of the group that it goes to or comes from.
Addressed = tuple[Tensor, int]


class Wire(Protocol):
    """Starts operations; each method returns what is to be waited for.

    Args:
        on_streams: whether the operations queue on the device's current stream, as those of NCCL
            and HCCL do; the others are waited for by the host.
    """

    on_streams: bool

    def point_to_point(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], group: CommGroup
    ) -> list[Waitable]:
        """Send some buffers and fill others; see `start_transfer`."""

    def all_to_all(
        self, into: Tensor, buffer: Tensor, sizes: tuple[list[int], list[int]], group: CommGroup
    ) -> list[Waitable]:
        """Fill a flat buffer with a part from each; `sizes` are those to receive and to send."""

    def all_gather(self, into: Tensor, buffer: Tensor, group: CommGroup) -> list[Waitable]:
        """Fill a flat buffer with everybody's."""

    def reduce_scatter(self, into: Tensor, buffer: Tensor, group: CommGroup) -> list[Waitable]:
        """Fill a flat buffer with this rank's part of the sum of everybody's."""


class ProcessGroupWire:
    """torch.distributed, on the tensors' own device."""

    on_streams = True

    def point_to_point(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], group: CommGroup
    ) -> list[Waitable]:
        """One batch for each process group, the groups in the same order on every rank.

        Within a batch NCCL starts all operations together. Separate calls can deadlock where two
        ranks both send first, and so can two groups whose order differs between ranks.
        """
        lanes: dict[dist.ProcessGroup | None, list[dist.P2POp]] = {group.group: []}
        if group.reverse is not None:
            lanes[group.reverse] = []
        for buffer, to in sends:
            lane = _lane(group, group.rank)
            lanes[lane].append(dist.P2POp(dist.isend, buffer, group.ranks[to], group=lane))
        for buffer, source in receives:
            lane = _lane(group, source)
            lanes[lane].append(dist.P2POp(dist.irecv, buffer, group.ranks[source], group=lane))
        works: list[Waitable] = []
        for operations in lanes.values():
            if operations:
                works += dist.batch_isend_irecv(operations)
        return works

    def all_to_all(
        self, into: Tensor, buffer: Tensor, sizes: tuple[list[int], list[int]], group: CommGroup
    ) -> list[Waitable]:
        """See `Wire`."""
        return [dist.all_to_all_single(into, buffer, *sizes, group=group.group, async_op=True)]

    def all_gather(self, into: Tensor, buffer: Tensor, group: CommGroup) -> list[Waitable]:
        """See `Wire`."""
        return [_all_gather(into, buffer, group=group.group, async_op=True)]

    def reduce_scatter(self, into: Tensor, buffer: Tensor, group: CommGroup) -> list[Waitable]:
        """See `Wire`."""
        return [_reduce_scatter(into, buffer, group=group.group, async_op=True)]


class _Landing:
    """What arrives in host memory and is to be copied to the device."""

    def __init__(self, works: list[Waitable], copies: list[tuple[Tensor, Tensor]]) -> None:
        self._works, self._copies = works, copies

    def wait(self) -> None:
        """Wait for it on the host, then copy it on the current stream."""
        for work in self._works:
            work.wait()
        for device, host in self._copies:
            # The allocator of pinned memory keeps it until the copy is done.
            device.copy_(host, non_blocking=True)
        self._works, self._copies = [], []


class HostStagingWire:
    """Copies what leaves to host memory, and what arrives back to the device.

    For process groups that carry host memory only, such as gloo's where several ranks share one
    GPU. The host waits for every copy and every message: this is for tests, not for speed.

    Args:
        inner: what carries the host's buffers.
    """

    on_streams = False

    def __init__(self, inner: Wire | None = None) -> None:
        self._inner = inner or ProcessGroupWire()

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, complete when this returns."""
        return self.host_like(tensor).copy_(tensor)

    def host_like(self, tensor: Tensor) -> Tensor:
        """Host memory for such a tensor, pinned where it will be copied to a device."""
        pinned = tensor.device.type != "cpu"
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)

    def point_to_point(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], group: CommGroup
    ) -> list[Waitable]:
        """See `Wire`."""
        leaving = [(self.to_host(buffer), to) for buffer, to in sends]
        arriving = [(self.host_like(buffer), source) for buffer, source in receives]
        works = self._inner.point_to_point(leaving, arriving, group)
        landed = [(buffer, host) for (buffer, _), (host, _) in zip(receives, arriving, strict=True)]
        return [_Landing(works, landed)]

    def all_to_all(
        self, into: Tensor, buffer: Tensor, sizes: tuple[list[int], list[int]], group: CommGroup
    ) -> list[Waitable]:
        """See `Wire`."""
        host = self.host_like(into)
        works = self._inner.all_to_all(host, self.to_host(buffer), sizes, group)
        return [_Landing(works, [(into, host)])]

    def all_gather(self, into: Tensor, buffer: Tensor, group: CommGroup) -> list[Waitable]:
        """See `Wire`."""
        host = self.host_like(into)
        works = self._inner.all_gather(host, self.to_host(buffer), group)
        return [_Landing(works, [(into, host)])]

    def reduce_scatter(self, into: Tensor, buffer: Tensor, group: CommGroup) -> list[Waitable]:
        """See `Wire`."""
        host = self.host_like(into)
        works = self._inner.reduce_scatter(host, self.to_host(buffer), group)
        return [_Landing(works, [(into, host)])]


class SilentWire:
    """Carries nothing: what arrives is this rank's own data, as often as it fits.

    For timing what a rank computes, without other ranks: results are meaningless.
    """

    on_streams = False

    def point_to_point(
        self, sends: Sequence[Addressed], receives: Sequence[Addressed], group: CommGroup
    ) -> list[Waitable]:
        """See `Wire`; where this rank sends nothing, zeros arrive."""
        for index, (into, _) in enumerate(receives):
            if sends:
                _fill(into, sends[index % len(sends)][0])
            else:
                into.zero_()
        return []

    def all_to_all(
        self, into: Tensor, buffer: Tensor, sizes: tuple[list[int], list[int]], group: CommGroup
    ) -> list[Waitable]:
        """See `Wire`."""
        _fill(into, buffer)
        return []

    def all_gather(self, into: Tensor, buffer: Tensor, group: CommGroup) -> list[Waitable]:
        """See `Wire`."""
        _fill(into, buffer)
        return []

    def reduce_scatter(self, into: Tensor, buffer: Tensor, group: CommGroup) -> list[Waitable]:
        """See `Wire`."""
        _fill(into, buffer)
        return []


def _fill(into: Tensor, source: Tensor) -> None:
    """Repeat a flat buffer in another; zeros if there is none."""
    if not source.numel():
        into.zero_()
        return
    for part in into.split(source.numel()):
        part.copy_(source[: part.numel()])


_STRAIGHT, _STAGED = ProcessGroupWire(), HostStagingWire()


def wire_for(group: CommGroup, device: torch.device) -> Wire:
    """What carries tensors of a device between the members of a group."""
    if group.wire is not None:
        return group.wire
    if device.type != "cpu" and _carries_host_only(group.group, device):
        return _STAGED
    return _STRAIGHT


@functools.lru_cache(maxsize=32)
def _carries_host_only(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether a process group has no way of its own for tensors of a device; says so once."""
    assert group is not None
    try:
        backend = group._get_backend(torch.device(device.type)).name()
    except RuntimeError:  # it has no backend for the device at all
        backend = "gloo"
    if backend.lower() != "gloo":
        return False
    warnings.warn(
        f"context parallelism: the process group's backend is gloo, which does not carry "
        f"{device.type} tensors; they go through host memory, which is slow",
        stacklevel=2,
    )
    return True


@functools.lru_cache(maxsize=32)
def connect(group: dist.ProcessGroup) -> None:
    """Make NCCL or HCCL set up a group's communicator, once.

    They do so at the first operation, in which every member must take part. A ring's first
    step may concern only some of them. Collective over the members.
    """
    for kind in group._device_types:
        if kind.type != "cpu" and group._get_backend(kind).name().lower() != "gloo":
            dist.all_reduce(torch.zeros(1, device=kind.type), group=group)


def _lane(group: CommGroup, sender: int) -> dist.ProcessGroup | None:
    """The process group on which `sender` sends: with two, odd ranks use the second."""
    return group.reverse if group.reverse is not None and sender % 2 else group.group
