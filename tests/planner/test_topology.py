"""Groups by arithmetic are the groups that Megatron makes."""

from __future__ import annotations

import pytest

from megatron_cp_ext.planner.topology import Topology

# world, tp, cp, pp, ulysses, ep, etp
WORLDS = [
    (8, 2, 4, 1, 2, 1, 1),
    (16, 2, 2, 2, 1, 2, 1),
    (24, 1, 6, 2, 3, 2, 2),
    (64, 4, 8, 2, 2, 4, 1),
    (12, 1, 3, 2, 1, 1, 1),
]


def megatron_groups(order: str, **sizes: int) -> dict[str, list[list[int]]]:
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(**sizes, order=order)
    return {kind: generator.get_ranks(kind) for kind in ("tp", "cp", "dp", "pp", "ep")}


@pytest.mark.parametrize("pipeline_first", [False, True])
@pytest.mark.parametrize(("world", "tp", "cp", "pp", "ulysses", "ep", "etp"), WORLDS)
def test_groups_are_megatrons(world, tp, cp, pp, ulysses, ep, etp, pipeline_first) -> None:
    topology = Topology(world, tp, cp, pp, ulysses, ep, etp, pipeline_first)
    order = "tp-cp-ep-pp-dp" if pipeline_first else "tp-cp-ep-dp-pp"
    dense = megatron_groups(order, tp=tp, ep=1, dp=topology.dp, pp=pp, cp=cp)
    expert = megatron_groups(order, tp=etp, ep=ep, dp=topology.expert_dp, pp=pp, cp=1)
    for rank in range(world):
        groups = topology.groups_of(rank)
        for kind in ("TP", "CP", "DP", "PP"):
            assert list(groups[kind]) in dense[kind.lower()], (rank, kind)
            assert rank in groups[kind]
        if ep > 1:
            assert list(groups["EP"]) in expert["ep"]
            assert rank in groups["EP"]


def test_a_hybrids_groups_are_megatrons_hierarchical_ones() -> None:
    """Innermost first, contiguous in the CP group: [[0, 2], [0, 4]] of [0, 2, 4, 6] at TP 2."""
    groups = Topology(8, tp=2, cp=4, ulysses=2).groups_of(4)
    assert groups["CP"] == (0, 2, 4, 6)
    assert groups["Ulysses"] == (4, 6)
    assert groups["ring"] == (0, 4)


def test_sizes_and_counts() -> None:
    topology = Topology(64, tp=2, cp=8, pp=2, ulysses=4)
    assert topology.sizes() == {"TP": 2, "CP": 8, "Ulysses": 4, "ring": 2, "DP": 2, "PP": 2}
    assert "EP" in Topology(64, tp=2, ep=4).sizes()
