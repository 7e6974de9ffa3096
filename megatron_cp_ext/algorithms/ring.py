"""Ring attention: keys and values visit the ranks in turn (arXiv:2310.01889).

Which chunk visits whom, and when, is the plan of `relay.py`. Here the plan is carried out: at
every step the chunks of the next step are already on their way while the kernel works on those
that are there. In the backward pass the chunks make the same journey again. Their gradients
follow one step behind: each rank adds its share in fp32 and passes the sum on, the last one home.

    step   here now            under way meanwhile
    0      own chunks          KV of step 1
    1      chunks of step 1    KV of step 2
    2      chunks of step 2    KV of step 3, dKV of step 1
    ...                        dKV home
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp_ext.algorithms.function import sharded_attention, zero_gradients
from megatron_cp_ext.algorithms.interface import Algorithm, AttentionCall
from megatron_cp_ext.algorithms.packing import KVPack
from megatron_cp_ext.algorithms.relay import Chunk, Hop, RelayPlan, relay_plan
from megatron_cp_ext.comm import CommGroup, Transfer, start_transfer, steps
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.groups import ContextParallelGroups
from megatron_cp_ext.kernels.interface import accumulation_dtype
from megatron_cp_ext.kernels.merge import OutputAccumulator
from megatron_cp_ext.layout import SequenceLayout

# What is being filled, and the transfer that fills it.
_Arriving = tuple[dict[Chunk, KVPack], Transfer]


class _Couriers:
    """The plan's transfers, as one rank takes part in them.

    Args:
        plan: who sends which chunk to whom.
        ring: the ranks.
        key: this rank's keys `[s_local, b, hk, d]`.
        value: this rank's values `[s_local, b, hk, dv]`.
    """

    def __init__(self, plan: RelayPlan, ring: CommGroup, key: Tensor, value: Tensor) -> None:
        self.ring = ring
        self._key, self._value = key, value
        self.here: dict[Chunk, KVPack] = {
            chunk: KVPack.of(key[chunk.rows.slice], value[chunk.rows.slice])
            for chunk in plan.chunks
            if chunk.owner == ring.rank and len(chunk.path) > 1
        }

    def start(
        self, hops: list[Hop], packs: dict[Chunk, KVPack], *, dtype: torch.dtype, kind: str
    ) -> _Arriving:
        """Start this rank's part in some hops: what arrives, and the transfer."""
        me = self.ring.rank
        sends = [(packs[hop.chunk].buffer, hop.to) for hop in hops if hop.source == me]
        sources = {hop.chunk: hop.source for hop in hops if hop.to == me}
        arriving = {
            chunk: KVPack.empty(chunk.run.length, key=self._key, value=self._value, dtype=dtype)
            for chunk in sources
        }
        receives = [(pack.buffer, sources[chunk]) for chunk, pack in arriving.items()]
        return arriving, start_transfer(sends, receives, self.ring, kind=kind)

    def arrived(self, under_way: _Arriving) -> dict[Chunk, KVPack]:
        """Wait for a transfer; what it brought."""
        arriving, transfer = under_way
        transfer.wait()
        return arriving


class RingExchange:
    """Keys and values travel around `call.groups.ring`."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, call: AttentionCall
    ) -> OutputAccumulator:
        """Attend to the chunks that are here while the next ones are on their way."""
        ring, plan = call.groups.ring, relay_plan(call.layout, call.mask)
        into = OutputAccumulator.empty(query, value.size(-1), accumulation_dtype(query.dtype))
        couriers = _Couriers(plan, ring, key, value)
        here = couriers.here
        for step in steps("ring step", plan.steps):
            under_way = couriers.start(plan.key_hops(step + 1), here, dtype=key.dtype, kind="kv")
            if step == 0:
                tiles = call.tiles(ring, call.layout.shards[ring.rank])
                call.kernel.forward(query, key, value, tiles, options=call.options, into=into)
            else:
                for chunk, kv in here.items():
                    tiles = call.tiles(ring, (chunk.run,))
                    call.kernel.forward(
                        query, kv.key, kv.value, tiles, options=call.options, into=into
                    )
            here = couriers.arrived(under_way)
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
        """The same journey; the gradient of each chunk follows it and ends at its owner."""
        ring, plan = call.groups.ring, relay_plan(call.layout, call.mask)
        dq, dk, dv = zero_gradients(query, key, value)
        couriers = _Couriers(plan, ring, key, value)
        here = couriers.here
        under_way_home: _Arriving | None = None
        for step in steps("ring step", plan.steps):
            under_way = couriers.start(plan.key_hops(step + 1), here, dtype=key.dtype, kind="kv")
            if step == 0:
                attended = [(key, value, dk, dv, call.tiles(ring, call.layout.shards[ring.rank]))]
            else:
                shares = {chunk: kv.zeros(dq.dtype) for chunk, kv in here.items()}
                attended = [
                    (
                        kv.key,
                        kv.value,
                        shares[chunk].key,
                        shares[chunk].value,
                        call.tiles(ring, (chunk.run,)),
                    )
                    for chunk, kv in here.items()
                ]
            for k, v, share_k, share_v, tiles in attended:
                call.kernel.backward(
                    dout,
                    query,
                    k,
                    v,
                    tiles,
                    out=out,
                    lse=lse,
                    options=call.options,
                    into=(dq, share_k, share_v),
                )
            if step > 0:
                _add_arrived(couriers, under_way_home, shares, dk, dv)
                under_way_home = couriers.start(
                    plan.gradient_hops(step), shares, dtype=dq.dtype, kind="dkv"
                )
            here = couriers.arrived(under_way)
        _add_arrived(couriers, under_way_home, {}, dk, dv)
        return dq, dk, dv


def _add_arrived(
    couriers: _Couriers,
    under_way: _Arriving | None,
    shares: dict[Chunk, KVPack],
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add gradients that arrive: to this rank's share if they travel on, else they are home."""
    if under_way is None:
        return
    for chunk, gradient in couriers.arrived(under_way).items():
        if chunk in shares:
            shares[chunk].buffer.add_(gradient.buffer)
        else:
            dk[chunk.rows.slice] += gradient.key
            dv[chunk.rows.slice] += gradient.value


class RingAlgorithm(Algorithm):
    """Ring attention over the whole context-parallel group."""

    name = "ring"

    def check(self, groups: ContextParallelGroups, layout: SequenceLayout, heads: int) -> None:
        """The ring must be the whole group."""
        require_ring_only(self.name, groups)

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
        return sharded_attention(query, key, value, sink=sink, exchange=RingExchange(), call=call)


def require_ring_only(name: str, groups: ContextParallelGroups) -> None:
    """Raise UsageError if the groups have a Ulysses part, which `name` would not use."""
    if groups.ulysses.size > 1:
        raise UsageError(
            option="ulysses_degree",
            value=groups.ulysses.size,
            reason=f"algorithm {name} exchanges no heads",
            remedy="use 1, or algorithm hybrid or ulysses",
        )
