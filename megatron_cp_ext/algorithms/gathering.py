"""Two ways to gather keys and values: everything from everyone, or the chunks that are needed.

Both bring keys in ascending positions, take gradients of what they brought, and give each rank
the sum for what it owns. Where a mask needs little, as windows and short documents do, sending
only that beats the collective made for sending everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_cp_ext.algorithms.packing import KVPack, packed_numel
from megatron_cp_ext.algorithms.relay import Chunk, RelayPlan
from megatron_cp_ext.comm import CommGroup, all_gather, all_to_all, reduce_scatter
from megatron_cp_ext.layout import Run, SequenceLayout


class Gathering(Protocol):
    """Brings keys and values here and their gradients home.

    Args:
        runs: positions of the gathered keys, ascending.
    """

    runs: tuple[Run, ...]

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[gathered, b, hk, d]` and values `[gathered, b, hk, dv]` of `runs`."""

    def scatter(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the ranks' gradients of `runs`; those of this rank's own shard."""


def gathering(layout: SequenceLayout, plan: RelayPlan, group: CommGroup) -> Gathering:
    """Send what is needed if that is at most half of everything, else everything."""
    if gathers_needed_only(plan, layout):
        return NeededGathering(layout, plan, group)
    return WholeGathering(layout, group)


def gathers_needed_only(plan: RelayPlan, layout: SequenceLayout) -> bool:
    """Whether the ranks need at most half of each other's keys."""
    needed = sum((len(chunk.path) - 1) * chunk.run.length for chunk in plan.chunks)
    return 2 * needed <= (layout.cp_size - 1) * layout.seq_len


class WholeGathering:
    """One all-gather, and one reduce-scatter for the gradients.

    Args:
        layout: which positions each rank of the group holds.
        group: who takes part.
    """

    def __init__(self, layout: SequenceLayout, group: CommGroup) -> None:
        self.layout, self.group = layout, group
        self.runs: tuple[Run, ...] = (Run(0, layout.seq_len),)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `Gathering`."""
        own = KVPack.of(key, value)
        packs = [own.holding(row) for row in all_gather(own.buffer, self.group, kind="kv")]
        return (
            self.layout.unshard([pack.key for pack in packs]),
            self.layout.unshard([pack.value for pack in packs]),
        )

    def scatter(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """See `Gathering`."""
        shards = [
            KVPack.of(self.layout.shard(dk, owner), self.layout.shard(dv, owner))
            for owner in range(self.group.size)
        ]
        stacked = torch.stack([shard.buffer for shard in shards])
        own = shards[self.group.rank].holding(reduce_scatter(stacked, self.group, kind="dkv"))
        return own.key, own.value


class NeededGathering:
    """One all-to-all in which each rank sends to each other just the chunks that it needs.

    Args:
        layout: which positions each rank of the group holds.
        plan: which chunks are needed where.
        group: who takes part.
    """

    def __init__(self, layout: SequenceLayout, plan: RelayPlan, group: CommGroup) -> None:
        self.group = group
        me, ranks = group.rank, range(group.size)
        own = [chunk for chunk in plan.chunks if chunk.owner == me]
        self._own = own
        self._leaving = [[c for c in own if rank in c.path[1:]] for rank in ranks]
        self._arriving = [
            [c for c in plan.chunks if c.owner == rank and me in c.path[1:]] for rank in ranks
        ]
        held = sorted(
            [*own, *itertools.chain.from_iterable(self._arriving)], key=lambda chunk: chunk.run
        )
        self.runs = tuple(chunk.run for chunk in held)
        starts = itertools.accumulate((run.length for run in self.runs), initial=0)
        self._place = {
            chunk: Run(start, start + chunk.run.length)
            for chunk, start in zip(held, starts, strict=False)
        }

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `Gathering`."""
        total = sum(run.length for run in self.runs)
        keys = key.new_empty(total, *key.shape[1:])
        values = value.new_empty(total, *value.shape[1:])
        for chunk in self._own:
            keys[self._place[chunk].slice].copy_(key[chunk.rows.slice])
            values[self._place[chunk].slice].copy_(value[chunk.rows.slice])
        parts = [
            [KVPack.of(key[c.rows.slice], value[c.rows.slice]).buffer for c in chunks]
            for chunks in self._leaving
        ]
        for chunk, pack in self._exchange(parts, self._arriving, key, value, kind="kv"):
            keys[self._place[chunk].slice].copy_(pack.key)
            values[self._place[chunk].slice].copy_(pack.value)
        return keys, values

    def scatter(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """See `Gathering`."""
        own_dk = torch.cat([dk[self._place[chunk].slice] for chunk in self._own])
        own_dv = torch.cat([dv[self._place[chunk].slice] for chunk in self._own])
        parts = [
            [KVPack.of(dk[self._place[c].slice], dv[self._place[c].slice]).buffer for c in chunks]
            for chunks in self._arriving
        ]
        for chunk, pack in self._exchange(parts, self._leaving, dk, dv, kind="dkv"):
            own_dk[chunk.rows.slice].add_(pack.key)
            own_dv[chunk.rows.slice].add_(pack.value)
        return own_dk, own_dv

    def _exchange(
        self,
        parts: Sequence[Sequence[Tensor]],
        expected: Sequence[Sequence[Chunk]],
        key: Tensor,
        value: Tensor,
        *,
        kind: str,
    ) -> list[tuple[Chunk, KVPack]]:
        """Send flat `parts[rank]` to each rank; receive the chunks `expected[rank]` from each."""
        sizes = [
            [packed_numel(chunk.run.length, key=key, value=value) for chunk in chunks]
            for chunks in expected
        ]
        flat = list(itertools.chain.from_iterable(parts))
        received = all_to_all(
            torch.cat(flat) if flat else key.new_empty(0),
            [sum(part.numel() for part in row) for row in parts],
            [sum(row) for row in sizes],
            self.group,
            kind=kind,
        )
        chunks = list(itertools.chain.from_iterable(expected))
        buffers = received.split(list(itertools.chain.from_iterable(sizes)))
        return [
            (chunk, KVPack.over(buffer, chunk.run.length, key=key, value=value))
            for chunk, buffer in zip(chunks, buffers, strict=True)
        ]
