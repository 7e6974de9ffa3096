"""Ulysses: ranks exchange their sequence parts for heads, attend, and exchange back.

One all-to-all brings the queries, one the keys and values, one takes the output home. What
happens in between is any other exchange: none for plain Ulysses, a ring for the hybrid.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron_cp_ext.algorithms.function import KVExchange, sharded_attention
from megatron_cp_ext.algorithms.heads import HeadExchange, HeadSplit, gather_heads, scatter_heads
from megatron_cp_ext.algorithms.interface import Algorithm, AttentionCall
from megatron_cp_ext.algorithms.local import LocalExchange
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.groups import ContextParallelGroups
from megatron_cp_ext.kernels.shared_heads import SharedHeadsKernel
from megatron_cp_ext.layout import SequenceLayout


def attend_by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sink: Tensor | None,
    exchange: KVExchange,
    call: AttentionCall,
) -> tuple[Tensor, Tensor | None]:
    """Attention with this rank's share of the heads inside its Ulysses group."""
    ulysses = call.groups.ulysses
    split = HeadSplit.of(query.size(2), key.size(2), ulysses.size)

    def among_neighbours(*heads: tuple, kind: str) -> HeadExchange:
        return HeadExchange.within(call.layout, call.groups.cp.rank, ulysses, heads, kind=kind)

    by_query_head = among_neighbours(split.query, kind="heads")
    (q,) = scatter_heads(by_query_head, query)
    k, v = scatter_heads(among_neighbours(split.kv, split.kv, kind="heads"), key, value)
    index, own = split.kv_index(ulysses.rank), split.query[ulysses.rank]
    inner = replace(
        call,
        kernel=call.kernel if index is None else SharedHeadsKernel(call.kernel, index),
        layout=call.layout.grouped(ulysses.size),
        options=replace(call.options, first_head=call.options.first_head + own.start),
    )
    out, lse = sharded_attention(
        q,
        k,
        v,
        sink=None if sink is None else sink[own.slice],
        exchange=exchange,
        call=inner,
    )
    return gather_heads(by_query_head, out), _gather_lse(by_query_head, lse, call)


def check_heads(name: str, groups: ContextParallelGroups, heads: int) -> None:
    """Raise UsageError if there are fewer query heads than ranks in a Ulysses group."""
    degree = groups.ulysses.size
    if heads < degree:
        fitting = [d for d in range(1, heads + 1) if groups.cp.size % d == 0]
        raise UsageError(
            option="ulysses_degree",
            value=degree,
            reason=f"algorithm {name} gives each rank query heads of its own, and there are "
            f"{heads} on each rank",
            remedy=f"use algorithm hybrid with a degree of {fitting}, ring or kvallgather",
        )


def _gather_lse(exchange: HeadExchange, lse: Tensor, call: AttentionCall) -> Tensor | None:
    """The lse of all heads, `[b, h, s_local]`, if the caller wants it."""
    if not call.return_lse:
        return None
    gathered = exchange.to_sequence([lse.permute(2, 0, 1).unsqueeze(-1)])[0]
    return gathered.squeeze(-1).permute(1, 2, 0)


class UlyssesAlgorithm(Algorithm):
    """Ulysses over the whole context-parallel group."""

    name = "ulysses"

    def check(self, groups: ContextParallelGroups, layout: SequenceLayout, heads: int) -> None:
        """The Ulysses group must be the whole group, and every rank needs a head."""
        if groups.ring.size > 1:
            raise UsageError(
                option="ulysses_degree",
                value=groups.ulysses.size,
                reason="algorithm ulysses exchanges heads over the whole context-parallel group",
                remedy=f"use {groups.cp.size}, or algorithm hybrid",
            )
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
        return attend_by_heads(query, key, value, sink=sink, exchange=LocalExchange(), call=call)
