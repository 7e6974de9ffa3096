"""Which ranks form which group, by Megatron's rank order."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """How a world is divided.

    Ranks count up through tensor, context, data and pipeline parallelism, the first fastest;
    with `pipeline_before_data` the last two change places. Expert groups are cut from the same
    ranks with expert tensor and expert parallelism in place of the first two.

    Args:
        world: number of ranks.
        tp: tensor-parallel size.
        cp: context-parallel size.
        pp: pipeline-parallel size.
        ulysses: size of the Ulysses groups within a CP group, 1 for none.
        ep: expert-parallel size.
        etp: expert-tensor-parallel size.
        pipeline_before_data: `--use-tp-pp-dp-mapping`.
    """

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ulysses: int = 1
    ep: int = 1
    etp: int = 1
    pipeline_before_data: bool = False

    def __post_init__(self) -> None:
        assert self.world % (self.tp * self.cp * self.pp) == 0, self
        assert self.world % (self.etp * self.ep * self.pp) == 0, self
        assert self.cp % self.ulysses == 0, self

    @property
    def dp(self) -> int:
        """Data-parallel size, context parallelism not included."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def ring(self) -> int:
        """Ranks among which keys and values travel."""
        return self.cp // self.ulysses

    def sizes(self) -> dict[str, int]:
        """Size of each kind of group."""
        sizes = {
            "TP": self.tp,
            "CP": self.cp,
            "Ulysses": self.ulysses,
            "ring": self.ring,
            "DP": self.dp,
            "PP": self.pp,
        }
        if self.ep > 1:
            sizes |= {"EP": self.ep}
        return sizes

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The global ranks of every group that `rank` belongs to, in group order."""
        dense = self._axes({"TP": self.tp, "CP": self.cp, "DP": self.dp, "PP": self.pp})
        groups = {kind: _group(dense, rank, kind) for kind in ("TP", "CP", "DP", "PP")}
        cp, place = groups["CP"], groups["CP"].index(rank)
        first = place - place % self.ulysses
        groups["Ulysses"] = cp[first : first + self.ulysses]
        groups["ring"] = cp[place % self.ulysses :: self.ulysses]
        if self.ep > 1:
            expert = self._axes(
                {"ETP": self.etp, "EP": self.ep, "DP": self.expert_dp, "PP": self.pp}
            )
            groups["EP"] = _group(expert, rank, "EP")
        return {kind: groups[kind] for kind in self.sizes()}

    def _axes(self, sizes: dict[str, int]) -> list[tuple[str, int]]:
        """Kinds and sizes, the fastest first."""
        axes = list(sizes.items())
        if self.pipeline_before_data:
            axes[-2:] = axes[:-3:-1]
        return axes


def _group(axes: list[tuple[str, int]], rank: int, kind: str) -> tuple[int, ...]:
    """Ranks that differ from `rank` along the axis `kind` only."""
    names = [name for name, _ in axes]
    index = names.index(kind)
    stride = math.prod(size for _, size in axes[:index])
    size = axes[index][1]
    first = rank - (rank // stride % size) * stride
    return tuple(first + stride * place for place in range(size))
