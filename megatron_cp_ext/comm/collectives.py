"""All-to-all, all-gather and reduce-scatter on flat buffers, counted.

Each comes in two forms: one that waits, and `start_...`, which returns a `Transfer` to wait for,
so that kernels run meanwhile. All ranks start the operations of a group in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp_ext.comm.places import members
from megatron_cp_ext.comm.topology import CommGroup
from megatron_cp_ext.comm.transfer import Transfer, start


def all_to_all(
    buffer: Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: CommGroup,
    *,
    kind: str,
) -> Tensor:
    """Send one part of a flat buffer to each rank, and receive one from each.

    Args:
        buffer: `[sum(send_sizes)]`, the parts in rank order.
        send_sizes: elements for each rank.
        receive_sizes: elements from each rank.
        group: who takes part.
        kind: what travels, for the count.

    Returns:
        `[sum(receive_sizes)]`, the parts in rank order.
    """
    return start_all_to_all(buffer, send_sizes, receive_sizes, group, kind=kind).wait()[0]


def start_all_to_all(
    buffer: Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: CommGroup,
    *,
    kind: str,
) -> Transfer:
    """Start `all_to_all`; what arrives is the transfer's one buffer."""
    if group.size == 1:
        return _nothing_to_do(buffer)
    received = buffer.new_empty(sum(receive_sizes))
    own = send_sizes[group.rank]
    group.traffic.record(kind, (buffer.numel() - own) * buffer.element_size())
    sizes = list(receive_sizes), list(send_sizes)
    return start(
        lambda wire: wire.all_to_all(received, buffer, sizes, group),
        sent=[buffer],
        received=[received],
        group=group,
        about=_with_others("all-to-all", kind, group),
    )


def all_gather(buffer: Tensor, group: CommGroup, *, kind: str) -> Tensor:
    """Gather a flat buffer of equal size from each rank: `[size, numel]`, in rank order."""
    return start_all_gather(buffer, group, kind=kind).wait()[0]


def start_all_gather(buffer: Tensor, group: CommGroup, *, kind: str) -> Transfer:
    """Start `all_gather`; what arrives is the transfer's one buffer."""
    if group.size == 1:
        return _nothing_to_do(buffer.unsqueeze(0))
    gathered = buffer.new_empty(group.size, buffer.numel())
    sent = (group.size - 1) * buffer.numel() * buffer.element_size()
    group.traffic.record(kind, sent)
    return start(
        lambda wire: wire.all_gather(gathered.view(-1), buffer, group),
        sent=[buffer],
        received=[gathered],
        group=group,
        about=_with_others("all-gather", kind, group),
    )


def reduce_scatter(buffer: Tensor, group: CommGroup, *, kind: str) -> Tensor:
    """Sum `[size, n]` over the ranks and return this rank's row, `[n]`."""
    return start_reduce_scatter(buffer, group, kind=kind).wait()[0]


def start_reduce_scatter(buffer: Tensor, group: CommGroup, *, kind: str) -> Transfer:
    """Start `reduce_scatter`; what arrives is the transfer's one buffer."""
    if group.size == 1:
        return _nothing_to_do(buffer.squeeze(0))
    reduced = torch.empty_like(buffer[0])
    sent = (group.size - 1) * reduced.numel() * buffer.element_size()
    group.traffic.record(kind, sent)
    flat = buffer.flatten()
    return start(
        lambda wire: wire.reduce_scatter(reduced, flat, group),
        sent=[flat],
        received=[reduced],
        group=group,
        about=_with_others("reduce-scatter", kind, group),
    )


def _nothing_to_do(buffer: Tensor) -> Transfer:
    return Transfer([buffer], [], [], "waiting for nothing")


def _with_others(operation: str, kind: str, group: CommGroup) -> str:
    """An operation in words, for the error that ends it."""
    others = [rank for rank in group.ranks if rank != group.ranks[group.rank]]
    return f"{operation} of {kind} with {members(others)}"
