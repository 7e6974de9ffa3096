"""`megatron-cp verify`: exit statuses, files, refusals, and an interrupt that leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_cp_ext.cli import main as cli
from megatron_cp_ext.cli import verify as command
from megatron_cp_ext.errors import UsageError

FAKE = Path(__file__).parents[1] / "verification" / "fake_training.py"


def alive(pid):
    """Whether a process still runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def plan_of(*argv):
    before, after = command._split(list(argv))
    return command.make_plan(command.make_parser().parse_args(before), after)


def test_equal_runs_exit_with_0_and_leave_json_and_picture(tmp_path, fake_launcher, capsys):
    status = command.main(
        ["--output", str(tmp_path), "--steps", "4", "--config", "ring:cp=2", "ulysses:cp=2"],
        launcher=fake_launcher,
    )
    assert status == 0
    assert json.loads((tmp_path / "verify.json").read_text())["verdict"] == "PASS"
    assert (tmp_path / "verify.png").stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["verify.json", "verify.png"]
    assert f"verify.json and verify.png in {tmp_path}" in capsys.readouterr().out


def test_a_difference_exits_with_1(tmp_path, fake_launcher):
    argv = ["--output", str(tmp_path), "--steps", "4", "--config", "ring:cp=2,fake=drift"]
    assert command.main(argv, launcher=fake_launcher) == 1
    assert json.loads((tmp_path / "verify.json").read_text())["verdict"] == "FAIL"


def test_tolerances_can_be_set(tmp_path, fake_launcher):
    argv = ["--output", str(tmp_path), "--steps", "4", "--config", "ring:cp=2,fake=drift"]
    assert command.main([*argv, "--loss-rtol", "1e-4"], launcher=fake_launcher) == 0
    argv = ["--output", str(tmp_path), "--steps", "4", "--config", "ring:cp=2,fake=grad-drift"]
    assert command.main([*argv, "--grad-norm-rtol", "1e-3"], launcher=fake_launcher) == 0


