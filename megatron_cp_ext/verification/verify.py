"""Runs the baselines and the configurations of a plan, and compares them."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_cp_ext.verification.compare import Comparison, Tolerances, compare, faults
from megatron_cp_ext.verification.launch import Launcher, torchrun
from megatron_cp_ext.verification.metrics import Metrics, Step
from megatron_cp_ext.verification.spec import RunSpec
from megatron_cp_ext.verification.training import TrainingFailed, train
from megatron_cp_ext.verification.workload import Workload


@dataclass(frozen=True)
class VerifyPlan:
    """What is to be verified.

    Args:
        workload: the training that every run repeats.
        configs: the configurations in question.
        tolerances: what counts as equal.
        output: folder for the runs' files.
        baseline: what every configuration is compared with; None for each one's own, without
            context parallelism at the same TP and PP.
        timeout_s: seconds for one run.
        jobs: runs at the same time.
        keep_logs: keep the files of runs that passed; those of failed ones always stay.
    """

    workload: Workload
    configs: tuple[RunSpec, ...]
    tolerances: Tolerances
    output: Path
    baseline: RunSpec | None = None
    timeout_s: float = 600.0
    jobs: int = 1
    keep_logs: bool = False

    def baseline_of(self, spec: RunSpec) -> RunSpec:
        """What a configuration is compared with."""
        return self.baseline or spec.baseline()

    @property
    def baselines(self) -> tuple[RunSpec, ...]:
        """Every baseline once, in the order of the configurations."""
        return tuple(dict.fromkeys(self.baseline_of(spec) for spec in self.configs))

    @property
    def runs(self) -> tuple[RunSpec, ...]:
        """All runs: the baselines, then the configurations."""
        return (*self.baselines, *self.configs)

    def directory(self, index: int) -> Path:
        """Folder of the run at `index` in `runs`."""
        name = "".join(c if c.isalnum() or c in "=-." else "-" for c in str(self.runs[index]))
        return self.output / "runs" / f"{index:02d}-{name[:80]}"


@dataclass(frozen=True)
class RunReport:
    """One run and its verdict.

    Args:
        spec: the configuration.
        baseline: what it was compared with; None when it is a baseline itself.
        metrics: what it logged; None when it failed or never started.
        comparison: the comparison with the baseline; None for baselines and failed runs.
        failures: why it does not pass; empty when it does.
        excerpt: the end of the log of a run that broke off.
        wall_s: seconds it took.
        directory: its folder, where logs are or were.
    """

    spec: RunSpec
    baseline: RunSpec | None
    metrics: Metrics | None
    comparison: Comparison | None
    failures: tuple[str, ...]
    excerpt: str
    wall_s: float
    directory: Path

    @property
    def passed(self) -> bool:
        """Nothing stands against it."""
        return not self.failures


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of a plan: baselines first, then the configurations."""

    plan: VerifyPlan
    runs: tuple[RunReport, ...]

    @property
    def passed(self) -> bool:
        """Every run passed, and something was compared."""
        return bool(self.configs) and all(run.passed for run in self.runs)

    @property
    def baselines(self) -> tuple[RunReport, ...]:
        """The runs that others were compared with."""
        return tuple(run for run in self.runs if run.baseline is None)

    @property
    def configs(self) -> tuple[RunReport, ...]:
        """The runs in question."""
        return tuple(run for run in self.runs if run.baseline is not None)

    def baseline_of(self, run: RunReport) -> RunReport:
        """The baseline's report for a configuration's."""
        return next(b for b in self.baselines if b.spec == run.baseline)


class Progress(Protocol):
    """Told how a verification goes on, from several threads when `jobs` is above 1.

    Runs are named by their index in `VerifyPlan.runs`.
    """

    def started(self, index: int) -> None:
        """A run was launched."""

    def stepped(self, index: int, step: Step) -> None:
        """A run made a step."""

    def finished(self, index: int, report: RunReport) -> None:
        """A run has its verdict, or was not started at all."""


