"""Megatron's parser and validation, and ours, for any world size, in one process.

Nothing is patched for good, no process group is made and no device is touched. The machine that
is planned for need not be this one: its platform is told, not looked for.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_cp_ext
from megatron_cp_ext.errors import UsageError, flatten
from megatron_cp_ext.features.cpu_platform import CpuPlatformFeature
from megatron_cp_ext.features.facts import BLACKWELL, Facts
from megatron_cp_ext.features.findings import Advice, Arguments, Finding, find_holder
from megatron_cp_ext.features.metrics import MetricsFeature
from megatron_cp_ext.features.plan import PlanFeature, plan_of
from megatron_cp_ext.features.registry import all_features
from megatron_cp_ext.features.rules import RulesFeature
from megatron_cp_ext.features.session import ARGUMENTS, Session
from megatron_cp_ext.patching import Feature, Patch, PatchManager, replace
from megatron_cp_ext.planner.plan import Plan

OWNER = "dry-run"


class ToldPlatform(CpuPlatformFeature):
    """`--cp-platform` of a machine that is planned for.

    Args:
        platform: "cpu", "cuda" or "npu".
    """

    def __init__(self, platform: str) -> None:
        self.platform = platform

    def pre_validate_args(self, args: argparse.Namespace) -> None:
        """Look for no device; do what is done there."""
        args.cp_platform = self.platform
        if self.platform == "cpu":
            super().pre_validate_args(args)


class MetricsOnPaper(MetricsFeature):
    """Leaves a file that an earlier run has written as it is."""

    def post_validate_args(self, args: argparse.Namespace) -> None:
        """Empty no file."""


class SilentPlan(PlanFeature):
    """Takes its flags and leaves the printing to whoever asked for the dry run."""

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        """Declare nothing, print nothing and stop nothing."""


@dataclass(frozen=True)
class Outcome:
    """What became of a command line.

    Args:
        errors: all mistakes found.
        advice: about what works.
        plan: None where there are errors.
        args: the arguments, as far as they came; None where they could not be parsed.
    """

    errors: tuple[UsageError, ...]
    advice: tuple[Advice, ...] = ()
    plan: Plan | None = None
    args: Any = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: errors, advice and plan."""
        return {
            "errors": [_parts(error) for error in self.errors],
            "advice": [_parts(advice) for advice in self.advice],
            "plan": self.plan.to_dict() if self.plan else None,
        }


def _parts(finding: Finding) -> dict[str, str]:
    return {name: str(getattr(finding, name)) for name in ("option", "value", "reason", "remedy")}


def _require_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise UsageError(
            option="--rank",
            value=rank,
            reason=f"there are {world_size} ranks",
            remedy=f"use 0 to {world_size - 1}",
        )


