"""Masks: what each constructor means, and that its tiles hold every attending pair once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_cp_ext import AttentionMask, SequenceLayout
from megatron_cp_ext.layout import Run
from megatron_cp_ext.testing import covered_pairs, dense_pairs
from megatron_cp_ext.testing.strategies import layouts, masks

Refused = Callable[..., AbstractContextManager[None]]

same_every_time = settings(max_examples=60, derandomize=True, deadline=None)


def drawing(pairs: Tensor) -> list[str]:
    return ["".join("#" if allowed else "." for allowed in row) for row in pairs.tolist()]


def of_the_whole(mask: AttentionMask, size: int) -> list[str]:
    everything = (Run(0, size),)
    (count,) = covered_pairs(mask.tiles(everything, everything), size, size)
    assert count.max() <= 1
    return drawing(count.bool())


# What each constructor means.


def test_causal_sees_itself_and_what_came_before() -> None:
    assert of_the_whole(AttentionMask.causal(), 4) == ["#...", "##..", "###.", "####"]


def test_full_sees_everything() -> None:
    assert of_the_whole(AttentionMask.full(), 3) == ["###", "###", "###"]


@pytest.mark.parametrize("right", [None, 0, 3])
def test_a_causal_window_counts_back_and_never_looks_ahead(right: int | None) -> None:
    """As in flash-attn: left = 1 sees itself and one more."""
    expected = ["#....", "##...", ".##..", "..##.", "...##"]
    assert of_the_whole(AttentionMask.causal(window=(1, right)), 5) == expected


def test_a_window_in_both_directions() -> None:
    expected = ["###..", "####.", ".####", "..###", "...##"]
    assert of_the_whole(AttentionMask.full(window=(1, 2)), 5) == expected


def test_a_window_of_zero_sees_itself_only() -> None:
    assert of_the_whole(AttentionMask.full(window=(0, 0)), 3) == ["#..", ".#.", "..#"]


def test_a_window_on_one_side() -> None:
    assert of_the_whole(AttentionMask.full(window=(None, 1)), 4) == ["##..", "###.", "####", "####"]
    assert of_the_whole(AttentionMask.full(window=(1, None)), 4) == ["####", "####", ".###", "..##"]


def test_documents_do_not_see_each_other() -> None:
    mask = AttentionMask.documents([0, 1, 3, 6])
    assert of_the_whole(mask, 6) == ["#.....", ".#....", ".##...", "...#..", "...##.", "...###"]
    both_ways = AttentionMask.documents([0, 1, 3, 6], causal=False)
    assert of_the_whole(both_ways, 6)[1:4] == [".##...", ".##...", "...###"]


def test_windows_end_at_the_document() -> None:
    mask = AttentionMask.documents([0, 3, 6], window=(1, 0))
    assert of_the_whole(mask, 6) == ["#.....", "##....", ".##...", "...#..", "...##.", "....##"]


def test_positions_behind_the_last_document_see_nothing_and_are_not_seen() -> None:
    assert of_the_whole(AttentionMask.documents([0, 2]), 4) == ["#...", "##..", "....", "...."]


def test_padding_behind_each_document_sees_nothing_and_is_not_seen() -> None:
    mask = AttentionMask.documents([0, 3, 5], lengths=[2, 1], causal=False)
    assert of_the_whole(mask, 5) == ["##...", "##...", ".....", "...#.", "....."]


def test_tensors_and_empty_documents_are_fine() -> None:
    bounds, lengths = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([2, 0, 3])
    mask = AttentionMask.documents(bounds, lengths=lengths)
    assert mask == AttentionMask.documents([0, 2, 5])


@pytest.mark.parametrize("shape", [(5, 5), (1, 1, 5, 5)])
def test_dense_means_true_may_attend(shape: tuple[int, ...]) -> None:
    pairs = torch.rand(5, 5, generator=torch.Generator().manual_seed(3)) < 0.5
    assert of_the_whole(AttentionMask.dense(pairs.view(shape)), 5) == drawing(pairs)


def test_dense_can_be_limited_to_a_band() -> None:
    pairs = torch.ones(4, 4, dtype=torch.bool)
    pairs[2, 1] = False
    limited = AttentionMask.dense(pairs, causal=True, window=(1, None))
    assert of_the_whole(limited, 4) == ["#...", "##..", "..#.", "..##"]


def test_each_sample_has_its_own_mask() -> None:
    mask = AttentionMask.per_sample([AttentionMask.causal(), AttentionMask.documents([0, 1, 2])])
    everything = (Run(0, 2),)
    count = covered_pairs(mask.tiles(everything, everything), 2, 2, batch=2)
    assert [drawing(sample.bool()) for sample in count] == [["#.", "##"], ["#.", ".#"]]


def test_equal_samples_are_one_mask() -> None:
    documents = [AttentionMask.documents([0, 2, 4]) for _ in range(3)]
    assert AttentionMask.per_sample(documents) == documents[0]
    assert AttentionMask.per_sample(documents).samples is None


def test_equal_masks_are_one_key_and_dense_ones_are_equal_to_themselves_only() -> None:
    assert AttentionMask.causal() == AttentionMask.causal((None, 5))
    assert hash(AttentionMask.documents([0, 4])) == hash(AttentionMask.documents([0, 4]))
    assert AttentionMask.causal() != AttentionMask.full()
    pairs = torch.ones(2, 2, dtype=torch.bool)
    assert AttentionMask.dense(pairs) == AttentionMask.dense(pairs)
    assert AttentionMask.dense(pairs) != AttentionMask.dense(pairs.clone())


def test_what_a_mask_remembers_is_computed_once_and_not_pickled() -> None:
    mask = AttentionMask.documents([0, 2, 4])
    size_before = len(pickle.dumps(mask))
    assert [mask.remember("key", lambda: [1] * 1000) is mask.remember("key", list)] == [True]
    assert len(pickle.dumps(mask)) == size_before
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask
    assert again.remember("key", lambda: "anew") == "anew"


# Tiles.


@same_every_time
@given(data=st.data(), cp_size=st.integers(1, 5), batch=st.integers(1, 2))
def test_tiles_hold_every_attending_pair_once_and_no_other(
    data: st.DataObject, cp_size: int, batch: int
) -> None:
    layout = data.draw(layouts(cp_size, uneven=True))
    mask = data.draw(masks(layout.seq_len, batch))
    pairs = dense_pairs(mask, layout.seq_len)
    pairs = pairs.expand(batch, 1, layout.seq_len, layout.seq_len).squeeze(1)
    for q_rank in range(cp_size):
        for k_rank in range(cp_size):
            tiles = mask.tiles(layout.shards[q_rank], layout.shards[k_rank])
            q, k = layout.positions(q_rank), layout.positions(k_rank)
            count = covered_pairs(tiles, len(q), len(k), batch=batch)
            assert torch.equal(count, pairs[:, q][:, :, k].long())


@same_every_time
@given(data=st.data(), cp_size=st.integers(1, 5))
def test_tiles_are_as_small_as_their_pairs_allow_and_know_when_they_are_full(
    data: st.DataObject, cp_size: int
) -> None:
    layout = data.draw(layouts(cp_size, uneven=True))
    mask = data.draw(masks(layout.seq_len))
    for q_runs in layout.shards:
        for tile in mask.tiles(q_runs, layout.shards[0]):
            allowed = tile.allowed()
            assert tile.is_full == (allowed.all().item() and tile.dense is None)
            if tile.dense is None:
                assert allowed[[0, -1]].any(1).all(), "the first and last row attend"
                assert allowed[:, [0, -1]].any(0).all(), "the first and last column attend"


@same_every_time
@given(data=st.data(), cp_size=st.integers(1, 5))
def test_parts_of_a_tile_hold_its_pairs(data: st.DataObject, cp_size: int) -> None:
    layout = data.draw(layouts(cp_size))
    mask = data.draw(masks(layout.seq_len))
    for tile in mask.tiles(layout.shards[0], layout.shards[-1]):
        rows, columns = (
            sorted(data.draw(st.tuples(*[st.integers(0, run.length)] * 2)))
            for run in (tile.q_rows, tile.k_rows)
        )
        if rows[0] < rows[1] and columns[0] < columns[1]:
            part = tile.part(Run(*rows), Run(*columns))
            assert torch.equal(part.allowed(), tile.allowed()[..., slice(*rows), slice(*columns)])


@same_every_time
@given(data=st.data(), seq_len=st.integers(1, 24), batch=st.integers(1, 2))
def test_touches_says_whether_some_pair_attends(
    data: st.DataObject, seq_len: int, batch: int
) -> None:
    mask = data.draw(masks(seq_len, batch))
    run = st.tuples(st.integers(0, seq_len), st.integers(0, seq_len)).map(sorted)
    q, k = (Run(*data.draw(run.filter(lambda r: r[0] < r[1]))) for _ in range(2))
    some = dense_pairs(mask, seq_len)[..., slice(*q), slice(*k)].any().item()
    if mask.pairs is not None or (mask.samples and any(m.pairs is not None for m in mask.samples)):
        assert mask.touches(q, k) >= some, "a dense mask may count as seeing everything"
    else:
        assert mask.touches(q, k) == some


@same_every_time
@given(data=st.data(), seq_len=st.integers(1, 24), batch=st.integers(1, 2))
def test_sight_and_reach_leave_out_nothing_that_attends(
    data: st.DataObject, seq_len: int, batch: int
) -> None:
    mask = data.draw(masks(seq_len, batch))
    run = Run(*data.draw(st.tuples(*[st.integers(0, seq_len)] * 2).map(sorted).filter(_not_empty)))
    pairs = dense_pairs(mask, seq_len)
    while pairs.dim() > 2:
        pairs = pairs.any(0)
    for hull, attending in (
        (mask.sight(run), pairs[run.slice].any(0)),
        (mask.reach(run), pairs[:, run.slice].any(1)),
    ):
        assert all(hull.start <= p < hull.stop for p in attending.nonzero().flatten().tolist())
    if mask.samples is None and mask.pairs is None and mask.spans is not None:
        inside = Run(mask.spans[0].start, mask.spans[0].stop) if mask.spans else Run(0, 1)
        assert mask.sight(inside).length <= inside.length


def _not_empty(pair: list[int]) -> bool:
    return pair[0] < pair[1]


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_causal_zigzag_has_three_cases(cp_size: int) -> None:
    """Own keys: two triangles and a rectangle. Others: two rectangles, joined where they touch."""
    layout = SequenceLayout.zigzag(16 * cp_size, cp_size)
    turn = cp_size - 1  # holds the two chunks in the middle, which are one run
    mask = AttentionMask.causal()
    for q in range(cp_size):
        for k in range(cp_size):
            tiles = mask.tiles(layout.shards[q], layout.shards[k])
            if q == k:
                assert len(tiles) == (1 if q == turn else 3)
                assert sum(not tile.is_full for tile in tiles) == (1 if q == turn else 2)
            else:
                assert len(tiles) == (1 if turn in (q, k) else 2)
                assert all(tile.is_full for tile in tiles)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_a_full_mask_has_one_tile_for_each_pair_of_runs(cp_size: int) -> None:
    layout = SequenceLayout.contiguous(8 * cp_size, cp_size)
    for q_runs in layout.shards:
        for k_runs in layout.shards:
            (tile,) = AttentionMask.full().tiles(q_runs, k_runs)
            assert tile.is_full


def test_shards_out_of_the_windows_reach_have_no_tiles() -> None:
    layout = SequenceLayout.contiguous(64, 4)
    mask = AttentionMask.causal(window=(8, 0))
    count = [[len(mask.tiles(q, k)) for k in layout.shards] for q in layout.shards]
    assert count == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_a_thousand_documents_have_a_thousand_tiles() -> None:
    mask = AttentionMask.documents(range(0, 4001, 4))
    everything = (Run(0, 4000),)
    assert len(mask.tiles(everything, everything)) == 1000
    (tile,) = mask.tiles((Run(2000, 2004),), everything)
    assert tile.k_rows == Run(2000, 2004)


# Mistakes.


@pytest.mark.parametrize(
    ("make", "option", "remedy"),
    [
        (lambda: AttentionMask.documents([1, 4]), "cu_seqlens", "cumulative lengths"),
        (lambda: AttentionMask.documents([0, 4, 3]), "cu_seqlens", "cumulative lengths"),
        (lambda: AttentionMask.documents([0]), "cu_seqlens", "cumulative lengths"),
        (lambda: AttentionMask.documents([0, 4, 8], lengths=[4]), "lengths", "2 lengths"),
        (lambda: AttentionMask.documents([0, 4, 8], lengths=[5, 3]), "lengths", "[0, 4, 8]"),
        (lambda: AttentionMask.documents([0, 4], lengths=[-1]), "lengths", "1 lengths"),
        (lambda: AttentionMask.causal(window=(-1, 0)), "window", "0 or more"),
        (lambda: AttentionMask.full(window=(None, -2)), "window", "0 or more"),
        (lambda: AttentionMask.documents([0, 4], window=(-1, None)), "window", "0 or more"),
        (lambda: AttentionMask.causal(window=5), "window", "(left, right)"),
        (lambda: AttentionMask.causal(window=(5,)), "window", "(left, right)"),
        (lambda: AttentionMask.dense(torch.ones(4, 4)), "dense mask", "additive_mask == 0"),
        (lambda: AttentionMask.dense(torch.ones(4, 3).bool()), "dense mask", "convert it"),
        (lambda: AttentionMask.dense(torch.ones(2, 4, 4).bool()), "dense mask", "convert it"),
        (lambda: AttentionMask.dense(torch.ones(2, 2, 4, 4).bool()), "dense mask", "convert it"),
        (lambda: AttentionMask.per_sample([]), "masks", "one mask for each sample"),
        (
            lambda: AttentionMask.per_sample(
                [AttentionMask.dense(torch.ones(2, 1, 4, 4).bool()), AttentionMask.causal()]
            ),
            "masks",
            "dense ones as [s, s]",
        ),
        (
            lambda: AttentionMask.per_sample(
                [AttentionMask(samples=(AttentionMask.causal(),)), AttentionMask.full()]
            ),
            "masks",
            "one mask for each sample",
        ),
    ],
)
def test_masks_that_make_no_sense_are_refused(
    refused: Refused, make: Callable[[], AttentionMask], option: str, remedy: str
) -> None:
    with refused(option, remedy=remedy):
        make()
