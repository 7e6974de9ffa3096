"""How keys, values or heads travel: one algorithm to a file."""

from __future__ import annotations

from megatron_cp_ext.algorithms.hybrid import HybridAlgorithm
from megatron_cp_ext.algorithms.interface import Algorithm, AttentionCall
from megatron_cp_ext.algorithms.kv_allgather import KVAllGatherAlgorithm
from megatron_cp_ext.algorithms.ring import RingAlgorithm
from megatron_cp_ext.algorithms.ulysses import UlyssesAlgorithm

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        RingAlgorithm(),
        UlyssesAlgorithm(),
        HybridAlgorithm(),
        KVAllGatherAlgorithm(),
    )
}

__all__ = ["ALGORITHMS", "Algorithm", "AttentionCall"]
