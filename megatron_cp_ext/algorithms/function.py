"""The autograd node that all algorithms share, around whatever brings keys and values to a rank.

An exchange has two methods and no knowledge of autograd, masks or kernels. What is common to
all of them is here: accumulators, the sink, what is kept for the backward pass, casting.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_cp_ext.algorithms.interface import AttentionCall
from megatron_cp_ext.comm import during, innermost
from megatron_cp_ext.kernels.interface import accumulation_dtype
from megatron_cp_ext.kernels.merge import OutputAccumulator, finite_lse


class KVExchange(Protocol):
    """Brings every shard of keys and values to every shard of queries."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, call: AttentionCall
    ) -> OutputAccumulator:
        """Attend this rank's queries to all keys that its tiles name."""

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
        """Gradients dq, dk, dv of this rank's shards, in the accumulation dtype."""


class _ShardedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        exchange: KVExchange,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor]:
        ctx.place = innermost()  # of the layer, which the backward pass does not know
        with during("forward"):
            accumulated = exchange.forward(query, key, value, call=call)
        if sink is not None:
            accumulated.add_sink(sink)
        out, lse = accumulated.out.to(query.dtype), accumulated.lse
        ctx.save_for_backward(query, key, value, out, lse, sink)
        ctx.exchange, ctx.call = exchange, call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sink = ctx.saved_tensors
        with during(ctx.place or "attention"), during("backward"):
            dq, dk, dv = ctx.exchange.backward(
                dout, query, key, value, out=out, lse=lse, call=ctx.call
            )
        dsink = None if sink is None else sink_gradient(dout, out, lse, sink)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), dsink, None, None


def sharded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sink: Tensor | None,
    exchange: KVExchange,
    call: AttentionCall,
) -> tuple[Tensor, Tensor]:
    """Attention over the keys that `exchange` brings: (out, lse), differentiable but for lse."""
    return _ShardedAttention.apply(query, key, value, sink, exchange, call)


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Gradient of the sink's logits from this rank's rows, `[h]`.

    The sink has weight p = exp(sink - lse) and value 0, so ds = p * (0 - rowsum(dout * out)).
    """
    dtype = accumulation_dtype(out.dtype)
    weight = torch.exp(sink.to(dtype)[None, :, None] - finite_lse(lse.to(dtype)))  # [b, h, s]
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1).permute(1, 2, 0)  # [b, h, s]
    return -(weight * delta).sum(dim=(0, 2)).to(sink.dtype)


def zero_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Accumulators for the gradients of some tensors."""
    return tuple(torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for t in tensors)
