"""How a training is started: torchrun on this machine, with a log file for every rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Launcher(Protocol):
    """Makes the command that trains."""

    def __call__(
        self, ranks: int, arguments: Sequence[str], *, logs: Path, script: Path | None
    ) -> list[str]:
        """The command.

        Args:
            ranks: number of processes.
            arguments: Megatron's command line arguments.
            logs: folder for the ranks' log files, as `.../RANK/stdout.log` and `stderr.log`.
            script: the training script; None for the packaged one.
        """


def torchrun(ranks: int, arguments: Sequence[str], *, logs: Path, script: Path | None) -> list[str]:
    """The command that trains in `ranks` processes of this machine, on a free port."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"),
        *("--nproc-per-node", str(ranks), "--redirects", "3", "--log-dir", str(logs)),
        *("-m", "megatron_cp_ext.run", *([] if script is None else [str(script)])),
        *arguments,
    ]


def forked(ranks: int, arguments: Sequence[str], *, logs: Path, script: Path | None) -> list[str]:
    """The command that trains in forks of one process: on CPUs far sooner under way."""
    return [
        *(sys.executable, "-m", "megatron_cp_ext.verification.forked"),
        *(str(ranks), str(logs), *([] if script is None else [str(script)])),
        *arguments,
    ]


def environment() -> dict[str, str]:
    """The environment of a run: this process's, with one thread per rank."""
    return {
        # Some Megatron releases demand it with TP or CP on the GPU.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
