"""KV all-gather: every rank gathers all keys and values once (Llama 3, arXiv:2407.21783).

The gradients of keys and values go back by one reduce-scatter, summed in fp32. As every rank
has all keys at once, any mask costs the same; memory grows with the whole sequence's KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp_ext.algorithms.function import sharded_attention, zero_gradients
from megatron_cp_ext.algorithms.interface import Algorithm, AttentionCall
from megatron_cp_ext.algorithms.packing import KVPack
from megatron_cp_ext.algorithms.ring import require_ring_only
from megatron_cp_ext.comm import all_gather, reduce_scatter
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.groups import ContextParallelGroups
from megatron_cp_ext.kernels.interface import accumulation_dtype
from megatron_cp_ext.kernels.merge import OutputAccumulator
from megatron_cp_ext.layout import SequenceLayout


class KVAllGatherExchange:
    """Keys and values of all ranks are gathered over `call.groups.ring`."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, call: AttentionCall
    ) -> OutputAccumulator:
        """Gather, then one kernel call."""
        into = OutputAccumulator.empty(query, value.size(-1), accumulation_dtype(query.dtype))
        all_keys, all_values = _gather(key, value, call)
        tiles = call.tiles_of_all_keys(call.groups.ring)
        call.kernel.forward(query, all_keys, all_values, tiles, options=call.options, into=into)
        return into

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gather again, one kernel call, and send each rank the sum of its gradients."""
        all_keys, all_values = _gather(key, value, call)
        dq, all_dk, all_dv = zero_gradients(query, all_keys, all_values)
        call.kernel.backward(
            dout,
            query,
            all_keys,
            all_values,
            call.tiles_of_all_keys(call.groups.ring),
            out=out,
            lse=lse,
            options=call.options,
            into=(dq, all_dk, all_dv),
        )
        layout, ring = call.layout, call.groups.ring
        shards = [
            KVPack.of(layout.shard(all_dk, owner), layout.shard(all_dv, owner))
            for owner in range(ring.size)
        ]
        stacked = torch.stack([shard.buffer for shard in shards])
        own = shards[ring.rank].holding(reduce_scatter(stacked, ring, kind="dkv"))
        return dq, own.key, own.value


def _gather(key: Tensor, value: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """All keys `[s, b, hk, d]` and values `[s, b, hk, dv]` in natural order."""
    ring = call.groups.ring
    own = KVPack.of(key, value)
    packs = [own.holding(row) for row in all_gather(own.buffer, ring, kind="kv")]
    return (
        call.layout.unshard([pack.key for pack in packs]),
        call.layout.unshard([pack.value for pack in packs]),
    )


class KVAllGatherAlgorithm(Algorithm):
    """KV all-gather over the whole context-parallel group."""

    name = "kvallgather"

    def check(self, groups: ContextParallelGroups, layout: SequenceLayout, heads: int) -> None:
        """The gathering group must be the whole group, and shards must be equally long."""
        require_ring_only(self.name, groups)
        lengths = [layout.local_length(rank) for rank in range(layout.cp_size)]
        if len(set(lengths)) > 1:
            raise UsageError(
                option="layout",
                value=f"shards of {lengths} tokens",
                reason=f"algorithm {self.name} gathers shards of one length",
                remedy="use a layout of equal shards, or algorithm ring, ulysses or hybrid",
            )

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
        return sharded_attention(
            query, key, value, sink=sink, exchange=KVAllGatherExchange(), call=call
        )