class Silent:
    """Progress that nobody looks at."""

    def started(self, index: int) -> None:
        """Say nothing."""

    def stepped(self, index: int, step: Step) -> None:
        """Say nothing."""

    def finished(self, index: int, report: RunReport) -> None:
        """Say nothing."""


def verify(
    plan: VerifyPlan, *, progress: Progress | None = None, launcher: Launcher = torchrun
) -> VerifyReport:
    """Run the plan: the baselines first, then whatever has one to be compared with.

    A run that fails does not stop the others. An interrupt does, and ends every process.

    Args:
        plan: what to run.
        progress: is told how it goes.
        launcher: makes the command of a training.
    """
    progress = progress or Silent()
    cancel = threading.Event()
    reports: dict[int, RunReport] = {}

    def run(index: int) -> None:
        spec = plan.runs[index]
        is_baseline = index < len(plan.baselines)
        baseline = None if is_baseline else reports[plan.baselines.index(plan.baseline_of(spec))]
        report = _run(
            plan, index, baseline=baseline, progress=progress, launcher=launcher, cancel=cancel
        )
        reports[index] = report
        progress.finished(index, report)

    first = len(plan.baselines)
    with ThreadPoolExecutor(plan.jobs) as pool:
        _all_of(pool, run, range(first), cancel)
        _all_of(pool, run, range(first, len(plan.runs)), cancel)
    return VerifyReport(plan, tuple(reports[index] for index in range(len(plan.runs))))


def _all_of(
    pool: ThreadPoolExecutor,
    function: Callable[[int], None],
    indices: Sequence[int],
    cancel: threading.Event,
) -> None:
    """Call `function` for every index and wait; when that is interrupted, stop what runs."""
    futures = [pool.submit(function, index) for index in indices]
    try:
        wait(futures)
    except BaseException:
        cancel.set()
        pool.shutdown(cancel_futures=True)
        raise
    for future in futures:
        future.result()


def _run(
    plan: VerifyPlan,
    index: int,
    *,
    baseline: RunReport | None,
    progress: Progress,
    launcher: Launcher,
    cancel: threading.Event,
) -> RunReport:
    """Train the run at `index` and judge it."""
    spec, directory = plan.runs[index], plan.directory(index)
    metrics, comparison = None, None
    failures: tuple[str, ...]
    text, wall_s = "", 0.0
    if baseline is not None and not baseline.passed:
        failures = ("not run: its baseline failed",)
    else:
        progress.started(index)
        try:
            metrics = train(
                spec,
                plan.workload,
                directory,
                timeout_s=plan.timeout_s,
                launcher=launcher,
                on_step=lambda step: progress.stepped(index, step),
                cancel=cancel,
            )
        except TrainingFailed as error:
            failures, text, wall_s = (error.reason,), error.excerpt, error.wall_s
        else:
            wall_s = metrics.wall_s
            failures = tuple(faults(metrics, iterations=range(1, plan.workload.steps + 1)))
            if baseline is not None and baseline.metrics is not None:
                comparison = compare(baseline.metrics, metrics, plan.tolerances)
                failures = tuple(dict.fromkeys((*failures, *comparison.failures)))
                failures += _hint(spec, baseline.spec, comparison)
    if not failures and not plan.keep_logs:
        shutil.rmtree(directory)
        with contextlib.suppress(OSError):  # not empty: another run's files are there
            directory.parent.rmdir()
    return RunReport(
        spec=spec,
        baseline=baseline.spec if baseline else None,
        metrics=metrics,
        comparison=comparison,
        failures=failures,
        excerpt=text,
        wall_s=wall_s,
        directory=directory,
    )


def _hint(spec: RunSpec, baseline: RunSpec, comparison: Comparison) -> tuple[str, ...]:
    """Why two runs may differ from the very first step on, where the sizes explain it."""
    if comparison.passed or (spec.tp, spec.pp) == (baseline.tp, baseline.pp):
        return ()
    return (
        f"{spec} and its baseline {baseline} differ in TP or PP, on which Megatron's initial "
        "weights depend; leave --baseline out to compare at the same TP and PP",
    )
