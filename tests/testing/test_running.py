"""Running cases on ranks: failures name the case, refusals are data, nothing passes unseen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_cp_ext import AttentionMask, ContextParallelGroups, SequenceLayout
from megatron_cp_ext.comm import all_gather
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.testing import (
    AttentionCase,
    GlooPool,
    Refusal,
    WorkerError,
    assert_matches_oracle,
    attend_here,
    covered_pairs,
    dense_pairs,
    run_case,
    run_cases,
)

GetPool = Callable[[int], GlooPool]

CASE = AttentionCase(SequenceLayout.zigzag(8, 2), heads=2, kv_heads=1, qk_dim=4, v_dim=4)
OTHER = replace(CASE, mask=AttentionMask.documents([0, 3, 8]), seed=77)
TOO_FEW_HEADS = replace(CASE, algorithm="ulysses", ulysses_degree=2, heads=1)


# What the ranks do in these tests.


def wrong_for_one_seed(case: AttentionCase, groups: ContextParallelGroups) -> dict[str, Tensor]:
    results = attend_here(case, groups)
    if case.seed == 77 and groups.cp.rank == 1:
        results["dk"][0] += 1
    return results


def raise_for_one_seed(case: AttentionCase, groups: ContextParallelGroups) -> dict[str, Tensor]:
    if case.seed == 77:
        raise ArithmeticError("no more numbers")
    return attend_here(case, groups)


def refuse_on_one_rank(case: AttentionCase, groups: ContextParallelGroups) -> dict[str, Tensor]:
    if groups.cp.rank == 0:
        raise UsageError(option="x", value=0, reason="not here", remedy="elsewhere")
    return {}


def refuse_after_sending(case: AttentionCase, groups: ContextParallelGroups) -> dict[str, Tensor]:
    all_gather(torch.zeros(3), groups.cp, kind="x")
    raise UsageError(option="x", value=0, reason="too late", remedy="earlier")


def its_ranks(case: AttentionCase, groups: ContextParallelGroups) -> dict[str, Tensor]:
    results = attend_here(case, groups)
    return results | {"out": torch.full_like(results["out"], float(groups.cp.ranks[0]))}


# The promises.


def test_a_wrong_case_is_named_with_what_is_wrong_and_right_ones_are_not(
    gloo_pool: GetPool,
) -> None:
    with pytest.raises(AssertionError, match="1 of 2 cases are wrong") as caught:
        assert_matches_oracle(gloo_pool(2), CASE, OTHER, execute=wrong_for_one_seed)
    message = str(caught.value)
    assert f"{OTHER}:" in message
    assert "dk: error" in message
    assert str(CASE) not in message
    assert not any(f"  {name}: " in message for name in ("out", "lse", "dq", "dv"))


def test_an_error_on_a_rank_names_the_case(gloo_pool: GetPool) -> None:
    with pytest.raises(WorkerError, match="no more numbers") as caught:
        run_cases(gloo_pool(2), [CASE, OTHER], execute=raise_for_one_seed)
    assert str(OTHER) in str(caught.value)


def test_a_refused_case_is_an_outcome_and_never_right(gloo_pool: GetPool) -> None:
    before, refusal, after = run_cases(gloo_pool(2), [CASE, TOO_FEW_HEADS, CASE])
    assert isinstance(refusal, Refusal)
    assert "remedy" in refusal.message
    assert not isinstance(before, Refusal)
    assert not isinstance(after, Refusal)
    assert torch.equal(before["out"], after["out"])
    with pytest.raises(AssertionError, match="refused"):
        assert_matches_oracle(gloo_pool(2), TOO_FEW_HEADS)
    with pytest.raises(AssertionError, match="was refused"):
        run_case(gloo_pool(2), TOO_FEW_HEADS)


def test_a_refusal_on_some_ranks_only_is_an_error(gloo_pool: GetPool) -> None:
    with pytest.raises(AssertionError, match="not alike"):
        run_cases(gloo_pool(2), [CASE], execute=refuse_on_one_rank)


def test_a_refusal_after_something_was_sent_is_an_error(gloo_pool: GetPool) -> None:
    with pytest.raises(WorkerError, match="refused after sending"):
        run_cases(gloo_pool(2), [CASE], execute=refuse_after_sending)


def test_a_case_runs_on_the_ranks_it_is_given(gloo_pool: GetPool) -> None:
    (outcome,) = run_cases(gloo_pool(3), [CASE], ranks=(1, 2), execute=its_ranks)
    assert not isinstance(outcome, Refusal)
    assert (outcome["out"] == 1.0).all()
    assert_matches_oracle(gloo_pool(3), CASE, OTHER, ranks=(0, 2))


def test_a_case_on_one_rank_needs_no_pool() -> None:
    assert_matches_oracle(None, CASE.on_one_rank(), OTHER.on_one_rank())


def test_the_same_case_has_the_same_numbers_and_another_seed_others() -> None:
    first, again, other = CASE.tensors(), CASE.tensors(), replace(CASE, seed=1).tensors()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert "sink" in replace(CASE, with_sink=True).tensors()


def test_a_case_says_all_that_sets_it_apart() -> None:
    case = replace(
        OTHER,
        layout=SequenceLayout.contiguous(8, 2),
        dropout_p=0.1,
        with_sink=True,
        kernel="reference",
        send_recv_overlap=True,
        softmax_scale=0.5,
        magnitude=3.0,
    )
    assert str(case) == (
        "ring on 2 ranks, overlapped, 8 tokens x 1, 2q/1kv heads of 4/4, float64, "
        "band ..0 documents [(0, 3), (3, 8)], scale 0.5, sink, dropout 0.1, kernel reference, "
        "magnitude 3, seed 77, shards [[(0, 4)], [(4, 8)]]"
    )
    hybrid = replace(CASE, algorithm="hybrid", ulysses_degree=2)
    assert str(hybrid).startswith("hybrid on 2 ranks, Ulysses degree 2, 8 tokens")
    samples = AttentionMask.per_sample([AttentionMask.full(window=(1, None)), CASE.mask])
    assert "samples [band -1..; band ..0]" in str(replace(CASE, mask=samples))
    dense = AttentionMask.dense(torch.ones(8, 8, dtype=torch.bool))
    assert "dense [8, 8]" in str(replace(CASE, mask=dense))


def test_dense_pairs_are_the_masks_definition() -> None:
    """By hand, because masks are tested against it."""
    documents = AttentionMask.documents([0, 2, 4], window=(0, 0))
    assert torch.equal(dense_pairs(documents, 5), torch.tensor([1, 1, 1, 1, 0]).diag().bool())
    causal = dense_pairs(AttentionMask.causal(), 4)
    assert torch.equal(causal, torch.ones(4, 4).tril().bool())
    both = dense_pairs(AttentionMask.per_sample([AttentionMask.causal(), AttentionMask.full()]), 3)
    assert both.shape == (2, 1, 3, 3)
    assert both[1].all()
    assert both[0].sum() == 6
    limited = AttentionMask.dense(torch.ones(3, 3).triu().bool(), causal=True)
    assert torch.equal(dense_pairs(limited, 3), torch.eye(3).bool())


def test_covered_pairs_counts_pairs_that_are_held_twice() -> None:
    tiles = AttentionMask.causal().tiles(CASE.layout.shards[0], CASE.layout.shards[0])
    assert torch.equal(covered_pairs(tiles, 4, 4)[0], torch.ones(4, 4).tril().long())
    assert covered_pairs([*tiles, tiles[0]], 4, 4).max() == 2
    assert covered_pairs(tiles[1:], 4, 4, batch=2).shape == (2, 4, 4)
