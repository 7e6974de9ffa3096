"""Rules about degrees: each mistake is found, named, and given a remedy that works."""

from __future__ import annotations

import re

import pytest

from megatron_cp_ext.features.facts import Facts


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_a_sound_command_has_no_findings(found) -> None:
    assert found() == ({}, {})


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--context-parallel-size", "context_parallel_size"),
        ("--tensor-model-parallel-size", "tensor_model_parallel_size"),
        ("--seq-length", "seq_length"),
        ("--num-layers", "num_layers"),
        ("--micro-batch-size", "micro_batch_size"),
    ],
)
def test_counts_are_positive(mistake, option: str, name: str) -> None:
    for value in (0, -2):
        mistake(option, **{name: value})


def test_no_kv_heads_are_refused(mistake) -> None:
    mistake("--num-query-groups", group_query_attention=True, num_query_groups=0)


def test_the_world_must_be_a_multiple_of_the_degrees(mistake) -> None:
    error = mistake(
        "--context-parallel-size", world_size=12, context_parallel_size=8, seq_length=64
    )
    assert "[1, 2, 3, 4, 6, 12]" in error.remedy
    error = mistake("--context-parallel-size", world_size=9, tensor_model_parallel_size=2)
    assert "[1, 3, 9]" in error.remedy


def test_the_sequence_has_two_chunks_for_each_rank(mistake) -> None:
    error = mistake("--seq-length", seq_length=60, max_position_embeddings=64)
    assert "8 equal chunks" in error.reason
    assert all(number % 8 == 0 for number in numbers(error.remedy))


def test_a_sequence_of_any_length_fits_one_rank(found) -> None:
    assert found(context_parallel_size=1, seq_length=61) == ({}, {})


def test_sequence_parallelism_divides_a_ranks_tokens(mistake, found) -> None:
    given = {"tensor_model_parallel_size": 8, "context_parallel_size": 2, "world_size": 16}
    error = mistake("--seq-length", sequence_parallel=True, seq_length=20, **given)
    assert "--sequence-parallel" in error.reason
    assert all(number % 16 == 0 for number in numbers(error.remedy))
    assert found(sequence_parallel=False, seq_length=20, **given)[0] == {}


def test_positions_reach_the_end_of_the_sequence(mistake) -> None:
    assert "64" in mistake("--max-position-embeddings", max_position_embeddings=32).remedy


def test_heads_divide_the_hidden_size(mistake, found) -> None:
    mistake("--num-attention-heads", hidden_size=60)
    assert found(hidden_size=60, kv_channels=8)[0] == {}


def test_tensor_parallelism_divides_heads(mistake) -> None:
    error = mistake(
        "--tensor-model-parallel-size",
        tensor_model_parallel_size=3,
        world_size=12,
        group_query_attention=True,
        num_query_groups=1,
    )
    assert error.value == 3 and "[1, 2, 4]" in error.remedy


