"""A verification as tables on a terminal."""

from __future__ import annotations

import math
import sys
from typing import TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_cp_ext.verification.metrics import Step
from megatron_cp_ext.verification.records import verdict
from megatron_cp_ext.verification.verify import RunReport, VerifyReport

WIDTH_OF_FILES = 140


def make_console(file: TextIO | None = None) -> Console:
    """A console for `file`, stdout by default; wide enough for the tables where it is no
    terminal."""
    file = file or sys.stdout
    return Console(file=file, highlight=False, width=None if file.isatty() else WIDTH_OF_FILES)


def print_report(report: VerifyReport, console: Console, *, per_step: bool = False) -> None:
    """Print the verdicts, what went wrong, and the numbers of each step.

    Args:
        report: what to print.
        console: where.
        per_step: the steps of every configuration, not only of the one furthest off.
    """
    console.print(_summary(report))
    for run in report.runs:
        if not run.passed:
            _print_failure(run, console)
    compared = [run for run in report.configs if run.comparison is not None]
    shown = compared if per_step else sorted(compared, key=_distance, reverse=True)[:1]
    for run in shown:
        console.print(_steps(report, run, worst=not per_step and len(compared) > 1))
    count = sum(run.passed for run in report.configs)
    allowed = report.plan.tolerances
    console.print(
        f"{_colored(report.passed)}  {count} of {len(report.configs)} configurations equal their "
        f"baseline over {report.plan.workload.steps} steps in {report.plan.workload.dtype} "
        f"(relative: loss {allowed.loss:g}, grad norm {allowed.grad_norm:g})"
    )


def _summary(report: VerifyReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("configuration", overflow="fold")
    table.add_column("ranks", justify="right")
    table.add_column("CP/TP/PP/DP", justify="center")
    # The differences are the largest of all steps, relative to the baseline.
    for heading in (
        "first\nloss",
        "last\nloss",
        "largest\ndiff. of\nloss",
        "largest\ndiff. of\ngrad norm",
        "wall\ntime",
    ):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    allowed = report.plan.tolerances
    for run in report.runs:
        spec, comparison = run.spec, run.comparison
        steps = run.metrics.steps if run.metrics else ()
        name = str(spec) if run.baseline is not None else f"baseline ({spec})"
        table.add_row(
            escape(name),
            str(spec.world_size),
            f"{spec.cp}/{spec.tp}/{spec.pp}/{spec.dp}",
            f"{steps[0].loss:.5f}" if steps else "-",
            f"{steps[-1].loss:.5f}" if steps else "-",
            _difference(comparison.largest_loss, allowed.loss) if comparison else "-",
            _difference(comparison.largest_grad_norm, allowed.grad_norm) if comparison else "-",
            f"{run.wall_s:.1f} s",
            _colored(run.passed),
        )
    return table


def _steps(report: VerifyReport, run: RunReport, *, worst: bool) -> Table:
    """Loss and grad norm of each step, beside the baseline's."""
    baseline, comparison = report.baseline_of(run), run.comparison
    assert baseline.metrics is not None
    assert run.metrics is not None
    assert comparison is not None
    title = f"{run.spec} against {run.baseline}" + (", the one furthest off" if worst else "")
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "step",
        "baseline\nloss",
        "\nloss",
        "rel.\ndifference",
        "baseline\ngrad norm",
        "\ngrad norm",
        "rel.\ndifference",
    ):
        table.add_column(heading, justify="right")
    allowed = report.plan.tolerances
    expected = {step.iteration: step for step in baseline.metrics.steps}
    actual = {step.iteration: step for step in run.metrics.steps}
    for iteration, loss, grad_norm in zip(
        comparison.iterations, comparison.loss, comparison.grad_norm, strict=True
    ):
        a: Step = expected[iteration]
        b: Step = actual[iteration]
        table.add_row(
            str(iteration),
            *(f"{a.loss:.7f}", f"{b.loss:.7f}", _difference(loss, allowed.loss)),
            *(f"{a.grad_norm:.7f}", f"{b.grad_norm:.7f}"),
            _difference(grad_norm, allowed.grad_norm),
        )
    return table


def _print_failure(run: RunReport, console: Console) -> None:
    console.print(f"[bold red]{escape(str(run.spec))}[/]")
    for failure in run.failures:
        console.print(f"  {escape(failure)}")
    for line in run.excerpt.splitlines():
        console.print(f"  [dim]|[/] {escape(line)}")
    if run.directory.exists():
        console.print(f"  logs: {escape(str(run.directory))}", soft_wrap=True)
    console.print()


def _distance(run: RunReport) -> float:
    """How far a run is from its baseline; not a number is furthest."""
    assert run.comparison is not None
    differences = (run.comparison.largest_loss, run.comparison.largest_grad_norm)
    return math.inf if any(math.isnan(d) for d in differences) else max(differences)


def _difference(value: float, allowed: float) -> str:
    """The difference; red when it is beyond what is allowed, or not a number."""
    text = "0" if value == 0 else f"{value:.1e}"
    return text if value <= allowed else f"[red]{text}[/]"


def _colored(passed: bool) -> str:
    return f"[bold {'green' if passed else 'red'}]{verdict(passed)}[/]"
