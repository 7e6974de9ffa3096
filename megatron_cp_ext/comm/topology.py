"""A process group as its members see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_cp_ext.comm.traffic import Traffic

if TYPE_CHECKING:
    from megatron_cp_ext.comm.wire import Wire


@dataclass(frozen=True)
class CommGroup:
    """Some ranks that exchange data, in order, and the place of this process among them.

    Args:
        ranks: global ranks of the members.
        rank: this process's index in `ranks`.
        group: their process group; None only for a group of one.
        reverse: a second group of the same ranks, on which every other rank sends around the
            ring, so that a rank's sends and receives are on different groups; None for none.
        wire: what carries the bytes; None for the process group itself, by way of host memory
            where its backend does not carry the tensors' device.
        traffic: where what this rank sends is counted.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: dist.ProcessGroup | None = None
    reverse: dist.ProcessGroup | None = None
    wire: Wire | None = None
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < len(self.ranks), (self.rank, self.ranks)
        connected = self.group is not None or self.wire is not None
        assert connected or self.size == 1, "several ranks need a process group"

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | None,
        *,
        reverse: dist.ProcessGroup | None = None,
        wire: Wire | None = None,
        traffic: Traffic | None = None,
    ) -> CommGroup:
        """This process's view of a process group; None stands for a group of its own."""
        traffic = traffic if traffic is not None else Traffic()
        if group is None or dist.get_world_size(group) == 1:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            return cls(ranks=(rank,), traffic=traffic)
        return cls(
            ranks=tuple(dist.get_process_group_ranks(group)),
            rank=dist.get_rank(group),
            group=group,
            reverse=reverse,
            wire=wire,
            traffic=traffic,
        )

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)
