"""Any algorithm, mask, layout and heads: the oracle's numbers, or a refusal by the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from megatron_cp_ext.testing import AttentionCase, GlooPool, Refusal, disagreement, run_cases
from megatron_cp_ext.testing.strategies import attention_cases

GetPool = Callable[[int], GlooPool]

LARGEST = 8
OF_THEIR_OWN = (2, 3, 4, 8)  # numbers of ranks for which there is a pool anyway
same_every_time = settings(
    derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
)


def refused_option(case: AttentionCase) -> str | None:
    """What the rules refuse about a case."""
    if case.heads < case.ulysses_degree:
        return "ulysses_degree"
    lengths = {case.layout.local_length(rank) for rank in range(case.layout.cp_size)}
    if case.algorithm == "kvallgather" and len(lengths) > 1:
        return "layout"
    return None


def assert_right_or_refused(gloo_pool: GetPool, case: AttentionCase) -> None:
    size = case.layout.cp_size
    ranks: Sequence[int] | None = None
    if size not in OF_THEIR_OWN:
        # Not the first ranks of the pool: a rank's number in its group is not its own.
        first = case.seed % (LARGEST - size) + 1
        ranks = range(first, first + size)
    pool = gloo_pool(LARGEST if ranks else size)
    (outcome,) = run_cases(pool, [case], ranks=ranks)
    option = refused_option(case)
    if option is not None:
        assert isinstance(outcome, Refusal), f"{case} was not refused"
        assert outcome.option == option
    else:
        complaint = disagreement(case, outcome)
        assert complaint is None, f"{case}:\n{complaint}"


@settings(same_every_time, max_examples=60)
@given(case=attention_cases())
def test_random_cases(gloo_pool: GetPool, case: AttentionCase) -> None:
    assert_right_or_refused(gloo_pool, case)


@pytest.mark.slow
@settings(same_every_time, max_examples=500)
@given(case=attention_cases(dtypes=(torch.float64, torch.float64, torch.float32, torch.bfloat16)))
def test_many_random_cases(gloo_pool: GetPool, case: AttentionCase) -> None:
    assert_right_or_refused(gloo_pool, case)
