"""Documents inside a training sequence, in the two forms in which Megatron has them.

Packed (`PackedSeqParams`, thd): one stream of tokens with cumulative lengths. Unpacked (sbhd with
`--reset-attention-mask`): documents end at EOD tokens. Megatron writes the latter as a mask of
`[b, 1, s, s]`; here a table of boundaries takes the mask's place in the batch and travels to the
attention as `attention_mask`. Boundary tables are int32 `[b, n]` on the host, each row ascending
from 0 to s, filled up by repeating s.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.mask import AttentionMask, Window
from megatron_cp_ext.megatron.host_copies import TensorMemory

_memory = TensorMemory()


def boundary_table(is_end: Tensor) -> Tensor:
    """Boundaries of documents that end at the marked tokens.

    Args:
        is_end: `[b, s]`, nonzero at the last token of a document.

    Returns:
        int32 `[b, n]` on the host.
    """
    is_end = is_end.cpu()
    b, s = is_end.shape
    rows = [
        [0, *(end for end in (row.nonzero().flatten() + 1).tolist() if end < s), s]
        for row in is_end
    ]
    table = torch.full((b, max(len(row) for row in rows)), s, dtype=torch.int32)
    for target, row in zip(table, rows, strict=True):
        target[: len(row)] = torch.tensor(row, dtype=torch.int32)
    return table


def is_boundary_table(mask: Tensor) -> bool:
    """Whether an `attention_mask` is a table of boundaries rather than a mask of pairs."""
    return mask.dim() == 2 and mask.dtype == torch.int32


def mask_of_table(table: Tensor, window: Window | None) -> AttentionMask:
    """The causal mask within the documents of each sample."""

    def compute() -> AttentionMask:
        rows = [tuple(row) for row in table.tolist()]
        return AttentionMask.per_sample(
            [AttentionMask.documents(row, causal=True, window=window) for row in rows]
        )

    return _memory.of(table, ("mask", window), compute)


def mask_of_pairs(masked: Tensor, *, causal: bool, window: Window | None) -> AttentionMask:
    """A mask of pairs in Megatron's form: bool `[b, 1, s, s]`, True = may not attend."""

    def compute() -> AttentionMask:
        return AttentionMask.dense(~masked, causal=causal, window=window)

    return _memory.of(masked, ("mask", causal, window), compute)


def packed_layout(cu_seqlens: Tensor, total: int, cp_size: int) -> SequenceLayout:
    """Where a packed stream's tokens are: the one rule for batches, positions and attention.

    Every document is in a zigzag of its own, which balances the ranks whatever the lengths are.

    Args:
        cu_seqlens: cumulative lengths, paddings included, `[documents + 1]`.
        total: tokens of the stream; those after the last document are padding.
        cp_size: number of ranks.

    Raises:
        UsageError: the stream's length is not a multiple of cp_size.
    """

    def compute() -> SequenceLayout:
        bounds = sorted({*_memory.integers(cu_seqlens), total})
        return SequenceLayout.zigzag_documents(bounds, cp_size)

    return _memory.of(cu_seqlens, ("layout", total, cp_size), compute)


def packed_mask(params: Any, *, causal: bool, window: Window | None) -> AttentionMask:
    """The mask of a packed stream.

    Args:
        params: Megatron's PackedSeqParams; padded cumulative lengths say where documents lie,
            the unpadded ones how long they really are.
        causal: whether tokens see only what came before.
        window: sliding window within documents.

    Raises:
        UsageError: queries and keys are packed differently.
    """
    starts = packed_boundaries(params)
    ends = _memory.integers(params.cu_seqlens_q)

    def compute() -> AttentionMask:
        return AttentionMask.documents(
            _memory.integers(starts),
            causal=causal,
            window=window,
            lengths=[b - a for a, b in itertools.pairwise(ends)],
        )

    return _memory.of(starts, ("mask", ends, causal, window), compute)


def packed_boundaries(params: Any) -> Tensor:
    """Where the documents of a packed stream begin and end, paddings included, `[n + 1]`."""
    for ours, theirs in (
        (params.cu_seqlens_q, params.cu_seqlens_kv),
        (params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded),
    ):
        if ours is not theirs and not (
            ours is not None
            and theirs is not None
            and _memory.integers(ours) == _memory.integers(theirs)
        ):
            raise UsageError(
                option="packed_seq_params",
                value="cu_seqlens_q and cu_seqlens_kv differ",
                reason="queries and keys of self-attention are the same tokens",
                remedy="pass the same cumulative lengths for both",
            )
    padded = params.cu_seqlens_q_padded
    return params.cu_seqlens_q if padded is None else padded


def stream_positions(cu_seqlens: Tensor, total: int, cp_size: int, rank: int) -> Tensor:
    """Positions of a rank's tokens in the packed stream: LongTensor `[local tokens]`."""

    def compute() -> Tensor:
        positions = packed_layout(cu_seqlens, total, cp_size).positions(rank)
        return positions.to(cu_seqlens.device)

    return _memory.of(cu_seqlens, ("stream", total, cp_size, rank), compute)


def document_positions(cu_seqlens: Tensor, total: int, cp_size: int, rank: int) -> Tensor:
    """Positions of a rank's tokens within their documents: LongTensor `[local tokens]`."""

    def compute() -> Tensor:
        positions = stream_positions(cu_seqlens, total, cp_size, rank)
        document = torch.searchsorted(cu_seqlens, positions, right=True) - 1
        return positions - cu_seqlens[document]

    return _memory.of(cu_seqlens, ("document", total, cp_size, rank), compute)
