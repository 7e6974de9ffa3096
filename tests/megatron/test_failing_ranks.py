"""A rank that fails ends the run, in bounded time, and the logs say which rank was where."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_cp_ext.comm.places import during, here, innermost, members, steps
from megatron_cp_ext.verification.launch import Launcher, forked, torchrun
from megatron_cp_ext.verification.spec import RunSpec
from megatron_cp_ext.verification.training import TrainingFailed, train
from megatron_cp_ext.verification.workload import Workload

FAULTY = Path(__file__).with_name("faulty.py")
RANK = 2
LIMIT_S = 240.0
STEP = r"iteration 1, {0} pass, layer \d, {0}, ring step \d of \d"


def fail(
    directory: Path,
    place: str,
    fault: str,
    *,
    spec: str = "ring:cp=4",
    options: Sequence[str] = (),
    launcher: Launcher = forked,
) -> tuple[TrainingFailed, dict[int, str]]:
    """Train on four ranks with a fault on one; the failure, and what each rank wrote to stderr."""

    def launch(
        ranks: int, arguments: Sequence[str], *, logs: Path, script: Path | None
    ) -> list[str]:
        return launcher(ranks, [str(RANK), place, fault, *arguments], logs=logs, script=script)

    workload = Workload(steps=3, seq_length=64, global_batch_size=2, script=FAULTY)
    with pytest.raises(TrainingFailed) as caught:
        train(
            RunSpec.parse(spec),
            workload,
            directory,
            launcher=launch,
            extra_args=options,
            timeout_s=LIMIT_S,
        )
    assert "failed with exit status 1" in caught.value.reason
    logs = sorted(directory.glob("ranks/**/stderr.log"))
    return caught.value, {int(log.parent.name): log.read_text() for log in logs}


def waits_for(place: str) -> str:
    return rf"rank [013]: {STEP.format(place)}, waiting .*\b{RANK}\b"


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_exception(tmp_path: Path, place: str) -> None:
    failure, _ = fail(tmp_path, place, "raise")
    assert failure.excerpt.startswith(f"rank {RANK}:\n")
    assert re.search(
        rf"RuntimeError: injected fault\nrank {RANK}: {STEP.format(place)}", failure.excerpt
    )


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_out_of_memory_in_a_hybrid(tmp_path: Path) -> None:
    failure, _ = fail(tmp_path, "backward", "memory", spec="hybrid:cp=4,ulysses=2")
    assert re.search(
        r"OutOfMemoryError: CUDA out of memory.*\n"
        rf"rank {RANK}: iteration 1, backward pass, layer \d, backward, ring step \d of 1",
        failure.excerpt,
    )


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_killed_rank_is_named_by_those_that_wait_for_it(tmp_path: Path, place: str) -> None:
    failure, logs = fail(tmp_path, place, "kill")
    assert f"rank {RANK} was killed by signal {signal.SIGKILL}" in failure.excerpt
    survivors = "\n".join(text for rank, text in logs.items() if rank != RANK)
    assert re.search(waits_for(place), survivors), survivors


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_rank_that_hangs_is_given_up(tmp_path: Path) -> None:
    failure, logs = fail(tmp_path, "forward", "stop", options=["--cp-timeout-seconds", "10"])
    survivors = "\n".join(text for rank, text in logs.items() if rank != RANK)
    assert re.search(r"Timed out waiting 10000ms.*\n(.*\n)*?" + waits_for("forward"), survivors)
    assert failure.wall_s < LIMIT_S


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_saving_a_checkpoint(tmp_path: Path, fault: str) -> None:
    options = ["--save", str(tmp_path / "checkpoint"), "--save-interval", "1"]
    failure, logs = fail(tmp_path, "save", fault, options=options)
    place = "saving the checkpoint of iteration 1"
    if fault == "raise":
        assert f"RuntimeError: injected fault\nrank {RANK}: {place}" in failure.excerpt
    else:
        assert f"rank {RANK} was killed by signal {signal.SIGKILL}" in failure.excerpt
        assert any(f"rank {rank}: {place}" in logs[rank] for rank in (0, 1, 3)), logs


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_torchrun_and_a_rank_held_up_by_a_thread(tmp_path: Path) -> None:
    failure, logs = fail(tmp_path, "forward", "linger", launcher=torchrun)
    assert re.search(rf"injected fault\n.*rank {RANK}: {STEP.format('forward')}", logs[RANK])
    assert "Timeout" in logs[RANK]
    assert failure.wall_s < LIMIT_S
