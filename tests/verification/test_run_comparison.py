"""Two runs agree only when both are trainings and every number is near the other."""

import math

import pytest

from megatron_cp_ext.verification import Metrics, Step, Tolerances, compare, faults
from megatron_cp_ext.verification.compare import relative_difference

FP32 = Tolerances.of("fp32")


def run(losses=(5.0, 4.0, 3.0, 2.0), grad_norms=(1.0, 1.1, 1.2, 1.3), *, first=1, samples=4):
    return Metrics(
        tuple(
            Step(first + i, loss, norm, samples=samples * (first + i))
            for i, (loss, norm) in enumerate(zip(losses, grad_norms, strict=True))
        )
    )


def test_equal_runs_agree():
    result = compare(run(), run(), FP32)
    assert result.passed
    assert result.largest_loss == result.largest_grad_norm == 0.0
    assert result.iterations == (1, 2, 3, 4)


def test_differences_are_relative_to_the_baseline_and_the_largest_counts():
    result = compare(run(), run(losses=(5.0, 4.0 * (1 + 4e-6), 3.0 * (1 - 8e-6), 2.0)), FP32)
    assert result.passed
    assert result.loss == pytest.approx((0.0, 4e-6, 8e-6, 0.0))
    assert result.largest_loss == pytest.approx(8e-6)


def test_a_loss_beyond_the_tolerance_fails_and_names_the_first_step():
    result = compare(run(), run(losses=(5.0, 4.0, 3.0 * (1 + 2e-5), 2.0 * (1 + 3e-5))), FP32)
    assert not result.passed
    (failure,) = result.failures
    assert "loss differs by 2e-05 at step 3 (allowed 1e-05), by 3e-05 at most; 2 of 4" in failure


def test_a_grad_norm_beyond_the_tolerance_fails():
    result = compare(run(), run(grad_norms=(1.0, 1.1, 1.2, 1.3 * (1 + 2e-4))), FP32)
    assert [text.startswith("grad norm differs") for text in result.failures] == [True]


def test_the_tolerances_of_bf16_are_wider():
    other = run(losses=(5.0, 4.0, 3.0, 2.0 * (1 + 5e-3)))
    assert compare(run(), other, Tolerances.of("bf16")).passed
    assert not compare(run(), other, FP32).passed


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("quantity", ["losses", "grad_norms"])
@pytest.mark.parametrize("which", ["baseline", "other", "both"])
def test_a_number_that_is_not_finite_fails_wherever_it_is(value, quantity, which):
    odd = run(**{quantity: (5.0, 4.0, value, 2.0)})
    baseline = odd if which in ("baseline", "both") else run()
    other = odd if which in ("other", "both") else run()
    result = compare(baseline, other, FP32)
    assert not result.passed
    assert any(f"is {value} at step 3" in failure for failure in result.failures)


def test_a_missing_step_fails():
    short = Metrics(run().steps[:3])
    assert "logged steps 1-3, the baseline steps 1-4" in compare(run(), short, FP32).failures
    assert not compare(short, run(), FP32).passed
    hole = Metrics(run().steps[:1] + run().steps[2:])
    assert "logged steps 1, 3, 4, the baseline steps 1-4" in compare(run(), hole, FP32).failures


def test_runs_without_steps_fail():
    assert not compare(Metrics(()), Metrics(()), FP32).passed
    assert math.isnan(compare(Metrics(()), Metrics(()), FP32).largest_loss)


def test_runs_without_a_common_step_fail():
    assert not compare(run(), run(first=11), FP32).passed


def test_other_data_fail():
    result = compare(run(), run(samples=8), FP32)
    assert result.failures == ("has seen another number of samples than the baseline at step 1",)


@pytest.mark.parametrize("losses", [(5.0, 5.0, 5.0, 5.0), (5.0, 5.1, 5.2, 5.3)])
def test_equal_runs_that_learn_nothing_fail(losses):
    result = compare(run(losses), run(losses), FP32)
    assert not result.passed
    assert any(failure.startswith("baseline: ") for failure in result.failures)


def test_equal_grad_norms_at_every_step_fail():
    assert not compare(run(grad_norms=(0.0,) * 4), run(grad_norms=(0.0,) * 4), FP32).passed


def test_the_end_of_a_resumed_training_need_not_fall():
    late = run((2.0, 2.1, 1.9, 2.2), first=6)
    assert compare(late, late, FP32, must_learn=False).passed
    assert not compare(late, late, FP32).passed


def test_part_of_a_run_can_be_compared():
    assert compare(run().between(3, 4), run((3.0, 2.0), (1.2, 1.3), first=3), FP32).passed


def test_the_expected_steps_are_checked():
    assert faults(run(), iterations=range(1, 5)) == []
    assert faults(run(), iterations=range(1, 6)) == ["logged steps 1-4 instead of steps 1-5"]


@pytest.mark.parametrize(
    ("expected", "actual", "difference"),
    [(2.0, 2.5, 0.25), (-2.0, -1.0, 0.5), (0.0, 0.0, 0.0), (0.0, 1e-30, math.inf)],
)
def test_relative_difference(expected, actual, difference):
    assert relative_difference(expected, actual) == difference


@pytest.mark.parametrize(("expected", "actual"), [(math.nan, 1.0), (1.0, math.nan), (0, math.nan)])
def test_the_relative_difference_to_nothing_is_no_number(expected, actual):
    assert math.isnan(relative_difference(expected, actual))
