"""MindSpeed's flags: each works, does nothing and says so, or is refused with a reason."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.features.context_parallel import ContextParallelFeature
from megatron_cp_ext.features.facts import Facts
from megatron_cp_ext.features.findings import Advice, Arguments
from megatron_cp_ext.features.hybrid import HybridFeature
from megatron_cp_ext.features.mindspeed_flags import (
    FLAGS,
    REFUSED_ALGORITHMS,
    MindSpeedFlagsFeature,
    flag_rules,
    markdown_table,
)
from megatron_cp_ext.features.ring import RingFeature

# Every flag that the issue promises to MindSpeed's users.
PROMISED = """
--context-parallel-algo --ulysses-degree-in-cp --cp-window-size --attention-mask-type
--cp-attention-mask-type --use-cp-send-recv-overlap --kv-head-repeat-before-uly-alltoall
--context-parallel-kv-cache-policy --context-parallel-cache-interval --use-ulysses-allgather-kv
--megatron-cp-in-bnsd --use-fused-ring-attention-update --attention-mask-on-cpu
--adaptive-cp-without-coarse --adaptive-cp-dynamic-attn-mask --adaptive-cp-only-reschedule
--adaptive-cp-manually-set-mask-list
""".split()

GIVEN = {
    "--cp-window-size": "2",
    "--context-parallel-kv-cache-policy": "half",
    "--context-parallel-cache-interval": "1",
}


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for feature in (
        ContextParallelFeature(),
        RingFeature(),
        HybridFeature(),
        MindSpeedFlagsFeature(),
    ):
        feature.register_args(parser)
    return parser.parse_args(argv, SimpleNamespace(rank=0))


def findings(*argv: str, platform: str = "npu") -> list:
    return list(flag_rules(Arguments(parse(*argv)), Facts(platform=platform)))


def command(flag: str) -> list[str]:
    return [flag, GIVEN[flag]] if flag in GIVEN else [flag]


def test_every_promised_flag_is_in_the_table_and_parsed() -> None:
    assert sorted(flag.name for flag in FLAGS) == sorted(PROMISED)
    parsed = vars(parse())
    assert all(flag.dest in parsed for flag in FLAGS)


def test_defaults_are_silent() -> None:
    assert findings() == []
    assert findings(platform="cpu") == []


@pytest.mark.parametrize("flag", [f.name for f in FLAGS if f.status == "refused"])
def test_a_refused_flag_names_itself_and_a_remedy(flag: str) -> None:
    (error,) = findings(*command(flag))
    assert isinstance(error, UsageError)
    assert error.option == flag
    assert error.reason and error.remedy


@pytest.mark.parametrize(
    "argv", [["--cp-window-size", "1"], ["--context-parallel-cache-interval", "0"]]
)
def test_values_that_ask_for_nothing_are_accepted(argv: list[str]) -> None:
    assert findings(*argv) == []


@pytest.mark.parametrize("flag", [f.name for f in FLAGS if f.status == "no-op"])
def test_a_hint_without_effect_is_said_once_on_rank_0(flag: str, capsys) -> None:
    assert findings(flag) == []
    args = parse(flag)
    MindSpeedFlagsFeature().post_validate_args(args)
    assert flag in capsys.readouterr().out
    args.rank = 1
    MindSpeedFlagsFeature().post_validate_args(args)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flag", [f.name for f in FLAGS if f.npu_only])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_hints_for_npus_are_noticed_elsewhere(flag: str, platform: str) -> None:
    (advice,) = findings(flag, platform=platform)
    assert isinstance(advice, Advice)
    assert advice.option == flag and "NPU" in advice.reason


@pytest.mark.parametrize("name", REFUSED_ALGORITHMS)
def test_adaptive_algorithms_are_refused_not_unknown(name: str) -> None:
    (error,) = findings("--context-parallel-algo", name)
    assert isinstance(error, UsageError) and error.option == "--context-parallel-algo"
    assert "megatron_cp_algo" in error.remedy


def test_the_old_name_of_the_mask_type_works_and_is_advised_against() -> None:
    args = parse("--cp-attention-mask-type", "general")
    MindSpeedFlagsFeature().pre_validate_args(args)
    assert args.attention_mask_type == "general"
    (advice,) = flag_rules(Arguments(args), Facts())
    assert isinstance(advice, Advice) and "--attention-mask-type general" in advice.remedy


def test_two_mask_types_that_disagree_are_an_error() -> None:
    argv = ["--cp-attention-mask-type", "causal", "--attention-mask-type", "general"]
    (error,) = findings(*argv)
    assert isinstance(error, UsageError) and error.option == "--cp-attention-mask-type"


def test_the_readmes_table_has_a_line_for_each_flag() -> None:
    lines = markdown_table().splitlines()
    assert len(lines) == len(FLAGS) + 2
    for flag, line in zip(FLAGS, lines[2:], strict=True):
        assert line.startswith(f"| `{flag.name}` | {flag.status} | ")
        assert line.count("|") == 4
