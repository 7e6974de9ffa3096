"""What an algorithm sends is what its formula says, to the byte.

Per rank and call, with c = S / P tokens, H query heads, K KV heads, dims d and dv, and e bytes:

    ring, KV all-gather   forward   (P-1) c K (d + dv) e
                          backward  again, and gradients (P-1) c K (d + dv) e_g, in fp32
    Ulysses               forward   (P-1)/P c (H + K') (d + dv) e         K' = max(K, P)
                          backward  the same
    hybrid, U x R         Ulysses of U, and a ring of R with U c tokens and K' / U heads

The ring sends a chunk only to ranks that need it, so the masks decide how much of its formula
it uses: everything without a mask, three quarters in a causal zigzag. The KV all-gather does so
too where that is at most half of everything; its collective is made for sending everything.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import megatron_cp_ext
from megatron_cp_ext import (
    AttentionMask,
    ContextParallelGroups,
    SequenceLayout,
    context_parallel_attention,
)
from megatron_cp_ext.testing import AttentionCase, GlooPool, dense_pairs

GetPool = Callable[[int], GlooPool]

HEADS, D, DV = 12, 6, 4
SEQ_LEN, BATCH = 48, 2


@dataclass(frozen=True)
class Sent:
    """What one rank sent: bytes and operations by kind, in each direction."""

    forward: Counter[str]
    backward: Counter[str]
    forward_operations: Counter[str]
    backward_operations: Counter[str]


def count(cases: Sequence[AttentionCase]) -> list[Sent]:
    """On each rank: what it sends for each case."""
    return [count_one(case) for case in cases]


def count_one(case: AttentionCase) -> Sent:
    groups = ContextParallelGroups.from_world(case.ulysses_degree)
    rank, layout, tensors = groups.cp.rank, case.layout, case.tensors()
    q, k, v = (
        layout.shard(tensors[name], rank).requires_grad_() for name in ("query", "key", "value")
    )
    out = context_parallel_attention(
        q, k, v, algorithm=case.algorithm, groups=groups, layout=layout, mask=case.mask
    )
    traffic = groups.traffic
    forward, forward_operations = traffic.bytes.copy(), traffic.operations.copy()
    traffic.reset()
    out.backward(layout.shard(tensors["dout"], rank))
    return Sent(forward, traffic.bytes, forward_operations, traffic.operations)


def element_size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def formula(case: AttentionCase) -> tuple[Fraction, Fraction]:
    """Bytes of one rank in the forward and in the backward pass if everyone needs everything."""
    world = case.layout.cp_size
    u, r = case.ulysses_degree, world // case.ulysses_degree
    e, e_g = element_size(case.dtype), max(4, element_size(case.dtype))
    c, dims = Fraction(SEQ_LEN, world) * BATCH, D + DV
    kv_heads = case.kv_heads if u == 1 else max(case.kv_heads, u)
    heads = Fraction(u - 1, u) * c * (case.heads + kv_heads) * dims * e
    # A ring of Ulysses groups: u times the tokens, a u-th of the heads.
    keys = (r - 1) * c * kv_heads * dims
    return heads + keys * e, heads + keys * (e + e_g)


def cases_of(algorithm: str, world: int, degree: int, mask: AttentionMask) -> list[AttentionCase]:
    return [
        AttentionCase(
            SequenceLayout.zigzag(SEQ_LEN, world),
            mask,
            algorithm=algorithm,
            ulysses_degree=degree,
            batch=BATCH,
            heads=HEADS,
            kv_heads=kv_heads,
            qk_dim=D,
            v_dim=DV,
            dtype=dtype,
        )
        for dtype, kv_heads in itertools.product(
            (torch.float32, torch.bfloat16, torch.float64), sorted({HEADS, world, 1})
        )
    ]


WAYS = [
    *(("ring", world, 1) for world in (2, 3, 4)),
    *(("kvallgather", world, 1) for world in (2, 3, 4)),
    *(("ulysses", world, world) for world in (2, 3, 4)),
    ("hybrid", 4, 2),
]


@pytest.mark.parametrize(("algorithm", "world", "degree"), WAYS)
def test_without_a_mask_every_rank_sends_what_the_formula_says(
    gloo_pool: GetPool, algorithm: str, world: int, degree: int
) -> None:
    cases = cases_of(algorithm, world, degree, AttentionMask.full())
    for sent_by_rank in gloo_pool(world).run(count, cases):
        for case, sent in zip(cases, sent_by_rank, strict=True):
            expected = formula(case)
            assert (sent.forward.total(), sent.backward.total()) == expected, str(case)


@pytest.mark.parametrize(("algorithm", "world", "degree"), WAYS)
def test_a_causal_zigzag_saves_the_ring_a_quarter_and_the_others_nothing(
    gloo_pool: GetPool, algorithm: str, world: int, degree: int
) -> None:
    cases = cases_of(algorithm, world, degree, AttentionMask.causal())
    by_rank = gloo_pool(world).run(count, cases)
    for index, case in enumerate(cases):
        sent = [ranks[index] for ranks in by_rank]
        forward, backward = (world * each for each in formula(case))
        if algorithm in ("ring", "hybrid"):
            e, e_g = element_size(case.dtype), max(4, element_size(case.dtype))
            r, c = world // degree, Fraction(SEQ_LEN, world) * BATCH
            kv_heads = case.kv_heads if degree == 1 else max(case.kv_heads, degree)
            unneeded = Fraction(1, 4) * world * (r - 1) * c * kv_heads * (D + DV)
            forward, backward = forward - unneeded * e, backward - unneeded * (e + e_g)
        assert sum(each.forward.total() for each in sent) == forward, str(case)
        assert sum(each.backward.total() for each in sent) == backward, str(case)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask.causal(window=(3, 0)),
        AttentionMask.causal(window=(20, 0)),
        AttentionMask.full(window=(1, 9)),
        AttentionMask.documents([0, 5, 30, 48]),
        AttentionMask.documents([0, 24, 40], causal=False),
        AttentionMask.per_sample([AttentionMask.causal(window=(2, 0)), AttentionMask.causal()]),
    ],
)
def test_a_chunk_goes_only_to_ranks_that_need_it(
    gloo_pool: GetPool, world: int, mask: AttentionMask
) -> None:
    cases = [
        AttentionCase(
            layout, mask, algorithm=algorithm, batch=BATCH, qk_dim=D, v_dim=DV, kv_heads=2
        )
        for layout, algorithm in itertools.product(
            (SequenceLayout.zigzag(SEQ_LEN, world), SequenceLayout.contiguous(SEQ_LEN, world)),
            ("ring", "kvallgather"),
        )
    ]
    by_rank = gloo_pool(world).run(count, cases)
    for index, case in enumerate(cases):
        tokens, everything = tokens_others_need(case), (world - 1) * SEQ_LEN
        if case.algorithm == "kvallgather" and 2 * tokens > everything:
            tokens = everything
        expected = tokens * BATCH * case.kv_heads * (D + DV) * 8
        sent = [ranks[index] for ranks in by_rank]
        assert sum(each.forward.total() for each in sent) == expected, str(case)
        assert sum(each.backward.total() for each in sent) == 2 * expected, str(case)


def tokens_others_need(case: AttentionCase) -> int:
    """Over all chunks: their tokens, times the other ranks that have a query seeing one of them."""
    layout = case.layout
    pairs = dense_pairs(case.mask, layout.seq_len).expand(BATCH, 1, SEQ_LEN, SEQ_LEN)
    return sum(
        run.length
        for owner, runs in enumerate(layout.shards)
        for run in runs
        for rank in range(layout.cp_size)
        if rank != owner and pairs[:, :, layout.positions(rank), run.start : run.stop].any()
    )


def split_of(heads: int, kv_heads: int, degree: int) -> tuple[list[int], list[int]]:
    """Bounds of each rank's query heads, as even as can be, and how many KV heads they use."""
    bounds = [heads * rank // degree for rank in range(degree + 1)]
    used = [
        len({head * kv_heads // heads for head in range(start, stop)})
        for start, stop in itertools.pairwise(bounds)
    ]
    return bounds, used


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world"), [(28, 7, 2), (8, 2, 3), (8, 8, 3), (32, 2, 4), (9, 3, 4)]
)
def test_ulysses_sends_a_kv_head_only_to_ranks_whose_query_heads_use_it(
    gloo_pool: GetPool, heads: int, kv_heads: int, world: int
) -> None:
    (case, *_) = cases_of("ulysses", world, world, AttentionMask.causal())
    case = replace(case, heads=heads, kv_heads=kv_heads)
    bounds, used = split_of(heads, kv_heads, world)
    for rank, (sent,) in enumerate(gloo_pool(world).run(count, [case])):
        own = bounds[rank + 1] - bounds[rank]
        # Before: all heads of its tokens, to the others. After: its heads of others' tokens.
        to_others = (heads - own) * D + (sum(used) - used[rank]) * (D + DV)
        back = own * (world - 1) * DV
        tokens = SEQ_LEN // world * BATCH * 4
        assert sent.forward.total() == (to_others + back) * tokens, str(case)


@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 7), (5, 1), (6, 3), (7, 7)])
def test_the_ring_of_a_hybrid_carries_the_kv_heads_in_use_and_no_copies(
    gloo_pool: GetPool, heads: int, kv_heads: int
) -> None:
    (case, *_) = cases_of("hybrid", 4, 2, AttentionMask.full())
    case = replace(case, heads=heads, kv_heads=kv_heads)
    _, used = split_of(heads, kv_heads, 2)
    for rank, (sent,) in enumerate(gloo_pool(4).run(count, [case])):
        keys = SEQ_LEN // 2 * BATCH * used[rank % 2] * (D + DV)
        assert sent.forward["kv"] == keys * 4
        assert sent.backward["kv"] + sent.backward["dkv"] == keys * (4 + 4)


