"""`megatron-cp verify`: is training with context parallelism the same training?"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.verification import (
    Launcher,
    RunSpec,
    Tolerances,
    VerifyPlan,
    Workload,
    torchrun,
    verify,
)
from megatron_cp_ext.verification.spec import refuse_decided

DEFAULT_CONFIGS = ("ring:cp=2", "ulysses:cp=2", "kvallgather:cp=2", "hybrid:cp=4,ulysses=2")
DEFAULT_OUTPUT = "megatron-cp-verify"

DESCRIPTION = """\
Runs the same training once without context parallelism and once in each configuration, and
compares loss and grad norm of every step. Exit status: 0 all equal, 1 any difference or failed
run, 2 wrong usage.

SPEC is ALGORITHM:key=value,flag,... with ALGORITHM one of ring, ulysses, kvallgather, hybrid, or
none for Megatron's own attention. Keys: cp, tp, pp, dp, ulysses (the degree, for hybrid), and the
flag sp (sequence parallelism). Every other key=value is passed to Megatron as --key value, every
other flag as --flag, in this run alone:

  megatron-cp verify --config ring:cp=2 hybrid:cp=4,ulysses=2
  megatron-cp verify --config ring:cp=2,tp=2,sp ulysses:cp=2,dp=2,use-distributed-optimizer
  megatron-cp verify --steps 50 --config ring:cp=2 -- --num-layers 4

What follows -- goes to every run, the baseline included."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of `megatron-cp verify`, for what stands before `--`."""
    parser = argparse.ArgumentParser(
        prog="megatron-cp verify",
        usage="megatron-cp verify [options] [--config SPEC ...] [-- MEGATRON_ARGUMENT ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--config",
        metavar="SPEC",
        nargs="+",
        action="extend",
        help="configurations to verify (default: " + ", ".join(DEFAULT_CONFIGS) + ")",
    )
    add(
        "--baseline",
        metavar="SPEC",
        help="compare all with this one (default: for each, none with the same tp and pp)",
    )
    add("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    add("--seq-length", type=int, default=256, help="tokens a sequence (default: %(default)s)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="default: %(default)s")
    add(
        "--data-prefix",
        type=Path,
        metavar="P",
        help="train on P.bin and P.idx, as launch/prepare_data.py makes them (default: mock data)",
    )
    add(
        "--script",
        type=Path,
        help="a Megatron pretrain_gpt.py (default: the packaged GPT pre-training)",
    )
    add(
        "--output",
        type=Path,
        default=Path(DEFAULT_OUTPUT),
        metavar="DIR",
        help="folder for verify.json, verify.png and logs (default: %(default)s)",
    )
    add(
        "--loss-rtol",
        type=float,
        metavar="X",
        help="allowed relative difference of the loss (default: 1e-5 for fp32, 1e-2 for bf16)",
    )
    add(
        "--grad-norm-rtol",
        type=float,
        metavar="Y",
        help="the same for the grad norm (default: 1e-4 for fp32, 1e-2 for bf16)",
    )
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for one run (default: %(default)g)",
    )
    add(
        "--jobs",
        type=int,
        default=1,
        help="runs at the same time; wall times then say little (default: %(default)s)",
    )
    add("--per-step", action="store_true", help="print the steps of every configuration")
    add("--keep-logs", action="store_true", help="keep the logs of runs that passed, too")
    return parser


