"""Trains one configuration in processes of its own, and gives back what it logged."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_cp_ext.verification.failure import excerpt
from megatron_cp_ext.verification.launch import Launcher, environment, torchrun
from megatron_cp_ext.verification.metrics import Metrics, MetricsError, MetricsReader, Step
from megatron_cp_ext.verification.processes import run_command
from megatron_cp_ext.verification.spec import RunSpec
from megatron_cp_ext.verification.workload import Workload


class TrainingFailed(Exception):
    """A run that did not end well.

    Args:
        reason: in one line.
        excerpt: the end of the log of the rank that failed; may be empty.
        wall_s: seconds until it failed.
    """

    def __init__(self, reason: str, excerpt: str = "", wall_s: float = 0.0) -> None:
        self.reason, self.excerpt, self.wall_s = reason, excerpt, wall_s
        super().__init__(f"{reason}\n{excerpt}" if excerpt else reason)


def train(
    spec: RunSpec,
    workload: Workload,
    directory: Path,
    *,
    extra_args: Sequence[str] = (),
    timeout_s: float = 600.0,
    launcher: Launcher = torchrun,
    on_step: Callable[[Step], None] = lambda step: None,
    cancel: threading.Event | None = None,
) -> Metrics:
    """Run one training and wait for it.

    Args:
        spec: how it is spread over ranks.
        workload: what is trained.
        directory: folder of this run, for metrics and logs; what an earlier run left is removed.
        extra_args: further Megatron arguments, for example `--save DIR` or `--load DIR`.
        timeout_s: seconds after which the run is stopped.
        launcher: makes the command.
        on_step: called with every step soon after it is made.
        cancel: stops the run once it is set.

    Returns:
        The steps it logged. Whether they are good is for `compare` to say.

    Raises:
        TrainingFailed: it exited with an error, took too long, or logged nothing to be read.
        Cancelled: `cancel` was set.
    """
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    metrics_file, log, rank_logs = (
        directory / name for name in ("metrics.jsonl", "launcher.log", "ranks")
    )
    # Yesterday's numbers must not be able to pass for today's.
    metrics_file.unlink(missing_ok=True)
    shutil.rmtree(rank_logs, ignore_errors=True)

    command = launcher(
        spec.world_size,
        [
            *workload.arguments(directory / "data-cache"),
            *spec.arguments(),
            *extra_args,
            *("--cp-metrics-file", str(metrics_file)),
        ],
        logs=rank_logs,
        script=workload.script,
    )
    reader = MetricsReader(metrics_file)
    steps: list[Step] = []

    def follow() -> None:
        for step in reader.new_steps():
            steps.append(step)
            on_step(step)

    try:
        finished = run_command(
            command,
            log=log,
            env=environment(),
            timeout_s=timeout_s,
            on_poll=follow,
            cancel=cancel,
        )
        follow()
    except MetricsError as error:
        raise TrainingFailed(str(error), excerpt(log, rank_logs)) from error
    if finished.timed_out:
        reason = f"stopped after {timeout_s:g} s, at step {len(steps)} of {workload.steps}"
    elif finished.returncode != 0:
        reason = f"failed with exit status {finished.returncode} after step {len(steps)}"
    elif not steps:
        reason = "ended without an error, but logged no metrics"
    else:
        return Metrics(tuple(steps), finished.wall_s)
    raise TrainingFailed(reason, excerpt(log, rank_logs), finished.wall_s)