class DryRun(Session):
    """Checks command lines, one after the other.

    Args:
        facts: of the machine that will train.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.rules = RulesFeature(lambda _platform: facts)
        stand_ins: dict[type[Feature], Feature] = {
            CpuPlatformFeature: ToldPlatform(facts.platform),
            RulesFeature: self.rules,
            MetricsFeature: MetricsOnPaper(),
            PlanFeature: SilentPlan(),
        }
        super().__init__([stand_ins.get(type(f), f) for f in all_features()])
        with quiet():
            for feature in self.features:
                feature.before_import()
            self.arguments = importlib.import_module(ARGUMENTS)
            self.yaml = importlib.import_module("megatron.training.yaml_arguments")

    def check(
        self, argv: Sequence[str], world_size: int | None = None, *, sample_rank: int = 0
    ) -> Outcome:
        """Parse, validate and plan a command line.

        Args:
            argv: Megatron's arguments and ours.
            world_size: number of ranks; None for the fewest that the degrees need.
            sample_rank: the rank whose groups the plan shows.
        """
        with quiet():
            try:
                args = self.parse(argv, world_size or 1)
            except ParserError as error:
                return Outcome((error.as_usage(),))
            except Exception as error:
                return Outcome((megatron_error(error),))
        if world_size is None:
            args.world_size = fewest_ranks(args)
        return self.check_parsed(args, sample_rank=sample_rank)

    def check_parsed(self, args: argparse.Namespace, *, sample_rank: int = 0) -> Outcome:
        """Validate and plan arguments that are parsed."""
        with self.pretending():
            return self.examine(args, sample_rank=sample_rank)

    def examine(self, args: argparse.Namespace, *, sample_rank: int = 0) -> Outcome:
        """The same inside `pretending`, which many command lines can share."""
        with quiet():
            try:
                _require_rank(sample_rank, args.world_size)
                args, patches = self.validate(args)
                plan = plan_of(args, self.facts, patches, sample_rank=sample_rank)
                self._build_config(args)
            except UsageError as error:
                return Outcome(tuple(flatten(error)), tuple(self.rules.advice), args=args)
            except Exception as error:
                return Outcome((megatron_error(error),), tuple(self.rules.advice), args=args)
        return Outcome((), tuple(self.rules.advice), plan, args)

    def patches_for(self, argv: Sequence[str], world_size: int) -> list[Patch]:
        """What the features declare for a command line.

        Raises:
            UsageError: it is refused.
        """
        with quiet(), self.pretending():
            _, patches = self.validate(self.parse(argv, world_size))
        return patches

    def parse(self, argv: Sequence[str], world_size: int) -> argparse.Namespace:
        """What Megatron's own parser makes of it.

        Raises:
            ParserError: it stops at a mistake.
        """
        stderr = io.StringIO()
        with _command_line(argv, world_size), contextlib.redirect_stderr(stderr):
            try:
                return self._parse_args(self.arguments.parse_args)
            except SystemExit as error:
                raise ParserError(stderr.getvalue()) from error

    def validate(self, args: argparse.Namespace) -> tuple[argparse.Namespace, list[Patch]]:
        """Run every hook around Megatron's validation; the arguments, and the patches declared.

        Raises:
            UsageError: all mistakes found together.
        """
        manager = PatchManager(self.manager.version)
        self._run_all("pre_validate_args", args)
        for feature in self.features:
            feature.register_early_patches(manager, args)
        if getattr(args, "yaml_cfg", None) is not None or find_holder(args, "hidden_size") is None:
            args = self.yaml.validate_yaml(args)
        else:
            args = self.arguments.validate_args(args)
        self._run_all("validate_args", args)
        self._run_all("post_validate_args", args)
        for feature in self.features:
            feature.register_patches(manager, args)
        return args, manager.declared()

    def _build_config(self, args: argparse.Namespace) -> None:
        """Make Megatron's model configuration, which has checks of its own."""
        from megatron.training.argument_utils import core_transformer_config_from_args

        args = copy.copy(args)
        if self.facts.platform == "cuda":
            # It looks for the fused kernel on this machine.
            args.apply_rope_fusion = False
        core_transformer_config_from_args(args)

    @contextlib.contextmanager
    def pretending(self) -> Iterator[None]:
        """Inside, Megatron's validation sees the device that is planned for, and prints nothing."""
        manager = PatchManager(self.manager.version)
        answers: dict[str, Callable[..., Any]] = {
            "megatron.training.utils.common_utils:get_device_arch_version": lambda: BLACKWELL,
            "torch.cuda:get_device_capability": lambda device=None: (9, 0),
            f"{ARGUMENTS}:_print_args": lambda title, args: None,
        }
        if self.facts.platform == "cuda":
            # This machine's Transformer Engine, or the lack of it, says nothing of the other's.
            answers["megatron.core.utils:is_te_min_version"] = lambda version, **_options: True
            rope = "megatron.core.models.common.embeddings.rope_utils"
            answers[f"{rope}:fused_apply_rotary_pos_emb"] = lambda *_, **_options: None
        for target, answer in answers.items():
            manager.register(replace(target, answer, owner=OWNER))
        manager.apply()
        try:
            yield
        finally:
            manager.undo()


class ParserError(Exception):
    """The parser stopped, with these words on stderr."""

    def as_usage(self) -> UsageError:
        """In our four parts."""
        *_, last = str(self).strip().splitlines() or ["it stopped without a word"]
        return UsageError(
            option="command line",
            value=last.split("error:")[-1].strip(),
            reason="Megatron's parser does not take it",
            remedy="correct it; --help lists all options",
        )


def megatron_error(error: Exception) -> UsageError:
    """What Megatron raised, with the place and the condition, in our four parts.

    Raises:
        Exception: the error itself, if this plugin raised it: that is a mistake of ours.
    """
    ours = Path(megatron_cp_ext.__file__).parent
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if ours in Path(frame.filename).parents:
        raise error
    reason = str(error) or f"Megatron demands: {frame.line}"
    return UsageError(
        option=f"Megatron's own check, {Path(frame.filename).name} line {frame.lineno}",
        value=f"{type(error).__name__}: {frame.line}",
        reason=reason.strip(),
        remedy="change the options that this line reads",
    )


def fewest_ranks(args: Any) -> int:
    """The smallest world that the degrees of parsed arguments fit."""
    view = Arguments(args)
    degrees = (view.tp, view.pp, view.cp, view.size("expert_model_parallel_size"))
    if min(degrees) < 1:
        return 1
    tp, pp, cp, ep = degrees
    etp = max(1, view.size("expert_tensor_parallel_size", tp))
    return math.lcm(tp * pp * cp, etp * ep * pp)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what Megatron prints and warns of from the screen."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _command_line(argv: Sequence[str], world_size: int) -> Iterator[None]:
    """Let Megatron's parser read `argv`, as rank 0 of a world."""
    wanted = {"RANK": "0", "WORLD_SIZE": str(world_size)}
    before = {name: os.environ.get(name) for name in wanted}
    old_argv, sys.argv = sys.argv, ["pretrain_gpt.py", *argv]
    os.environ.update(wanted)
    try:
        yield
    finally:
        sys.argv = old_argv
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
