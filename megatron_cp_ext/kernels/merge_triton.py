"""Merging and summing of partial results in one pass over memory each, as Triton kernels.

`merge.py` says what is computed and is what calls this; here is how. torch needs a pass for
each of logaddexp, exp, the cast and lerp. A partial result may have any dtype and any strides: it
is read where the attention kernel left it.
"""

# Triton gives a kernel's arguments their types.
# mypy: allow-untyped-defs

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements a program works on: with 4 warps 32 for each thread, which fit its registers.
_ELEMENTS = 4096


@triton.jit
def _merge_kernel(
    out,
    lse,
    part,
    part_lse,
    rows,
    heads,
    dim,
    out_s,
    out_b,
    out_h,
    out_d,
    lse_b,
    lse_h,
    lse_s,
    part_s,
    part_b,
    part_h,
    part_d,
    part_lse_b,
    part_lse_h,
    part_lse_s,
    FIRST: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_DIM: tl.constexpr,  # noqa: N803
):
    """Some rows of one sample and head; FIRST takes the partial result as it is."""
    # 64 bits: 128k rows of 128 heads of 128 are 2^31 elements.
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    is_row = row < rows
    is_element = is_row[:, None] & (column < dim)[None, :]
    out += sample * out_b + head * out_h + row[:, None] * out_s + column[None, :] * out_d
    part += sample * part_b + head * part_h + row[:, None] * part_s + column[None, :] * part_d
    lse += sample * lse_b + head * lse_h + row * lse_s
    part_lse += sample * part_lse_b + head * part_lse_h + row * part_lse_s
    nothing = -float("inf")

    new = tl.load(part, mask=is_element, other=0.0).to(tl.float32)
    new_lse = tl.load(part_lse, mask=is_row, other=nothing).to(tl.float32)
    if FIRST:
        tl.store(out, new, mask=is_element)
        tl.store(lse, new_lse, mask=is_row)
    else:
        held = tl.load(out, mask=is_element, other=0.0)
        held_lse = tl.load(lse, mask=is_row, other=nothing)
        larger = tl.maximum(held_lse, new_lse)
        # exp(-inf - -inf) would be NaN: where neither saw anything, subtract 0 and divide by 1.
        shift = tl.where(larger == nothing, 0.0, larger)
        share = tl.exp(new_lse - shift)
        total = tl.exp(held_lse - shift) + share
        divisor = tl.where(total == 0.0, 1.0, total)
        merged = tl.where(total == 0.0, nothing, shift + tl.log(divisor))
        tl.store(out, held + (share / divisor)[:, None] * (new - held), mask=is_element)
        tl.store(lse, merged, mask=is_row)


@triton.jit
def _add_kernel(
    into,
    part,
    rows,
    heads,
    dim,
    into_s,
    into_b,
    into_h,
    into_d,
    part_s,
    part_b,
    part_h,
    part_d,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_DIM: tl.constexpr,  # noqa: N803
):
    """Some rows of one sample and head."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    is_element = (row < rows)[:, None] & (column < dim)[None, :]
    into += sample * into_b + head * into_h + row[:, None] * into_s + column[None, :] * into_d
    part += sample * part_b + head * part_h + row[:, None] * part_s + column[None, :] * part_d
    held = tl.load(into, mask=is_element, other=0.0)
    new = tl.load(part, mask=is_element, other=0.0).to(tl.float32)
    tl.store(into, held + new, mask=is_element)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, *, first: bool) -> None:
    """Merge a partial result into fp32 accumulators, in place.

    Args:
        out: `[s, b, h, dv]`, fp32, any strides; 0 where `lse` is -inf.
        lse: `[b, h, s]`, fp32, any strides.
        part: like `out`, any dtype.
        part_lse: like `lse`, any dtype.
        first: take the partial result as it is.
    """
    if not out.numel():
        return
    grid, blocks = _blocks(out)
    with _on(out.device):
        _merge_kernel[grid](
            out,
            lse,
            part,
            part_lse,
            out.size(0),
            out.size(2),
            out.size(3),
            *out.stride(),
            *lse.stride(),
            *part.stride(),
            *part_lse.stride(),
            FIRST=first,
            **blocks,
        )


def add(into: Tensor, part: Tensor) -> None:
    """`into += part` for `[s, b, h, d]`: `into` in fp32, `part` in any dtype, any strides."""
    if not into.numel():
        return
    grid, blocks = _blocks(into)
    with _on(into.device):
        _add_kernel[grid](
            into,
            part,
            into.size(0),
            into.size(2),
            into.size(3),
            *into.stride(),
            *part.stride(),
            **blocks,
        )


def _blocks(tensor: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid for `[s, b, h, d]`, and what a program of it covers."""
    s, b, h, d = tensor.shape
    columns = triton.next_power_of_2(d)
    rows = max(1, _ELEMENTS // columns)
    return (triton.cdiv(s, rows), b * h), {"BLOCK_ROWS": rows, "BLOCK_DIM": columns}


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Launch on the tensors' device, which need not be the current one."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:  # Triton's interpreter, in tests
        yield
