"""Exchange of sequence shards for head shards by all-to-all, and back (arXiv:2309.14509).

Before: each rank holds all heads of its part of the sequence. After: each rank holds some heads
of the whole sequence, in natural order. The two directions are each other's transpose, and so
each other's backward pass: a head that was sent to several ranks gets the sum of its gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_cp_ext.comm import CommGroup, all_to_all, during, innermost
from megatron_cp_ext.kernels.interface import accumulation_dtype
from megatron_cp_ext.layout import Run, SequenceLayout, copy_runs_to, local_runs


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank of a Ulysses group attends with.

    Query heads are split as evenly as possible. A rank gets the KV heads its query heads need
    and no others, so a KV head is sent to more than one rank only where it must be.

    Args:
        query: run of query heads for each rank.
        kv: run of KV heads for each rank.
        group_size: query heads for each KV head.
    """

    query: tuple[Run, ...]
    kv: tuple[Run, ...]
    group_size: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, degree: int) -> HeadSplit:
        """Split `heads` query heads and `kv_heads` KV heads among `degree` ranks."""
        assert heads % kv_heads == 0 and heads >= degree, (heads, kv_heads, degree)
        bounds = [heads * rank // degree for rank in range(degree + 1)]
        group_size = heads // kv_heads
        query = tuple(Run(a, b) for a, b in itertools.pairwise(bounds))
        kv = tuple(Run(q.start // group_size, (q.stop - 1) // group_size + 1) for q in query)
        return cls(query, kv, group_size)

    def kv_index(self, rank: int) -> list[int] | None:
        """For each query head of `rank` its KV head among those the rank has.

        None where the kernels' own rule (equal groups, in order) already says so.
        """
        query, kv = self.query[rank], self.kv[rank]
        index = [head // self.group_size - kv.start for head in range(query.start, query.stop)]
        group, rest = divmod(query.length, kv.length)
        if rest == 0 and index == [place // group for place in range(query.length)]:
            return None
        return index


@dataclass(frozen=True)
class HeadExchange:
    """How tensors are cut for an all-to-all within a Ulysses group.

    Args:
        group: who exchanges.
        rows: for each rank the rows of the gathered sequence that it holds before.
        heads: for each tensor, and each rank, the heads that the rank holds after.
        kind: what travels, for the count.
    """

    group: CommGroup
    rows: tuple[tuple[Run, ...], ...]
    heads: tuple[tuple[Run, ...], ...]
    kind: str

    @classmethod
    def within(
        cls,
        layout: SequenceLayout,
        cp_rank: int,
        group: CommGroup,
        heads: Sequence[tuple[Run, ...]],
        *,
        kind: str,
    ) -> HeadExchange:
        """The exchange among the neighbours of `cp_rank`, whose shards `layout` gives."""
        first = cp_rank - group.rank
        gathered = layout.grouped(group.size).shards[cp_rank // group.size]
        members = layout.shards[first : first + group.size]
        rows = tuple(local_runs(gathered, member) for member in members)
        return cls(group, rows, tuple(heads), kind)

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[s_local, b, all heads, d]` to `[s, b, own heads, d]`, several tensors at once."""
        me, group = self.group.rank, self.group
        b = tensors[0].size(1)
        parts = [
            [tensor[:, :, runs[to].slice] for tensor, runs in self._with(tensors)]
            for to in range(group.size)
        ]
        shapes = [
            [
                (_length(rows), b, runs[me].length, tensor.size(-1))
                for tensor, runs in self._with(tensors)
            ]
            for rows in self.rows
        ]
        received = _exchange(parts, shapes, group, self.kind)
        total = sum(_length(rows) for rows in self.rows)
        whole = [
            tensor.new_empty(total, b, runs[me].length, tensor.size(-1))
            for tensor, runs in self._with(tensors)
        ]
        for rows, pieces in zip(self.rows, received, strict=True):
            for target, piece in zip(whole, pieces, strict=True):
                copy_runs_to(target, piece, rows)
        return whole

    def to_sequence(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The transpose of `to_heads`: heads that several ranks hold are summed."""
        me, group = self.group.rank, self.group
        b = tensors[0].size(1)
        parts = [
            [torch.cat([tensor[run.slice] for run in rows]) for tensor in tensors]
            for rows in self.rows
        ]
        s_local = _length(self.rows[me])
        shapes = [
            [
                (s_local, b, runs[source].length, tensor.size(-1))
                for tensor, runs in self._with(tensors)
            ]
            for source in range(group.size)
        ]
        received = _exchange(parts, shapes, group, self.kind)
        columns = zip(*received, strict=True)
        return [_join_heads(pieces, runs) for pieces, runs in zip(columns, self.heads, strict=True)]

    def _with(self, tensors: Sequence[Tensor]) -> zip[tuple[Tensor, tuple[Run, ...]]]:
        return zip(tensors, self.heads, strict=True)


def _exchange(
    parts: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    group: CommGroup,
    kind: str,
) -> list[list[Tensor]]:
    """Send `parts[rank]` to each rank in one message; receive tensors of `shapes[rank]`."""
    sizes = [sum(part.numel() for part in row) for row in parts]
    expected = [sum(torch.Size(shape).numel() for shape in row) for row in shapes]
    buffer = parts[0][0].new_empty(sum(sizes))
    offset = 0
    for part in itertools.chain.from_iterable(parts):
        buffer[offset : offset + part.numel()].view(part.shape).copy_(part)
        offset += part.numel()
    received = all_to_all(buffer, sizes, expected, group, kind=kind)
    pieces: list[list[Tensor]] = []
    offset = 0
    for row in shapes:
        pieces.append([])
        for shape in row:
            count = torch.Size(shape).numel()
            pieces[-1].append(received[offset : offset + count].view(shape))
            offset += count
    return pieces


def _join_heads(pieces: Sequence[Tensor], runs: Sequence[Run]) -> Tensor:
    """Put pieces `[s, b, heads, d]` side by side; where their heads overlap, sum in fp32."""
    s, b, _, d = pieces[0].shape
    heads = max(run.stop for run in runs)
    dtype = pieces[0].dtype
    if sum(run.length for run in runs) == heads:
        joined = pieces[0].new_empty(s, b, heads, d)
        for piece, run in zip(pieces, runs, strict=True):
            joined[:, :, run.slice] = piece
        return joined
    total = pieces[0].new_zeros(s, b, heads, d, dtype=accumulation_dtype(dtype))
    for piece, run in zip(pieces, runs, strict=True):
        total[:, :, run.slice] += piece
    return total.to(dtype)


def _length(rows: Sequence[Run]) -> int:
    return sum(run.length for run in rows)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.place = exchange, innermost()
        with during("forward, scattering heads"):
            return tuple(exchange.to_heads(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with during(ctx.place or "attention"), during("backward, gathering heads"):
            return None, *ctx.exchange.to_sequence(gradients)


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, tensor: Tensor) -> Tensor:
        ctx.exchange, ctx.place = exchange, innermost()
        with during("forward, gathering heads"):
            return exchange.to_sequence([tensor])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with during(ctx.place or "attention"), during("backward, scattering heads"):
            return None, ctx.exchange.to_heads([gradient])[0]


def scatter_heads(exchange: HeadExchange, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Differentiable `exchange.to_heads`."""
    return _ToHeads.apply(exchange, *tensors)


def gather_heads(exchange: HeadExchange, tensor: Tensor) -> Tensor:
    """Differentiable `exchange.to_sequence` of one tensor, each head of which one rank holds."""
    return _ToSequence.apply(exchange, tensor)
