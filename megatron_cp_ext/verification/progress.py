"""Shows how a verification goes on: bars on a terminal, lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_cp_ext.verification.metrics import Step
from megatron_cp_ext.verification.records import verdict
from megatron_cp_ext.verification.verify import RunReport, VerifyPlan


class Bars:
    """A bar for every run, on a terminal.

    Args:
        plan: the runs.
        console: the terminal.
    """

    def __init__(self, plan: VerifyPlan, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._tasks = [
            self._progress.add_task(
                escape(_name(plan, index)), total=plan.workload.steps, start=False, state="waiting"
            )
            for index in range(len(plan.runs))
        ]

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def started(self, index: int) -> None:
        """Start the run's clock."""
        self._progress.start_task(self._tasks[index])
        self._progress.update(self._tasks[index], state="starting")

    def stepped(self, index: int, step: Step) -> None:
        """Move the run's bar."""
        self._progress.update(self._tasks[index], advance=1, state=f"loss {step.loss:.4f}")

    def finished(self, index: int, report: RunReport) -> None:
        """Stop the run's clock and show its verdict."""
        color = "green" if report.passed else "red"
        state = f"[{color}]{verdict(report.passed)}[/]"
        self._progress.update(self._tasks[index], state=state)
        self._progress.stop_task(self._tasks[index])


class Lines:
    """Now and then a line, for logs.

    Args:
        plan: the runs.
        console: where the lines go.
    """

    def __init__(self, plan: VerifyPlan, console: Console) -> None:
        self._plan, self._console = plan, console

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is left open."""

    def started(self, index: int) -> None:
        """Say that a run starts, and on how many ranks."""
        ranks = self._plan.runs[index].world_size
        self._say(index, f"started on {ranks} rank{'s' if ranks > 1 else ''}")

    def stepped(self, index: int, step: Step) -> None:
        """Report the first step and each quarter of the way."""
        quarter = max(1, self._plan.workload.steps // 4)
        if step.iteration == 1 or step.iteration % quarter == 0:
            self._say(index, f"step {step.iteration}/{self._plan.workload.steps}, {_state(step)}")

    def finished(self, index: int, report: RunReport) -> None:
        """Report the verdict and the time."""
        reason = f": {report.failures[0]}" if report.failures else ""
        self._say(index, f"{verdict(report.passed)} after {report.wall_s:.1f} s{reason}")

    def _say(self, index: int, text: str) -> None:
        total = len(self._plan.runs)
        line = f"[{index + 1}/{total}] {_name(self._plan, index)}: {text}"
        self._console.print(escape(line), soft_wrap=True)


def progress_on(console: Console, plan: VerifyPlan) -> Bars | Lines:
    """Bars on a terminal, lines elsewhere; use it in a `with` statement."""
    return Bars(plan, console) if console.is_terminal else Lines(plan, console)


def _name(plan: VerifyPlan, index: int) -> str:
    spec = plan.runs[index]
    return f"baseline ({spec})" if index < len(plan.baselines) else str(spec)


def _state(step: Step) -> str:
    return f"loss {step.loss:.6f}, grad norm {step.grad_norm:.6f}"
