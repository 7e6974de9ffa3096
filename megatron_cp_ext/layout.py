"""Which global token positions each context-parallel rank holds.

`SequenceLayout` is the one coordinate of this package: batch slices, position embeddings,
attention masks, labels and the reassembly of outputs all derive from it.

Zigzag over 4 ranks, 8 chunks. Each rank pairs an early chunk with its mirror image, so that
under a causal mask every rank has the same number of query-key pairs to compute:

    chunk   0 1 2 3 4 5 6 7
    rank    0 1 2 3 3 2 1 0
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_ext.errors import UsageError


class Run(NamedTuple):
    """Consecutive positions `start, ..., stop - 1`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """For indexing a dimension with it."""
        return slice(self.start, self.stop)


def merge_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join each run to the next one where the next starts where it stops."""
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].stop == run.start:
            merged[-1] = Run(merged[-1].start, run.stop)
        elif run.length:
            merged.append(run)
    return tuple(merged)


def with_offsets(runs: Iterable[Run]) -> list[tuple[Run, int]]:
    """Each run with its first row in a tensor that holds the runs one after the other."""
    offset, found = 0, []
    for run in runs:
        found.append((run, offset))
        offset += run.length
    return found


def overlapping(held: Sequence[tuple[Run, int]], hull: Run) -> Iterator[tuple[Run, int]]:
    """Those of some ascending, disjoint runs `with_offsets` that share a position with `hull`."""
    first = bisect.bisect_right(held, hull.start, key=lambda item: item[0].stop)
    for run, offset in itertools.islice(held, first, None):
        if run.start >= hull.stop:
            return
        yield run, offset


@dataclass(frozen=True)
class SequenceLayout:
    """Assignment of a sequence's positions to ranks.

    Args:
        seq_len: tokens of the whole sequence.
        shards: for each rank the runs of global positions it holds, in local order. Every
            position belongs to exactly one rank.
    """

    seq_len: int
    shards: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        covered = merge_runs(sorted(itertools.chain.from_iterable(self.shards)))
        assert covered == (Run(0, self.seq_len),), f"positions missing or held twice: {covered}"

    @classmethod
    def zigzag(cls, seq_len: int, cp_size: int) -> SequenceLayout:
        """Rank r of n holds chunks r and 2n-1-r of 2n: Megatron's own slicing.

        Raises:
            UsageError: seq_len is not a multiple of 2 * cp_size.
        """
        _require_multiple(seq_len, cp_size, parts=2 * cp_size if cp_size > 1 else 1)
        return cls(seq_len, _zigzag_shards(Run(0, seq_len), cp_size))

    @classmethod
    def contiguous(cls, seq_len: int, cp_size: int) -> SequenceLayout:
        """Rank r of n holds the r-th of n equal parts.

        Raises:
            UsageError: seq_len is not a multiple of cp_size.
        """
        _require_multiple(seq_len, cp_size, parts=cp_size)
        part = seq_len // cp_size
        return cls(seq_len, tuple((Run(r * part, (r + 1) * part),) for r in range(cp_size)))

    @classmethod
    def zigzag_documents(cls, cu_seqlens: Sequence[int] | Tensor, cp_size: int) -> SequenceLayout:
        """Each document of a packed sequence is laid out in a zigzag of its own.

        Under a causal mask within documents every rank then has the same work, whatever the
        lengths are; a zigzag over the whole sequence cannot promise that. Where a length is not
        a multiple of 2 * cp_size, some chunks are one token longer than others, of ranks that
        take turns, so that all ranks hold equally many tokens in the end.

        Args:
            cu_seqlens: document boundaries, `[documents + 1]`, from 0 to the sequence length.
            cp_size: number of ranks.

        Raises:
            UsageError: the boundaries do not ascend from 0, or the sequence length is not a
                multiple of cp_size.
        """
        bounds = document_bounds(cu_seqlens)
        _require_multiple(bounds[-1], cp_size, parts=cp_size, option="cu_seqlens")
        shards: list[list[Run]] = [[] for _ in range(cp_size)]
        turn = 0
        for start, stop in itertools.pairwise(bounds):
            document = Run(start, stop)
            for shard, runs in zip(shards, _zigzag_shards(document, cp_size, turn), strict=True):
                shard.extend(run for run in runs if run.length)
            turn = (turn + document.length) % cp_size
        return cls(bounds[-1], tuple(tuple(shard) for shard in shards))

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return len(self.shards)

    def local_length(self, rank: int) -> int:
        """Number of tokens `rank` holds."""
        return sum(run.length for run in self.shards[rank])

    def positions(self, rank: int) -> Tensor:
        """Global positions that `rank` holds, in local order: LongTensor `[local tokens]`."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.shards[rank]])

    def shard(self, tensor: Tensor, rank: int, dim: int = 0) -> Tensor:
        """The slice of a whole-sequence tensor that `rank` holds.

        Raises:
            UsageError: the tensor does not have the sequence's length in `dim`.
        """
        if tensor.size(dim) != self.seq_len:
            raise UsageError(
                option="tensor",
                value=list(tensor.shape),
                reason=f"this is a layout of {self.seq_len} positions",
                remedy=f"pass a whole-sequence tensor, of size {self.seq_len} in dimension {dim}",
            )
        return torch.cat([tensor.narrow(dim, r.start, r.length) for r in self.shards[rank]], dim)

    def unshard(self, shards: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Put the ranks' slices back together: the inverse of `shard`.

        Raises:
            UsageError: there is not one slice for each rank, of the length that the rank holds.
        """
        lengths = [tensor.size(dim) for tensor in shards]
        expected = [self.local_length(rank) for rank in range(self.cp_size)]
        if lengths != expected:
            raise UsageError(
                option="shards",
                value=f"lengths {lengths}",
                reason=f"the layout has {self.cp_size} ranks, which hold {expected} positions",
                remedy=f"pass slices of {', '.join(map(str, expected))} in dimension {dim}",
            )
        shape = list(shards[0].shape)
        shape[dim] = self.seq_len
        whole = shards[0].new_empty(shape)
        for tensor, runs in zip(shards, self.shards, strict=True):
            copy_runs_to(whole, tensor, runs, dim)
        return whole

    def grouped(self, degree: int) -> SequenceLayout:
        """The layout over groups of `degree` neighbouring ranks, each in ascending order.

        This is what an all-to-all inside each group leaves: group g of a zigzag over n ranks
        holds exactly what rank g of a zigzag over n / degree ranks would hold.
        """
        assert self.cp_size % degree == 0, (self.cp_size, degree)
        return _grouped(self, degree)


@functools.lru_cache(maxsize=64)
def _grouped(layout: SequenceLayout, degree: int) -> SequenceLayout:
    shards = (_join_shards(members) for members in itertools.batched(layout.shards, degree))
    return SequenceLayout(layout.seq_len, tuple(shards))


def _join_shards(members: Sequence[tuple[Run, ...]]) -> tuple[Run, ...]:
    """The runs of several ranks, in ascending order, joined where they meet.

    Where all have equally many runs, only the n-th ones join: joining across a zigzag's turning
    point would make one chunk of two that different ranks need.
    """
    if len({len(runs) for runs in members}) > 1:
        return merge_runs(sorted(itertools.chain.from_iterable(members)))
    layers = [merge_runs(sorted(runs)) for runs in zip(*members, strict=True)]
    return tuple(sorted(itertools.chain.from_iterable(layers)))


def copy_runs_to(whole: Tensor, local: Tensor, runs: Sequence[Run], dim: int = 0) -> None:
    """Write a local tensor's rows to their positions in `whole`, whose origin is position 0."""
    offset = 0
    for run in runs:
        whole.narrow(dim, run.start, run.length).copy_(local.narrow(dim, offset, run.length))
        offset += run.length


def local_runs(outer: Sequence[Run], inner: Sequence[Run]) -> tuple[Run, ...]:
    """Where the positions `inner` lie within a tensor that holds the positions `outer`.

    Every run of `inner` must lie within one run of `outer`, which must be merged and ascending.
    """
    held = with_offsets(outer)
    found: list[Run] = []
    for run in inner:
        holder, offset = held[bisect.bisect_right(held, run.start, key=lambda h: h[0].start) - 1]
        assert holder.start <= run.start and run.stop <= holder.stop, f"{run} is not in {outer}"
        start = offset + run.start - holder.start
        found.append(Run(start, start + run.length))
    return tuple(found)


def _zigzag_shards(span: Run, cp_size: int, turn: int = 0) -> tuple[tuple[Run, ...], ...]:
    """Rank r's chunks r and 2 * cp_size - 1 - r of a span.

    What is left over after equal chunks is dealt out one token to each rank, from rank `turn` on,
    first to their late chunks, then to their early ones.
    """
    if cp_size == 1:
        return ((span,),)
    chunk, rest = divmod(span.length, 2 * cp_size)
    lengths = [chunk] * (2 * cp_size)
    for extra in range(rest):
        rank = (turn + extra) % cp_size
        lengths[2 * cp_size - 1 - rank if extra < cp_size else rank] += 1
    bounds = list(itertools.accumulate(lengths, initial=span.start))
    runs = [Run(start, stop) for start, stop in itertools.pairwise(bounds)]
    return tuple((runs[rank], runs[2 * cp_size - 1 - rank]) for rank in range(cp_size))


def document_bounds(cu_seqlens: Sequence[int] | Tensor) -> list[int]:
    """Document boundaries as integers.

    Raises:
        UsageError: they do not ascend from 0, or are fewer than two.
    """
    bounds = integers(cu_seqlens)
    if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise UsageError(
            option="cu_seqlens",
            value=shorten(bounds),
            reason="document boundaries must ascend from 0",
            remedy="pass cumulative lengths such as [0, 5, 12, 16]",
        )
    return bounds


def integers(values: Sequence[int] | Tensor) -> list[int]:
    """A sequence or tensor of integers as a list."""
    return values.tolist() if isinstance(values, Tensor) else [int(value) for value in values]


def shorten(values: Sequence[int]) -> str:
    """The first few of some integers, for an error message."""
    shown = ", ".join(str(value) for value in values[:8])
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"


def _require_multiple(
    length: int, cp_size: int, *, parts: int, option: str = "sequence length"
) -> None:
    if cp_size < 1:
        raise UsageError(
            option="cp_size", value=cp_size, reason="it must be at least 1", remedy="use 1 or more"
        )
    if length < parts or length % parts:
        nearest = max(1, round(length / parts)) * parts
        raise UsageError(
            option=option,
            value=length,
            reason=f"{cp_size} context-parallel ranks cut it into {parts} equal parts",
            remedy=f"use a multiple of {parts}, for example {nearest}",
        )
