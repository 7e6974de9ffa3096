"""Rules about what a model contains: what works is let pass, what does not is named."""

from __future__ import annotations

import pytest

from megatron_cp_ext.features.facts import Facts

CUDA = Facts(platform="cuda", here=False, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
# Long enough to hide a ring.
LONG = {"seq_length": 1 << 20, "max_position_embeddings": 1 << 20, "cp_kernel": "reference"}
UNSPLIT = {"context_parallel_size": 1}


@pytest.mark.parametrize(
    "works",
    [
        {"window_size": (8, 0)},
        {"softmax_type": "learnable"},
        {"reset_attention_mask": True},
        {"dataloader_inter_document_masking": True},
        {"multi_latent_attention": True, "v_head_dim": 64},
        {"position_embedding_type": "learned_absolute"},
        {"position_embedding_type": "yarn"},
        {"recompute_granularity": "selective"},
        {"deterministic_mode": True},
        {"mtp_num_layers": 1},
        {"num_experts": 4, "expert_model_parallel_size": 2},
        {"bf16": True},
        {"attention_mask_type": "general"},
    ],
)
@pytest.mark.parametrize("algorithm", ["ring", "ulysses", "kvallgather"])
def test_what_works_is_let_pass(found, works, algorithm: str) -> None:
    assert found(context_parallel_algo=algorithm, **works) == ({}, {})


def test_alibi_and_relative_positions(mistake, found) -> None:
    option = "--position-embedding-type"
    mistake(option, position_embedding_type="relative")
    mistake(option, position_embedding_type="alibi")
    mistake(option, alibi=True)
    mistake(option, position_embedding_type="relative", **UNSPLIT)
    engine = {"transformer_impl": "transformer_engine"}
    assert found(position_embedding_type="relative", **engine, **UNSPLIT) == ({}, {})


def test_multi_modal_positions_have_sections(mistake, found) -> None:
    mistake("--mrope-section", position_embedding_type="mrope")
    assert found(position_embedding_type="mrope", mrope_section=[2, 3, 3])[0] == {}


def test_mla_has_no_groups(mistake) -> None:
    mistake(
        "--group-query-attention",
        multi_latent_attention=True,
        group_query_attention=True,
        num_query_groups=2,
    )


def test_one_half_precision(mistake) -> None:
    mistake("--fp16", fp16=True, bf16=True)


@pytest.mark.parametrize("kind", ["learned_absolute", "yarn"])
def test_several_tokens_need_rotary_positions(mistake, kind: str) -> None:
    mistake("--mtp-num-layers", mtp_num_layers=1, position_embedding_type=kind)


def test_mamba_layers_run_on_cuda(mistake, hint) -> None:
    given = {"hybrid_layer_pattern": "M*M*", "mamba_num_heads": 8, "mamba_num_groups": 8}
    mistake("--hybrid-layer-pattern", **given)
    advice = hint("--hybrid-layer-pattern", facts=CUDA, **LONG, **given)
    assert "has not tested" in advice.reason


def test_mamba_heads_and_groups_divide(mistake) -> None:
    given = {"hybrid_layer_pattern": "M*M*", "facts": CUDA, **LONG}
    error = mistake("--mamba-num-heads", mamba_num_heads=6, **given)
    assert "multiple of 4" in error.remedy
    mistake("--mamba-num-groups", mamba_num_heads=8, mamba_num_groups=3, **given)


def test_mamba_without_context_parallelism_is_megatrons_business(found) -> None:
    assert found(hybrid_layer_pattern="M*M*", **UNSPLIT) == ({}, {})


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--experimental-attention-variant", {"experimental_attention_variant": "dsa"}),
        ("--use-kitchen-attention", {"use_kitchen_attention": True}),
        ("--fp8-dot-product-attention", {"fp8_dot_product_attention": True}),
        ("--fp8-multi-head-attention", {"fp8_multi_head_attention": True}),
    ],
)
def test_attention_of_another_kind(mistake, found, option: str, changes) -> None:
    mistake(option, **changes)
    assert found(**changes, **UNSPLIT) == ({}, {})


@pytest.mark.parametrize("name", ["qk_clip", "log_max_attention_logit"])
def test_logits_are_not_reported(mistake, found, name: str) -> None:
    option = "--" + name.replace("_", "-")
    mistake(option, **{name: True})
    mistake(option, **{name: True}, **UNSPLIT)
    assert found(**{name: True}, **UNSPLIT, facts=CUDA) == ({}, {})


def test_dynamic_context_parallelism_is_another_thing(mistake) -> None:
    error = mistake("--hybrid-context-parallel", hybrid_context_parallel=True)
    assert "hybrid_cp_algo" in error.remedy


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--flash-decode", {"flash_decode": True}),
        ("--inference-dynamic-batching", {"inference_dynamic_batching": True}),
        ("--enable-chunked-prefill", {"enable_chunked_prefill": True}),
        ("--cache-mla-latents", {"cache_mla_latents": True}),
        ("--perform-rl-step", {"perform_rl_step": True}),
        ("--transformer-impl", {"transformer_impl": "inference_optimized"}),
    ],
)
def test_no_kv_cache_under_context_parallelism(mistake, found, option: str, changes) -> None:
    assert "cache" in mistake(option, **changes).reason
    assert found(**changes, **UNSPLIT) == ({}, {})


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--cuda-graph-impl", {"cuda_graph_impl": "local"}),
        ("--cuda-graph-impl", {"cuda_graph_impl": "full_iteration"}),
        ("--enable-cuda-graph", {"enable_cuda_graph": True}),
        ("--external-cuda-graph", {"external_cuda_graph": True}),
    ],
)
def test_no_cuda_graphs(mistake, found, option: str, changes) -> None:
    mistake(option, **changes)
    assert found(**changes, **UNSPLIT) == ({}, {})
    assert found(cuda_graph_impl="none") == ({}, {})
    mistake(option, recompute_activations=True, attention_dropout=0.1, **changes, **UNSPLIT)


def test_recomputation_is_complete(mistake, found) -> None:
    option = "--recompute-granularity"
    mistake(option, recompute_granularity="full")
    mistake(option, recompute_granularity="full", recompute_method="uniform")
    mistake(option, recompute_granularity="selective", recompute_method="uniform")
    mistake(option, recompute_activations=True, recompute_num_layers=1)
    whole = {"recompute_method": "uniform", "recompute_num_layers": 1}
    assert found(recompute_granularity="full", **whole) == ({}, {})
    mistake("--distribute-saved-activations", distribute_saved_activations=True)


def test_overlaps_have_what_they_overlap(mistake) -> None:
    mistake("--tp-comm-overlap", tp_comm_overlap=True)
    mistake("--overlap-param-gather", overlap_param_gather=True)
    error = mistake(
        "--overlap-param-gather", overlap_param_gather=True, use_distributed_optimizer=True
    )
    assert "--overlap-grad-reduce" in error.remedy


def test_routing_by_the_count_of_a_ranks_own_tokens(mistake, found) -> None:
    moe = {"num_experts": 4, "expert_model_parallel_size": 2}
    mistake("--moe-expert-capacity-factor", moe_expert_capacity_factor=1.0, **moe)
    for balancing in ("sinkhorn", ["sinkhorn"]):
        mistake("--moe-router-load-balancing-type", moe_router_load_balancing_type=balancing, **moe)
    harmless = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}
    assert found(**moe, **harmless)[0] == {}
    assert found(moe_expert_capacity_factor=1.0, **moe, **UNSPLIT)[0] == {}
