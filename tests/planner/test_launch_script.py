"""The torchrun line of a launch script, with nothing else of the script carried out."""

from __future__ import annotations

import pytest

from megatron_cp_ext.planner.launch_script import read_launch


@pytest.fixture
def script(tmp_path):
    """`script(text)`: a launch script of that text."""

    def write(text: str):
        path = tmp_path / "train.sh"
        path.write_text("#!/bin/bash\nset -euo pipefail\n" + text)
        return path

    return write


def test_variables_arrays_and_conditions_are_expanded(script) -> None:
    path = script(
        'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\n'
        "CP=$((${SLURM_NNODES:-1} * 2))\n"
        'MODEL=(--num-layers 4 --hidden-size 64)\nMODEL+=(--data-path "a b")\n'
        '[[ "${1:-}" == long ]] && MODEL+=(--seq-length 1024)\n'
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
        "srun --label -N 2 torchrun --nnodes=$SLURM_NNODES --nproc-per-node 8 --rdzv-backend c10d "
        '"$HERE/pretrain_gpt.py" "${MODEL[@]}" --context-parallel-size $CP 2>&1 | tee x.log\n'
    )
    launch = read_launch(path, ["long"], environment={"SLURM_NNODES": "4"})
    assert launch.arguments == (
        *("--num-layers", "4", "--hidden-size", "64", "--data-path", "a b"),
        *("--seq-length", "1024", "--context-parallel-size", "8"),
    )
    assert launch.world_size == 32
    assert launch.max_connections == "1"


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc_per_node 2 pretrain_gpt.py --lr 1",
        "torchrun --standalone --nproc-per-node=2 -m megatron_cp_ext.run pretrain_gpt.py --lr 1",
        "torchrun --nproc-per-node=2 -m megatron_cp_ext.run --lr 1",
        "python -m torch.distributed.run --nproc-per-node=2 pretrain_gpt.py --lr 1",
        "python3 -u -m torch.distributed.launch --nproc-per-node=2 pretrain_gpt.py --lr 1",
        "exec torchrun --nproc-per-node=2 pretrain_gpt.py --lr 1",
        "env A=1 nohup torchrun --nproc-per-node=2 pretrain_gpt.py --lr 1",
        "srun bash -c 'torchrun --nproc-per-node=2 pretrain_gpt.py --lr 1'",
        'run() { torchrun --nproc-per-node=2 pretrain_gpt.py "$@"; }; run --lr 1',
    ],
)
def test_every_way_to_launch_is_read(script, line: str) -> None:
    launch = read_launch(script(line + "\n"))
    assert launch.arguments == ("--lr", "1")
    assert launch.world_size == 2


def test_python_alone_says_no_world_size(script) -> None:
    launch = read_launch(script("srun python pretrain_gpt.py --lr 1\n"))
    assert launch.arguments == ("--lr", "1") and launch.world_size is None


def test_programs_are_not_run(script, tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    path = script(
        f"export PATH=/usr/bin:/bin:$PATH\nrm {precious}\nmkdir {tmp_path}/made\n"
        f"echo gone > {precious} || true\n"
        "torchrun --nproc-per-node 1 pretrain_gpt.py --lr 1\n"
    )
    assert read_launch(path).arguments == ("--lr", "1")
    assert precious.read_text() == "x"
    assert not (tmp_path / "made").exists()


def test_a_script_that_launches_nothing(script, refused, tmp_path) -> None:
    with refused("launch script", reason="no torchrun"):
        read_launch(script("echo hello\n"))
    with refused("launch script", reason="no such file"):
        read_launch(tmp_path / "nothing.sh")
    with refused("launch script", reason="unbound variable"):
        read_launch(script("echo $UNKNOWN_TO_ALL\n"))
