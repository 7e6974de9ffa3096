"""Groups: rings of Ulysses groups of neighbours, from the world or from Megatron's groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_cp_ext import ContextParallelGroups
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.testing import GlooPool

GetPool = Callable[[int], GlooPool]

# Global ranks, and the place in them, of each of: cp, ulysses, ring.
Members = list[tuple[tuple[int, ...], int]]


def members(groups: ContextParallelGroups) -> Members:
    traffic = groups.traffic
    assert traffic is groups.ulysses.traffic
    assert traffic is groups.ring.traffic
    return [(group.ranks, group.rank) for group in (groups.cp, groups.ulysses, groups.ring)]


def from_world(degree: int) -> Members:
    return members(ContextParallelGroups.from_world(degree))


def test_ulysses_groups_are_neighbours_and_rings_connect_them(gloo_pool: GetPool) -> None:
    everyone = (0, 1, 2, 3)
    assert gloo_pool(4).run(from_world, 2) == [
        [(everyone, 0), ((0, 1), 0), ((0, 2), 0)],
        [(everyone, 1), ((0, 1), 1), ((1, 3), 0)],
        [(everyone, 2), ((2, 3), 0), ((0, 2), 1)],
        [(everyone, 3), ((2, 3), 1), ((1, 3), 1)],
    ]


def test_degree_one_is_a_ring_and_the_whole_size_is_ulysses(gloo_pool: GetPool) -> None:
    everyone = (0, 1, 2)
    for degree in (1, 3):
        for rank, (cp, ulysses, ring) in enumerate(gloo_pool(3).run(from_world, degree)):
            whole, alone = (ring, ulysses) if degree == 1 else (ulysses, ring)
            assert cp == whole == (everyone, rank)
            assert alone == ((rank,), 0)


def refused_degrees() -> list[tuple[str, str]]:
    errors = []
    for degree, ring_window in ((2, 1), (0, 1), (-1, 1), (6, 1), (1, 3)):
        with pytest.raises(UsageError) as caught:
            ContextParallelGroups.from_world(degree, ring_window)
        errors.append((caught.value.option, caught.value.remedy))
    return errors


def test_degrees_that_do_not_divide_are_refused_on_every_rank(gloo_pool: GetPool) -> None:
    for errors in gloo_pool(3).run(refused_degrees):
        *degrees, window = errors
        assert degrees == [("ulysses_degree", "use one of [1, 3]")] * 4
        assert window[0] == "ring_window"


def from_megatron(degree: int) -> Members:
    """As Megatron makes them for TP2 x CP4: every other rank, hierarchical groups [2, 2]."""
    chosen: dict[str, list[dist.ProcessGroup | None]] = {"cp": [], "inner": [], "outer": []}
    for tp in range(2):
        cp = [tp, tp + 2, tp + 4, tp + 6]
        parts = {
            "cp": [cp],
            "inner": [cp[:2], cp[2:]],
            "outer": [cp[::2], cp[1::2]],
        }
        for name, lists in parts.items():
            for ranks in lists:
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    chosen[name].append(group)
    (cp_group,), (inner,), (outer,) = chosen.values()
    collection = SimpleNamespace(cp=cp_group, hcp=[inner, outer])
    return members(ContextParallelGroups.from_megatron(collection, ulysses_degree=degree))


def test_megatrons_groups_are_taken_as_they_are(gloo_pool: GetPool) -> None:
    for rank, (cp, ulysses, ring) in enumerate(gloo_pool(8).run(from_megatron, 2)):
        tp, place = rank % 2, rank // 2
        everyone = (tp, tp + 2, tp + 4, tp + 6)
        inner, outer = everyone[place // 2 * 2 :][:2], everyone[place % 2 :: 2]
        assert cp == (everyone, place)
        assert ulysses == (inner, place % 2)
        assert ring == (outer, place // 2)


@pytest.mark.parametrize("degree", [1, 4])
def test_megatrons_hierarchical_groups_are_needed_for_the_hybrid_only(
    gloo_pool: GetPool, degree: int
) -> None:
    for rank, (cp, ulysses, ring) in enumerate(gloo_pool(8).run(from_megatron, degree)):
        whole, alone = (ring, ulysses) if degree == 1 else (ulysses, ring)
        assert cp == whole
        assert alone == ((rank,), 0)


def refused_collections() -> list[tuple[str, str]]:
    world = dist.group.WORLD
    errors = []
    for collection, degree in (
        (SimpleNamespace(cp=world), 2),
        (SimpleNamespace(cp=world, hcp=None), 2),
        (SimpleNamespace(cp=world, hcp=[world]), 2),
        (SimpleNamespace(cp=world), 3),
    ):
        with pytest.raises(UsageError) as caught:
            ContextParallelGroups.from_megatron(collection, ulysses_degree=degree)
        errors.append((caught.value.option, caught.value.remedy))
    return errors


def test_missing_or_other_hierarchical_groups_are_refused(gloo_pool: GetPool) -> None:
    for errors in gloo_pool(4).run(refused_collections):
        *hierarchical, degree = errors
        assert hierarchical == [("--hierarchical-context-parallel-sizes", "pass 2 2")] * 3
        assert degree == ("ulysses_degree", "use one of [1, 2, 4]")


def second_group_quietly() -> tuple[bool, bool]:
    """Whether the second group of the ring lasts as long as the first, and is another one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ring = ContextParallelGroups.from_world(send_recv_overlap=True).ring
    assert ring.group is not None
    assert ring.reverse is not None
    first, second = (
        group._get_backend(torch.device("cpu")).options._timeout
        for group in (ring.group, ring.reverse)
    )
    return first == second, ring.group is not ring.reverse


def test_a_second_group_for_the_ring_is_made_without_a_warning(gloo_pool: GetPool) -> None:
    assert gloo_pool(3).run(second_group_quietly) == [(True, True)] * 3


def test_a_single_rank_needs_no_process_group() -> None:
    assert members(ContextParallelGroups.single()) == [((0,), 0)] * 3
