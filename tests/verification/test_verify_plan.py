"""A verification compares every configuration with its baseline and reports each verdict."""

import dataclasses
import io
import json
import math
import sys
import threading

import pytest
from rich.console import Console

from megatron_cp_ext.verification import (
    RunSpec,
    Tolerances,
    VerifyPlan,
    Workload,
    verify,
)
from megatron_cp_ext.verification.picture import MatplotlibMissing, draw
from megatron_cp_ext.verification.progress import Bars, Lines, progress_on
from megatron_cp_ext.verification.records import record, write_json
from megatron_cp_ext.verification.tables import make_console, print_report

STEPS = 4


@pytest.fixture
def make_plan(tmp_path):
    def make(*configs, baseline=None, **kwargs):
        return VerifyPlan(
            Workload(steps=STEPS),
            tuple(map(RunSpec.parse, configs)),
            Tolerances.of("fp32"),
            tmp_path,
            baseline=baseline and RunSpec.parse(baseline),
            **kwargs,
        )

    return make


def printed(report, **kwargs):
    console = make_console(io.StringIO())
    print_report(report, console, **kwargs)
    return console.file.getvalue()


def test_equal_runs_pass(make_plan, fake_launcher):
    report = verify(make_plan("ring:cp=2", "ulysses:cp=2"), launcher=fake_launcher)
    assert report.passed
    assert [str(run.spec) for run in report.runs] == ["none", "ring:cp=2", "ulysses:cp=2"]
    assert [run.baseline for run in report.runs[1:]] == [RunSpec("none")] * 2
    assert all(run.comparison.largest_loss == 0 for run in report.configs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("drift", "loss differs by 3e-05 at step 3"),
        ("grad-drift", "grad norm differs by 0.0003 at step 3"),
        ("nan", "loss is nan at step 3"),
        ("short", "logged steps 1-3 instead of steps 1-4"),
        ("flat", "loss is 5 at every step"),
        ("rising", "the loss did not fall"),
        ("samples", "another number of samples"),
        ("silent", "logged no metrics"),
        ("crash", "failed with exit status 1"),
        ("broken", "not a step"),
    ],
)
def test_each_way_of_going_wrong_fails_and_the_other_runs_go_on(
    make_plan, fake_launcher, kind, reason
):
    plan = make_plan(f"ring:cp=2,fake={kind}", "ulysses:cp=2")
    report = verify(plan, launcher=fake_launcher)
    assert not report.passed
    assert [run.passed for run in report.runs] == [True, False, True]
    assert any(reason in failure for failure in report.runs[1].failures)
    assert reason in printed(report)


def test_a_baseline_that_learns_nothing_fails_and_nothing_is_compared_with_it(
    make_plan, fake_launcher
):
    plan = make_plan("ring:cp=2", "ulysses:cp=2", baseline="none:fake=flat")
    report = verify(plan, launcher=fake_launcher)
    assert [run.passed for run in report.runs] == [False, False, False]
    assert report.configs[0].failures == ("not run: its baseline failed",)


def test_configurations_with_other_tp_or_pp_have_their_own_baseline(make_plan, fake_launcher):
    plan = make_plan("ring:cp=2", "ring:cp=2,tp=2", "ulysses:cp=2,tp=2,sp", "ring:cp=2,dp=2")
    assert list(map(str, plan.baselines)) == ["none", "none:tp=2"]
    report = verify(plan, launcher=fake_launcher)
    assert [str(run.baseline) for run in report.configs] == ["none", "none:tp=2"] * 1 + [
        "none:tp=2",
        "none",
    ]


def test_a_given_baseline_of_another_model_explains_the_difference(make_plan, fake_launcher):
    plan = make_plan("ring:cp=2,tp=2,fake=drift", baseline="none")
    report = verify(plan, launcher=fake_launcher)
    assert "leave --baseline out" in report.configs[0].failures[-1]


def test_nothing_to_compare_is_no_pass(make_plan, fake_launcher):
    assert not verify(make_plan(), launcher=fake_launcher).passed


def test_logs_of_failed_runs_stay_and_those_of_others_on_request(make_plan, fake_launcher):
    plan = make_plan("ring:cp=2,fake=crash", "ulysses:cp=2")
    report = verify(plan, launcher=fake_launcher)
    assert [run.directory.exists() for run in report.runs] == [False, True, False]
    assert str(report.runs[1].directory) in printed(report)
    kept = verify(dataclasses.replace(plan, keep_logs=True), launcher=fake_launcher)
    assert all((run.directory / "launcher.log").exists() for run in kept.runs)


def test_jobs_run_at_the_same_time(make_plan, fake_launcher):
    both = threading.Barrier(2, timeout=30)

    def launcher(ranks, arguments, *, logs, script):
        if ranks > 1:
            both.wait()
        return fake_launcher(ranks, arguments, logs=logs, script=script)

    assert verify(make_plan("ring:cp=2", "ulysses:cp=2", jobs=2), launcher=launcher).passed


def test_an_error_of_our_own_is_not_swallowed(make_plan):
    def launcher(ranks, arguments, *, logs, script):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        verify(make_plan("ring:cp=2"), launcher=launcher)


