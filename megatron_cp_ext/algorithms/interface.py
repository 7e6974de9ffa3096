"""What an algorithm is, and the call it serves."""

from __future__ import annotations

import abc
import functools
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

    def tiles(self, group: CommGroup, owner: int) -> Sequence[Tile]:
        """Tiles of this rank's queries against the keys that rank `owner` of `group` holds."""
        return shard_tiles(self.mask, self.layout.shards[group.rank], self.layout.shards[owner])

    def tiles_of_all_keys(self, group: CommGroup) -> Sequence[Tile]:
        """Tiles of this rank's queries against the whole sequence in natural order."""
        everything = (Run(0, self.layout.seq_len),)
        return shard_tiles(self.mask, self.layout.shards[group.rank], everything)


class Algorithm(abc.ABC):
    """A way to attend over a sequence that several ranks share.

    Shapes on each rank: query `[s_local, b, h, d]`, key `[s_local, b, hk, d]`, value
    `[s_local, b, hk, dv]`, sink `[h]`; out `[s_local, b, h, dv]` in the query's dtype and lse
    `[b, h, s_local]`.
    """

    name: str

    @abc.abstractmethod
    def check(self, call: AttentionCall, heads: int, kv_heads: int) -> None:
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


def shard_tiles(
    mask: AttentionMask, q_runs: tuple[Run, ...], k_runs: tuple[Run, ...]
) -> Sequence[Tile]:
    """`mask.tiles`, remembered for masks that are the same at every step.

    Dense masks and documents change with the batch, and remembering them would keep their
    tensors alive.
    """
    if mask.pairs is None and mask.spans is None and mask.samples is None:
        return _remembered_tiles(mask, q_runs, k_runs)
    return mask.tiles(q_runs, k_runs)


@functools.lru_cache(maxsize=4096)
def _remembered_tiles(
    mask: AttentionMask, q_runs: tuple[Run, ...], k_runs: tuple[Run, ...]
) -> Sequence[Tile]:
    return mask.tiles(q_runs, k_runs)
