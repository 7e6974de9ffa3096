"""Every kernel: what it computes over tiles, shard by shard, is the oracle's attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_cp_ext import AttentionMask, SequenceLayout, capabilities
from megatron_cp_ext.kernels import KERNELS, AttentionKernel, KernelOptions
from megatron_cp_ext.kernels.shared_heads import SharedHeadsKernel
from megatron_cp_ext.layout import Run
from megatron_cp_ext.testing import (
    AttentionCase,
    assert_close_to_oracle,
    attend_by_tiles,
    bounds,
    covered_pairs,
    dense_pairs,
    relative_errors,
)
from megatron_cp_ext.testing.strategies import layouts, masks

Refused = Callable[..., AbstractContextManager[None]]

same_every_time = settings(max_examples=25, derandomize=True, deadline=None)
on_cpu = [
    kernel for kernel in KERNELS.values() if capabilities.platform_support(kernel.name, "cpu").works
]


@pytest.fixture(params=on_cpu, ids=lambda kernel: kernel.name)
def kernel(request: pytest.FixtureRequest) -> AttentionKernel:
    return request.param


Place = Callable[[Tensor], Tensor]


def assert_right(
    kernel: AttentionKernel, case: AttentionCase, *, place: Place = lambda tensor: tensor
) -> None:
    oracle = case.oracle().tensors()
    in_one_piece = relative_errors(attend_by_tiles(kernel, case.on_one_rank()), oracle)
    results = attend_by_tiles(kernel, case, place=place)
    assert_close_to_oracle(results, oracle, bounds(in_one_piece, case.dtype))


@same_every_time
@given(data=st.data(), cp_size=st.integers(1, 3), batch=st.integers(1, 2))
@pytest.mark.parametrize("kernel", on_cpu, ids=lambda kernel: kernel.name)
def test_any_mask_over_any_shards(
    kernel: AttentionKernel, data: st.DataObject, cp_size: int, batch: int
) -> None:
    layout = data.draw(layouts(cp_size, uneven=True))
    assert_right(
        kernel,
        AttentionCase(
            layout,
            data.draw(masks(layout.seq_len, batch)),
            batch=batch,
            heads=4,
            kv_heads=data.draw(st.sampled_from([1, 2, 4])),
            qk_dim=data.draw(st.sampled_from([8, 3])),
            v_dim=data.draw(st.sampled_from([8, 5])),
        ),
    )


LONG = SequenceLayout.zigzag(1200, 2)
LONG_MASKS = {
    "causal": AttentionMask.causal(),
    "window": AttentionMask.causal(window=(700, 0)),
    "narrow window both ways": AttentionMask.full(window=(33, 60)),
    "wide window both ways": AttentionMask.full(window=(800, 500)),
    "documents": AttentionMask.documents([0, 7, 700, 701, 1190]),
}


@pytest.mark.parametrize("mask", LONG_MASKS.values(), ids=LONG_MASKS.keys())
def test_shards_longer_than_a_block(kernel: AttentionKernel, mask: AttentionMask) -> None:
    assert_right(kernel, AttentionCase(LONG, mask, heads=1, kv_heads=1, dtype=torch.float32))


@pytest.mark.parametrize("mask", LONG_MASKS.values(), ids=LONG_MASKS.keys())
def test_prepared_long_tiles_hold_the_same_pairs(
    kernel: AttentionKernel, mask: AttentionMask
) -> None:
    runs = LONG.shards[0]
    prepared = kernel.prepare(mask.tiles(runs, runs))
    positions = LONG.positions(0)
    expected = dense_pairs(mask, 1200)[positions][:, positions].long()
    assert torch.equal(covered_pairs(prepared, 600, 600)[0], expected)


@same_every_time
@given(data=st.data(), cp_size=st.integers(1, 3), batch=st.integers(1, 2))
@pytest.mark.parametrize("kernel", on_cpu, ids=lambda kernel: kernel.name)
def test_prepared_tiles_hold_the_same_pairs(
    kernel: AttentionKernel, data: st.DataObject, cp_size: int, batch: int
) -> None:
    layout = data.draw(layouts(cp_size, uneven=True))
    mask = data.draw(masks(layout.seq_len, batch))
    for keys in range(cp_size):
        tiles = mask.tiles(layout.shards[0], layout.shards[keys])
        size = layout.local_length(0), layout.local_length(keys)
        assert torch.equal(
            covered_pairs(kernel.prepare(tiles), *size, batch=batch),
            covered_pairs(tiles, *size, batch=batch),
        )


def test_tiles_of_different_samples_stay_apart(kernel: AttentionKernel) -> None:
    """Sample 0 fills the lower half of a key shard's rows, sample 1 the upper."""
    layout = SequenceLayout(16, ((Run(0, 4), Run(8, 12)), (Run(4, 8), Run(12, 16))))
    samples = [AttentionMask.causal(), AttentionMask.documents([0, 8], causal=False)]
    mask = AttentionMask.per_sample(samples)
    lower, upper = mask.tiles(layout.shards[0], layout.shards[1])
    assert (lower.q_rows, lower.batch) == (Run(4, 8), Run(0, 1))
    assert (upper.q_rows, upper.batch) == (Run(0, 4), Run(1, 2))
    assert_right(kernel, AttentionCase(layout, mask, batch=2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_dtypes_and_grouped_heads(
    kernel: AttentionKernel, dtype: torch.dtype, kv_heads: int
) -> None:
    layout = SequenceLayout.zigzag(32, 2)
    for mask in (AttentionMask.causal(), AttentionMask.full(window=(5, 9))):
        case = AttentionCase(layout, mask, batch=2, kv_heads=kv_heads, dtype=dtype)
        assert_right(kernel, case)


@pytest.mark.parametrize("dims", [(192, 128), (24, 16), (8, 64), (1, 1)])
def test_value_heads_of_another_size(kernel: AttentionKernel, dims: tuple[int, int]) -> None:
    layout = SequenceLayout.zigzag(16, 2)
    case = AttentionCase(layout, heads=2, kv_heads=1, qk_dim=dims[0], v_dim=dims[1])
    assert_right(kernel, case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_kv_heads_repeated_for_the_kernel_are_shared_heads(
    kernel: AttentionKernel, dtype: torch.dtype
) -> None:
    """Unequal groups, which this is for, are met in the algorithms' tests."""
    case = AttentionCase(SequenceLayout.zigzag(32, 2), kv_heads=2, batch=2, dtype=dtype)
    assert_right(SharedHeadsKernel(kernel, [0, 0, 1, 1]), case)


def last_dimension_strided(tensor: Tensor) -> Tensor:
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


def every_other_entry(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, torch.full_like(tensor, math.nan)], dim=-1)[..., 0]


def batch_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("place", [last_dimension_strided, every_other_entry, batch_first])
@pytest.mark.parametrize("mask", [AttentionMask.causal(), AttentionMask.full(window=(3, 3))])
def test_tensors_may_lie_in_memory_in_any_way(
    kernel: AttentionKernel, place: Place, mask: AttentionMask
) -> None:
    layout = SequenceLayout.zigzag(32, 2)
    for dims in ((8, 8), (8, 5)):
        case = AttentionCase(layout, mask, batch=2, kv_heads=2, qk_dim=dims[0], v_dim=dims[1])
        assert_right(kernel, case, place=place)


def test_rows_that_see_nothing_are_zero_and_minus_infinity(kernel: AttentionKernel) -> None:
    pairs = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(1)) < 0.3
    pairs[:, :, 5] = False
    pairs[1, :, 20:] = False
    layout = SequenceLayout.zigzag(32, 2)
    case = AttentionCase(layout, AttentionMask.dense(pairs), batch=2)
    results = attend_by_tiles(kernel, case)
    blind = ~pairs.any(-1).squeeze(1)  # [b, s]
    assert (results["lse"].transpose(1, 2)[blind] == -math.inf).all()
    assert not results["out"].transpose(0, 1)[blind].any()
    assert not results["dq"].transpose(0, 1)[blind].any()
    assert all(not tensor.isnan().any() for tensor in results.values())
    assert_right(kernel, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_ten_thousand_stay_finite(kernel: AttentionKernel, dtype: torch.dtype) -> None:
    case = AttentionCase(SequenceLayout.zigzag(32, 2), magnitude=120.0, dtype=dtype)
    results = attend_by_tiles(kernel, case)
    assert results["lse"].abs().max() > 1e4
    assert all(tensor.isfinite().all() for tensor in results.values())


def test_scores_of_ten_thousand_are_right(kernel: AttentionKernel) -> None:
    """The softmax is all but one-hot, so that gradients vanish and their error is absolute."""
    case = AttentionCase(SequenceLayout.zigzag(32, 2), magnitude=120.0)
    results = attend_by_tiles(kernel, case)
    for name, expected in case.oracle().tensors().items():
        torch.testing.assert_close(results[name], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("broken", ["query", "key", "value", "dout"])
def test_a_nan_is_not_lost_between_tiles(kernel: AttentionKernel, broken: str) -> None:
    """A NaN that turned into numbers would train on unnoticed."""
    layout = SequenceLayout.zigzag(32, 2)
    case = AttentionCase(layout, AttentionMask.causal(), heads=1, kv_heads=1)
    seen: list[int] = []

    def break_one(tensor: Tensor) -> Tensor:
        seen.append(len(seen))
        if len(seen) - 1 == list(case.tensors()).index(broken):
            tensor = tensor.clone()
            tensor[12] = math.nan
        return tensor

    results = attend_by_tiles(kernel, case, place=break_one)
    # Row 12 itself, or all that see it; rows that do not may be broken too, by 0 * NaN.
    rows = [12] if broken in ("query", "dout") else list(range(12, 32))
    if broken != "dout":
        assert results["out"][rows].isnan().flatten(1).any(1).all()
    if broken in ("query", "key"):
        assert results["lse"][:, :, rows].isnan().all()
    assert results["dq"][rows].isnan().flatten(1).any(1).all()
    assert results["dk"][:13].isnan().flatten(1).any(1).all()


def test_gradients_are_added_to_what_is_there(kernel: AttentionKernel) -> None:
    case = AttentionCase(SequenceLayout.contiguous(16, 1))
    tensors = case.tensors()
    q, k, v, dout = (tensors[name] for name in ("query", "key", "value", "dout"))
    tiles = case.mask.tiles(*case.layout.shards, *case.layout.shards)
    oracle = case.oracle()
    held = [torch.full_like(tensor, 7.0) for tensor in (q, k, v)]
    kernel.backward(
        dout,
        q,
        k,
        v,
        tiles,
        out=oracle.out,
        lse=oracle.lse,
        options=KernelOptions(1.0 / math.sqrt(8)),
        into=(held[0], held[1], held[2]),
    )
    for total, gradient in zip(held, (oracle.dq, oracle.dk, oracle.dv), strict=True):
        torch.testing.assert_close(total, gradient + 7.0, rtol=0, atol=1e-12)


def test_inputs_are_left_alone(kernel: AttentionKernel) -> None:
    case = AttentionCase(SequenceLayout.contiguous(16, 1), AttentionMask.full(window=(2, 2)))
    seen: list[tuple[Tensor, Tensor]] = []

    def remember(tensor: Tensor) -> Tensor:
        seen.append((tensor, tensor.clone()))
        return tensor

    attend_by_tiles(kernel, case, place=remember)
    assert all(torch.equal(now, before) for now, before in seen)
