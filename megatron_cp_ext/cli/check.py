"""`megatron-cp check`: a launch command, checked and planned without devices."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_cp_ext.errors import UsageError

DESCRIPTION = """\
Parses a whole launch command with Megatron's own parser, applies its validation and this
plugin's for the world size named, and prints every mistake with its remedy, or what the training
would do: groups, tokens of each rank, kernel, patches, bytes and memory. One process, no devices.

  megatron-cp check --nodes 64 --gpus-per-node 8 -- --num-layers 32 ... --context-parallel-size 8
  megatron-cp check -- launch/train.sh configs/llama3-8b-128k.sh --train-iters 100

Exit status: 0 if it would start, 1 if not, 2 for wrong usage of this command. A script is run by
bash with torchrun, python and srun replaced by functions that only write down their arguments,
and with no other program on the search path. Programs it names by absolute path still run, and
redirections still create files: do not check a script you would not read first."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of `megatron-cp check`, for what stands before `--`."""
    parser = argparse.ArgumentParser(
        prog="megatron-cp check",
        usage="megatron-cp check [options] -- MEGATRON_ARGUMENT ... | script.sh [ARGUMENT ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks of the training (default: nodes times GPUs, what the script starts, or as "
        "many as the degrees need)",
    )
    add("--nodes", type=int, metavar="N", help="nodes; a script sees it as SLURM_NNODES")
    add("--gpus-per-node", type=int, metavar="N", help="devices of a node (default: 8)")
    add(
        "--platform",
        choices=("cpu", "cuda", "npu"),
        help="where it will run (default: what --cp-platform says, or cuda)",
    )
    add("--rank", type=int, default=0, metavar="R", help="rank whose groups are shown (default: 0)")
    add("--json", action="store_true", help="print JSON, for programs")
    add("--strict", action="store_true", help="treat advice as mistakes")
    add("--patches", action="store_true", help="list every patch")
    return parser


def main(argv: Sequence[str]) -> int:
    """Check as `argv` says; return the exit status.

    Raises:
        UsageError: the command itself is used wrongly.
    """
    if "--" not in argv:
        make_parser().parse_args(argv)
        raise UsageError(
            option="--",
            value=None,
            reason="nothing is given to check",
            remedy="put Megatron's arguments, or a launch script, after --",
        )
    index = list(argv).index("--")
    args = make_parser().parse_args(argv[:index])
    command, world_size, environment = _command(args, list(argv[index + 1 :]))

    with warnings.catch_warnings():
        # Megatron warns of every package that only a cluster has.
        warnings.simplefilter("ignore")
        from megatron_cp_ext.features.checking import check_command

    outcome = check_command(
        command,
        world_size=world_size,
        platform=args.platform,
        devices_per_node=args.gpus_per_node or 8,
        environment=environment,
        sample_rank=args.rank,
    )
    failed = bool(outcome.errors) or (args.strict and bool(outcome.advice))
    if args.json:
        print(json.dumps({"ok": not failed, **outcome.to_dict()}, indent=1))
    else:
        from megatron_cp_ext.planner.render import print_outcome

        print_outcome(
            outcome.errors, outcome.advice, outcome.plan, patches=args.patches, strict=args.strict
        )
    return int(failed)


def _command(
    args: argparse.Namespace, words: list[str]
) -> tuple[list[str], int | None, Mapping[str, str] | None]:
    """Megatron's arguments, the world size, and the environment where a script sets it."""
    for option, value in (
        ("--world-size", args.world_size),
        ("--nodes", args.nodes),
        ("--gpus-per-node", args.gpus_per_node),
    ):
        if value is not None and value < 1:
            raise UsageError(
                option=option, value=value, reason="it is a count", remedy="use 1 or more"
            )
    world_size = args.world_size
    if world_size is None and (args.nodes or args.gpus_per_node):
        world_size = (args.nodes or 1) * (args.gpus_per_node or 8)
    if not words or words[0].startswith("-"):
        return words, world_size, None

    from megatron_cp_ext.planner.launch_script import read_launch

    launch = read_launch(Path(words[0]), words[1:], environment=_batch_variables(args))
    environment = {}
    if launch.max_connections is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = launch.max_connections
    return list(launch.arguments), world_size or launch.world_size, environment


def _batch_variables(args: argparse.Namespace) -> dict[str, str]:
    """What a batch system would tell the script."""
    nodes = str(args.nodes or 1)
    wanted = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_GPUS_ON_NODE": str(args.gpus_per_node or 8),
        "SLURM_GPUS_PER_NODE": str(args.gpus_per_node or 8),
        "SLURM_JOB_ID": "0",
        "SLURM_JOB_NAME": "check",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_SUBMIT_DIR": os.getcwd(),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}
