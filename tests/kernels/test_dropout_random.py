"""Dropout's random numbers: fair, independent, and a function of the place alone."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_cp_ext.kernels import KernelOptions
from megatron_cp_ext.kernels.random import keep_mask
from megatron_cp_ext.layout import Run
from megatron_cp_ext.mask import Tile

S, HEADS, BATCH = 96, 4, 3
WHOLE = Tile(Run(0, S), Run(0, S), 0, 0)
OPTIONS = KernelOptions(softmax_scale=1.0, dropout_p=0.3, dropout_seed=77)
CPU = torch.device("cpu")


def keep(
    tile: Tile = WHOLE,
    options: KernelOptions = OPTIONS,
    heads: slice = slice(0, HEADS),
    batch: int = BATCH,
) -> Tensor:
    kept = keep_mask(tile, options, heads, batch, CPU)
    assert kept is not None
    return kept


def correlation(a: Tensor, b: Tensor) -> float:
    """Correlation of two bool tensors, in units of its standard deviation when independent."""
    pair = torch.stack([a.flatten(), b.flatten()]).double()
    return abs(torch.corrcoef(pair)[0, 1].item()) * math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.05, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**40 + 3])
def test_the_share_that_is_dropped_is_p(p: float, seed: int) -> None:
    kept = keep(options=dataclasses.replace(OPTIONS, dropout_p=p, dropout_seed=seed))
    sigma = math.sqrt(p * (1 - p) / kept.numel())
    assert abs((~kept).double().mean().item() - p) < 4 * sigma


def test_every_row_column_head_and_sample_is_dropped_alike() -> None:
    kept = keep().double()
    for axis in range(4):
        share = kept.mean([other for other in range(4) if other != axis])
        sigma = math.sqrt(0.3 * 0.7 / (kept.numel() / kept.size(axis)))
        assert (share - 0.7).abs().max() < 4.5 * sigma


def test_neighbours_in_every_direction_are_independent() -> None:
    kept = keep()
    for axis in range(4):
        size = kept.size(axis)
        for distance in (1, 2, 3):
            if distance < size:
                a = kept.narrow(axis, 0, size - distance)
                assert correlation(a, kept.narrow(axis, distance, size - distance)) < 4.5


def test_transposed_places_are_independent() -> None:
    kept = keep()
    off_diagonal = ~torch.eye(S, dtype=torch.bool)
    assert correlation(kept[..., off_diagonal], kept.mT[..., off_diagonal]) < 4.5


@pytest.mark.parametrize("other", [76, 78, 0, -77])
def test_other_seeds_drop_independently(other: int) -> None:
    assert correlation(keep(), keep(options=dataclasses.replace(OPTIONS, dropout_seed=other))) < 4.5


def test_the_same_seed_drops_the_same() -> None:
    assert torch.equal(keep(), keep())


def test_more_is_kept_with_a_smaller_p_at_the_same_places() -> None:
    fewer = keep(options=dataclasses.replace(OPTIONS, dropout_p=0.1))
    assert (fewer | ~keep()).all()


def test_no_dropout_has_no_mask() -> None:
    none = dataclasses.replace(OPTIONS, dropout_p=0.0)
    assert keep_mask(WHOLE, none, slice(0, 1), 1, CPU) is None


ranges = st.tuples(st.integers(0, S), st.integers(0, S)).map(sorted).filter(lambda r: r[0] < r[1])


@settings(max_examples=60, derandomize=True, deadline=None)
@given(rows=ranges, columns=ranges, data=st.data())
def test_what_is_dropped_does_not_depend_on_how_the_work_is_cut(
    rows: list[int], columns: list[int], data: st.DataObject
) -> None:
    q, k = Run(*rows), Run(*columns)
    first_head = data.draw(st.integers(0, HEADS - 1))
    offset = data.draw(st.integers(0, first_head))
    sample = data.draw(st.none() | st.integers(0, BATCH - 1))
    batch = None if sample is None else Run(sample, sample + 1)
    # Where the rows lie in their shards is arbitrary; only positions count.
    part = Tile(Run(5, 5 + q.length), Run(9, 9 + k.length), q.start, k.start, batch=batch)
    kept = keep(
        part,
        dataclasses.replace(OPTIONS, first_head=offset),
        slice(first_head - offset, HEADS - offset),
        BATCH if batch is None else 1,
    )
    whole = keep()[slice(None) if batch is None else slice(*batch), first_head:]
    assert torch.equal(kept, whole[:, :, slice(*q), slice(*k)])