def test_without_matplotlib_the_rest_still_works(tmp_path, fake_launcher, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    argv = ["--output", str(tmp_path), "--steps", "4", "--config", "ring:cp=2"]
    assert command.main(argv, launcher=fake_launcher) == 0
    assert "matplotlib is missing" in capsys.readouterr().out
    assert (tmp_path / "verify.json").exists()


def test_the_defaults_are_the_four_algorithms_in_fp32():
    plan = plan_of()
    assert list(map(str, plan.configs)) == list(command.DEFAULT_CONFIGS)
    assert (plan.workload.steps, plan.workload.dtype, plan.jobs) == (20, "fp32", 1)
    assert (plan.tolerances.loss, plan.tolerances.grad_norm) == (1e-5, 1e-4)
    assert "--mock-data" in plan.workload.arguments(Path("cache"))


def test_options_reach_the_plan(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").touch()
    (tmp_path / "pretrain.py").touch()
    plan = plan_of(
        *("--dtype", "bf16", "--steps", "7", "--seq-length", "64", "--timeout", "9"),
        *("--data-prefix", str(tmp_path / "text"), "--script", str(tmp_path / "pretrain.py")),
        *("--jobs", "2", "--keep-logs", "--baseline", "none:tp=2"),
        *("--config", "ring:cp=2", "--config", "ulysses:cp=2", "--", "--num-layers", "4"),
    )
    arguments = plan.workload.arguments(tmp_path / "cache")
    assert arguments[-2:] == ["--num-layers", "4"]
    assert "--bf16" in arguments
    assert arguments[arguments.index("--data-path") + 1] == str(tmp_path / "text")
    assert arguments[arguments.index("--train-iters") + 1] == "7"
    assert arguments[arguments.index("--seq-length") + 1] == "64"
    assert plan.workload.script == tmp_path / "pretrain.py"
    assert (plan.timeout_s, plan.jobs, plan.keep_logs) == (9.0, 2, True)
    assert list(map(str, plan.runs)) == ["none:tp=2", "ring:cp=2", "ulysses:cp=2"]
    assert (plan.tolerances.loss, plan.tolerances.grad_norm) == (1e-2, 1e-2)


@pytest.mark.parametrize(
    ("argv", "option", "remedy"),
    [
        (["--config", "rong:cp=2"], "--config", "ring"),
        (["--config", "ring:cp=2", "ring:cp=2"], "--config", "once"),
        (["--baseline", "rong"], "--baseline", "ring"),
        (["--steps", "1"], "--steps", "2 or more"),
        (["--seq-length", "250"], "--seq-length", "multiple of 4"),
        (["--timeout", "0"], "--timeout", "above 0"),
        (["--jobs", "0"], "--jobs", "1 or more"),
        (["--loss-rtol", "nan"], "--loss-rtol", "below 1"),
        (["--grad-norm-rtol", "2"], "--grad-norm-rtol", "below 1"),
        (["--data-prefix", "nowhere"], "--data-prefix", "prepare_data.py"),
        (["--script", "nowhere.py"], "--script", "pretrain_gpt.py"),
        (["--", "--train-iters", "4"], "--", "--steps"),
    ],
)
def test_wrong_options_are_refused_with_a_remedy(argv, option, remedy):
    with pytest.raises(UsageError) as caught:
        plan_of(*argv)
    assert caught.value.option == option
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    "argv",
    [
        ["verify", "--config", "hybrid:cp=4"],
        ["verify", "--", "--seq-length", "8"],
        ["verify", "--no-such-option"],
        ["no-such-command"],
        [],
    ],
)
def test_wrong_usage_exits_with_2_and_says_why_on_stderr(argv, capsys):
    try:
        status = cli.main(argv)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith(("megatron-cp", "usage: megatron-cp"))


def test_a_refusal_has_option_value_reason_and_remedy_on_lines_of_their_own(capsys):
    assert cli.main(["verify", "--config", "hybrid:cp=4"]) == 2
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert lines[1:] == [
        "option: --config",
        "value:  hybrid:cp=4",
        "reason: hybrid needs its Ulysses degree",
        "remedy: as in hybrid:cp=4,ulysses=2",
    ]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_process_and_exits_with_130(tmp_path, number):
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    program = f"""
        import signal, sys
        from megatron_cp_ext.cli import main, verify

        signal.signal(signal.SIGINT, signal.default_int_handler)

        def launcher(ranks, arguments, *, logs, script):
            return [sys.executable, {str(FAKE)!r}, *arguments]

        verify.main.__kwdefaults__["launcher"] = launcher
        sys.exit(main.main(sys.argv[1:]))
    """
    argv = ["verify", "--output", str(tmp_path), "--baseline", "none:fake=hang"]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *argv, "--", "--fifo", str(fifo)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = list(map(int, fifo.read_text().split()))
    try:
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
        left = [pid for pid in pids if alive(pid)]
    finally:
        for pid in filter(alive, [process.pid, *pids]):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 130
    assert error.splitlines() == ["megatron-cp verify: interrupted"]
    assert len(pids) == 2
    assert left == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_training_passes_where_it_is_the_same_and_fails_where_it_is_not(tmp_path, capsys):
    argv = ["verify", "--output", str(tmp_path), "--steps", "3", "--timeout", "180"]
    assert cli.main([*argv, "--config", "ring:cp=2", "ring:cp=2,lr=2e-3"]) == 1
    data = json.loads((tmp_path / "verify.json").read_text())
    assert [run["verdict"] for run in data["runs"]] == ["PASS", "PASS", "FAIL"], (
        capsys.readouterr().out
    )
    same, other = data["runs"][1:]
    assert same["largest_loss_difference"] < 1e-6
    assert other["differences"][0]["loss"] < 1e-6
    assert other["differences"][1]["loss"] > 1e-3