def test_kv_heads_divide_heads_and_fit_tensor_parallelism(mistake) -> None:
    mistake("--num-query-groups", group_query_attention=True, num_query_groups=3)
    mistake(
        "--num-query-groups",
        group_query_attention=True,
        num_query_groups=6,
        num_attention_heads=12,
        hidden_size=96,
        tensor_model_parallel_size=4,
        world_size=16,
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_few_kv_heads_are_no_mistake(found, kv_heads: int) -> None:
    for algorithm in ("megatron_cp_algo", "ulysses_cp_algo", "kvallgather_cp_algo"):
        given = {"group_query_attention": True, "num_query_groups": kv_heads}
        assert found(context_parallel_algo=algorithm, **given) == ({}, {})


def test_uneven_heads_are_no_mistake(found) -> None:
    given = {"num_attention_heads": 6, "hidden_size": 48}
    assert found(context_parallel_algo="ulysses_cp_algo", **given) == ({}, {})


def test_each_ulysses_rank_needs_a_head(mistake) -> None:
    error = mistake(
        "--context-parallel-size",
        context_parallel_algo="ulysses_cp_algo",
        num_attention_heads=2,
        context_parallel_size=8,
    )
    assert "hybrid_cp_algo" in error.remedy and "[2]" in error.remedy
    mistake(
        "--ulysses-degree-in-cp",
        context_parallel_algo="hybrid_cp_algo",
        num_attention_heads=2,
        context_parallel_size=8,
        ulysses_degree_in_cp=4,
    )


@pytest.mark.parametrize("degree", [None, 1, 3, 4, 8, 0, -2])
def test_a_hybrid_has_two_factors(mistake, degree) -> None:
    error = mistake(
        "--ulysses-degree-in-cp",
        context_parallel_algo="hybrid_cp_algo",
        ulysses_degree_in_cp=degree,
        num_attention_heads=8,
    )
    assert "[2]" in error.remedy


def test_a_prime_size_has_no_hybrid(mistake) -> None:
    error = mistake(
        "--ulysses-degree-in-cp",
        context_parallel_algo="hybrid_cp_algo",
        ulysses_degree_in_cp=2,
        context_parallel_size=2,
    )
    assert "not prime" in error.remedy


def test_a_degree_without_a_hybrid_is_not_ignored(mistake) -> None:
    mistake("--ulysses-degree-in-cp", ulysses_degree_in_cp=2)


def test_hierarchical_sizes_multiply_to_the_whole(mistake) -> None:
    mistake("--hierarchical-context-parallel-sizes", hierarchical_context_parallel_sizes=[2, 4])


def test_hierarchical_sizes_agree_with_the_degree(mistake, found) -> None:
    hybrid = {"context_parallel_algo": "hybrid_cp_algo", "world_size": 8}
    hybrid |= {"context_parallel_size": 8, "ulysses_degree_in_cp": 2}
    error = mistake(
        "--hierarchical-context-parallel-sizes",
        hierarchical_context_parallel_sizes=[4, 2],
        **hybrid,
    )
    assert "[2, 4]" in error.reason
    assert found(hierarchical_context_parallel_sizes=[2, 4], **hybrid) == ({}, {})


def test_hierarchical_sizes_without_a_hybrid_are_not_ignored(mistake) -> None:
    mistake("--hierarchical-context-parallel-sizes", hierarchical_context_parallel_sizes=[2, 2])


@pytest.mark.parametrize(
    ("given", "algorithm"),
    [
        (["a2a"], "megatron_cp_algo"),
        (["allgather"], "ulysses_cp_algo"),
        (["all_gather"], "ring"),
        (["a2a+p2p"], "kvallgather"),
    ],
)
def test_comm_type_and_algorithm_must_agree(mistake, given, algorithm: str) -> None:
    error = mistake("--cp-comm-type", cp_comm_type=given, context_parallel_algo=algorithm)
    assert "--context-parallel-algo" in error.remedy


@pytest.mark.parametrize("given", [["all_gather"], ["allgather"], ["allgather"] * 4])
def test_both_spellings_of_all_gather_agree(found, given) -> None:
    assert found(cp_comm_type=given, context_parallel_algo="kvallgather_cp_algo") == ({}, {})


@pytest.mark.parametrize("given", [["carrier-pigeon"], ["p2p", "a2a"], ["a2a", "a2a"]])
def test_comm_types_are_known_alike_and_one_for_all_layers(mistake, given) -> None:
    mistake("--cp-comm-type", cp_comm_type=given, context_parallel_algo="ulysses_cp_algo")


def test_comm_types_say_nothing_without_context_parallelism(found) -> None:
    assert found(context_parallel_size=1, cp_comm_type=["a2a"]) == ({}, {})


def test_one_rank_has_no_two_levels(mistake) -> None:
    mistake("--cp-comm-type", cp_comm_type=["a2a+p2p"], context_parallel_size=1)


def test_batches_divide(mistake) -> None:
    assert "multiple of 2" in mistake("--global-batch-size", global_batch_size=3).remedy
    mistake("--eval-global-batch-size", eval_global_batch_size=3)
    mistake("--micro-batch-size", micro_batch_size=None)


def test_layers_divide_into_stages(mistake, found) -> None:
    error = mistake("--pipeline-model-parallel-size", pipeline_model_parallel_size=3, world_size=12)
    assert "[1, 2, 4]" in error.remedy
    uneven = {"pipeline_model_parallel_size": 3, "world_size": 12}
    assert found(decoder_first_pipeline_num_layers=2, **uneven) == ({}, {})


def test_virtual_stages_divide_and_need_a_pipeline(mistake, found) -> None:
    two = {"pipeline_model_parallel_size": 2, "world_size": 8}
    option = "--num-layers-per-virtual-pipeline-stage"
    mistake(option, num_layers_per_virtual_pipeline_stage=3, **two)
    mistake(option, num_layers_per_virtual_pipeline_stage=2)
    mistake(option, num_layers_per_virtual_pipeline_stage=1, overlap_p2p_comm=False, **two)
    mistake(
        option,
        num_layers_per_virtual_pipeline_stage=1,
        num_virtual_stages_per_pipeline_rank=2,
        **two,
    )
    mistake("--num-virtual-stages-per-pipeline-rank", num_virtual_stages_per_pipeline_rank=3, **two)
    assert found(num_layers_per_virtual_pipeline_stage=1, **two) == ({}, {})


def test_expert_parallelism_needs_experts_that_divide(mistake) -> None:
    option = "--expert-model-parallel-size"
    mistake(option, expert_model_parallel_size=2)
    assert "[1, 2, 3, 6]" in mistake(option, expert_model_parallel_size=4, num_experts=6).remedy
    assert (
        "16 ranks"
        in mistake(
            option, expert_model_parallel_size=8, num_experts=8, expert_tensor_parallel_size=2
        ).reason
    )


def test_experts_are_enough_for_the_router(mistake) -> None:
    mistake("--moe-router-topk", num_experts=2, moe_router_topk=4)


def test_experts_with_tensor_parallelism_need_sequence_parallelism(mistake) -> None:
    error = mistake("--num-experts", num_experts=4, tensor_model_parallel_size=2)
    assert "--sequence-parallel" in error.remedy


def test_grouped_gemm_needs_its_device(mistake, found) -> None:
    given = {"num_experts": 4, "moe_grouped_gemm": True}
    mistake("--moe-grouped-gemm", **given)
    cuda = {"platform": "cuda", "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    mistake("--moe-grouped-gemm", facts=Facts(device_arch=7, **cuda), **given)
    errors, _ = found(facts=Facts(device_arch=9, **cuda), **given)
    assert errors == {}


def test_all_mistakes_are_reported_together(found) -> None:
    errors, _ = found(
        seq_length=60,
        ulysses_degree_in_cp=2,
        global_batch_size=3,
        hybrid_context_parallel=True,
        max_position_embeddings=8,
    )
    assert set(errors) == {
        "--seq-length",
        "--ulysses-degree-in-cp",
        "--global-batch-size",
        "--hybrid-context-parallel",
        "--max-position-embeddings",
    }
