"""Layouts: every position is held once, in Megatron's order, and comes back where it was."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp_ext import AttentionMask, SequenceLayout
from megatron_cp_ext.layout import Run
from megatron_cp_ext.testing import dense_pairs
from megatron_cp_ext.testing.strategies import layouts

Refused = Callable[..., AbstractContextManager[None]]

any_layout = st.integers(1, 8).flatmap(lambda size: layouts(size, uneven=True))
same_every_time = settings(max_examples=60, derandomize=True, deadline=None)


def positions(layout: SequenceLayout, rank: int) -> list[int]:
    return layout.positions(rank).tolist()


def test_zigzag_pairs_early_chunks_with_late_ones() -> None:
    layout = SequenceLayout.zigzag(16, 4)
    held = [positions(layout, rank) for rank in range(4)]
    assert held == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_zigzag_is_megatrons_slicing(cp_size: int) -> None:
    """Megatron views the sequence as 2 * cp_size chunks and selects r and 2 * cp_size - 1 - r."""
    whole = torch.arange(2 * cp_size * 3)
    chunks = whole.view(2 * cp_size, 3)
    layout = SequenceLayout.zigzag(whole.numel(), cp_size)
    for rank in range(cp_size):
        expected = chunks[[rank, 2 * cp_size - 1 - rank]].flatten()
        assert torch.equal(layout.positions(rank), expected)


def test_contiguous_cuts_equal_parts() -> None:
    layout = SequenceLayout.contiguous(9, 3)
    held = [positions(layout, rank) for rank in range(3)]
    assert held == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_zigzag_documents_lays_out_each_document_by_itself() -> None:
    layout = SequenceLayout.zigzag_documents([0, 4, 12], 2)
    assert positions(layout, 0) == [0, 3, 4, 5, 10, 11]
    assert positions(layout, 1) == [1, 2, 6, 7, 8, 9]


def test_documents_of_any_length_leave_every_rank_equally_many_tokens() -> None:
    layout = SequenceLayout.zigzag_documents([0, 5, 7, 8, 16], 2)
    assert [positions(layout, rank) for rank in range(2)] == [
        [0, 3, 4, 6, 8, 9, 14, 15],
        [1, 2, 5, 7, 10, 11, 12, 13],
    ]


@same_every_time
@given(cp_size=st.integers(1, 5), lengths=st.lists(st.integers(0, 30), min_size=1), data=st.data())
def test_chunks_of_a_document_differ_by_one_token_at_most(
    cp_size: int, lengths: list[int], data: st.DataObject
) -> None:
    lengths.append(cp_size * data.draw(st.integers(1, 3)) - sum(lengths) % cp_size)
    bounds = [0, *itertools.accumulate(lengths)]
    layout = SequenceLayout.zigzag_documents(bounds, cp_size)
    assert {layout.local_length(rank) for rank in range(cp_size)} == {bounds[-1] // cp_size}
    for start, stop in itertools.pairwise(bounds):
        held = [
            sum(start <= position < stop for position in positions(layout, rank))
            for rank in range(cp_size)
        ]
        assert max(held) - min(held) <= 1


def test_zigzag_documents_takes_tensors() -> None:
    bounds = torch.tensor([0, 4, 12], dtype=torch.int32)
    assert SequenceLayout.zigzag_documents(bounds, 2) == SequenceLayout.zigzag_documents(
        [0, 4, 12], 2
    )


@pytest.mark.parametrize("make", [SequenceLayout.zigzag, SequenceLayout.contiguous])
def test_one_rank_holds_everything_whatever_the_length(
    make: Callable[[int, int], SequenceLayout],
) -> None:
    assert positions(make(7, 1), 0) == list(range(7))
    assert positions(SequenceLayout.zigzag_documents([0, 3, 7], 1), 0) == list(range(7))


@same_every_time
@given(layout=any_layout)
def test_every_position_is_held_exactly_once(layout: SequenceLayout) -> None:
    held = torch.cat([layout.positions(rank) for rank in range(layout.cp_size)])
    assert held.dtype == torch.int64
    assert torch.equal(held.sort().values, torch.arange(layout.seq_len))
    lengths = [layout.local_length(rank) for rank in range(layout.cp_size)]
    assert lengths == [layout.positions(rank).numel() for rank in range(layout.cp_size)]


@same_every_time
@given(layout=any_layout, dim=st.sampled_from([0, 1, 2, -1]))
def test_shard_takes_the_positions_and_unshard_puts_them_back(
    layout: SequenceLayout, dim: int
) -> None:
    shape = [2, 3, 4]
    shape[dim] = layout.seq_len
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    shards = [layout.shard(whole, rank, dim) for rank in range(layout.cp_size)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, whole.index_select(dim, layout.positions(rank)))
    assert torch.equal(layout.unshard(shards, dim), whole)


def test_gradients_pass_through_shard_and_unshard() -> None:
    layout = SequenceLayout.zigzag(8, 2)
    whole = torch.randn(8, 3, requires_grad=True)
    weights = torch.randn(8, 3)
    (layout.unshard([layout.shard(whole, rank) for rank in range(2)]) * weights).sum().backward()
    assert torch.equal(whole.grad, weights)


@pytest.mark.parametrize(("cp_size", "degree"), [(2, 2), (4, 2), (6, 3), (8, 2), (8, 4), (4, 1)])
def test_groups_of_neighbours_in_a_zigzag_hold_a_smaller_zigzag(cp_size: int, degree: int) -> None:
    layout = SequenceLayout.zigzag(96, cp_size)
    smaller = SequenceLayout.zigzag(96, cp_size // degree)
    grouped = layout.grouped(degree)
    assert grouped.cp_size == smaller.cp_size
    for rank in range(smaller.cp_size):
        assert torch.equal(grouped.positions(rank), smaller.positions(rank))


@same_every_time
@given(layout=layouts(6, uneven=True), degree=st.sampled_from([1, 2, 3, 6]))
def test_groups_hold_what_their_members_hold_in_ascending_order(
    layout: SequenceLayout, degree: int
) -> None:
    grouped = layout.grouped(degree)
    for group in range(6 // degree):
        members = range(group * degree, (group + 1) * degree)
        held = torch.cat([layout.positions(rank) for rank in members])
        assert torch.equal(grouped.positions(group), held.sort().values)


@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        (SequenceLayout.zigzag(48, 4), AttentionMask.causal()),
        (
            SequenceLayout.zigzag_documents([0, 8, 32, 48], 4),
            AttentionMask.documents([0, 8, 32, 48]),
        ),
    ],
)
def test_every_rank_has_the_same_number_of_pairs_under_the_mask_it_is_made_for(
    layout: SequenceLayout, mask: AttentionMask
) -> None:
    pairs = dense_pairs(mask, layout.seq_len).sum(1)
    assert len({layout.shard(pairs, rank).sum().item() for rank in range(layout.cp_size)}) == 1


def test_equal_layouts_are_one_key_and_survive_pickling() -> None:
    layout = SequenceLayout.zigzag(16, 2)
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert {layout: 1}[SequenceLayout.zigzag(16, 2)] == 1
    assert layout != SequenceLayout.contiguous(16, 2)


@pytest.mark.parametrize(
    ("make", "option", "remedy"),
    [
        (lambda: SequenceLayout.zigzag(20, 4), "sequence length", "a multiple of 8"),
        (lambda: SequenceLayout.zigzag(4, 4), "sequence length", "for example 8"),
        (lambda: SequenceLayout.zigzag(0, 1), "sequence length", "for example 1"),
        (lambda: SequenceLayout.contiguous(10, 4), "sequence length", "a multiple of 4"),
        (lambda: SequenceLayout.zigzag(8, 0), "cp_size", "1 or more"),
        (lambda: SequenceLayout.contiguous(8, -1), "cp_size", "1 or more"),
        (lambda: SequenceLayout.zigzag_documents([0, 8], 0), "cp_size", "1 or more"),
        (lambda: SequenceLayout.zigzag_documents([0, 8, 15], 2), "cu_seqlens", "multiple of 2"),
        (lambda: SequenceLayout.zigzag_documents([4, 12], 2), "cu_seqlens", "cumulative lengths"),
        (lambda: SequenceLayout.zigzag_documents([0, 8, 4], 2), "cu_seqlens", "cumulative"),
        (lambda: SequenceLayout.zigzag_documents([0], 2), "cu_seqlens", "cumulative lengths"),
        (lambda: SequenceLayout.zigzag_documents([], 2), "cu_seqlens", "cumulative lengths"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    refused: Refused, make: Callable[[], SequenceLayout], option: str, remedy: str
) -> None:
    with refused(option, remedy=remedy):
        make()


def test_tensors_of_another_length_are_refused(refused: Refused) -> None:
    layout = SequenceLayout.zigzag(8, 2)
    with refused("tensor", remedy="size 8 in dimension 1"):
        layout.shard(torch.zeros(8, 9), 0, dim=1)


@pytest.mark.parametrize("lengths", [(4, 5), (5, 4), (4,), (4, 4, 4)])
def test_shards_of_another_length_are_refused(refused: Refused, lengths: Sequence[int]) -> None:
    layout = SequenceLayout.zigzag(8, 2)
    with refused("shards", remedy="4, 4"):
        layout.unshard([torch.zeros(length, 2) for length in lengths])


@pytest.mark.parametrize(
    "shards",
    [
        ((Run(0, 4),), (Run(3, 8),)),  # position 3 twice
        ((Run(0, 4),), (Run(5, 8),)),  # position 4 missing
        ((Run(0, 4),), (Run(4, 7),)),  # the last one missing
    ],
)
def test_a_layout_that_loses_or_doubles_a_position_cannot_be_made(
    shards: tuple[tuple[Run, ...], ...],
) -> None:
    with pytest.raises(AssertionError, match="missing or held twice"):
        SequenceLayout(8, shards)
