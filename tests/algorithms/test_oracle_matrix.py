"""The matrix: algorithm x mask x heads x dtype x number of ranks x batch, against the oracle.

Each test sends all its cases in one call to the ranks. The quick part takes every seventh case,
which meets each value of each axis; the slow part takes all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from megatron_cp_ext import AttentionMask, SequenceLayout
from megatron_cp_ext.testing import AttentionCase, GlooPool, assert_matches_oracle

GetPool = Callable[[int], GlooPool]

SEQ_LEN = 48  # a multiple of 2 * 8 and of 2 * 3
HEADS = 8
STRIDE = 7

MASKS = (AttentionMask.causal(), AttentionMask.full())
KV_HEADS = (8, 2, 1)  # multi-head, grouped 4:1, multi-query
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
BATCHES = (1, 2)

WAYS = [
    *((algorithm, world, 1) for algorithm in ("ring", "kvallgather") for world in (1, 2, 3, 4, 8)),
    *(("ulysses", world, world) for world in (1, 2, 3, 4, 8)),
    ("hybrid", 4, 2),
    ("hybrid", 8, 2),
    ("hybrid", 8, 4),
]
ways = pytest.mark.parametrize(("algorithm", "world", "degree"), WAYS)


def all_cases(algorithm: str, world: int, degree: int) -> list[AttentionCase]:
    return [
        AttentionCase(
            SequenceLayout.zigzag(SEQ_LEN, world),
            mask,
            algorithm=algorithm,
            ulysses_degree=degree,
            batch=batch,
            heads=HEADS,
            kv_heads=kv_heads,
            dtype=dtype,
            with_sink=index % 5 == 0,
        )
        for index, (mask, kv_heads, dtype, batch) in enumerate(
            itertools.product(MASKS, KV_HEADS, DTYPES, BATCHES)
        )
    ]


def pool_of(gloo_pool: GetPool, world: int) -> GlooPool | None:
    return gloo_pool(world) if world > 1 else None


@ways
def test_some_of_the_matrix(gloo_pool: GetPool, algorithm: str, world: int, degree: int) -> None:
    first = WAYS.index((algorithm, world, degree)) % STRIDE
    cases = all_cases(algorithm, world, degree)[first::STRIDE]
    assert_matches_oracle(pool_of(gloo_pool, world), *cases)


@pytest.mark.slow
@ways
def test_all_of_the_matrix(gloo_pool: GetPool, algorithm: str, world: int, degree: int) -> None:
    cases = all_cases(algorithm, world, degree)
    assert len(cases) == 36
    assert_matches_oracle(pool_of(gloo_pool, world), *cases, timeout=180)


def test_the_quick_part_meets_every_value_of_every_axis_with_every_algorithm() -> None:
    for algorithm in ("ring", "ulysses", "hybrid", "kvallgather"):
        cases = [
            case
            for index, way in enumerate(WAYS)
            if way[0] == algorithm
            for case in all_cases(*way)[index % STRIDE :: STRIDE]
        ]
        assert {case.mask for case in cases} == set(MASKS)
        assert {case.kv_heads for case in cases} == set(KV_HEADS)
        assert {case.dtype for case in cases} == set(DTYPES)
        assert {case.batch for case in cases} == set(BATCHES)
        assert {case.with_sink for case in cases} == {True, False}


# Heads that do not divide: (query heads, KV heads, ranks, Ulysses degree).
ODD_HEADS = [
    (8, 8, 3, 3),  # uneven query heads
    (8, 2, 3, 3),  # a rank whose query heads share two KV heads unequally
    (5, 1, 4, 4),
    (32, 2, 4, 4),  # fewer KV heads than ranks
    (28, 7, 2, 2),
    (28, 7, 8, 4),
    (6, 3, 4, 2),
    (12, 3, 8, 8),
    (4, 4, 4, 4),
]


@pytest.mark.parametrize(("heads", "kv_heads", "world", "degree"), ODD_HEADS)
def test_heads_that_do_not_divide(
    gloo_pool: GetPool, heads: int, kv_heads: int, world: int, degree: int
) -> None:
    cases = [
        AttentionCase(
            SequenceLayout.zigzag(2 * world * 2, world),
            mask,
            algorithm="ulysses" if degree == world else "hybrid",
            ulysses_degree=degree,
            batch=2,
            heads=heads,
            kv_heads=kv_heads,
            qk_dim=4,
            v_dim=4,
            dtype=dtype,
            with_sink=True,
        )
        for mask, dtype in itertools.product(MASKS, (torch.float64, torch.bfloat16))
    ]
    assert_matches_oracle(gloo_pool(world), *cases)


def test_seven_ranks_share_28_query_and_7_kv_heads(gloo_pool: GetPool) -> None:
    case = AttentionCase(
        SequenceLayout.zigzag(28, 7),
        algorithm="ulysses",
        ulysses_degree=7,
        heads=28,
        kv_heads=7,
        with_sink=True,
    )
    assert_matches_oracle(gloo_pool(8), case, ranks=range(1, 8))


# A context-parallel group is seldom the whole world: with TP2 x CP4 it is every other rank.
@pytest.mark.parametrize("ranks", [(4, 5, 6, 7), (0, 2, 4, 6), (1, 3, 5, 7), (2, 3), (5, 7)])
def test_groups_anywhere_among_the_ranks(gloo_pool: GetPool, ranks: tuple[int, ...]) -> None:
    size = len(ranks)
    cases = [
        AttentionCase(
            SequenceLayout.zigzag(16, size),
            algorithm=algorithm,
            ulysses_degree=degree,
            send_recv_overlap=overlap,
            with_sink=True,
        )
        for algorithm, degree, overlap in (
            ("ring", 1, False),
            ("ring", 1, True),
            ("ulysses", size, False),
            ("kvallgather", 1, False),
            ("hybrid", 2, False),
            ("hybrid", 2, True),
        )
    ]
    assert_matches_oracle(gloo_pool(8), *cases, ranks=ranks)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sends_and_receives_on_separate_groups(gloo_pool: GetPool, world: int) -> None:
    cases = [
        AttentionCase(
            SequenceLayout.zigzag(24, world), mask, send_recv_overlap=True, kv_heads=2, dtype=dtype
        )
        for mask, dtype in itertools.product(MASKS, (torch.float64, torch.bfloat16))
    ]
    assert_matches_oracle(gloo_pool(world), *cases)


@pytest.mark.parametrize(("algorithm", "world", "degree"), [way for way in WAYS if way[1] == 8])
def test_the_error_of_bf16_does_not_grow_with_the_number_of_ranks(
    gloo_pool: GetPool, algorithm: str, world: int, degree: int
) -> None:
    """Eight ranks merge eight partial results; the bound is that of one rank's error."""
    cases = [
        AttentionCase(
            SequenceLayout.zigzag(512, world),
            mask,
            algorithm=algorithm,
            ulysses_degree=degree,
            heads=8,
            kv_heads=2,
            qk_dim=16,
            v_dim=16,
            dtype=torch.bfloat16,
        )
        for mask in MASKS
    ]
    assert_matches_oracle(gloo_pool(world), *cases)
