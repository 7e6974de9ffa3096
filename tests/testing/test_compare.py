"""The comparison catches what a context-parallel bug looks like, and says where it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.testing.compare import (
    assert_close_to_oracle,
    bounds,
    relative_error,
    relative_errors,
    tolerance,
)
from megatron_cp_ext.testing.oracle import oracle_attention

S, B, H, D = 32, 2, 2, 8
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """Causal attention whose row 5 sees nothing in head 0, without a sink; dsink is made up."""
    generator = torch.Generator().manual_seed(99)
    q, k, v, dout = torch.randn(4, S, B, H, D, dtype=torch.float64, generator=generator)
    mask = torch.ones(S, S, dtype=torch.bool).tril().expand(B, H, S, S).clone()
    mask[:, 0, 5] = False
    result = oracle_attention(q, k, v, mask, dout=dout).tensors()
    return result | {"dsink": torch.randn(H, dtype=torch.float64, generator=generator)}


def copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_error_is_the_largest_deviation_over_the_largest_expected_value() -> None:
    assert relative_error(torch.tensor([1.0, -4.0]), torch.tensor([1.5, -4.0])) == 0.125


def test_error_where_zero_is_expected_is_absolute() -> None:
    assert relative_error(torch.tensor([0.0, 0.25]), torch.zeros(2)) == 0.25
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0


def test_equal_infinities_agree_and_anything_else_is_infinitely_far_off() -> None:
    a = torch.tensor([-math.inf, 2.0])
    assert relative_error(a, a) == 0.0
    for other in (3.0, math.nan, math.inf):
        b = torch.tensor([other, 2.0])
        assert relative_error(a, b) == math.inf
        assert relative_error(b, a) == math.inf
    nan = torch.tensor([math.nan])
    assert relative_error(nan, nan) == math.inf


def test_empty_tensors_agree() -> None:
    assert relative_error(torch.empty(0, 3), torch.empty(0, 3)) == 0.0


def test_error_refuses_shapes_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match=r"shape \[1, 3\] where \[2, 3\]"):
        relative_error(torch.zeros(1, 3), torch.zeros(2, 3))


def test_equal_tensors_pass_at_bound_zero(expected: dict[str, Tensor]) -> None:
    assert_close_to_oracle(copy(expected), expected, 0.0)
    assert set(relative_errors(copy(expected), expected).values()) == {0.0}


def test_lower_precision_passes_within_its_bound_and_not_below(
    expected: dict[str, Tensor],
) -> None:
    rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert_close_to_oracle(rounded, expected, 2**-8)
    with pytest.raises(AssertionError, match="differs from the oracle"):
        assert_close_to_oracle(rounded, expected, 1e-5)


def lose_a_row(x: dict[str, Tensor]) -> None:
    x["out"][17] = 0


def swap_two_chunks(x: dict[str, Tensor]) -> None:
    x["dq"][:16] = torch.cat([x["dq"][8:16], x["dq"][:8]])


def leave_out_the_scale(x: dict[str, Tensor]) -> None:
    x["dk"] *= math.sqrt(D)


def lose_one_contribution(x: dict[str, Tensor]) -> None:
    x["dv"][0] *= 0.9


def flip_the_sign(x: dict[str, Tensor]) -> None:
    x["dsink"].neg_()


def let_one_nan_in(x: dict[str, Tensor]) -> None:
    x["dq"][3, 1, 1, 2] = math.nan


def zero_for_minus_infinity(x: dict[str, Tensor]) -> None:
    x["lse"].masked_fill_(x["lse"] == -math.inf, 0.0)


def minus_infinity_too_many(x: dict[str, Tensor]) -> None:
    x["lse"][1, 1, 9] = -math.inf


def very_negative_for_minus_infinity(x: dict[str, Tensor]) -> None:
    x["lse"].clamp_(min=-1e30)


def other_shape(x: dict[str, Tensor]) -> None:
    x["out"] = x["out"].flatten(2)


@pytest.mark.parametrize(
    ("mutate", "name"),
    [
        (lose_a_row, "out"),
        (swap_two_chunks, "dq"),
        (leave_out_the_scale, "dk"),
        (lose_one_contribution, "dv"),
        (flip_the_sign, "dsink"),
        (let_one_nan_in, "dq"),
        (zero_for_minus_infinity, "lse"),
        (minus_infinity_too_many, "lse"),
        (very_negative_for_minus_infinity, "lse"),
        (other_shape, "out"),
    ],
)
def test_mutations_fail_even_at_the_loosest_bound(
    expected: dict[str, Tensor], mutate: Callable[[dict[str, Tensor]], None], name: str
) -> None:
    actual = copy(expected)
    mutate(actual)
    loosest = {each: tolerance(torch.bfloat16, each) for each in NAMES}
    with pytest.raises(AssertionError, match=f"  {name}: ") as caught:
        assert_close_to_oracle(actual, expected, loosest)
    others = set(NAMES) - {name}
    assert not any(f"  {other}: " in str(caught.value) for other in others)


def test_message_names_tensor_error_bound_and_worst_position() -> None:
    want = torch.tensor([[1.0, 2.0], [4.0, 0.0]])
    got = torch.tensor([[1.0, 2.5], [4.0, 1.0]])
    with pytest.raises(AssertionError) as caught:
        assert_close_to_oracle({"dk": got}, {"dk": want}, 0.1)
    assert (
        "dk: error 2.500e-01 exceeds the bound 1.000e-01 in 2 of 4 entries; "
        "worst at [1, 1]: 1 where 0 is expected"
    ) in str(caught.value)


def test_every_tensor_that_is_off_is_reported(expected: dict[str, Tensor]) -> None:
    actual = {name: tensor + 1 for name, tensor in expected.items()}
    with pytest.raises(AssertionError) as caught:
        assert_close_to_oracle(actual, expected, 1e-3)
    assert all(f"  {name}: " in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_may_be_missing_on_either_side(expected: dict[str, Tensor], name: str) -> None:
    fewer = {other: tensor for other, tensor in expected.items() if other != name}
    with pytest.raises(AssertionError, match=f"missing from the results: \\['{name}'\\]"):
        assert_close_to_oracle(fewer, expected, 1.0)
    with pytest.raises(AssertionError, match=f"nothing to compare with: \\['{name}'\\]"):
        assert_close_to_oracle(expected, fewer, 1.0)
    with pytest.raises(AssertionError, match="no bound given"):
        assert_close_to_oracle(expected, expected, dict.fromkeys(fewer, 1.0))
    with pytest.raises(AssertionError, match="missing"):
        relative_errors(fewer, expected)


@pytest.mark.parametrize("bound", [math.inf, math.nan])
def test_bound_that_decides_nothing_is_refused(expected: dict[str, Tensor], bound: float) -> None:
    with pytest.raises(AssertionError, match="lets everything pass"):
        assert_close_to_oracle(expected, expected, bound)


def test_each_tensor_is_held_to_its_own_bound(expected: dict[str, Tensor]) -> None:
    actual = copy(expected)
    actual["dv"] *= 1.01
    assert_close_to_oracle(actual, expected, dict.fromkeys(NAMES, 0.0) | {"dv": 0.011})
    with pytest.raises(AssertionError, match="  dv: "):
        assert_close_to_oracle(actual, expected, dict.fromkeys(NAMES, 1.0) | {"dv": 0.009})


def test_fp64_and_fp32_are_held_to_fixed_bounds() -> None:
    errors = dict.fromkeys(NAMES, 1e-12)
    assert bounds(errors, torch.float64) == dict.fromkeys(NAMES, 1e-9)
    assert bounds(errors, torch.float32) == dict.fromkeys(NAMES, 1e-5)


def test_bf16_bounds_follow_the_one_rank_error_above_a_floor() -> None:
    assert bounds({"out": 0.01, "dq": 0.01}, torch.bfloat16) == {"out": 0.02, "dq": 0.03}
    rounding = 2**-8  # half an epsilon: an output has two of them, a gradient three
    floors = {"out": 2 * rounding, "dq": 3 * rounding}
    assert bounds({"out": 1e-6, "dq": 1e-6}, torch.bfloat16) == floors


def test_lse_of_bf16_is_held_to_fp32() -> None:
    assert tolerance(torch.bfloat16, "lse") == 1e-5
    assert bounds({"lse": 1e-4}, torch.bfloat16) == {"lse": 2e-4}


@pytest.mark.parametrize("error", [0.2, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_rank_run_that_is_itself_wrong_is_no_yardstick(
    error: float, dtype: torch.dtype
) -> None:
    with pytest.raises(AssertionError, match="dk of the one-rank run"):
        bounds({"dk": error}, dtype)


def test_unknown_dtype_or_tensor_has_no_tolerance() -> None:
    with pytest.raises(UsageError, match="no tolerance"):
        tolerance(torch.int32, "out")
    with pytest.raises(UsageError, match="no such tensor"):
        tolerance(torch.float32, "dx")
