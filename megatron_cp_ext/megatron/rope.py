"""Rotary positions of packed sequences under context parallelism."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_cp_ext.megatron.documents import document_positions, stream_positions


def rotate_packed(
    original: Callable[..., Tensor],
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    *rest: Any,
    **kw: Any,
) -> Tensor:
    """Wrapper of `_apply_rotary_pos_emb_thd`: every token gets its position in its document.

    Megatron's own cuts each document into 2 * cp_size chunks, which is where its tokens are only
    if all lengths are multiples of that. Positions here come from where the tokens are; those of
    padding after the last document do not matter.

    Args:
        original: Megatron's function; it is used as it is on a single rank.
        t: `[tokens, heads, dim]` of this rank.
        cu_seqlens: cumulative lengths of the whole stream.
        freqs: `[positions, 1, 1, dim]`, for one document or for the whole stream.
        rest: what else Megatron passes.
        kw: likewise.
    """
    call = inspect.signature(original).bind(t, cu_seqlens, freqs, *rest, **kw).arguments
    group = call["cp_group"]
    if group is None or group.size() == 1:
        return original(t, cu_seqlens, freqs, *rest, **kw)
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    size, rank = group.size(), group.rank()
    total = t.size(0) * size
    # Frequencies for the whole stream, as multimodal positions have them, or for one document.
    positions = stream_positions if freqs.size(0) == total else document_positions
    rows = positions(cu_seqlens, total, size, rank).to(freqs.device)
    options = {
        name: call[name]
        for name in ("rotary_interleaved", "mla_rotary_interleaved", "mscale")
        if name in call
    }
    rotated = _apply_rotary_pos_emb_bshd(
        t.unsqueeze(1), freqs.index_select(0, rows.clamp(max=freqs.size(0) - 1)), **options
    )
    return rotated.squeeze(1)
