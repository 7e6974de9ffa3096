"""Attention by the textbook: an explicit softmax in fp32 or fp64, on any device.

It is slow and takes memory for every query-key pair, and it is what other kernels are measured
against in a model. It alone has dropout whose drops do not depend on how a sequence is split.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_cp_ext.kernels.interface import (
    AttentionKernel,
    KernelOptions,
    accumulation_dtype,
)
from megatron_cp_ext.kernels.merge import finite_lse
from megatron_cp_ext.kernels.random import keep_mask
from megatron_cp_ext.mask import Tile


class ReferenceKernel(AttentionKernel):
    """Explicit softmax, one KV head at a time."""

    name = "reference"

    def tile_forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, tile: Tile, options: KernelOptions
    ) -> tuple[Tensor, Tensor]:
        """See the contract in `interface.py`."""
        dtype = accumulation_dtype(query.dtype)
        s, b, h, _ = query.shape
        out = torch.empty(s, b, h, value.size(-1), dtype=dtype, device=query.device)
        lse = torch.empty(b, h, s, dtype=dtype, device=query.device)
        allowed = tile.allowed(query.device)
        for heads, q, k, v in _by_kv_head(query, key, value, dtype):
            scores = _scores(q, k, allowed, options)  # [b, g, q, k]
            row_lse = torch.logsumexp(scores, dim=-1)
            weights = _weights(scores, row_lse)
            keep = keep_mask(tile, options, heads, b, weights.device)
            if keep is not None:
                weights = weights * keep.to(dtype) / (1.0 - options.dropout_p)
            out[:, :, heads] = torch.einsum("bgqk,bkd->qbgd", weights, v)
            lse[:, heads] = row_lse
        return out, lse

    def tile_backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        tile: Tile,
        options: KernelOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the contract in `interface.py`."""
        dtype = accumulation_dtype(query.dtype)
        dq, dk, dv = (torch.empty_like(t, dtype=dtype) for t in (query, key, value))
        allowed = tile.allowed(query.device)
        for index, (heads, q, k, v) in enumerate(_by_kv_head(query, key, value, dtype)):
            scores = _scores(q, k, allowed, options)
            weights = _weights(scores, lse[:, heads].to(dtype))
            do = dout[:, :, heads].permute(1, 2, 0, 3).to(dtype)  # [b, g, q, dv]
            delta = (do * out[:, :, heads].permute(1, 2, 0, 3).to(dtype)).sum(-1, keepdim=True)
            dropped, dweights = weights, torch.einsum("bgqd,bkd->bgqk", do, v)
            keep = keep_mask(tile, options, heads, dout.size(1), weights.device)
            if keep is not None:
                factor = keep.to(dtype) / (1.0 - options.dropout_p)
                dropped, dweights = weights * factor, dweights * factor
            dscores = weights * (dweights - delta) * options.softmax_scale
            dq[:, :, heads] = torch.einsum("bgqk,bkd->qbgd", dscores, k)
            dk[:, :, index] = torch.einsum("bgqk,bgqd->kbd", dscores, q)
            dv[:, :, index] = torch.einsum("bgqk,bgqd->kbd", dropped, do)
        return dq, dk, dv


def _by_kv_head(
    query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """For each KV head its query heads, q `[b, g, s, d]`, k `[b, s, d]` and v `[b, s, dv]`."""
    group = query.size(2) // key.size(2)
    for index in range(key.size(2)):
        heads = slice(index * group, (index + 1) * group)
        yield (
            heads,
            query[:, :, heads].permute(1, 2, 0, 3).to(dtype),
            key[:, :, index].transpose(0, 1).to(dtype),
            value[:, :, index].transpose(0, 1).to(dtype),
        )


def _scores(q: Tensor, k: Tensor, allowed: Tensor, options: KernelOptions) -> Tensor:
    scores = torch.einsum("bgqd,bkd->bgqk", q, k) * options.softmax_scale
    return scores.masked_fill_(~allowed, -torch.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows that see nothing, where both are -inf."""
    return torch.exp(scores - finite_lse(lse).unsqueeze(-1))
