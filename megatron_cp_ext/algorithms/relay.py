"""Which chunk of keys and values goes to whom, and when: the ring's plan.

A chunk is one run of positions of one rank. It goes only to ranks whose queries see some of it,
handed on from one such rank to the next around the ring, in the direction in which the last of
them is nearer. Under a causal zigzag of 4 ranks, rank 2 holds chunks 2 and 5: chunk 2 is seen by
every rank and goes the whole way round, chunk 5 is seen by chunks 6 and 7 only and goes back to
ranks 1 and 0:

    chunk 2    2 -> 3 -> 0 -> 1        chunk 5    2 -> 1 -> 0

Together the halves cost three quarters of what a ring costs that sends everything everywhere,
and each direction of a link carries about half of it. Windows and documents shorten the paths
further. Plans are plain data, the same on every rank, made without a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_cp_ext.layout import Run, SequenceLayout
from megatron_cp_ext.mask import AttentionMask


@dataclass(frozen=True)
class Chunk:
    """Some consecutive positions of one rank, and the way their keys and values take.

    Args:
        owner: rank that holds them.
        rows: where they lie in the owner's shard.
        run: their global positions.
        path: the owner, then the ranks that need them, in the order of visit.
    """

    owner: int
    rows: Run
    run: Run
    path: tuple[int, ...]


@dataclass(frozen=True)
class Hop:
    """One chunk's transfer from one rank to another."""

    chunk: Chunk
    source: int
    to: int


@dataclass(frozen=True)
class RelayPlan:
    """All transfers of a ring, step by step.

    Args:
        chunks: all chunks, in order of owner and position.
    """

    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, layout: SequenceLayout, mask: AttentionMask) -> RelayPlan:
        """The shortest plan that brings every key to every query that sees it."""
        chunks: list[Chunk] = []
        for owner, runs in enumerate(layout.shards):
            offset = 0
            for index, run in enumerate(runs):
                needing = [
                    rank
                    for rank, q_runs in enumerate(layout.shards)
                    if rank != owner and any(mask.touches(q_run, run) for q_run in q_runs)
                ]
                path = _path(owner, needing, layout.cp_size, prefer_backward=index % 2 == 1)
                chunks.append(Chunk(owner, Run(offset, offset + run.length), run, path))
                offset += run.length
        return cls(tuple(chunks))

    @property
    def steps(self) -> int:
        """Transfers in sequence: visits of the chunk that makes most."""
        return max(len(chunk.path) for chunk in self.chunks) - 1

    def visiting(self, rank: int, step: int) -> list[Chunk]:
        """Chunks of other ranks that are at `rank` after `step` transfers, step >= 1."""
        return [c for c in self.chunks if len(c.path) > step and c.path[step] == rank]

    def key_hops(self, step: int) -> list[Hop]:
        """Transfers by which chunks reach the ranks they visit at `step`, step >= 1."""
        return [
            Hop(chunk, chunk.path[step - 1], chunk.path[step])
            for chunk in self.chunks
            if len(chunk.path) > step
        ]

    def gradient_hops(self, step: int) -> list[Hop]:
        """Transfers of gradients out of the ranks visited at `step`: onwards, or home at last."""
        return [
            Hop(chunk, chunk.path[step], chunk.path[(step + 1) % len(chunk.path)])
            for chunk in self.chunks
            if len(chunk.path) > step >= 1
        ]


def relay_plan(layout: SequenceLayout, mask: AttentionMask) -> RelayPlan:
    """`RelayPlan.of`, remembered as long as the mask lives."""
    return mask.remember(("relay", layout), lambda: RelayPlan.of(layout, mask))


def _path(
    owner: int, needing: Sequence[int], size: int, *, prefer_backward: bool
) -> tuple[int, ...]:
    """The owner and the ranks in need, in the direction in which the last of them is nearer."""
    forward = sorted(needing, key=lambda rank: (rank - owner) % size)
    backward = sorted(needing, key=lambda rank: (owner - rank) % size)
    if not needing:
        return (owner,)
    farthest_forward = (forward[-1] - owner) % size
    farthest_backward = (owner - backward[-1]) % size
    if farthest_backward < farthest_forward or (
        farthest_backward == farthest_forward and prefer_backward
    ):
        return (owner, *backward)
    return (owner, *forward)
