"""Sending around a ring: each rank to the next, from the previous, without waiting."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_ext.comm.topology import CommGroup


class RingTransfer:
    """A transfer under way.

    Args:
        received: where the data of the previous rank arrives.
        sent: what leaves; kept alive, and unchanged, until the transfer is over.
        works: the pending operations.
    """

    def __init__(self, received: Tensor, sent: Tensor, works: list[dist.Work]) -> None:
        self._received, self._sent, self._works = received, sent, works

    def wait(self) -> Tensor:
        """Block until both directions are done; return what the previous rank sent."""
        for work in self._works:
            work.wait()
        return self._received


def ring_send(buffer: Tensor, group: CommGroup, *, kind: str) -> RingTransfer:
    """Start sending `buffer` to the next rank and receiving as much from the previous one.

    Args:
        buffer: contiguous; every rank's has the same shape and dtype.
        group: the ring, of at least two ranks.
        kind: what travels, for the count.
    """
    assert group.size > 1 and buffer.is_contiguous()
    received = torch.empty_like(buffer)
    here = group.rank
    to, source = group.ranks[(here + 1) % group.size], group.ranks[here - 1]
    group.traffic.record(kind, buffer.numel() * buffer.element_size())
    if group.reverse is None:
        # Both operations in one batch: with separate calls NCCL can deadlock on a ring.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, buffer, to, group=group.group),
                dist.P2POp(dist.irecv, received, source, group=group.group),
            ]
        )
    else:
        sending = dist.isend(buffer, to, group=_lane(group, here))
        receiving = dist.irecv(received, source, group=_lane(group, (here - 1) % group.size))
        works = [work for work in (sending, receiving) if work is not None]
    return RingTransfer(received, buffer, works)


def _lane(group: CommGroup, sender: int) -> dist.ProcessGroup | None:
    """The process group on which `sender` sends: with two, odd ranks use the second."""
    return group.reverse if sender % 2 else group.group
