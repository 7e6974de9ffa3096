"""Reads the metrics a run writes: one JSON object per line and optimizer step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOSS = "lm loss"
GRAD_NORM = "grad_norm"


class MetricsError(ValueError):
    """A line of a metrics file cannot be read."""


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Args:
        iteration: counted from 1 over the whole training, restarts included.
        loss: mean loss of the global batch; NaN when the run gave none.
        grad_norm: norm of the whole gradient before clipping; NaN when the run gave none.
        samples: sequences consumed since the training began; None when the run does not say.
        seconds: duration of the step; None when the run does not say.
    """

    iteration: int
    loss: float
    grad_norm: float
    samples: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Metrics:
    """The steps of one run, in the order they were made.

    Args:
        steps: what was logged.
        wall_s: seconds of the whole run, start-up included.
    """

    steps: tuple[Step, ...]
    wall_s: float = 0.0

    @property
    def iterations(self) -> tuple[int, ...]:
        """The logged iterations."""
        return tuple(step.iteration for step in self.steps)

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss of each step."""
        return tuple(step.loss for step in self.steps)

    @property
    def grad_norms(self) -> tuple[float, ...]:
        """Gradient norm of each step."""
        return tuple(step.grad_norm for step in self.steps)

    def between(self, first: int, last: int) -> Metrics:
        """The steps from iteration `first` to iteration `last`, both included."""
        return Metrics(tuple(s for s in self.steps if first <= s.iteration <= last), self.wall_s)


class MetricsReader:
    """Follows a metrics file that is being written.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_steps(self) -> list[Step]:
        """The steps that were completed since the last call.

        Raises:
            MetricsError: a complete line is not a step.
        """
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [_step(line) for line in complete.decode().splitlines() if line.strip()]


def read_metrics(path: Path, wall_s: float = 0.0) -> Metrics:
    """All steps in a metrics file; none when the file does not exist.

    Raises:
        MetricsError: a line is not a step.
    """
    return Metrics(tuple(MetricsReader(path).new_steps()), wall_s)


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else math.nan


def _step(line: str) -> Step:
    try:
        record = json.loads(line)
        elapsed_ms = record.get("elapsed_ms")
        return Step(
            int(record["iteration"]),
            _number(record, LOSS),
            _number(record, GRAD_NORM),
            samples=record.get("consumed_samples"),
            seconds=None if elapsed_ms is None else elapsed_ms / 1000.0,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise MetricsError(f"not a step: {line!r} ({error})") from error


def _number(record: dict[str, Any], key: str) -> float:
    """A number of a record; NaN when it is absent or null, so that it cannot pass as equal."""
    value = record.get(key)
    return math.nan if value is None else float(value)
