"""Stands in for a training: takes the same arguments, writes the same metrics file.

`--fake KIND` makes it go wrong in one way. Under torchrun only rank 0 writes metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

CHILD = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


def hang(fifo: str) -> None:
    """Start a child that has left the process group and ignores SIGTERM; report both; wait."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
    with open(fifo, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    signal.pause()


def losses(steps: int, kind: str) -> list[float]:
    if kind == "flat":
        return [5.0] * steps
    if kind == "rising":
        return [5.0 + 0.1 * step for step in range(steps)]
    return [5.0 - 0.1 * step for step in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int)
    parser.add_argument("--context-parallel-size", type=int)
    parser.add_argument("--cp-metrics-file", type=Path)
    parser.add_argument("--fake", default="")
    parser.add_argument("--fifo")
    args, _ = parser.parse_known_args()
    rank, kind = int(os.environ.get("RANK", "0")), args.fake
    if kind == "one-rank-fails" and rank != 1:
        signal.pause()
    if kind in ("crash", "one-rank-fails"):
        raise RuntimeError(f"heads do not divide on rank {rank}")
    if kind == "hang":
        hang(args.fifo)
    if kind == "silent" or rank != 0:
        return
    with open(args.cp_metrics_file, "w") as file:
        for index, loss in enumerate(losses(args.train_iters, kind)):
            step = index + 1
            line = {
                "iteration": step,
                "lm loss": loss,
                "grad_norm": 1.0 + 0.01 * step,
                "consumed_samples": 4 * step,
                "elapsed_ms": 12.0,
            }
            if kind == "drift" and step == 3:
                line["lm loss"] *= 1 + 3e-5
            if kind == "grad-drift" and step == 3:
                line["grad_norm"] *= 1 + 3e-4
            if kind == "tiny-drift":
                line["lm loss"] *= 1 + 1e-7 * args.context_parallel_size
            if kind == "nan" and step == 3:
                line["lm loss"] = float("nan")
            if kind == "samples":
                line["consumed_samples"] = 8 * step
            if kind == "short" and step == args.train_iters:
                break
            file.write(("{broken" if kind == "broken" else json.dumps(line)) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
