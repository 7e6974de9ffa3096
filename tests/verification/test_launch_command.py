"""torchrun gets a free port, a log for every rank, and the script before its arguments."""

import sys
from pathlib import Path

import pytest

from megatron_cp_ext.verification import torchrun
from megatron_cp_ext.verification.launch import environment


@pytest.mark.parametrize(("script", "words"), [(None, []), (Path("s.py"), ["s.py"])])
def test_the_plugin_runs_the_script_or_the_packaged_one(script, words):
    command = torchrun(3, ["--lr", "1"], logs=Path("logs"), script=script)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[command.index("--nproc-per-node") + 1] == "3"
    assert command[command.index("--rdzv-endpoint") + 1] == "localhost:0"
    assert command[command.index("--log-dir") + 1] == "logs"
    assert command[-len(words) - 4 :] == ["-m", "megatron_cp_ext.run", *words, "--lr", "1"]


def test_every_rank_has_one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert environment()["OMP_NUM_THREADS"] == "1"
    assert environment()["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
