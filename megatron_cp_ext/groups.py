"""The process groups of context parallelism: the whole, the Ulysses part, the ring part.

The ranks of a context-parallel group are arranged as rings of Ulysses groups. A Ulysses group
is `ulysses_degree` neighbouring ranks, which by Megatron's rank order share the fastest links.
A ring connects the ranks of the same place in every Ulysses group. With CP = 4 and Ulysses
degree 2:

    Ulysses groups  (0 1) (2 3)
    rings           (0 2) (1 3)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_cp_ext.comm import CommGroup, HostStagingWire, SilentWire, Traffic, connect
from megatron_cp_ext.errors import UsageError


@dataclass(frozen=True)
class ContextParallelGroups:
    """The groups one rank belongs to.

    Args:
        cp: all ranks that share a sequence.
        ulysses: the neighbours among which heads are exchanged.
        ring: the ranks among which keys and values travel.
    """

    cp: CommGroup
    ulysses: CommGroup
    ring: CommGroup

    def __post_init__(self) -> None:
        assert self.cp.size == self.ulysses.size * self.ring.size

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent in all of these groups."""
        return self.cp.traffic

    @classmethod
    def single(cls) -> ContextParallelGroups:
        """One rank with the whole sequence."""
        traffic = Traffic()
        alone = CommGroup.of(None, traffic=traffic)
        return cls(alone, alone, alone)

    @classmethod
    def pretended(cls, size: int, *, rank: int, ulysses_degree: int = 1) -> ContextParallelGroups:
        """One rank of a group whose others do not exist; its results are meaningless.

        For timing what a rank computes; see `SilentWire`.
        """
        check_degrees(size, ulysses_degree, 1)
        traffic, wire = Traffic(), SilentWire()

        def view(ranks: list[int]) -> CommGroup:
            return CommGroup(tuple(ranks), ranks.index(rank), wire=wire, traffic=traffic)

        (ulysses,) = (r for r in ulysses_ranks(size, ulysses_degree) if rank in r)
        (ring,) = (r for r in ring_ranks(size, ulysses_degree) if rank in r)
        return cls(view(list(range(size))), view(ulysses), view(ring))

    @classmethod
    def from_world(
        cls,
        ulysses_degree: int = 1,
        ring_window: int = 1,
        *,
        send_recv_overlap: bool = False,
        host_staging: bool = False,
    ) -> ContextParallelGroups:
        """Use the default process group as the context-parallel group.

        Collective: every rank calls it with the same arguments.

        Args:
            ulysses_degree: size of the Ulysses groups; the rings have the rest.
            ring_window: size of the inner rings of a double ring; 1 for a plain ring.
            send_recv_overlap: send and receive around the ring on separate groups.
            host_staging: send everything by way of host memory; without it that is done only
                where a group's backend does not carry the tensors' device.

        Raises:
            UsageError: a degree does not divide the number of ranks.
        """
        size = dist.get_world_size()
        check_degrees(size, ulysses_degree, ring_window)
        here = dist.get_rank()
        world = dist.group.WORLD
        ulysses = ring = None
        for ranks in ulysses_ranks(size, ulysses_degree):
            group = world if len(ranks) == size else _new_group(ranks)
            ulysses = group if here in ranks else ulysses
        for ranks in ring_ranks(size, ulysses_degree):
            group = world if len(ranks) == size else _new_group(ranks)
            ring = group if here in ranks else ring
        return cls.build(
            world,
            ulysses,
            ring,
            send_recv_overlap=send_recv_overlap,
            host_staging=host_staging,
        )

    @classmethod
    def build(
        cls,
        cp: dist.ProcessGroup | None,
        ulysses: dist.ProcessGroup | None,
        ring: dist.ProcessGroup | None,
        *,
        send_recv_overlap: bool = False,
        host_staging: bool = False,
    ) -> ContextParallelGroups:
        """Views of process groups that exist; None for a group of one."""
        traffic, wire = Traffic(), HostStagingWire() if host_staging else None
        reverse = second_group(ring) if send_recv_overlap and ring is not None else None
        for group in (ring, reverse):
            if group is not None:
                connect(group)
        return cls(
            cp=CommGroup.of(cp, wire=wire, traffic=traffic),
            ulysses=CommGroup.of(ulysses, wire=wire, traffic=traffic),
            ring=CommGroup.of(ring, reverse=reverse, wire=wire, traffic=traffic),
        )

    @classmethod
    def from_megatron(
        cls,
        pg_collection: Any,
        *,
        ulysses_degree: int = 1,
        send_recv_overlap: bool = False,
    ) -> ContextParallelGroups:
        """Take the groups from Megatron.

        Args:
            pg_collection: Megatron's ProcessGroupCollection, of which `cp` is read, and `hcp`
                (hierarchical groups, innermost first) if both degrees exceed one.
            ulysses_degree: size of the Ulysses groups.
            send_recv_overlap: send and receive around the ring on separate groups.

        Raises:
            UsageError: the hierarchical groups are not [ulysses, ring].
        """
        cp = pg_collection.cp
        size = dist.get_world_size(cp)
        check_degrees(size, ulysses_degree, 1)
        if ulysses_degree == 1:
            return cls.build(cp, None, cp, send_recv_overlap=send_recv_overlap)
        if ulysses_degree == size:
            return cls.build(cp, cp, None)
        levels = getattr(pg_collection, "hcp", None) or []
        sizes = [dist.get_world_size(level) for level in levels]
        if sizes != [ulysses_degree, size // ulysses_degree]:
            raise UsageError(
                option="--hierarchical-context-parallel-sizes",
                value=sizes or None,
                reason=f"a hybrid with Ulysses degree {ulysses_degree} needs process groups of "
                "the Ulysses and ring sizes, innermost first",
                remedy=f"pass {ulysses_degree} {size // ulysses_degree}",
            )
        return cls.build(cp, levels[0], levels[1], send_recv_overlap=send_recv_overlap)


@functools.lru_cache(maxsize=8)
def second_group(first: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another process group of the same ranks, the same one at every call.

    Collective over the members of `first` alone.
    """
    # A group's timeout has no public name; it is the same on each of its devices.
    backend = first._get_backend(first._device_types[0])
    return dist.new_group(
        dist.get_process_group_ranks(first),
        timeout=backend.options._timeout,
        use_local_synchronization=True,
    )


def ulysses_ranks(size: int, degree: int) -> list[list[int]]:
    """Neighbouring ranks in groups of `degree`."""
    return [list(range(first, first + degree)) for first in range(0, size, degree)]


def ring_ranks(size: int, degree: int) -> list[list[int]]:
    """Ranks of the same place in every group of `degree` neighbours."""
    return [list(range(place, size, degree)) for place in range(degree)]


def check_degrees(size: int, ulysses_degree: int, ring_window: int) -> None:
    """Raise UsageError unless the degrees divide the context-parallel size."""
    if ulysses_degree < 1 or size % ulysses_degree:
        fitting = [d for d in range(1, size + 1) if size % d == 0]
        raise UsageError(
            option="ulysses_degree",
            value=ulysses_degree,
            reason=f"it must divide the context-parallel size {size}",
            remedy=f"use one of {fitting}",
        )
    if ring_window != 1:
        raise UsageError(
            option="ring_window",
            value=ring_window,
            reason="double rings are not available in this version",
            remedy="use 1, or a hybrid with Ulysses inside the node",
        )


def _new_group(ranks: list[int]) -> dist.ProcessGroup | None:
    """A process group of these ranks; collective over all ranks. None for a single rank."""
    group = dist.new_group(ranks)
    return group if len(ranks) > 1 else None
