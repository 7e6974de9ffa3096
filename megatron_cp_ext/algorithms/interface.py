"""What an algorithm is, and the call it serves."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_cp_ext.comm import CommGroup
from megatron_cp_ext.groups import ContextParallelGroups
from megatron_cp_ext.kernels import AttentionKernel, KernelOptions
from megatron_cp_ext.layout import Run, SequenceLayout
from megatron_cp_ext.mask import AttentionMask, Tile


@dataclass(frozen=True)
class AttentionCall:
    """Everything about one attention call but its tensors.

    Args:
        layout: which positions each rank of the group that exchanges KV holds.
        mask: what may attend to what, in global positions.
        kernel: what computes the tiles.
        options: scale, dropout, determinism.
        groups: who exchanges what.
        return_lse: whether the caller wants the log-sum-exp of every head.
    """

    layout: SequenceLayout
    mask: AttentionMask
    kernel: AttentionKernel
    options: KernelOptions
    groups: ContextParallelGroups
    return_lse: bool = False

    def tiles(self, group: CommGroup, k_runs: tuple[Run, ...]) -> Sequence[Tile]:
        """Tiles of this rank's queries against keys of the positions `k_runs`, in that order."""
        q_runs = self.layout.shards[group.rank]
        return self.mask.remember(
            ("tiles", q_runs, k_runs), lambda: self.mask.tiles(q_runs, k_runs)
        )


class Algorithm(abc.ABC):
    """A way to attend over a sequence that several ranks share.

    Shapes on each rank: query `[s_local, b, h, d]`, key `[s_local, b, hk, d]`, value
    `[s_local, b, hk, dv]`, sink `[h]`; out `[s_local, b, h, dv]` in the query's dtype and lse
    `[b, h, s_local]`.
    """

    name: str

    @abc.abstractmethod
    def check(self, groups: ContextParallelGroups, layout: SequenceLayout, heads: int) -> None:
        """Raise UsageError if these groups or head counts cannot be served."""

    @abc.abstractmethod
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sink: Tensor | None,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over the whole sequence: (out, lse). Differentiable, except for lse.

        lse is None where it was not asked for and would have to be sent.
        """
