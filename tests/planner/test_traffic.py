"""Bytes by arithmetic are the bytes that a real run sends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from megatron_cp_ext import (
    AttentionMask,
    ContextParallelGroups,
    SequenceLayout,
    context_parallel_attention,
)
from megatron_cp_ext.planner.traffic import AttentionShape, Sent, attention_traffic
from megatron_cp_ext.testing import AttentionCase, GlooPool

GetPool = Callable[[int], GlooPool]

MASKS = {
    "causal": AttentionMask.causal(),
    "full": AttentionMask.full(),
    "window": AttentionMask.causal(window=(5, 0)),
    "documents": AttentionMask.documents([0, 5, 30, 48]),
}
# (query heads, KV heads): plain, grouped, fewer KV heads than ranks, not divisible by the ranks
HEADS = [(4, 4), (12, 3), (4, 1), (5, 5), (10, 2)]


def send(cases: Sequence[AttentionCase]) -> list[Sent]:
    """On each rank: what it sends for each case."""
    sent = []
    for case in cases:
        groups = ContextParallelGroups.from_world(case.ulysses_degree)
        rank, layout, tensors = groups.cp.rank, case.layout, case.tensors()
        q, k, v = (
            layout.shard(tensors[name], rank).requires_grad_() for name in ("query", "key", "value")
        )
        out = context_parallel_attention(
            q, k, v, algorithm=case.algorithm, groups=groups, layout=layout, mask=case.mask
        )
        forward = groups.traffic.total_bytes
        out.backward(layout.shard(tensors["dout"], rank))
        sent.append(Sent(forward, groups.traffic.total_bytes - forward))
    return sent


@pytest.mark.parametrize(
    ("algorithm", "world", "degree"),
    [
        *(("ring", world, 1) for world in (2, 4)),
        *(("ulysses", world, world) for world in (2, 4)),
        *(("kvallgather", world, 1) for world in (2, 4)),
        ("hybrid", 4, 2),
    ],
)
def test_what_is_planned_is_what_is_sent(
    gloo_pool: GetPool, algorithm: str, world: int, degree: int
) -> None:
    cases = [
        AttentionCase(
            SequenceLayout.zigzag(48, world),
            mask,
            algorithm=algorithm,
            ulysses_degree=degree,
            batch=2,
            heads=heads,
            kv_heads=kv_heads,
            qk_dim=6,
            v_dim=4,
            dtype=dtype,
        )
        for mask, (heads, kv_heads), dtype in itertools.product(
            MASKS.values(), HEADS, (torch.bfloat16, torch.float64)
        )
    ]
    by_rank = gloo_pool(world).run(send, cases, timeout=180)
    for index, case in enumerate(cases):
        shape = AttentionShape(
            heads=case.heads,
            kv_heads=case.kv_heads,
            qk_dim=case.qk_dim,
            v_dim=case.v_dim,
            batch=case.batch,
            element_size=2 if case.dtype == torch.bfloat16 else 8,
        )
        planned = attention_traffic(
            shape, case.layout, case.mask, algorithm=algorithm, ulysses=degree
        )
        assert planned == [sent[index] for sent in by_rank], str(case)


def test_one_rank_sends_nothing() -> None:
    shape = AttentionShape(4, 4, 8, 8)
    layout = SequenceLayout.zigzag(16, 1)
    for algorithm in ("ring", "kvallgather", "ulysses", "hybrid"):
        planned = attention_traffic(shape, layout, AttentionMask.causal(), algorithm=algorithm)
        assert planned == [Sent(0, 0)]
