"""Random layouts, masks and cases for hypothesis, which this module needs (extra `test`).

    @given(case=attention_cases())
    def test_mine(case): ...

Sizes are small, because an attention bug shows at small sizes, and shrinking makes them smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from megatron_cp_ext.layout import Run, SequenceLayout, merge_runs
from megatron_cp_ext.mask import AttentionMask, Window
from megatron_cp_ext.testing.cases import AttentionCase

_LARGEST_CHUNK = 4


@st.composite
def layouts(draw: st.DrawFn, cp_size: int, *, uneven: bool = False) -> SequenceLayout:
    """A zigzag, contiguous or per-document zigzag layout over `cp_size` ranks.

    Args:
        draw: given by hypothesis.
        cp_size: number of ranks.
        uneven: also draw layouts whose ranks hold different numbers of tokens, in any order.
    """
    chunk = st.integers(1, _LARGEST_CHUNK)
    kind = draw(st.sampled_from(["zigzag", "contiguous", "documents"] + ["uneven"] * uneven))
    if kind == "zigzag":
        return SequenceLayout.zigzag(2 * cp_size * draw(chunk), cp_size)
    if kind == "contiguous":
        return SequenceLayout.contiguous(2 * cp_size * draw(chunk), cp_size)
    if kind == "documents":
        lengths = draw(st.lists(st.integers(1, 5 * cp_size), max_size=3))
        lengths.append(cp_size * draw(st.integers(1, 3)) - sum(lengths) % cp_size)
        return SequenceLayout.zigzag_documents([0, *itertools.accumulate(lengths)], cp_size)
    owners = list(range(cp_size)) + draw(st.lists(st.integers(0, cp_size - 1), max_size=8))
    shards: list[list[Run]] = [[] for _ in range(cp_size)]
    start = 0
    for owner in draw(st.permutations(owners)):
        stop = start + draw(chunk)
        shards[owner].append(Run(start, stop))
        start = stop
    return SequenceLayout(start, tuple(merge_runs(shard) for shard in shards))


def windows(seq_len: int) -> st.SearchStrategy[Window | None]:
    """Window limits from 0 to beyond the sequence, on either side or both, or none."""
    side = st.none() | st.integers(0, seq_len + 2)
    return st.none() | st.tuples(side, side)


@st.composite
def document_masks(draw: st.DrawFn, seq_len: int) -> AttentionMask:
    """Packed documents of any length, some empty, with or without padding in between or after."""
    bounds = sorted(draw(st.lists(st.integers(0, seq_len), max_size=6)))
    bounds = [0, *bounds] + ([seq_len] if draw(st.booleans()) else [])
    if len(bounds) < 2:
        bounds = [0, seq_len]
    lengths = None
    if draw(st.booleans()):
        lengths = [draw(st.integers(0, b - a)) for a, b in itertools.pairwise(bounds)]
    return AttentionMask.documents(
        bounds, causal=draw(st.booleans()), window=draw(windows(seq_len)), lengths=lengths
    )


@st.composite
def dense_masks(draw: st.DrawFn, seq_len: int, batch: int) -> AttentionMask:
    """A random mask, for all samples alike or for each its own, with rows that see nothing."""
    shape = draw(st.sampled_from([(seq_len, seq_len), (batch, 1, seq_len, seq_len)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    density = draw(st.sampled_from([0.05, 0.5, 0.95]))
    pairs = torch.rand(shape, generator=generator) < density
    pairs[..., draw(st.integers(0, seq_len - 1)), :] = False
    return AttentionMask.dense(pairs)


@st.composite
def masks(draw: st.DrawFn, seq_len: int, batch: int = 1) -> AttentionMask:
    """Any mask: a band, documents, dense, or one for each sample."""
    band = st.builds(AttentionMask.causal, windows(seq_len)) | st.builds(
        AttentionMask.full, windows(seq_len)
    )
    alike = band | document_masks(seq_len) | document_masks(seq_len)
    kind = draw(st.sampled_from(["alike"] * 5 + ["dense"] + ["samples"] * (batch > 1)))
    if kind == "dense":
        return draw(dense_masks(seq_len, batch))
    if kind == "samples":
        each = alike | dense_masks(seq_len, 1)
        return AttentionMask.per_sample([draw(each) for _ in range(batch)])
    return draw(alike)


@st.composite
def attention_cases(
    draw: st.DrawFn,
    worlds: Sequence[int] = (2, 3, 4, 5, 6, 7, 8),
    dtypes: Sequence[torch.dtype] = (torch.float64,),
) -> AttentionCase:
    """A case of any algorithm on one of these numbers of ranks.

    Some cases have fewer query heads than ranks in a Ulysses group, or shards of different
    length; the algorithms that cannot do that refuse them.
    """
    world = draw(st.sampled_from(worlds))
    algorithm = draw(st.sampled_from(["ring", "ulysses", "hybrid", "hybrid", "kvallgather"]))
    degree = 1
    if algorithm == "ulysses":
        degree = world
    elif algorithm == "hybrid":
        degree = draw(st.sampled_from([d for d in range(1, world + 1) if world % d == 0]))
    layout = draw(layouts(world, uneven=True))
    batch = draw(st.integers(1, 2))
    kv_heads = draw(st.integers(1, 4))
    dropout = draw(st.sampled_from([0.0, 0.0, 0.0, 0.2]))
    return AttentionCase(
        layout=layout,
        mask=draw(masks(layout.seq_len, batch)),
        algorithm=algorithm,
        ulysses_degree=degree,
        send_recv_overlap=draw(st.booleans()),
        batch=batch,
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        qk_dim=draw(st.sampled_from([8, 4, 1])),
        v_dim=draw(st.sampled_from([8, 5])),
        dtype=draw(st.sampled_from(dtypes)),
        softmax_scale=draw(st.sampled_from([None, 0.7])),
        with_sink=draw(st.booleans()),
        dropout_p=dropout,
        kernel="auto" if dropout else draw(st.sampled_from(["auto", "auto", "reference"])),
        seed=draw(st.integers(0, 999)),
    )
