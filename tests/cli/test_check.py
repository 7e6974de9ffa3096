"""`megatron-cp check`: exit status, JSON and what is printed."""

from __future__ import annotations

import json

import pytest

from megatron_cp_ext.cli import check
from megatron_cp_ext.cli import main as cli

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128 --attention-dropout 0"
).split()


def test_a_sound_command_is_planned(capsys) -> None:
    argv = ["--platform", "cpu", "--nodes", "2", "--gpus-per-node", "2", "--patches", "--"]
    assert check.main([*argv, *MODEL, "--context-parallel-size", "4"]) == 0
    shown = capsys.readouterr().out
    for part in ("4 ranks on cpu", "algorithm ring", "0-7, 56-63", "memory", "DotProductAttention"):
        assert part in shown
    assert shown.rstrip().endswith("this would start")


def test_mistakes_are_printed_together_and_fail(capsys) -> None:
    argv = ["--platform", "cpu", "--world-size", "6", "--", *MODEL, "--context-parallel-size", "4"]
    assert check.main([*argv, "--cp-window-size", "2"]) == 1
    shown = capsys.readouterr().out
    assert "option: --context-parallel-size" in shown and "option: --cp-window-size" in shown
    assert "2 mistake(s): this would not start" in shown


def test_json_is_for_programs(capsys) -> None:
    argv = ["--json", "--platform", "cpu", "--", *MODEL, "--context-parallel-size", "4"]
    assert check.main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["errors"] == []
    assert report["plan"]["world"] == 4
    assert report["plan"]["memory"]["total"] > 0
    assert check.main([*argv, "--ulysses-degree-in-cp", "2"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and report["plan"] is None
    assert set(report["errors"][0]) == {"option", "value", "reason", "remedy"}


def test_strict_makes_advice_fail(capsys) -> None:
    rest = ["--platform", "cpu", "--", *MODEL, "--context-parallel-size", "4"]
    rest += ["--megatron-cp-in-bnsd"]
    assert check.main(rest) == 0
    assert "advice" in capsys.readouterr().out
    assert check.main(["--strict", *rest]) == 1
    assert "--strict" in capsys.readouterr().out


def test_a_launch_script(tmp_path, capsys) -> None:
    script = tmp_path / "train.sh"
    words = " ".join(MODEL)
    script.write_text(
        f"ARGS='{words}'\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n"
        "torchrun --nnodes $SLURM_NNODES --nproc-per-node 2 pretrain_gpt.py $ARGS "
        '--context-parallel-size 4 "$@"\n'
    )
    argv = ["--platform", "cpu", "--nodes", "2", "--gpus-per-node", "2", "--", str(script)]
    assert check.main([*argv, "--context-parallel-algo", "ulysses_cp_algo"]) == 0
    assert "algorithm ulysses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "option"),
    [([], "--"), (["--world-size", "0", "--", "--x"], "--world-size")],
)
def test_wrong_usage(argv, option: str, capsys) -> None:
    assert cli.main(["check", *argv]) == 2
    assert f"option: {option}\n" in capsys.readouterr().err