def test_the_record_holds_every_number_and_survives_json(make_plan, fake_launcher, tmp_path):
    plan = make_plan("ring:cp=2,fake=nan", "hybrid:cp=4,ulysses=2,fake=tiny-drift")
    report = verify(plan, launcher=fake_launcher)
    write_json(report, tmp_path / "verify.json")

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    data = json.loads((tmp_path / "verify.json").read_text(), parse_constant=refuse)
    assert data["verdict"] == "FAIL"
    assert data["tolerances"] == {"loss": 1e-5, "grad_norm": 1e-4}
    assert data["workload"]["steps"] == STEPS
    assert {"python", "torch", "megatron-core", "megatron-cp-ext"} <= set(data["versions"])
    baseline, nan, hybrid = data["runs"]
    assert [run["verdict"] for run in data["runs"]] == ["PASS", "FAIL", "PASS"]
    assert nan["steps"][2]["loss"] == "nan"
    assert hybrid["spec"] == "hybrid:cp=4,ulysses=2,fake=tiny-drift"
    assert hybrid["baseline"] == baseline["spec"] == "none"
    assert hybrid["degrees"] == {"cp": 4, "tp": 1, "pp": 1, "dp": 1, "ulysses": 2}
    assert "--ulysses-degree-in-cp" in hybrid["arguments"]
    assert [step["iteration"] for step in hybrid["steps"]] == [1, 2, 3, 4]
    assert hybrid["largest_loss_difference"] == pytest.approx(4e-7, rel=1e-3)
    assert max(d["loss"] for d in hybrid["differences"]) == hybrid["largest_loss_difference"]
    assert record(report)["runs"][1]["steps"][2]["loss"] is not None


def test_the_table_has_a_row_for_each_run_and_the_steps_of_the_worst(make_plan, fake_launcher):
    plan = make_plan("ring:cp=2", "hybrid:cp=4,ulysses=2,dp=2,fake=tiny-drift")
    text = printed(verify(plan, launcher=fake_launcher))
    cells = next(line.split() for line in text.splitlines() if " 4/1/1/2 " in line)
    assert cells[0].startswith("hybrid:cp=4")
    assert cells[1:7] == ["8", "4/1/1/2", "5.00000", "4.70000", "4.0e-07", "0"]
    assert cells[-1] == "PASS"
    assert "against none, the one furthest off" in text
    assert "ring:cp=2 against" not in text
    assert sum(line.split()[:2] == ["3", "4.8000000"] for line in text.splitlines()) == 1
    assert "PASS  2 of 2 configurations equal their baseline over 4 steps in fp32" in text


def test_a_difference_beyond_the_tolerance_is_red(make_plan, fake_launcher):
    report = verify(make_plan("ring:cp=2,fake=drift"), launcher=fake_launcher)
    console = Console(file=io.StringIO(), force_terminal=True, width=140, color_system="standard")
    print_report(report, console)
    red = "\x1b[31m3.0e-05\x1b[0m"
    assert sum(red in line for line in console.file.getvalue().splitlines()) == 2


def test_the_steps_of_every_configuration_on_request(make_plan, fake_launcher):
    report = verify(make_plan("ring:cp=2", "ulysses:cp=2"), launcher=fake_launcher)
    text = printed(report, per_step=True)
    assert sum(line.split()[:2] == ["3", "4.8000000"] for line in text.splitlines()) == 2


def test_a_run_that_is_not_a_number_is_the_one_furthest_off(make_plan, fake_launcher):
    plan = make_plan("ring:cp=2,fake=drift", "ulysses:cp=2,fake=nan")
    report = verify(plan, launcher=fake_launcher)
    assert math.isnan(report.configs[1].comparison.largest_loss)
    assert "ulysses:cp=2,fake=nan against none, the one furthest off" in printed(report)


def test_the_picture_is_drawn_even_when_runs_failed(make_plan, fake_launcher, tmp_path):
    pytest.importorskip("matplotlib")
    plan = make_plan("ring:cp=2", "ulysses:cp=2,fake=nan", "ring:cp=4,fake=crash")
    report = verify(plan, launcher=fake_launcher)
    draw(report, tmp_path / "verify.png")
    from matplotlib.image import imread

    image = imread(tmp_path / "verify.png")
    assert image.shape[0] > 500
    assert image.shape[1] > 1000
    assert image[..., :3].std() > 0.01


def test_without_matplotlib_the_message_says_how_to_get_it(
    make_plan, fake_launcher, tmp_path, monkeypatch
):
    report = verify(make_plan("ring:cp=2"), launcher=fake_launcher)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MatplotlibMissing, match=r"pip install 'megatron-cp-ext\[viz\]'"):
        draw(report, tmp_path / "verify.png")
    assert not (tmp_path / "verify.png").exists()


def test_progress_is_lines_where_there_is_no_terminal(make_plan, fake_launcher):
    plan, console = make_plan("ring:cp=2", "ulysses:cp=2,fake=crash"), make_console(io.StringIO())
    with progress_on(console, plan) as progress:
        assert isinstance(progress, Lines)
        verify(plan, progress=progress, launcher=fake_launcher)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "[1/3] baseline (none): started on 1 rank"
    assert "[2/3] ring:cp=2: started on 2 ranks" in lines
    assert "[2/3] ring:cp=2: step 4/4, loss 4.700000, grad norm 1.040000" in lines
    assert any(line.startswith("[2/3] ring:cp=2: PASS after") for line in lines)
    assert lines[-1].startswith("[3/3] ulysses:cp=2,fake=crash: FAIL after")
    assert lines[-1].endswith(": failed with exit status 1 after step 0")


def test_progress_is_bars_on_a_terminal(make_plan, fake_launcher):
    plan = make_plan("ring:cp=2")
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress_on(console, plan) as progress:
        assert isinstance(progress, Bars)
        verify(plan, progress=progress, launcher=fake_launcher)
    last = [line for line in console.file.getvalue().splitlines() if "step" in line][-2:]
    assert ["step 4/4" in line and "PASS" in line for line in last] == [True, True]
