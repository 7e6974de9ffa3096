"""`--cp-comm-type` and `--context-parallel-algo` say the same thing, or are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_cp_ext.features.context_parallel import ContextParallelFeature
from megatron_cp_ext.features.hybrid import HybridFeature
from megatron_cp_ext.megatron.settings import algorithm_of


def settled(comm_type, algorithm=None, *, cp=4, degree=None, sizes=None) -> SimpleNamespace:
    args = SimpleNamespace(
        context_parallel_size=cp,
        context_parallel_algo=algorithm,
        cp_comm_type=comm_type,
        ulysses_degree_in_cp=degree,
        hierarchical_context_parallel_sizes=sizes,
    )
    ContextParallelFeature().pre_validate_args(args)
    HybridFeature().pre_validate_args(args)
    return args


@pytest.mark.parametrize(
    ("comm_type", "algorithm"),
    [
        (["p2p"], "ring"),
        (["a2a"], "ulysses"),
        (["a2a+p2p"], "hybrid"),
        (["allgather"], "kvallgather"),
        (["all_gather"], "kvallgather"),
        (["a2a", "a2a"], "ulysses"),
        ("a2a", "ulysses"),
    ],
)
def test_the_type_alone_chooses_the_algorithm(comm_type, algorithm: str) -> None:
    assert algorithm_of(settled(comm_type)) == algorithm


def test_the_default_type_chooses_nothing() -> None:
    assert settled(["p2p"]).context_parallel_algo is None
    assert settled(["a2a"], cp=1).context_parallel_algo is None


def test_an_algorithm_is_never_overruled() -> None:
    assert settled(["a2a"], "megatron_cp_algo").context_parallel_algo == "megatron_cp_algo"


def test_a_hybrids_two_ways_to_say_its_degrees_fill_each_other_in() -> None:
    by_degree = settled(["a2a+p2p"], degree=2)
    assert by_degree.hierarchical_context_parallel_sizes == [2, 2]
    by_sizes = settled(["a2a+p2p"], cp=8, sizes=[2, 4])
    assert by_sizes.ulysses_degree_in_cp == 2
    assert settled(["p2p"], degree=None).hierarchical_context_parallel_sizes is None
    assert settled(["a2a+p2p"], degree=3).hierarchical_context_parallel_sizes is None
