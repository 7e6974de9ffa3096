"""Hybrid: Ulysses among neighbours, a ring across them (USP, arXiv:2405.07719).

The all-to-all stays on the fast links inside a node; the ring has fewer, longer steps.
"""

from __future__ import annotations

from torch import Tensor

from megatron_cp_ext.algorithms.interface import Algorithm, AttentionCall
from megatron_cp_ext.algorithms.ring import RingExchange
from megatron_cp_ext.algorithms.ulysses import attend_by_heads, check_heads
from megatron_cp_ext.groups import ContextParallelGroups
from megatron_cp_ext.layout import SequenceLayout


class HybridAlgorithm(Algorithm):
    """Ulysses of `groups.ulysses` inside a ring of `groups.ring`."""

    name = "hybrid"

    def check(self, groups: ContextParallelGroups, layout: SequenceLayout, heads: int) -> None:
        """Every rank of a Ulysses group needs a head."""
        check_heads(self.name, groups, heads)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sink: Tensor | None,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor | None]:
        """See `Algorithm`."""
        return attend_by_heads(query, key, value, sink=sink, exchange=RingExchange(), call=call)
