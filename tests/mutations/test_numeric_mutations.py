"""The tests can fail: each way of being wrong is put into the code, and the check must object.

A mutation is applied on the ranks only, for one case, and undone after it. The oracle and the
yardstick of one rank, which the check compares with, stay as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numeric_mutations as wrong
import pytest
import torch
from torch import Tensor

from megatron_cp_ext import AttentionMask, ContextParallelGroups, SequenceLayout
from megatron_cp_ext.testing import AttentionCase, GlooPool, assert_matches_oracle, attend_here

GetPool = Callable[[int], GlooPool]

S, WORLD = 32, 4
RING, ULYSSES, GATHER, HYBRID = ("ring", 1), ("ulysses", 4), ("kvallgather", 1), ("hybrid", 2)
ALL = (RING, ULYSSES, GATHER, HYBRID)
EXCHANGING_KEYS = (RING, GATHER, HYBRID)


def case_of(way: tuple[str, int], **changes: Any) -> AttentionCase:
    algorithm, degree = way
    case = AttentionCase(
        SequenceLayout.zigzag(S, WORLD),
        algorithm=algorithm,
        ulysses_degree=degree,
        heads=8,
        kv_heads=2,
        qk_dim=8,
        v_dim=8,
    )
    return replace(case, **changes)


def attend_mutated(
    case: AttentionCase, groups: ContextParallelGroups, *, mutation: wrong.Mutation
) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        return attend_here(mutation(patch, case, groups.cp.rank), groups)


# The loosest bounds in which a mutation must still be noticed.
EXACT, ANY = torch.float32, torch.bfloat16
CAUSAL: dict[str, Any] = {}
FULL: dict[str, Any] = {"mask": AttentionMask.full()}
WINDOW: dict[str, Any] = {"mask": AttentionMask.full(window=(3, 5))}
DOCUMENTS: dict[str, Any] = {"mask": AttentionMask.documents([0, 10, 29])}
SINK: dict[str, Any] = {"with_sink": True}
DROPOUT: dict[str, Any] = {"dropout_p": 0.2}
ONE_KV_HEAD: dict[str, Any] = {"kv_heads": 1}

both = functools.partial(wrong.lose_a_block_of_keys, methods=("forward", "backward"))
forward_only = functools.partial(wrong.lose_a_block_of_keys, methods=("forward",))
backward_only = functools.partial(wrong.lose_a_block_of_keys, methods=("backward",))
dk, dv = (functools.partial(wrong.scale_a_gradient, index=index) for index in (1, 2))

# Mutation, the dtype and algorithms it must be noticed in, and the case to notice it by.
MUTATIONS: dict[str, tuple[wrong.Mutation, torch.dtype, Sequence[Any], dict[str, Any]]] = {
    "a block of keys is lost": (both, ANY, ALL, CAUSAL),
    "a block of keys is lost in the forward pass": (forward_only, ANY, ALL, CAUSAL),
    "a block of keys is lost in the backward pass": (backward_only, ANY, ALL, CAUSAL),
    "a ring step is skipped": (wrong.skip_a_step, ANY, (RING, HYBRID), FULL),
    "two chunks are cut the other way": (wrong.cut_two_chunks_the_other_way, ANY, ALL, CAUSAL),
    "two chunks are swapped for the mask": (wrong.believe_two_chunks_swapped, ANY, ALL, CAUSAL),
    "dK is not scaled": (functools.partial(dk, factor=math.sqrt(8)), ANY, ALL, CAUSAL),
    "dV is doubled": (functools.partial(dv, factor=2.0), ANY, ALL, CAUSAL),
    "dV is off by a thousandth": (functools.partial(dv, factor=1.001), EXACT, ALL, CAUSAL),
    "dKV of other ranks is lost": (wrong.lose_gradients_on_the_way, ANY, EXCHANGING_KEYS, CAUSAL),
    "a shared head loses a gradient": (
        wrong.keep_one_of_the_gradients_of_a_shared_head,
        ANY,
        (ULYSSES,),
        ONE_KV_HEAD,
    ),
    "one element of the keys is lost": (wrong.lose_keys_on_the_way, EXACT, EXCHANGING_KEYS, CAUSAL),
    "the softmax scale is forgotten": (
        functools.partial(wrong.scale_scores_otherwise, factor=math.sqrt(8)),
        ANY,
        ALL,
        CAUSAL,
    ),
    "the softmax scale is off by a thousandth": (
        functools.partial(wrong.scale_scores_otherwise, factor=1.001),
        EXACT,
        ALL,
        CAUSAL,
    ),
    "the backward pass has another scale": (
        functools.partial(wrong.scale_scores_otherwise, factor=1.05, methods=("backward",)),
        ANY,
        ALL,
        CAUSAL,
    ),
    "heads are permuted": (wrong.attend_with_the_next_ranks_heads, ANY, (ULYSSES, HYBRID), CAUSAL),
    "parts merge with another weight": (
        functools.partial(wrong.merge_with_another_weight, shift=0.3),
        ANY,
        EXCHANGING_KEYS,
        CAUSAL,
    ),
    "parts merge with a slightly other weight": (
        functools.partial(wrong.merge_with_another_weight, shift=1e-3),
        EXACT,
        EXCHANGING_KEYS,
        CAUSAL,
    ),
    "the diagonal sees the future": (
        functools.partial(wrong.move_the_band, hi=1),
        ANY,
        ALL,
        CAUSAL,
    ),
    "the diagonal does not see itself": (
        functools.partial(wrong.move_the_band, hi=-1),
        ANY,
        ALL,
        CAUSAL,
    ),
    "the window begins too late": (functools.partial(wrong.move_the_band, lo=1), ANY, ALL, WINDOW),
    "the window begins too early": (
        functools.partial(wrong.move_the_band, lo=-1),
        ANY,
        ALL,
        WINDOW,
    ),
    "the window ends too late": (functools.partial(wrong.move_the_band, hi=1), ANY, ALL, WINDOW),
    "a document ends too late": (
        functools.partial(wrong.move_a_document, bounds=[0, 11, 29]),
        ANY,
        ALL,
        DOCUMENTS,
    ),
    "documents are not told apart": (
        functools.partial(wrong.move_a_document, bounds=[0, 29]),
        ANY,
        ALL,
        DOCUMENTS,
    ),
    "padding is attended to": (
        functools.partial(wrong.move_a_document, bounds=[0, 10, 30]),
        ANY,
        ALL,
        DOCUMENTS,
    ),
    "the sink has no gradient": (wrong.leave_the_sink_without_gradient, ANY, ALL, SINK),
    "the sink is forgotten": (wrong.forget_the_sink, ANY, ALL, SINK),
    "the sink counts twice": (wrong.add_the_sink_twice, ANY, ALL, SINK),
    "ranks drop by seeds of their own": (wrong.drop_by_another_seed, ANY, ALL, DROPOUT),
}


def cases_of(name: str) -> list[AttentionCase]:
    _, dtype, ways, changes = MUTATIONS[name]
    return [case_of(way, dtype=dtype, **changes) for way in ways]


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed_in_every_algorithm(gloo_pool: GetPool, name: str) -> None:
    mutation, cases = MUTATIONS[name][0], cases_of(name)
    with pytest.raises(AssertionError, match=f"{len(cases)} of {len(cases)} cases are wrong"):
        assert_matches_oracle(
            gloo_pool(WORLD), *cases, execute=functools.partial(attend_mutated, mutation=mutation)
        )


def test_without_a_mutation_all_of_these_cases_are_right(gloo_pool: GetPool) -> None:
    cases = list(dict.fromkeys(case for name in MUTATIONS for case in cases_of(name)))
    assert_matches_oracle(
        gloo_pool(WORLD), *cases, execute=functools.partial(attend_mutated, mutation=wrong.nothing)
    )
