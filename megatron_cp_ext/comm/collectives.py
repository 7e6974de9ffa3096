"""All-to-all, all-gather and reduce-scatter on flat buffers, counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_ext.comm.places import during, members
from megatron_cp_ext.comm.topology import CommGroup

# torch 2.13 renames these two and warns at every use of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
    if group.size == 1:
        return buffer
    received = buffer.new_empty(sum(receive_sizes))
    own = send_sizes[group.rank]
    group.traffic.record(kind, (buffer.numel() - own) * buffer.element_size())
    with during(_with_others("all-to-all", kind, group)):
        dist.all_to_all_single(
            received, buffer, list(receive_sizes), list(send_sizes), group=group.group
        )
    return received


def all_gather(buffer: Tensor, group: CommGroup, *, kind: str) -> Tensor:
    """Gather a flat buffer of equal size from each rank: `[size, numel]`, in rank order."""
    if group.size == 1:
        return buffer.unsqueeze(0)
    gathered = buffer.new_empty(group.size * buffer.numel())
    sent = (group.size - 1) * buffer.numel() * buffer.element_size()
    group.traffic.record(kind, sent)
    with during(_with_others("all-gather", kind, group)):
        _all_gather(gathered, buffer, group=group.group)
    return gathered.view(group.size, -1)


def reduce_scatter(buffer: Tensor, group: CommGroup, *, kind: str) -> Tensor:
    """Sum `[size, n]` over the ranks and return this rank's row, `[n]`."""
    if group.size == 1:
        return buffer.squeeze(0)
    reduced = torch.empty_like(buffer[0])
    sent = (group.size - 1) * reduced.numel() * buffer.element_size()
    group.traffic.record(kind, sent)
    with during(_with_others("reduce-scatter", kind, group)):
        _reduce_scatter(reduced, buffer.flatten(), group=group.group)
    return reduced


def _with_others(operation: str, kind: str, group: CommGroup) -> str:
    """An operation in words, for the error that ends it."""
    others = [rank for rank in group.ranks if rank != group.ranks[group.rank]]
    return f"{operation} of {kind} with {members(others)}"
