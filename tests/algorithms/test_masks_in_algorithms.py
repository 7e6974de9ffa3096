"""Every kind of mask, sinks, dropout and unequal head sizes, in every algorithm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megatron_cp_ext import AttentionMask, SequenceLayout
from megatron_cp_ext.testing import (
    AttentionCase,
    GlooPool,
    Refusal,
    assert_close_to_oracle,
    assert_matches_oracle,
    dense_pairs,
    oracle_attention,
    run_case,
    run_cases,
)

GetPool = Callable[[int], GlooPool]

S = 32
ON_FOUR = [("ring", 4, 1), ("ulysses", 4, 4), ("kvallgather", 4, 1), ("hybrid", 4, 2)]
ON_TWO = [("ring", 2, 1), ("ulysses", 2, 2), ("kvallgather", 2, 1)]
ways = pytest.mark.parametrize(
    ("algorithm", "world", "degree"),
    [*ON_FOUR, *(pytest.param(*way, marks=pytest.mark.slow) for way in ON_TWO)],
)

DOCUMENTS = ([0, 8, 32], [0, 10, 32], [0, 1, 2, 31, 32], [0, 32])


def case_of(algorithm: str, world: int, degree: int, mask: AttentionMask) -> AttentionCase:
    return AttentionCase(
        SequenceLayout.zigzag(S, world),
        mask,
        algorithm=algorithm,
        ulysses_degree=degree,
        batch=2,
        heads=4,
        kv_heads=2,
    )


@pytest.mark.parametrize(("algorithm", "world", "degree"), [*ON_FOUR, *ON_TWO])
def test_packed_documents(gloo_pool: GetPool, algorithm: str, world: int, degree: int) -> None:
    cases = [
        case_of(algorithm, world, degree, AttentionMask.documents(bounds, causal=causal))
        for bounds, causal in itertools.product(DOCUMENTS, (True, False))
    ]
    per_document = SequenceLayout.zigzag_documents([0, 8, 32], world)
    cases += [replace(case, layout=per_document) for case in cases]
    assert_matches_oracle(gloo_pool(world), *cases)


@pytest.mark.parametrize("bounds", DOCUMENTS)
def test_packed_documents_equal_each_document_alone(gloo_pool: GetPool, bounds: list[int]) -> None:
    case = case_of("ring", 2, 1, AttentionMask.documents(bounds))
    packed = run_case(gloo_pool(2), case)
    whole = case.tensors()
    for start, stop in itertools.pairwise(bounds):
        part = {name: tensor[start:stop] for name, tensor in whole.items()}
        alone = oracle_attention(
            part["query"],
            part["key"],
            part["value"],
            torch.ones(stop - start, stop - start, dtype=torch.bool).tril(),
            dout=part["dout"],
        )
        for name, expected in alone.tensors().items():
            held = packed[name].narrow(2 if name == "lse" else 0, start, stop - start)
            torch.testing.assert_close(held, expected, rtol=0, atol=1e-12)


# In units of a chunk (32 tokens, 4 ranks: 4 tokens) smaller, across chunks, across ranks, beyond.
WINDOWS = [(0, 0), (2, 0), (3, 3), (9, 5), (0, 14), (31, 31), (40, 50), (None, 3), (7, None)]


@ways
def test_windows(gloo_pool: GetPool, algorithm: str, world: int, degree: int) -> None:
    masks = [
        make(window) for make in (AttentionMask.causal, AttentionMask.full) for window in WINDOWS
    ]
    masks += [AttentionMask.documents([0, 10, 32], causal=c, window=(4, 2)) for c in (True, False)]
    cases = [case_of(algorithm, world, degree, mask) for mask in masks]
    assert_matches_oracle(gloo_pool(world), *cases)


@ways
def test_sinks(gloo_pool: GetPool, algorithm: str, world: int, degree: int) -> None:
    masks = [
        AttentionMask.causal(),
        AttentionMask.full(window=(3, 3)),
        AttentionMask.documents([0, 10, 29]),  # the last three rows see the sink only
    ]
    cases = [
        replace(case_of(algorithm, world, degree, mask), with_sink=True, dtype=dtype)
        for mask, dtype in itertools.product(masks, (torch.float64, torch.float32, torch.bfloat16))
    ]
    assert_matches_oracle(gloo_pool(world), *cases)


@ways
def test_dense_masks(gloo_pool: GetPool, algorithm: str, world: int, degree: int) -> None:
    generator = torch.Generator().manual_seed(5)
    same_for_all = torch.rand(S, S, generator=generator) < 0.4
    for_each = torch.rand(2, 1, S, S, generator=generator) < 0.4
    same_for_all[11] = for_each[1, :, 3] = False  # rows that see nothing
    for_each[:, :, :, 20:] = False  # keys that nobody sees: padding
    masks = [
        AttentionMask.dense(same_for_all),
        AttentionMask.dense(for_each),
        AttentionMask.dense(for_each, causal=True, window=(9, 0)),
        AttentionMask.dense(torch.zeros(S, S, dtype=torch.bool)),
    ]
    cases = [
        replace(case_of(algorithm, world, degree, mask), with_sink=sink)
        for mask, sink in itertools.product(masks, (False, True))
    ]
    assert_matches_oracle(gloo_pool(world), *cases)


@ways
def test_a_mask_for_each_sample(
    gloo_pool: GetPool, algorithm: str, world: int, degree: int
) -> None:
    pairs = torch.rand(S, S, generator=torch.Generator().manual_seed(6)) < 0.5
    cases = [
        case_of(algorithm, world, degree, AttentionMask.per_sample(masks))
        for masks in (
            [AttentionMask.documents([0, 10, 32]), AttentionMask.documents([0, 5, 21])],
            [AttentionMask.causal(), AttentionMask.full(window=(2, 2))],
            [AttentionMask.dense(pairs), AttentionMask.causal()],
        )
    ]
    assert_matches_oracle(gloo_pool(world), *cases)


@ways
def test_key_heads_larger_than_value_heads(
    gloo_pool: GetPool, algorithm: str, world: int, degree: int
) -> None:
    """Multi-head latent attention: 192 and 128."""
    case = case_of(algorithm, world, degree, AttentionMask.causal())
    mla = replace(case, batch=1, kv_heads=4, qk_dim=192, v_dim=128)
    cases = [mla, replace(mla, dtype=torch.bfloat16), replace(case, qk_dim=6, v_dim=10)]
    assert_matches_oracle(gloo_pool(world), *cases)


@ways
def test_dropout_drops_what_one_rank_drops(
    gloo_pool: GetPool, algorithm: str, world: int, degree: int
) -> None:
    cases = [
        replace(case_of(algorithm, world, degree, mask), dropout_p=p, with_sink=True, kernel=kernel)
        for (mask, p), kernel in itertools.product(
            [
                (AttentionMask.causal(), 0.1),
                (AttentionMask.full(window=(5, 9)), 0.3),
                (AttentionMask.documents([0, 10, 32]), 0.2),
            ],
            ("reference", "auto"),
        )
    ]
    outcomes = run_cases(gloo_pool(world), cases)
    for case, outcome in zip(cases, outcomes, strict=True):
        assert not isinstance(outcome, Refusal)
        assert_close_to_oracle(outcome, run_case(None, case.on_one_rank()), 1e-9)
        assert_close_to_oracle(outcome, case.oracle().tensors(), 1e-9)
    undropped = case_of(algorithm, world, degree, AttentionMask.causal())
    differs = run_case(gloo_pool(world), undropped)["out"] - outcomes[0]["out"]
    assert differs.abs().max() > 0.01


PADDED, REAL = 704, 698


@pytest.mark.parametrize(("algorithm", "world", "degree"), ON_FOUR)
def test_tail_padding_has_no_output_and_no_gradient_and_is_repeatable(
    gloo_pool: GetPool, algorithm: str, world: int, degree: int
) -> None:
    case = AttentionCase(
        SequenceLayout.zigzag(PADDED, world),
        AttentionMask.documents([0, REAL]),
        algorithm=algorithm,
        ulysses_degree=degree,
        heads=4,
        kv_heads=2,
        dtype=torch.float32,
    )
    by_length = AttentionMask.documents([0, PADDED], lengths=[REAL])
    first, again, other = run_cases(gloo_pool(world), [case, case, replace(case, mask=by_length)])
    for outcome in (first, again, other):
        assert not isinstance(outcome, Refusal)
        for name in ("out", "dq", "dk", "dv"):
            assert not outcome[name][REAL:].any(), name
            assert torch.equal(outcome[name], first[name]), name
        assert (outcome["lse"][:, :, REAL:] == -math.inf).all()
        assert torch.equal(outcome["lse"], first["lse"])
    assert_close_to_oracle(first, case.oracle().tensors(), 1e-5)


@ways
def test_equal_calls_give_bitwise_equal_results(
    gloo_pool: GetPool, algorithm: str, world: int, degree: int
) -> None:
    case = replace(
        case_of(algorithm, world, degree, AttentionMask.documents([0, 10, 29])),
        with_sink=True,
        dtype=torch.bfloat16,
        layout=SequenceLayout.zigzag(256, world),
    )
    first, *others = run_cases(gloo_pool(world), [case] * 4)
    assert not isinstance(first, Refusal)
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in first)


@ways
def test_scores_of_ten_thousand(
    gloo_pool: GetPool, algorithm: str, world: int, degree: int
) -> None:
    """The softmax is all but one-hot: gradients vanish, and their error is absolute."""
    case = case_of(algorithm, world, degree, AttentionMask.full(window=(20, 3)))
    large = replace(case, magnitude=120.0, with_sink=True)
    exact, low = run_cases(gloo_pool(world), [large, replace(large, dtype=torch.bfloat16)])
    assert not isinstance(exact, Refusal)
    assert not isinstance(low, Refusal)
    assert exact["lse"].max() > 1e4
    for name, expected in large.oracle().tensors().items():
        torch.testing.assert_close(exact[name], expected, rtol=1e-9, atol=1e-8)
    assert all(tensor.isfinite().all() for tensor in low.values())


@ways
def test_softmax_scale(gloo_pool: GetPool, algorithm: str, world: int, degree: int) -> None:
    case = case_of(algorithm, world, degree, AttentionMask.causal())
    cases = [replace(case, softmax_scale=scale) for scale in (1.0, 0.01, 0.0, -0.5)]
    assert_matches_oracle(gloo_pool(world), *cases)


@ways
def test_contiguous_layouts(gloo_pool: GetPool, algorithm: str, world: int, degree: int) -> None:
    cases = [
        replace(case_of(algorithm, world, degree, mask), layout=SequenceLayout.contiguous(S, world))
        for mask in (
            AttentionMask.causal(),
            AttentionMask.full(),
            AttentionMask.causal(window=(9, 0)),
            AttentionMask.documents([0, 10, 32]),
        )
    ]
    assert_matches_oracle(gloo_pool(world), *cases)


def test_a_mask_and_its_dense_picture_give_the_same(gloo_pool: GetPool) -> None:
    for mask in (AttentionMask.causal(), AttentionMask.documents([0, 1, 2, 31], window=(5, 0))):
        case = case_of("ring", 4, 1, mask)
        pictured = replace(case, mask=AttentionMask.dense(dense_pairs(mask, S)))
        outcomes = run_cases(gloo_pool(4), [case, pictured])
        assert_close_to_oracle(outcomes[1], outcomes[0], 1e-12)
