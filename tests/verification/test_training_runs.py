"""A run gives its metrics back, or says what went wrong, and leaves no process behind."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from megatron_cp_ext.verification import Cancelled, RunSpec, TrainingFailed, Workload, train
from megatron_cp_ext.verification.metrics import MetricsReader
from megatron_cp_ext.verification.processes import run_command

FAKE = Path(__file__).with_name("fake_training.py")
WORKLOAD = Workload(steps=4)
NONE = RunSpec.parse("none")
LIMIT_S = 100.0


def alive(pid):
    """Whether a process still runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def pids():
    """A list for process ids; what a failing test leaves of them is killed."""
    found = []
    yield found
    for pid in filter(alive, found):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "pids"
    os.mkfifo(path)
    return path


def test_the_metrics_of_a_run_come_back_while_it_goes_on_and_at_its_end(tmp_path, fake_launcher):
    seen = []
    metrics = train(NONE, WORKLOAD, tmp_path, launcher=fake_launcher, on_step=seen.append)
    assert metrics.iterations == (1, 2, 3, 4)
    assert metrics.losses == pytest.approx((5.0, 4.9, 4.8, 4.7))
    assert metrics.grad_norms == pytest.approx((1.01, 1.02, 1.03, 1.04))
    assert [step.samples for step in metrics.steps] == [4, 8, 12, 16]
    assert metrics.steps[0].seconds == pytest.approx(0.012)
    assert tuple(seen) == metrics.steps
    assert metrics.wall_s > 0


def test_a_run_gets_all_arguments_in_order(tmp_path):
    commands = []

    def launcher(ranks, arguments, *, logs, script):
        commands.append((ranks, arguments, script))
        return [sys.executable, str(FAKE), *arguments]

    workload = Workload(steps=4, script=Path("pretrain.py"), extra=("--seed", "7"))
    train(
        RunSpec.parse("ring:cp=2,lr=1"),
        workload,
        tmp_path,
        extra_args=["--save", "DIR"],
        launcher=launcher,
    )
    ((ranks, arguments, script),) = commands
    assert (ranks, script) == (2, Path("pretrain.py"))
    positions = [
        arguments.index(name) for name in ("--mock-data", "--context-parallel-size", "--save")
    ]
    assert positions == sorted(positions)
    seeds = [arguments[i + 1] for i, name in enumerate(arguments) if name == "--seed"]
    assert seeds == ["1234", "7"]


def test_numbers_of_an_earlier_run_do_not_count(tmp_path, fake_launcher):
    train(NONE, WORKLOAD, tmp_path, launcher=fake_launcher)
    with pytest.raises(TrainingFailed, match="logged no metrics"):
        train(NONE, WORKLOAD, tmp_path, launcher=fake_launcher, extra_args=["--fake", "silent"])


def test_a_crash_shows_its_error(tmp_path, fake_launcher):
    with pytest.raises(TrainingFailed) as caught:
        train(NONE, WORKLOAD, tmp_path, launcher=fake_launcher, extra_args=["--fake", "crash"])
    assert caught.value.reason == "failed with exit status 1 after step 0"
    assert caught.value.excerpt.splitlines()[0] == "Traceback (most recent call last):"
    assert caught.value.excerpt.splitlines()[-1] == "RuntimeError: heads do not divide on rank 0"


def test_a_broken_metrics_file_is_a_failed_run(tmp_path, fake_launcher):
    with pytest.raises(TrainingFailed, match=r"not a step: '\{broken'"):
        train(NONE, WORKLOAD, tmp_path, launcher=fake_launcher, extra_args=["--fake", "broken"])


@pytest.mark.timeout(120)
def test_torchrun_shows_the_error_of_the_rank_that_failed(tmp_path):
    def launcher(ranks, arguments, *, logs, script):
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *("--local-addr", "localhost", "--nproc-per-node", str(ranks)),
            *("--redirects", "3", "--log-dir", str(logs), str(FAKE), *arguments),
        ]

    spec = RunSpec.parse("ring:cp=2,fake=one-rank-fails")
    with pytest.raises(TrainingFailed) as caught:
        train(spec, WORKLOAD, tmp_path, launcher=launcher, timeout_s=LIMIT_S)
    lines = caught.value.excerpt.splitlines()
    assert lines[0] == "rank 1:"
    assert lines[-1] == "RuntimeError: heads do not divide on rank 1"
    assert not any("torch/distributed" in line for line in lines)


@pytest.mark.timeout(60)
def test_a_timeout_ends_every_process_even_one_in_another_session(tmp_path, fifo, pids):
    def read_pids():
        if not pids:
            pids.extend(map(int, fifo.read_text().split()))

    # Reading waits for the writer, so the time is over only once both processes exist.
    result = run_command(
        [sys.executable, str(FAKE), "--fake", "hang", "--fifo", str(fifo)],
        log=tmp_path / "log",
        env=dict(os.environ),
        timeout_s=0.5,
        on_poll=read_pids,
    )
    assert result.timed_out
    assert result.returncode < 0
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


@pytest.mark.timeout(60)
def test_a_timeout_is_reported_as_a_failed_run(tmp_path, fake_launcher):
    # Rank 0 of this training waits for ever.
    waiting = ["--fake", "one-rank-fails"]
    with pytest.raises(TrainingFailed, match=r"stopped after 1 s, at step 0 of 4"):
        train(NONE, WORKLOAD, tmp_path, launcher=fake_launcher, extra_args=waiting, timeout_s=1.0)


@pytest.mark.timeout(60)
def test_cancelling_ends_every_process(tmp_path, fifo, pids):
    cancel = threading.Event()

    def read_pids():
        pids.extend(map(int, fifo.read_text().split()))
        cancel.set()

    with pytest.raises(Cancelled):
        run_command(
            [sys.executable, str(FAKE), "--fake", "hang", "--fifo", str(fifo)],
            log=tmp_path / "log",
            env=dict(os.environ),
            timeout_s=LIMIT_S,
            on_poll=read_pids,
            cancel=cancel,
        )
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_a_process_left_behind_by_a_run_that_ended_is_ended_too(tmp_path, pids):
    script = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', "
        "'import signal; signal.pause()'], start_new_session=True); print(p.pid)"
    )
    result = run_command(
        [sys.executable, "-c", script],
        log=tmp_path / "log",
        env=dict(os.environ),
        timeout_s=LIMIT_S,
    )
    pids.append(int((tmp_path / "log").read_text()))
    assert (result.returncode, result.timed_out) == (0, False)
    assert not alive(pids[0])


def test_half_a_line_waits_for_its_other_half(tmp_path):
    path = tmp_path / "metrics"
    reader = MetricsReader(path)
    assert reader.new_steps() == []
    path.write_text('{"iteration": 1, "lm loss": 2.0, "grad_norm": 1.0}\n{"iterat')
    assert [step.iteration for step in reader.new_steps()] == [1]
    assert reader.new_steps() == []
    with open(path, "a") as file:
        file.write('ion": 2, "lm loss": 1.5, "grad_norm": null}\n')
    (step,) = reader.new_steps()
    assert (step.iteration, step.loss) == (2, 1.5)
    assert step.grad_norm != step.grad_norm
