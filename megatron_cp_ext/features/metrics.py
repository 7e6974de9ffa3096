"""Metrics for machines: one JSON line an iteration, before any rounding for print."""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.patching import Feature, PatchManager
from megatron_cp_ext.patching.patch import wrap

TRAINING = "megatron.training.training"
LOG_PARAMETERS = (
    "loss_dict",
    "learning_rate",
    "iteration",
    "skipped_iter",
    "grad_norm",
    "num_zeros_in_grad",
)


def number(value: Any) -> float | int | None:
    """A Python number from a tensor with one element or a number."""
    return value.item() if hasattr(value, "item") else value


def holds_the_loss() -> bool:
    """Whether this is the one rank that writes: the first of the last pipeline stage."""
    from megatron.core import mpu

    return (
        mpu.is_pipeline_last_stage(ignore_virtual=True)
        and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        and mpu.get_tensor_model_parallel_rank() == 0
    )


class MetricsRecorder:
    """Writes what Megatron's training log is given.

    Args:
        path: the file to write.
        args: Megatron's arguments; the count of consumed samples is read from them.
    """

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.path, self.args = path, args
        self._file: TextIO | None = None
        self._step_start = time.perf_counter()

    def time_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`train_step`: remember when it began."""
        self._step_start = time.perf_counter()
        return original(*args, **kwargs)

    def log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`training_log`: write the iteration's line, then log as usual."""
        if holds_the_loss():
            self.write(bind(original, *args, **kwargs))
        return original(*args, **kwargs)

    def write(self, values: dict[str, Any]) -> None:
        """Write one line from `training_log`'s arguments, by name."""
        losses = {name: number(loss) for name, loss in values["loss_dict"].items()}
        # Reading the losses has waited for the device, so the time below is the step's.
        elapsed_ms = (time.perf_counter() - self._step_start) * 1000.0
        line: dict[str, Any] = {
            "iteration": values["iteration"],
            **losses,
            "grad_norm": number(values["grad_norm"]),
            "learning_rate": number(values["learning_rate"]),
            "elapsed_ms": elapsed_ms,
            "skipped": bool(values["skipped_iter"]),
            "consumed_samples": self.args.consumed_train_samples,
        }
        if values["num_zeros_in_grad"] is not None:
            line["num_zeros"] = number(values["num_zeros_in_grad"])
        if self._file is None:
            self._file = open_empty(self.path)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call, by the names of the function's parameters."""
    return inspect.signature(function).bind(*args, **kwargs).arguments


def open_empty(path: Path) -> TextIO:
    """Open `path` for writing, empty, with the folders it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w", encoding="utf-8")


class MetricsFeature(Feature):
    """`--cp-metrics-file`: exact losses and gradient norms for comparison between runs."""

    name = "metrics"

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(title="context parallelism: metrics")
        group.add_argument(
            "--cp-metrics-file",
            type=Path,
            default=None,
            metavar="PATH",
            help="Write one JSON line an iteration: losses, grad_norm, learning_rate, elapsed_ms, "
            "skipped, consumed_samples; in full precision. The file is emptied first.",
        )

    def validate_args(self, args: argparse.Namespace) -> None:
        if args.cp_metrics_file is not None and args.cp_metrics_file.is_dir():
            raise UsageError(
                option="--cp-metrics-file",
                value=args.cp_metrics_file,
                reason="it is a folder",
                remedy="give the path of a file",
            )

    def post_validate_args(self, args: argparse.Namespace) -> None:
        # The rank that writes is known only when process groups exist; until then a file left
        # by an earlier run could be taken for this one's.
        if args.cp_metrics_file is not None and args.rank == 0:
            open_empty(args.cp_metrics_file).close()

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        if args.cp_metrics_file is None:
            return
        recorder = MetricsRecorder(args.cp_metrics_file, args)
        manager.register(wrap(f"{TRAINING}:train_step", recorder.time_step, owner=self.name))
        manager.register(
            wrap(
                f"{TRAINING}:training_log", recorder.log, owner=self.name, parameters=LOG_PARAMETERS
            )
        )