def main(argv: Sequence[str], *, launcher: Launcher = torchrun) -> int:
    """Verify as `argv` says; return the exit status.

    Args:
        argv: the command's arguments.
        launcher: makes the command of a training.

    Raises:
        UsageError: an argument is wrong.
        KeyboardInterrupt: interrupted or terminated; every process has been ended.
    """
    before, after = _split(list(argv))
    args = make_parser().parse_args(before)
    plan = make_plan(args, after)

    from megatron_cp_ext.verification.picture import MatplotlibMissing, draw
    from megatron_cp_ext.verification.progress import progress_on
    from megatron_cp_ext.verification.records import write_json
    from megatron_cp_ext.verification.tables import make_console, print_report

    plan.output.mkdir(parents=True, exist_ok=True)
    console = make_console()
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with progress_on(console, plan) as progress:
            report = verify(plan, progress=progress, launcher=launcher)
    finally:
        signal.signal(signal.SIGTERM, previous)
    print_report(report, console, per_step=args.per_step)
    write_json(report, plan.output / "verify.json")
    written = ["verify.json"]
    try:
        draw(report, plan.output / "verify.png")
        written.append("verify.png")
    except MatplotlibMissing as error:
        console.print(str(error), markup=False, soft_wrap=True)
    console.print(f"{' and '.join(written)} in {plan.output}", markup=False, soft_wrap=True)
    return 0 if report.passed else 1


def make_plan(args: argparse.Namespace, extra: Sequence[str]) -> VerifyPlan:
    """The plan that the parsed arguments describe.

    Args:
        args: what `make_parser` parsed.
        extra: Megatron's arguments for every run.

    Raises:
        UsageError: an argument is wrong.
    """
    refuse_decided(extra)
    configs = tuple(RunSpec.parse(text) for text in args.config or DEFAULT_CONFIGS)
    for index, spec in enumerate(configs):
        _require(spec not in configs[:index], "--config", spec, "given twice", "give it once")
        _require(
            args.seq_length > 0 and args.seq_length % (2 * spec.cp) == 0,
            "--seq-length",
            args.seq_length,
            f"{spec} cuts a sequence into 2 x {spec.cp} equal chunks",
            f"a multiple of {2 * spec.cp}",
        )
    # The loss cannot be seen to fall within a single step.
    _require(args.steps >= 2, "--steps", args.steps, "the loss has to fall", "2 or more")
    _require(args.timeout > 0, "--timeout", args.timeout, "no time at all", "seconds above 0")
    _require(args.jobs >= 1, "--jobs", args.jobs, "nothing would run", "1 or more")
    default = Tolerances.of(args.dtype)
    tolerances = Tolerances(
        _tolerance("--loss-rtol", args.loss_rtol, default.loss),
        _tolerance("--grad-norm-rtol", args.grad_norm_rtol, default.grad_norm),
    )
    if args.data_prefix is not None:
        for suffix in (".bin", ".idx"):
            path = args.data_prefix.with_name(args.data_prefix.name + suffix)
            _require(
                path.is_file(),
                "--data-prefix",
                args.data_prefix,
                f"there is no {path}",
                "make it with launch/prepare_data.py, or leave the option out for mock data",
            )
    if args.script is not None:
        _require(
            args.script.is_file() and args.script.suffix == ".py",
            "--script",
            args.script,
            "there is no such Python file",
            "the path of a pretrain_gpt.py; leave it out for the packaged one",
        )
    return VerifyPlan(
        workload=Workload(
            steps=args.steps,
            seq_length=args.seq_length,
            dtype=args.dtype,
            data_prefix=args.data_prefix and args.data_prefix.resolve(),
            script=args.script and args.script.resolve(),
            extra=tuple(extra),
        ),
        configs=configs,
        tolerances=tolerances,
        output=args.output,
        baseline=args.baseline and RunSpec.parse(args.baseline, option="--baseline"),
        timeout_s=args.timeout,
        jobs=args.jobs,
        keep_logs=args.keep_logs,
    )


def _require(holds: bool, option: str, value: object, reason: str, remedy: str) -> None:
    if not holds:
        raise UsageError(option=option, value=value, reason=reason, remedy=remedy)


def _tolerance(option: str, value: float | None, default: float) -> float:
    """A tolerance below 1: a difference as large as the number itself is no agreement."""
    if value is None:
        return default
    _require(0 <= value < 1, option, value, "no relative tolerance", "a number from 0 to below 1")
    return value


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What stands before the first `--`, and what follows it."""
    if "--" not in argv:
        return argv, []
    index = argv.index("--")
    return argv[:index], argv[index + 1 :]


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Treat SIGTERM like Ctrl-C, so that the runs' processes are ended on the way out."""
    raise KeyboardInterrupt
