"""Torch's flash attention for CPUs: blocked, no S x S memory, fp32, bf16, fp16 and fp64.

Its limits, and what is done about them: it knows full, top-left causal and additively masked
blocks, so bands are recut (`tiling.py`); rows that see nothing come back with lse = 0, so they
are set right here; value and query dims must be equal, so the smaller is padded with zeros; it
reads the last dimension as if its entries were neighbours in memory, so others are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp_ext.kernels.interface import AttentionKernel, KernelOptions
from megatron_cp_ext.kernels.merge import finite_lse
from megatron_cp_ext.kernels.tiling import cut_bands, is_top_left_causal, join_full_tiles
from megatron_cp_ext.mask import Tile

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_MASKED_ROWS = 512  # rows of a block with an explicit mask: bounds the mask's memory


class AtenCpuKernel(AttentionKernel):
    """FlashAttention-2 for CPUs inside torch."""

    name = "aten_cpu"

    def prepare(self, tiles: Sequence[Tile]) -> Sequence[Tile]:
        """Full, top-left causal and small masked tiles."""
        return join_full_tiles(list(cut_bands(tiles, block=_MASKED_ROWS)))

    def tile_forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, tile: Tile, options: KernelOptions
    ) -> tuple[Tensor, Tensor]:
        """See the contract in `interface.py`."""
        causal, bias, blind = _mask_of(tile, query)
        v_dim = value.size(-1)
        q, k, v = _same_dim(query, key, value)
        out, lse = _flash(
            _heads_first(q),
            _heads_first(k),
            _heads_first(v),
            0.0,
            causal,
            attn_mask=bias,
            scale=options.softmax_scale,
        )
        if blind is not None:
            lse = lse.masked_fill(blind, -torch.inf)
            out = out.masked_fill(blind.unsqueeze(-1), 0.0)
        return out.permute(2, 0, 1, 3)[..., :v_dim], lse

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
        qk_dim, v_dim = query.size(-1), value.size(-1)
        tensors = _same_dim(query, key, value, dout, out)
        if not _has_fast_products(query.dtype):
            tensors = [tensor.float() for tensor in tensors]
        q, k, v, do, o = tensors
        causal, bias, _ = _mask_of(tile, q)
        gradients = _flash_backward(
            _heads_first(do),
            _heads_first(q),
            _heads_first(k),
            _heads_first(v),
            _heads_first(o),
            finite_lse(lse),
            0.0,
            causal,
            attn_mask=bias,
            scale=options.softmax_scale,
        )
        dq, dk, dv = (gradient.permute(2, 0, 1, 3) for gradient in gradients)
        return dq[..., :qk_dim], dk[..., :qk_dim], dv[..., :v_dim]


@functools.cache
def _has_fast_products(dtype: torch.dtype) -> bool:
    """Whether the CPU multiplies matrices of this dtype faster than those of fp32.

    Torch's backward pass leaves them to oneDNN. Without AVX-512 that falls back to a loop which
    takes seven times as long as fp32.
    """
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


def _mask_of(tile: Tile, query: Tensor) -> tuple[bool, Tensor | None, Tensor | None]:
    """(is_causal, additive mask, rows that see nothing `[b or 1, 1, q]`) of a prepared tile."""
    if tile.is_full:
        return False, None, None
    if is_top_left_causal(tile):
        return True, None, None
    allowed = tile.allowed(query.device)
    bias = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~allowed, -torch.inf)
    blind = ~allowed.any(dim=-1)
    if not blind.any():
        return False, bias, None
    return False, bias, blind if blind.dim() == 3 else blind[None, None]


def _heads_first(tensor: Tensor) -> Tensor:
    """`[s, b, h, d]` as `[b, h, s, d]`, a view where the kernel can read it."""
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous()).permute(1, 2, 0, 3)


def _same_dim(*tensors: Tensor) -> list[Tensor]:
    """Pad the last dimension with zeros up to the largest; zeros change no product."""
    size = max(tensor.size(-1) for tensor in tensors)
    return [
        tensor
        if tensor.size(-1) == size
        else torch.nn.functional.pad(tensor, (0, size - tensor.size(-1)))
        for tensor in tensors
    ]
