"""Decides whether two trainings are the same, and whether they are trainings at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_cp_ext.verification.metrics import Metrics, mean


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that still count as equal, at every step."""

    loss: float
    grad_norm: float

    @classmethod
    def of(cls, dtype: str) -> Tolerances:
        """The tolerances for a dtype, `fp32` or `bf16`."""
        return {"fp32": cls(1e-5, 1e-4), "bf16": cls(1e-2, 1e-2)}[dtype]


@dataclass(frozen=True)
class Comparison:
    """A run held against its baseline.

    Args:
        iterations: the iterations that both have.
        loss: relative difference of the loss at each of them.
        grad_norm: relative difference of the gradient norm at each of them.
        failures: why the two are not the same training; empty when they are.
    """

    iterations: tuple[int, ...]
    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Nothing stands against it."""
        return not self.failures

    @property
    def largest_loss(self) -> float:
        """Largest relative difference of the loss; NaN when there is nothing to compare."""
        return _largest(self.loss)

    @property
    def largest_grad_norm(self) -> float:
        """Largest relative difference of the gradient norm; NaN when there is none."""
        return _largest(self.grad_norm)


def compare(
    baseline: Metrics,
    other: Metrics,
    tolerances: Tolerances,
    *,
    must_learn: bool = True,
) -> Comparison:
    """Compare a run with its baseline, step by step.

    Two runs that agree on nothing worth having fail too: neither may hold a number that is
    not finite, repeat one loss at every step, or (with `must_learn`) end no better than it began.

    Args:
        baseline: the run that is taken as right.
        other: the run in question.
        tolerances: what counts as equal.
        must_learn: the loss has to fall. Turn it off for a few steps of a resumed training.
    """
    failures = [f"baseline: {text}" for text in faults(baseline, must_learn=must_learn)]
    failures += faults(other, must_learn=must_learn)
    if baseline.iterations != other.iterations:
        failures.append(
            f"logged {_span(other.iterations)}, the baseline {_span(baseline.iterations)}"
        )
    expected = {step.iteration: step for step in baseline.steps}
    pairs = [(expected[s.iteration], s) for s in other.steps if s.iteration in expected]
    unlike = [b.iteration for a, b in pairs if a.samples != b.samples]
    if unlike:
        failures.append(f"has seen another number of samples than the baseline at step {unlike[0]}")
    iterations = tuple(step.iteration for _, step in pairs)
    loss = tuple(relative_difference(a.loss, b.loss) for a, b in pairs)
    grad_norm = tuple(relative_difference(a.grad_norm, b.grad_norm) for a, b in pairs)
    for name, differences, allowed in (
        ("loss", loss, tolerances.loss),
        ("grad norm", grad_norm, tolerances.grad_norm),
    ):
        beyond = [(i, d) for i, d in zip(iterations, differences, strict=True) if not d <= allowed]
        if beyond:
            first, difference = beyond[0]
            failures.append(
                f"{name} differs by {difference:.2g} at step {first} (allowed {allowed:g}), "
                f"by {_largest(differences):.2g} at most; {len(beyond)} of {len(differences)} "
                "steps are beyond"
            )
    return Comparison(iterations, loss, grad_norm, tuple(failures))


def faults(
    run: Metrics, *, iterations: Sequence[int] | None = None, must_learn: bool = True
) -> list[str]:
    """What disqualifies a run, whatever it is compared with.

    Args:
        run: the run.
        iterations: the iterations it had to log; None when that is not known.
        must_learn: the loss has to fall.
    """
    if not run.steps:
        return ["no step was logged"]
    found = []
    if iterations is not None and tuple(iterations) != run.iterations:
        found.append(f"logged {_span(run.iterations)} instead of {_span(iterations)}")
    for name, values in (("loss", run.losses), ("grad norm", run.grad_norms)):
        odd = [(i, v) for i, v in zip(run.iterations, values, strict=True) if not math.isfinite(v)]
        if odd:
            found.append(f"{name} is {odd[0][1]} at step {odd[0][0]}")
        elif len(values) > 1 and len(set(values)) == 1:
            found.append(f"{name} is {values[0]:g} at every step: this is no training")
    if must_learn and not found and not _fell(run.losses):
        found.append(f"the loss did not fall: {run.losses[0]:.6g} to {run.losses[-1]:.6g}")
    return found


def relative_difference(expected: float, actual: float) -> float:
    """|actual - expected| / |expected|; NaN when either is NaN."""
    if expected == 0.0:
        return 0.0 if actual == 0.0 else math.nan if math.isnan(actual) else math.inf
    return abs(actual - expected) / abs(expected)


def _fell(losses: Sequence[float]) -> bool:
    """The second half lies below the first; halves, because single batches scatter."""
    half = len(losses) // 2
    return half > 0 and mean(losses[-half:]) < mean(losses[:half])


def _largest(values: Sequence[float]) -> float:
    """The maximum; NaN when there is one among the values, or nothing."""
    if not values or any(math.isnan(v) for v in values):
        return math.nan
    return max(values)


def _span(iterations: Sequence[int]) -> str:
    """`steps 1-20`, or the steps one by one where some are missing or repeated."""
    if not iterations:
        return "no step"
    if tuple(iterations) == tuple(range(iterations[0], iterations[-1] + 1)):
        return f"steps {iterations[0]}-{iterations[-1]}"
    shown = ", ".join(map(str, iterations[:30]))
    return f"steps {shown}" + (" ..." if len(iterations) > 30 else "")
