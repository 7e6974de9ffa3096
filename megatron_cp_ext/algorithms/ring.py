"""Ring attention: keys and values visit every rank in turn (arXiv:2310.01889).

At step t rank r works on the keys of rank r - t, while they already travel on to rank r + 1.
In the backward pass the keys make the same round again. Their gradients follow one step behind:
each rank adds its share in fp32 and passes the sum on, until after the last step it is home.

    step        0     1     2          rank 1 of 3
    keys of     1     0     2
    sends KV    1     0     -          before the step's kernel starts
    sends dKV   1     0     2          after the step's kernel
"""

from __future__ import annotations

from torch import Tensor

from megatron_cp_ext.algorithms.function import sharded_attention, zero_gradients
from megatron_cp_ext.algorithms.interface import Algorithm, AttentionCall
from megatron_cp_ext.algorithms.packing import KVPack
from megatron_cp_ext.comm import RingTransfer, ring_send
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.kernels.interface import accumulation_dtype
from megatron_cp_ext.kernels.merge import OutputAccumulator


class RingExchange:
    """Keys and values travel around `call.groups.ring`."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, call: AttentionCall
    ) -> OutputAccumulator:
        """Attend to one rank's keys at a time while the next rank's are on their way."""
        ring = call.groups.ring
        into = OutputAccumulator.empty(query, value.size(-1), accumulation_dtype(query.dtype))
        kv = KVPack.of(key, value)
        for step in range(ring.size):
            is_last = step == ring.size - 1
            incoming = None if is_last else ring_send(kv.buffer, ring, kind="kv")
            tiles = call.tiles(ring, (ring.rank - step) % ring.size)
            call.kernel.forward(query, kv.key, kv.value, tiles, options=call.options, into=into)
            if incoming is not None:
                kv = kv.holding(incoming.wait())
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
        """The same round; the gradient of each shard follows it and ends at its owner."""
        ring = call.groups.ring
        (dq,) = zero_gradients(query)
        kv = KVPack.of(key, value)
        arriving: RingTransfer | None = None
        for step in range(ring.size):
            is_last = step == ring.size - 1
            incoming = None if is_last else ring_send(kv.buffer, ring, kind="kv")
            tiles = call.tiles(ring, (ring.rank - step) % ring.size)
            dkv = kv.zeros(dq.dtype)
            call.kernel.backward(
                dout,
                query,
                kv.key,
                kv.value,
                tiles,
                out=out,
                lse=lse,
                options=call.options,
                into=(dq, dkv.key, dkv.value),
            )
            if arriving is not None:
                dkv.buffer.add_(arriving.wait())
            if ring.size > 1:
                arriving = ring_send(dkv.buffer, ring, kind="dkv")
            if incoming is not None:
                kv = kv.holding(incoming.wait())
        if arriving is not None:
            dkv = dkv.holding(arriving.wait())
        return dq, dkv.key, dkv.value


class RingAlgorithm(Algorithm):
    """Ring attention over the whole context-parallel group."""

    name = "ring"

    def check(self, call: AttentionCall, heads: int, kv_heads: int) -> None:
        """The ring must be the whole group."""
        require_ring_only(self.name, call)

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


def require_ring_only(name: str, call: AttentionCall) -> None:
    """Raise UsageError if the groups have a Ulysses part, which `name` would not use."""
    if call.groups.ulysses.size > 1:
        raise UsageError(
            option="ulysses_degree",
            value=call.groups.ulysses.size,
            reason=f"algorithm {name} exchanges no heads",
            remedy="use 1, or algorithm hybrid or ulysses",
        )
