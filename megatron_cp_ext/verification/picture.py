"""A verification as a picture: the loss curves, and how far each run is from its baseline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_cp_ext.verification.records import verdict
from megatron_cp_ext.verification.verify import VerifyReport

# Colours that stay apart for colour-blind readers (Okabe and Ito), then shapes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv<>PX*"
# Where a log axis shows an exact match: below any difference that two fp32 numbers can have.
FLOOR = 1e-9
MISSING = "no picture: matplotlib is missing; pip install 'megatron-cp-ext[viz]' brings it"


class MatplotlibMissing(Exception):
    """The extra `viz` is not installed."""


def draw(report: VerifyReport, path: Path) -> None:
    """Draw the report as a PNG.

    Args:
        report: what to draw.
        path: the file to write.

    Raises:
        MatplotlibMissing: matplotlib cannot be imported.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MatplotlibMissing(MISSING) from error
    figure = Figure(figsize=(13, 6.5), layout="constrained", dpi=110)
    axes = figure.subplot_mosaic([["losses", "loss"], ["losses", "grad_norm"]], sharex=True)
    allowed = report.plan.tolerances
    _draw_losses(report, axes["losses"])
    _draw_differences(report, axes["loss"], "loss", allowed.loss)
    _draw_differences(report, axes["grad_norm"], "grad_norm", allowed.grad_norm)
    axes["grad_norm"].set_xlabel("step")
    axes["grad_norm"].xaxis.set_major_locator(MaxNLocator(integer=True))
    workload = report.plan.workload
    against = "CP=1" if report.plan.baseline is None else str(report.plan.baseline)
    figure.suptitle(
        f"{verdict(report.passed)}: training with context parallelism against {against}, "
        f"{workload.dtype}, sequences of {workload.seq_length} tokens"
    )
    figure.savefig(path)


def _draw_losses(report: VerifyReport, axes: Any) -> None:
    """Baselines as broad grey lines, the configurations on top of them."""
    for run in report.baselines:
        if run.metrics is not None:
            axes.plot(
                run.metrics.iterations,
                run.metrics.losses,
                color="0.75",
                linewidth=7,
                solid_capstyle="round",
                label=f"baseline ({run.spec})",
            )
    for index, run in enumerate(report.configs):
        steps = run.metrics.steps if run.metrics else ()
        remark = verdict(run.passed) if steps else f"{verdict(run.passed)}, no numbers"
        # Where curves coincide, staggered markers let each be seen.
        axes.plot(
            [step.iteration for step in steps],
            [step.loss for step in steps],
            label=f"{run.spec}  {remark}",
            markevery=(index % len(MARKERS), max(1, len(report.configs))),
            **_style(index),
        )
    axes.set_xlabel("step")
    axes.set_ylabel("lm loss")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_differences(report: VerifyReport, axes: Any, quantity: str, tolerance: float) -> None:
    """Relative differences on a log axis, with the tolerance they are held against."""
    name = quantity.replace("_", " ")
    for index, run in enumerate(report.configs):
        if run.comparison is None:
            continue
        values = [
            max(value, FLOOR) if math.isfinite(value) else math.nan
            for value in getattr(run.comparison, quantity)
        ]
        axes.plot(run.comparison.iterations, values, **_style(index))
    limit = max(tolerance, FLOOR)
    axes.axhline(limit, color="red", linestyle="--", linewidth=1.2)
    axes.text(
        *(0.99, limit, f"allowed: {tolerance:g}"),
        transform=axes.get_yaxis_transform(),
        **{"color": "red", "ha": "right", "va": "bottom", "fontsize": 9},
    )
    axes.set_yscale("log")
    axes.set_ylim(bottom=FLOOR / 20, top=max(axes.get_ylim()[1], limit * 10))
    axes.set_ylabel(f"relative difference\nof the {name}")
    axes.text(
        *(0.01, FLOOR / 2, "equal in every bit"),
        transform=axes.get_yaxis_transform(),
        **{"color": "0.4", "ha": "left", "va": "top", "fontsize": 8},
    )
    axes.grid(alpha=0.3)


def _style(index: int) -> dict[str, Any]:
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.3,
    }
