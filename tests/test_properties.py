"""Any algorithm, mask, layout and heads: the oracle's numbers, or a refusal by the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_cp_ext.testing import AttentionCase, GlooPool, Refusal, disagreement, run_cases
from megatron_cp_ext.testing.strategies import attention_cases

GetPool = Callable[[int], GlooPool]

LARGEST = 8
OF_THEIR_OWN = (2, 3, 4, 8)  # numbers of ranks for which there is a pool anyway
IN_A_CALL = 4
same_every_time = settings(
    derandomize=True,
    deadline=None,
    report_multiple_bugs=False,  # a case that breaks the ranks takes seconds to try again
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def refused_option(case: AttentionCase) -> str | None:
    """What the rules refuse about a case."""
    if case.heads < case.ulysses_degree:
        return "ulysses_degree"
    lengths = {case.layout.local_length(rank) for rank in range(case.layout.cp_size)}
    if case.algorithm == "kvallgather" and len(lengths) > 1:
        return "layout"
    return None


def assert_right_or_refused(gloo_pool: GetPool, cases: Sequence[AttentionCase]) -> None:
    size = cases[0].layout.cp_size
    ranks: Sequence[int] | None = None
    if size not in OF_THEIR_OWN:
        # Not the first ranks of the pool: a rank's number in its group is not its own.
        first = cases[0].seed % (LARGEST - size) + 1
        ranks = range(first, first + size)
    outcomes = run_cases(gloo_pool(LARGEST if ranks else size), cases, ranks=ranks)
    for case, outcome in zip(cases, outcomes, strict=True):
        option = refused_option(case)
        if option is not None:
            assert isinstance(outcome, Refusal), f"{case} was not refused"
            assert outcome.option == option
        else:
            complaint = disagreement(case, outcome)
            assert complaint is None, f"{case}:\n{complaint}"


def batches(*dtypes: torch.dtype) -> st.SearchStrategy[list[AttentionCase]]:
    """Cases for one number of ranks, which go to them in one call."""
    return st.sampled_from(range(2, LARGEST + 1)).flatmap(
        lambda world: st.lists(
            attention_cases((world,), dtypes), min_size=IN_A_CALL, max_size=IN_A_CALL
        )
    )


@settings(same_every_time, max_examples=60 // IN_A_CALL)
@given(cases=batches(torch.float64))
def test_60_random_cases(gloo_pool: GetPool, cases: list[AttentionCase]) -> None:
    assert_right_or_refused(gloo_pool, cases)


@pytest.mark.slow
@settings(same_every_time, max_examples=600 // IN_A_CALL)
@given(cases=batches(torch.float64, torch.float64, torch.float32, torch.bfloat16))
def test_600_random_cases(gloo_pool: GetPool, cases: list[AttentionCase]) -> None:
    assert_right_or_refused(gloo_pool, cases)
