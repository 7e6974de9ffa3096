"""The table of what works with what: every cell that says yes is run, every no is raised."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_cp_ext import capabilities
from megatron_cp_ext.algorithms import ALGORITHMS
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.kernels import KERNELS
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.mask import AttentionMask
from megatron_cp_ext.testing import (
    AttentionCase,
    GlooPool,
    Refusal,
    assert_matches_oracle,
    run_cases,
)

S = 32
PADDED = AttentionMask.documents([0, 9, S - 3], lengths=[7, S - 12])
SOME_PAIRS = torch.rand(2, 1, S, S, generator=torch.Generator().manual_seed(3)) > 0.4

# How a case comes to need each feature.
NEEDS: dict[str, dict[str, object]] = {
    "causal": {},
    "full": {"mask": AttentionMask.full()},
    "window": {"mask": AttentionMask.full(window=(3, 2))},
    "documents": {"mask": AttentionMask.documents([0, 1, 6, 25, S])},
    "padding": {"mask": PADDED},
    "dense": {"mask": AttentionMask.dense(SOME_PAIRS), "batch": 2},
    "per_sample": {
        "mask": AttentionMask.per_sample(
            [AttentionMask.causal(), AttentionMask.documents([0, 5, S])]
        ),
        "batch": 2,
    },
    "sink": {"with_sink": True},
    "gqa": {"kv_heads": 2},
    "few_kv_heads": {"kv_heads": 1},
    "uneven_heads": {"heads": 9, "kv_heads": 3},
    "few_heads": {"heads": 1, "kv_heads": 1},
    "v_dim": {"v_dim": 5},
    "dropout": {"dropout_p": 0.2},
    "deterministic": {"deterministic": True},
    "any_scale": {"softmax_scale": -0.5},
    "fp64": {},
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
}
DEGREES = {"ring": 1, "kvallgather": 1, "ulysses": 4, "hybrid": 2}


def case_for(algorithm: str, kernel: str, feature: str) -> AttentionCase:
    """A case on four ranks that needs the feature."""
    plain = AttentionCase(
        layout=SequenceLayout.zigzag(S, 4),
        algorithm=algorithm,
        ulysses_degree=DEGREES[algorithm],
        kernel=kernel,
        heads=8,
        kv_heads=8,
    )
    return dataclasses.replace(plain, **NEEDS[feature])


def test_the_table_names_what_exists() -> None:
    assert set(capabilities.ALGORITHMS) == set(ALGORITHMS)
    assert tuple(KERNELS) == capabilities.KERNELS
    assert set(NEEDS) == set(capabilities.FEATURES)


@pytest.mark.parametrize("feature", capabilities.FEATURES)
def test_every_cell_keeps_its_word(feature: str, gloo_pool: Callable[[int], GlooPool]) -> None:
    working: list[AttentionCase] = []
    refused: list[tuple[AttentionCase, capabilities.Support]] = []
    for algorithm, kernel in itertools.product(capabilities.ALGORITHMS, capabilities.KERNELS):
        cell = capabilities.support(
            algorithm=algorithm, kernel=kernel, feature=feature, platform="cpu"
        )
        case = case_for(algorithm, kernel, feature)
        if cell.works:
            working.append(case)
        else:
            refused.append((case, cell))
    assert_matches_oracle(gloo_pool(4), *working)
    outcomes = run_cases(gloo_pool(4), [case for case, _ in refused]) if refused else []
    for (case, cell), outcome in zip(refused, outcomes, strict=True):
        assert isinstance(outcome, Refusal), f"{case} was not refused"
        if feature != "few_heads":  # its own check comes first and names the degrees that work
            assert cell.reason in outcome.message
            assert cell.instead in outcome.message


def test_a_cell_nobody_filled_is_refused() -> None:
    for changed in (
        {"algorithm": "star"},
        {"kernel": "abacus"},
        {"feature": "telepathy"},
        {"platform": "slide rule"},
    ):
        cell = {"algorithm": "ring", "kernel": "reference", "feature": "causal", "platform": "cpu"}
        assert capabilities.support(**cell).works
        assert not capabilities.support(**(cell | changed)).works


@pytest.mark.parametrize(
    ("kernel", "features", "platform", "chosen"),
    [
        ("auto", ["causal", "bf16"], "cpu", "aten_cpu"),
        ("auto", ["causal", "dropout"], "cpu", "reference"),
        ("auto", ["causal"], "cuda", "reference"),
        ("reference", ["causal"], "cpu", "reference"),
    ],
)
def test_auto_takes_the_fastest_kernel_that_can(
    kernel: str, features: list[str], platform: str, chosen: str
) -> None:
    assert (
        capabilities.require(algorithm="ring", kernel=kernel, features=features, platform=platform)
        == chosen
    )


@pytest.mark.parametrize(
    ("algorithm", "kernel", "features", "platform", "option"),
    [
        ("star", "auto", ["causal"], "cpu", "algorithm"),
        ("ring", "abacus", ["causal"], "cpu", "kernel"),
        ("ring", "aten_cpu", ["causal", "dropout"], "cpu", "kernel"),
        ("ring", "aten_cpu", ["causal"], "cuda", "kernel"),
        ("ring", "auto", ["causal"], "npu", "kernel"),
        ("ulysses", "auto", ["causal", "few_heads"], "cpu", "algorithm"),
    ],
)
def test_what_does_not_work_is_refused_with_what_does(
    algorithm: str, kernel: str, features: list[str], platform: str, option: str
) -> None:
    with pytest.raises(UsageError) as caught:
        capabilities.require(
            algorithm=algorithm, kernel=kernel, features=features, platform=platform
        )
    assert caught.value.option == option
    assert caught.value.reason
    assert caught.value.remedy


def test_the_readme_shows_the_table() -> None:
    readme = Path(__file__).parents[1] / "README.md"
    assert capabilities.markdown_table() in readme.read_text()
