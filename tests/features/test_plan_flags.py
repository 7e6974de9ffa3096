"""`--cp-print-plan` and `--cp-dry-run` in a real run's session."""

from __future__ import annotations

import argparse

import pytest

from megatron_cp_ext.features import plan as plan_module
from megatron_cp_ext.features.plan import PlanFeature
from megatron_cp_ext.patching import PatchManager


@pytest.fixture
def start(monkeypatch):
    """`start(rank, *flags)`: the feature's hook, with the plan itself put aside."""
    printed = []
    monkeypatch.setattr(plan_module, "plan_of", lambda args, facts, patches: "the plan")
    monkeypatch.setattr(
        "megatron_cp_ext.planner.render.print_plan", lambda plan, console: printed.append(plan)
    )

    def run(rank: int, *flags: str) -> list[str]:
        printed.clear()
        parser = argparse.ArgumentParser()
        feature = PlanFeature()
        feature.register_args(parser)
        args = parser.parse_args(flags, argparse.Namespace(rank=rank, cp_platform="cpu"))
        try:
            feature.register_patches(PatchManager(), args)
        except SystemExit as stop:
            printed.append(f"exit {stop.code}")
        return printed

    return run


def test_without_the_flags_nothing_happens(start) -> None:
    assert start(0) == []


def test_printing_is_for_rank_0(start) -> None:
    assert start(0, "--cp-print-plan") == ["the plan"]
    assert start(1, "--cp-print-plan") == []


def test_a_dry_run_ends_every_rank_without_error(start) -> None:
    assert start(0, "--cp-dry-run") == ["the plan", "exit 0"]
    assert start(3, "--cp-dry-run") == ["exit 0"]
