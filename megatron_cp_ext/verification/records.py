"""A verification as plain data, for `verify.json`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import platform
from pathlib import Path
from typing import Any

from megatron_cp_ext.verification.verify import RunReport, VerifyReport

PACKAGES = ("megatron-cp-ext", "megatron-core", "torch", "transformer-engine", "numpy")


def write_json(report: VerifyReport, path: Path) -> None:
    """Write everything about a verification: arguments, versions, numbers, verdict."""
    text = json.dumps(_finite(record(report)), indent=2, allow_nan=False)
    path.write_text(text + "\n")


def record(report: VerifyReport) -> dict[str, Any]:
    """The report as dictionaries, lists, strings and numbers."""
    plan = report.plan
    workload = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in dataclasses.asdict(plan.workload).items()
    }
    return {
        "verdict": verdict(report.passed),
        "versions": versions(),
        "workload": workload,
        "tolerances": dataclasses.asdict(plan.tolerances),
        "timeout_s": plan.timeout_s,
        "runs": [_run(report, run) for run in report.runs],
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def verdict(passed: bool) -> str:
    """`PASS` or `FAIL`."""
    return "PASS" if passed else "FAIL"


def _run(report: VerifyReport, run: RunReport) -> dict[str, Any]:
    spec, comparison = run.spec, run.comparison
    return {
        "spec": str(spec),
        "baseline": None if run.baseline is None else str(run.baseline),
        "verdict": verdict(run.passed),
        "failures": list(run.failures),
        "excerpt": run.excerpt,
        "algorithm": spec.algorithm,
        "ranks": spec.world_size,
        "degrees": {key: getattr(spec, key) for key in ("cp", "tp", "pp", "dp", "ulysses")},
        "sequence_parallel": spec.sequence_parallel,
        "arguments": spec.arguments(),
        "wall_s": run.wall_s,
        "largest_loss_difference": comparison.largest_loss if comparison else None,
        "largest_grad_norm_difference": comparison.largest_grad_norm if comparison else None,
        "steps": [dataclasses.asdict(step) for step in run.metrics.steps] if run.metrics else [],
        "differences": [
            {"iteration": iteration, "loss": loss, "grad_norm": grad_norm}
            for iteration, loss, grad_norm in zip(
                comparison.iterations, comparison.loss, comparison.grad_norm, strict=True
            )
        ]
        if comparison
        else [],
    }


def _finite(value: Any) -> Any:
    """`value` with NaN and infinities as strings: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
