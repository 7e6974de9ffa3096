"""Merging of partial results: exact, in any order, in fp32, and at peace with -inf."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megatron_cp_ext.kernels.merge import OutputAccumulator
from megatron_cp_ext.layout import Run
from megatron_cp_ext.testing import oracle_attention

S, B, H, D, DV = 6, 2, 3, 4, 5
ROWS = Run(0, S)
KEYS = [Run(0, 3), Run(3, 4), Run(4, 9), Run(9, 11)]


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "q": draw(S, B, H, D) * 3,
        "k": draw(11, B, H, D),
        "v": draw(11, B, H, DV),
        "sink": draw(H),
        "mask": torch.rand(B, 1, S, 11, generator=generator) < 0.6,
    }


def partial(keys: Run, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse over some of the keys."""
    x, part = tensors(), slice(*keys)
    allowed = None if mask is None else mask[..., part]
    result = oracle_attention(x["q"], x["k"][part], x["v"][part], allowed)
    return result.out, result.lse


def empty(dtype: torch.dtype = torch.float64) -> OutputAccumulator:
    return OutputAccumulator.empty(tensors()["q"], DV, dtype)


def assert_close(actual: OutputAccumulator, out: Tensor, lse: Tensor, atol: float = 1e-13) -> None:
    torch.testing.assert_close(actual.out, out, rtol=0, atol=atol, check_dtype=False)
    torch.testing.assert_close(actual.lse, lse, rtol=0, atol=atol, check_dtype=False)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_parts_merge_to_the_whole_in_any_order(order: tuple[int, ...]) -> None:
    mask = tensors()["mask"]
    merged = empty()
    for index in order:
        merged.merge(*partial(KEYS[index], mask), rows=ROWS)
    assert_close(merged, *partial(Run(0, 11), mask))


def test_nothing_merged_is_zero_and_minus_infinity() -> None:
    merged = empty()
    assert not merged.out.any()
    assert (merged.lse == -math.inf).all()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_parts_that_see_nothing_change_nothing_wherever_they_come(first: int) -> None:
    nothing = torch.zeros(S, B, H, DV).double(), torch.full((B, H, S), -math.inf).double()
    parts = [partial(Run(0, 5)), partial(Run(5, 11))]
    parts.insert(first, nothing)
    merged = empty()
    for part in parts:
        merged.merge(*part, rows=ROWS)
    assert_close(merged, *partial(Run(0, 11)))


def test_rows_that_never_see_anything_stay_zero_without_nan() -> None:
    nothing = torch.zeros(S, B, H, DV).double(), torch.full((B, H, S), -math.inf).double()
    merged = empty()
    for _ in range(3):
        merged.merge(*nothing, rows=ROWS)
    assert not merged.out.any()
    assert (merged.lse == -math.inf).all()
    merged.add_sink(tensors()["sink"])
    assert not merged.out.any()
    assert torch.equal(merged.lse, tensors()["sink"][None, :, None].expand(B, H, S))


def test_some_rows_and_some_samples_merge_without_touching_others() -> None:
    merged = empty()
    (out, lse), (more_out, more_lse) = partial(Run(0, 5)), partial(Run(5, 11))
    merged.merge(out, lse, rows=ROWS)
    rows, batch = Run(2, 5), Run(1, 2)
    merged.merge(more_out[2:5, 1:2], more_lse[1:2, :, 2:5], rows=rows, batch=batch)
    whole_out, whole_lse = partial(Run(0, 11))
    out[2:5, 1], lse[1, :, 2:5] = whole_out[2:5, 1], whole_lse[1, :, 2:5]
    assert_close(merged, out, lse)


def test_samples_that_come_one_by_one_make_the_batch() -> None:
    merged = empty()
    for keys in (Run(0, 5), Run(5, 11)):
        out, lse = partial(keys)
        for sample in range(B):
            of_one = slice(sample, sample + 1)
            merged.merge(out[:, of_one], lse[of_one], rows=ROWS, batch=Run(sample, sample + 1))
    assert_close(merged, *partial(Run(0, 11)))


def test_the_first_result_of_a_row_is_taken_as_it_is() -> None:
    out, lse = partial(Run(0, 11))
    merged = empty()
    for rows in (Run(0, 2), Run(2, S)):
        part = slice(*rows)
        merged.merge(out[part], lse[:, :, part], rows=rows)
    assert torch.equal(merged.out, out)
    assert torch.equal(merged.lse, lse)


@pytest.mark.parametrize("size", [1e4, -1e4, 1e30])
def test_large_scores_merge_without_overflow(size: float) -> None:
    parts = [partial(Run(0, 5)), partial(Run(5, 11))]
    merged = empty(torch.float32)
    for out, lse in parts:
        merged.merge(out.float(), (lse + size).float(), rows=ROWS)
    assert merged.out.isfinite().all()
    assert merged.lse.isfinite().all()
    if size == 1e4:
        assert_close(merged, partial(Run(0, 11))[0], partial(Run(0, 11))[1] + size, atol=5e-3)


def test_low_precision_parts_are_merged_in_fp32() -> None:
    """The sum of many bf16 parts is as good as their own rounding, not worse with each one."""
    merged = empty(torch.float32)
    exact = empty()
    for start in range(11):
        out, lse = partial(Run(start, start + 1))
        merged.merge(out.bfloat16(), lse.float(), rows=ROWS)
        exact.merge(out.bfloat16(), lse, rows=ROWS)
    assert merged.out.dtype == merged.lse.dtype == torch.float32
    assert_close(merged, exact.out, exact.lse, atol=2e-6)


def test_a_sink_joins_the_denominator_only() -> None:
    x = tensors()
    merged = empty()
    for keys in KEYS:
        merged.merge(*partial(keys), rows=ROWS)
    merged.add_sink(x["sink"])
    expected = oracle_attention(x["q"], x["k"], x["v"], None, sink=x["sink"])
    assert_close(merged, expected.out, expected.lse)


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    mask = tensors()["mask"].clone()
    mask[:, :, 3] = False
    merged = empty()
    for keys in KEYS:
        merged.merge(*partial(keys, mask), rows=ROWS)
    merged.add_sink(torch.full((H,), -math.inf))
    assert_close(merged, *partial(Run(0, 11), mask))


def test_a_nan_is_not_merged_away() -> None:
    merged = empty()
    merged.merge(*partial(Run(0, 5)), rows=ROWS)
    out, lse = partial(Run(5, 11))
    out[2, 1, 0], lse[1, 0, 2] = math.nan, math.nan
    merged.merge(out, lse, rows=ROWS)
    is_nan = torch.zeros(S, B, H, dtype=torch.bool)
    is_nan[2, 1, 0] = True
    assert torch.equal(merged.out.isnan().all(-1), is_nan)
    assert torch.equal(merged.lse.isnan(), is_nan.permute(1, 2, 0))
