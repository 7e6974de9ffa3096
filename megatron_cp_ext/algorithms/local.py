"""No exchange: this rank holds all keys of its queries, in natural order."""

from __future__ import annotations

from torch import Tensor

from megatron_cp_ext.algorithms.function import zero_gradients
from megatron_cp_ext.algorithms.interface import AttentionCall
from megatron_cp_ext.comm import CommGroup
from megatron_cp_ext.kernels.interface import accumulation_dtype
from megatron_cp_ext.kernels.merge import OutputAccumulator

_ALONE = CommGroup()


class LocalExchange:
    """Attention of one rank that has the whole sequence."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, call: AttentionCall
    ) -> OutputAccumulator:
        """One kernel call over everything."""
        into = OutputAccumulator.empty(query, value.size(-1), accumulation_dtype(query.dtype))
        tiles = call.tiles(_ALONE, call.layout.shards[0])
        call.kernel.forward(query, key, value, tiles, options=call.options, into=into)
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
        """One kernel call over everything."""
        dq, dk, dv = zero_gradients(query, key, value)
        call.kernel.backward(
            dout,
            query,
            key,
            value,
            call.tiles(_ALONE, call.layout.shards[0]),
            out=out,
            lse=lse,
            options=call.options,
            into=(dq, dk, dv),
        )
        return dq, dk, dv
