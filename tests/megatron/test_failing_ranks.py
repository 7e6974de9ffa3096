"""A rank that fails ends the run, in bounded time, and the logs say which rank was where."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megatron_cp_ext.comm.places import during, here, innermost, members, steps
from megatron_cp_ext.features.failure import FailureFeature
from megatron_cp_ext.megatron import failure
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


def waits_for(place: str, rank: str = str(RANK)) -> str:
    return rf"rank [013]: {STEP.format(place)}, (starting, then )?waiting .*\b{rank}\b"


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_exception(tmp_path: Path, place: str) -> None:
    failed, _ = fail(tmp_path, place, "raise")
    assert failed.excerpt.startswith(f"rank {RANK}:\n")
    assert re.search(
        rf"RuntimeError: injected fault\nrank {RANK}: {STEP.format(place)}", failed.excerpt
    )


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_out_of_memory_in_a_hybrid(tmp_path: Path) -> None:
    failed, _ = fail(tmp_path, "backward", "memory", spec="hybrid:cp=4,ulysses=2")
    assert re.search(
        r"OutOfMemoryError: CUDA out of memory.*\n"
        rf"rank {RANK}: iteration 1, backward pass, layer \d, backward, ring step \d of 1",
        failed.excerpt,
    )


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_killed_rank_is_named_and_others_say_where_they_waited(
    tmp_path: Path, place: str
) -> None:
    failed, logs = fail(tmp_path, place, "kill")
    assert f"rank {RANK} was killed by signal {signal.SIGKILL}" in failed.excerpt
    survivors = "\n".join(text for rank, text in logs.items() if rank != RANK)
    # Whoever is stopped first may wait for a neighbour that waits for the dead rank.
    assert re.search(waits_for(place, "[0-3]"), survivors), survivors


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_rank_that_hangs_is_given_up(tmp_path: Path) -> None:
    failed, logs = fail(tmp_path, "forward", "stop", options=["--cp-timeout-seconds", "10"])
    survivors = "\n".join(text for rank, text in logs.items() if rank != RANK)
    assert re.search(r"Timed out waiting 10000ms.*\n(.*\n)*?" + waits_for("forward"), survivors)
    assert failed.wall_s < LIMIT_S


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_saving_a_checkpoint(tmp_path: Path, fault: str) -> None:
    options = ["--save", str(tmp_path / "checkpoint"), "--save-interval", "1"]
    failed, logs = fail(tmp_path, "save", fault, options=options)
    place = "saving the checkpoint of iteration 1"
    if fault == "raise":
        assert f"RuntimeError: injected fault\nrank {RANK}: {place}" in failed.excerpt
    else:
        assert f"rank {RANK} was killed by signal {signal.SIGKILL}" in failed.excerpt
        assert any(f"rank {rank}: {place}" in logs[rank] for rank in (0, 1, 3)), logs


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_torchrun_and_a_rank_held_up_by_a_thread(tmp_path: Path) -> None:
    failed, logs = fail(tmp_path, "forward", "linger", launcher=torchrun)
    assert re.search(rf"injected fault\n.*rank {RANK}: {STEP.format('forward')}", logs[RANK])
    assert "Timeout" in logs[RANK]
    assert failed.wall_s < LIMIT_S


# ------------------------------------------------------------------------------- the functions


def test_an_error_carries_the_names_of_the_blocks_it_leaves_once() -> None:
    def fail_in_step(failing: int) -> None:
        with during("iteration 3"), during("layer 2"):
            for step in steps("ring step", 3):
                with during("waiting for kv from rank 1"):
                    assert here().startswith("rank 0: iteration 3, layer 2, ring step ")
                    if step == failing:
                        raise RuntimeError("lost")

    with pytest.raises(RuntimeError) as caught:
        fail_in_step(1)
    assert caught.value.__notes__ == [
        "rank 0: iteration 3, layer 2, ring step 1 of 3, waiting for kv from rank 1"
    ]
    # It is on its way out until something else begins.
    assert (here(), innermost()) == (caught.value.__notes__[0], "")
    with during("iteration 4"):
        assert here() == "rank 0: iteration 4"
    assert here() == ""


def test_blocks_that_end_well_leave_nothing() -> None:
    with during("outer"):
        assert list(steps("step", 2)) == [0, 1, 2]
        assert innermost() == "outer"
    assert here() == ""


def test_ranks_in_words() -> None:
    assert members([4]) == "rank 4"
    assert members([3, 1, 3]) == "ranks 1 and 3"
    assert members([0, 1, 5]) == "ranks 0, 1 and 5"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused(refused: Any, seconds: float) -> None:
    with refused("--cp-timeout-seconds", remedy="above 0"):
        FailureFeature().validate_args(Namespace(cp_timeout_seconds=seconds))


@pytest.mark.parametrize(
    ("description", "bounded"),
    [
        ("CONTEXT_PARALLEL_GROUP", True),
        ("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0", True),
        ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", False),
        ("DATA_PARALLEL_GROUP_WITH_CP", False),
        (None, False),
    ],
)
def test_only_context_parallel_groups_get_the_timeout(
    description: str | None, bounded: bool
) -> None:
    def create_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, group_desc: str | None = None
    ) -> Any:
        return timeout

    given = failure.bounded_group(7.0)(create_group, [0, 1], "theirs", group_desc=description)
    assert given == (timedelta(seconds=7) if bounded else "theirs")


def python(code: str, **options: Any) -> subprocess.Popen[str]:
    prelude = "from megatron_cp_ext.megatron.failure import *\n"
    return subprocess.Popen(
        # Python warns of forks from a process with threads, as every training is.
        [sys.executable, "-W", "ignore", "-c", prelude + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.timeout(120)
def test_a_thread_that_never_ends_cannot_keep_a_failed_process() -> None:
    process = python(
        """
        with certain_end(limit_s=0.5):
            threading.Thread(target=threading.Event().wait).start()
            raise RuntimeError("lost")
        """
    )
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "RuntimeError: lost" in errors
    assert "Timeout" in errors


@pytest.mark.timeout(120)
def test_a_loop_that_ends_well_leaves_hooks_and_signals_as_they_were() -> None:
    process = python(
        """
        before = sys.excepthook, faulthandler.is_enabled()
        with certain_end(), report_of_termination():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert (sys.excepthook, faulthandler.is_enabled()) == before
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
        assert threading.active_count() == 1
        """
    )
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors


@pytest.mark.timeout(120)
def test_a_rank_that_is_stopped_while_it_waits_says_where_it_is() -> None:
    process = python(
        """
        lock = threading.Lock()
        lock.acquire()
        with report_of_termination(), during("layer 2"), during("waiting for kv from rank 1"):
            print("waiting", flush=True)
            lock.acquire()
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.terminate()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == "stopped by SIGTERM; rank 0: layer 2, waiting for kv from rank 1\n"


@pytest.mark.timeout(120)
def test_a_forked_child_is_stopped_alone_and_in_silence() -> None:
    process = python(
        """
        with report_of_termination():
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(writing, b"x")
                signal.pause()
            os.read(reading, 1)
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM, status
        """
    )
    _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.timeout(120)
def test_somebody_elses_handler_is_left_alone() -> None:
    process = python(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with report_of_termination():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        """
    )
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
