"""KV all-gather: every rank gathers all keys and values once (Llama 3, arXiv:2407.21783).

The gradients of keys and values go back in one step too, summed in fp32. A rank has all keys it
needs at once, so its memory grows with the whole sequence's KV, unless the mask needs little of
it. How much is gathered, and by which collective, is for `gathering.py`.
"""

from __future__ import annotations

from torch import Tensor

from megatron_cp_ext.algorithms.function import sharded_attention, zero_gradients
from megatron_cp_ext.algorithms.gathering import Gathering, gathering
from megatron_cp_ext.algorithms.interface import Algorithm, AttentionCall
from megatron_cp_ext.algorithms.relay import relay_plan
from megatron_cp_ext.algorithms.ring import require_ring_only
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
        source = _gathering(call)
        keys, values = source.gather(key, value)
        tiles = call.tiles(call.groups.ring, source.runs)
        call.kernel.forward(query, keys, values, tiles, options=call.options, into=into)
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
        source = _gathering(call)
        keys, values = source.gather(key, value)
        dq, dk, dv = zero_gradients(query, keys, values)
        call.kernel.backward(
            dout,
            query,
            keys,
            values,
            call.tiles(call.groups.ring, source.runs),
            out=out,
            lse=lse,
            options=call.options,
            into=(dq, dk, dv),
        )
        return dq, *source.scatter(dk, dv)


def _gathering(call: AttentionCall) -> Gathering:
    return gathering(call.layout, relay_plan(call.layout, call.mask), call.groups.ring)


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
