"""Point-to-point transfers between the ranks of a ring, started without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from megatron_cp_ext.comm.places import during, members
from megatron_cp_ext.comm.topology import CommGroup


class Transfer:
    """Sends and receives under way.

    Args:
        received: buffers that are being filled, in the order they were named.
        sent: what leaves; kept alive until the transfer is over.
        works: the pending operations.
        about: what is waited for, in words.
    """

    def __init__(
        self, received: list[Tensor], sent: list[Tensor], works: list[dist.Work], about: str
    ) -> None:
        self._received, self._sent, self._works = received, sent, works
        self._about = about

    def wait(self) -> list[Tensor]:
        """Block until all of it is done; return what has arrived and let go of what was sent."""
        with during(self._about):
            for work in self._works:
                work.wait()
        self._works, self._sent = [], []
        return self._received


def start_transfer(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    group: CommGroup,
    *,
    kind: str,
) -> Transfer:
    """Start sending some buffers and receiving others.

    Between two ranks, what is sent first is received first. All ranks of the group must call
    this in the same order for transfers that concern each other.

    Args:
        sends: contiguous buffers, each with the member of the group it goes to.
        receives: contiguous buffers to be filled, each with the member it comes from.
        group: whose members these are.
        kind: what travels, for the count.
    """
    sent = [buffer for buffer, _ in sends]
    received = [buffer for buffer, _ in receives]
    if not sends and not receives:
        return Transfer(received, sent, [], "waiting for nothing")
    about = _in_words(
        kind, [group.ranks[s] for _, s in receives], [group.ranks[t] for _, t in sends]
    )
    with during(f"starting, then {about}"):
        return Transfer(received, sent, _start(sends, receives, group, kind=kind), about)


def _start(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    group: CommGroup,
    *,
    kind: str,
) -> list[dist.Work]:
    for buffer, _ in sends:
        group.traffic.record(kind, buffer.numel() * buffer.element_size())
    if group.reverse is None:
        # One batch: with separate calls NCCL can deadlock where ranks send to each other.
        operations = [
            dist.P2POp(dist.isend, buffer, group.ranks[to], group=group.group)
            for buffer, to in sends
        ] + [
            dist.P2POp(dist.irecv, buffer, group.ranks[source], group=group.group)
            for buffer, source in receives
        ]
        return dist.batch_isend_irecv(operations)
    works = [
        dist.isend(buffer, group.ranks[to], group=_lane(group, group.rank)) for buffer, to in sends
    ] + [
        dist.irecv(buffer, group.ranks[source], group=_lane(group, source))
        for buffer, source in receives
    ]
    return [work for work in works if work is not None]


def _in_words(kind: str, sources: list[int], targets: list[int]) -> str:
    """A transfer in words, with global ranks, for the error that ends it."""
    waiting = [f"for {kind} from {members(sources)}"] if sources else []
    sending = [f"to send {kind} to {members(targets)}"] if targets else []
    return f"waiting {' and '.join(waiting + sending)}"


def _lane(group: CommGroup, sender: int) -> dist.ProcessGroup | None:
    """The process group on which `sender` sends: with two, odd ranks use the second."""
    return group.reverse if sender % 2 else group.group