def test_operations_are_as_few_as_promised(gloo_pool: GetPool) -> None:
    """Ulysses: one all-to-all for q, one for k and v together, one for out, and back."""
    cases = [
        cases_of(algorithm, 2, degree, AttentionMask.causal())[0]
        for algorithm, degree in (("ulysses", 2), ("kvallgather", 1))
    ]
    for ulysses, gather in gloo_pool(2).run(count, cases):
        assert ulysses.forward_operations == ulysses.backward_operations == {"heads": 3}
        assert gather.forward_operations == {"kv": 1}
        assert gather.backward_operations == {"kv": 1, "dkv": 1}


def test_one_rank_sends_nothing() -> None:
    groups = ContextParallelGroups.single()
    q = torch.randn(8, 1, 2, 4, requires_grad=True)
    for algorithm in ("ring", "ulysses", "hybrid", "kvallgather"):
        context_parallel_attention(
            q,
            q,
            q,
            algorithm=algorithm,
            groups=groups,
            layout=SequenceLayout.zigzag(8, 1),
            mask=AttentionMask.causal(),
        ).sum().backward()
    assert groups.traffic.total_bytes == 0
    assert not groups.traffic.operations


def test_nothing_but_comm_can_send() -> None:
    """A byte that went past `comm` would not be counted."""
    package = Path(megatron_cp_ext.__file__).parent
    files = [
        *(package / "algorithms").glob("*.py"),
        *(package / "kernels").glob("*.py"),
        *(package / name for name in ("attention.py", "layout.py", "mask.py")),
    ]
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                module = getattr(node, "module", "") or ""
                imported = [*names, module, *(f"{module}.{name}" for name in names)]
                assert "torch.distributed" not in imported, path
            if isinstance(node, ast.Attribute):
                assert node.attr != "distributed", path
