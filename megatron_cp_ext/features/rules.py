"""All rules, and the feature that asks them before and after Megatron's own validation."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_cp_ext.errors import UsageError, raise_all
from megatron_cp_ext.features import rules_kernel, rules_model, rules_parallel
from megatron_cp_ext.features.facts import Facts
from megatron_cp_ext.features.findings import Advice, Arguments, Rule
from megatron_cp_ext.features.mindspeed_flags import flag_rules
from megatron_cp_ext.patching import Feature

RULES: tuple[Rule, ...] = (
    flag_rules,
    *rules_parallel.RULES,
    *rules_model.RULES,
    *rules_kernel.RULES,
)


def examine(namespace: Any, facts: Facts) -> tuple[list[UsageError], list[Advice]]:
    """Ask every rule: all mistakes, and all advice.

    Args:
        namespace: Megatron's arguments, parsed or validated, flat or grouped.
        facts: of the machine that will train.
    """
    args = Arguments(namespace)
    # Where a count is not positive the other rules would divide by it.
    broken = list(rules_parallel.degrees_are_positive(args, facts))
    findings = broken or [finding for rule in RULES for finding in rule(args, facts)]
    return (
        [finding for finding in findings if isinstance(finding, UsageError)],
        [finding for finding in findings if isinstance(finding, Advice)],
    )


class RulesFeature(Feature):
    """Reports every mistake, before Megatron's validation can stop at one of them.

    Args:
        facts_of: makes the facts for a platform.
    """

    name = "rules"

    def __init__(self, facts_of: Callable[[str], Facts] = Facts.of_this_machine) -> None:
        self.facts_of = facts_of
        self.advice: list[Advice] = []

    def pre_validate_args(self, args: argparse.Namespace) -> None:
        """Ask the rules about what the user gave."""
        self.advice.clear()
        self._examine(args)

    def validate_args(self, args: argparse.Namespace) -> None:
        """Ask them again: validation merges a YAML file's groups and fills in defaults."""
        self._examine(args)

    def post_validate_args(self, args: argparse.Namespace) -> None:
        """Give the advice, once."""
        for advice in self.advice if args.rank == 0 else []:
            print(f"context parallelism, advice:{advice}", flush=True)

    def _examine(self, args: argparse.Namespace) -> None:
        platform = getattr(args, "cp_platform", "cpu")
        errors, advice = examine(args, self.facts_of(platform))
        self.advice += [each for each in advice if each not in self.advice]
        raise_all(errors)
