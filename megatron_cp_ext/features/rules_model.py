"""Rules about what a model or a run contains: positions, attention variants, inference, graphs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.features.facts import Facts
from megatron_cp_ext.features.findings import Advice, Arguments, Finding

_UNSPLIT = "drop it, or train with --context-parallel-size 1 without --context-parallel-algo"


def no_position_bias(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """ALiBi and relative positions are additive biases, which no algorithm computes."""
    kind = args.position_embedding_type
    if not (kind in ("relative", "alibi") or args.alibi):
        return
    if not args.is_active:
        if kind == "relative" and args.transformer_impl == "local":
            yield UsageError(
                option="--position-embedding-type",
                value=kind,
                reason="Megatron's local attention takes no bias on the scores",
                remedy="use rope, or --transformer-impl transformer_engine on CUDA",
            )
        return
    yield UsageError(
        option="--position-embedding-type",
        value=kind,
        reason="its bias on the scores (ALiBi, relative positions) is not computed under "
        "context parallelism",
        remedy="use rope, or --context-parallel-size 1 without --context-parallel-algo",
    )


def mrope_has_sections(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Multi-modal rotary positions are cut into sections."""
    if args.position_embedding_type == "mrope" and args.mrope_section is None:
        yield UsageError(
            option="--mrope-section",
            value=None,
            reason="--position-embedding-type mrope needs it",
            remedy="give the three sections, or use rope",
        )


def mla_has_no_groups(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """MLA makes all KV heads from one latent vector."""
    if args.multi_latent_attention and args.group_query_attention:
        yield UsageError(
            option="--group-query-attention",
            value=True,
            reason="multi-latent attention has as many KV heads as query heads",
            remedy="drop it, or --multi-latent-attention",
        )


def one_half_precision(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """A run has one 16-bit type."""
    if args.fp16 and args.bf16:
        yield UsageError(
            option="--fp16",
            value=True,
            reason="--bf16 is given too",
            remedy="drop one of the two; bf16 needs no loss scaling",
        )


def mtp_positions(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Multi-token prediction shifts positions, which a learned table does not follow."""
    kind = args.position_embedding_type
    if args.mtp_num_layers and kind not in (None, "rope", "none"):
        yield UsageError(
            option="--mtp-num-layers",
            value=args.mtp_num_layers,
            reason=f"Megatron predicts several tokens with rotary positions or none, not {kind}",
            remedy="use --position-embedding-type rope",
        )


def mamba_divides(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """State-space layers exchange their heads among CP ranks by Megatron's own code."""
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern or ""
    if "M" not in pattern or args.cp == 1:
        return
    if facts.platform == "cpu":
        yield UsageError(
            option="--hybrid-layer-pattern",
            value=pattern,
            reason="Mamba layers run on CUDA only",
            remedy="use --cp-platform cuda, or a pattern of attention layers",
        )
    heads = args.mamba_num_heads
    if heads is None and args.hidden_size is not None:
        heads = 2 * args.hidden_size // args.size("mamba_head_dim", 64)
    ranks = args.tp * args.cp
    if heads is not None and heads % ranks:
        yield UsageError(
            option="--mamba-num-heads",
            value=heads,
            reason=f"Mamba layers divide them among TP {args.tp} x CP {args.cp} = {ranks} ranks",
            remedy=f"use a multiple of {ranks}",
        )
    groups = args.size("mamba_num_groups", 8)
    if groups % args.tp or ((groups // args.tp) % args.cp and args.cp % (groups // args.tp)):
        yield UsageError(
            option="--mamba-num-groups",
            value=groups,
            reason=f"TP {args.tp} must divide it, and what is left must be a multiple or a "
            f"divisor of CP {args.cp}",
            remedy=f"use a multiple of {ranks}",
        )
    yield Advice(
        "--hybrid-layer-pattern",
        pattern,
        "Mamba layers keep Megatron's own context parallelism, which this plugin has not tested",
        "compare a few steps with --context-parallel-size 1 first",
    )


def known_attention(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Attention variants with kernels of their own do not go through core attention."""
    if not args.is_active:
        return
    for option, value in (
        ("--experimental-attention-variant", args.experimental_attention_variant),
        ("--use-kitchen-attention", args.use_kitchen_attention),
        ("--fp8-dot-product-attention", args.fp8_dot_product_attention),
        ("--fp8-multi-head-attention", args.fp8_multi_head_attention),
    ):
        if value:
            yield UsageError(
                option=option,
                value=value,
                reason="it computes attention by kernels of its own, which know nothing of the "
                "algorithms here",
                remedy=_UNSPLIT,
            )


def logits_are_reported(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """The largest attention logit comes from Transformer Engine's kernels alone."""
    for option, value in (
        ("--qk-clip", args.qk_clip),
        ("--log-max-attention-logit", args.log_max_attention_logit),
    ):
        if value and (args.is_active or facts.platform == "cpu"):
            yield UsageError(
                option=option,
                value=value,
                reason="the largest attention logit is reported by Transformer Engine alone, and "
                "its kernels are not used here",
                remedy=_UNSPLIT + ", on CUDA",
            )


def no_dynamic_cp(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Megatron's own hybrid context parallelism: another thing than hybrid_cp_algo."""
    if args.hybrid_context_parallel:
        yield UsageError(
            option="--hybrid-context-parallel",
            value=True,
            reason="Megatron's dynamic context parallelism changes the CP size from sample to "
            "sample, and the algorithms here need one size",
            remedy="drop it; for Ulysses inside a ring use --context-parallel-algo "
            "hybrid_cp_algo, for documents of unequal length "
            "--dataloader-inter-document-masking",
        )


def no_inference(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """A KV cache holds whole sequences, one rank's at a time."""
    if not args.is_active:
        return
    for option, value in (
        ("--flash-decode", args.flash_decode),
        ("--inference-dynamic-batching", args.inference_dynamic_batching),
        ("--enable-chunked-prefill", args.enable_chunked_prefill),
        ("--cache-mla-latents", args.cache_mla_latents),
        ("--perform-rl-step", args.perform_rl_step),
        ("--transformer-impl", args.transformer_impl == "inference_optimized"),
    ):
        if value:
            yield UsageError(
                option=option,
                value="inference_optimized" if option == "--transformer-impl" else value,
                reason="generating with a KV cache is not supported while the sequence is "
                "split over ranks",
                remedy="generate with --context-parallel-size 1 from the same checkpoint",
            )


def no_cuda_graphs(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Exchanges between ranks and their plans are made on the host at every call."""
    impl = args.cuda_graph_impl
    given = {
        "--cuda-graph-impl": impl if impl not in (None, "none") else None,
        "--enable-cuda-graph": args.enable_cuda_graph,
        "--external-cuda-graph": args.external_cuda_graph,
    }
    selective = args.recompute_activations or args.recompute_granularity == "selective"
    for option, value in given.items():
        if value and not args.is_active and selective and args.attention_dropout:
            yield UsageError(
                option=option,
                value=value,
                reason="Megatron captures no recomputed attention with dropout",
                remedy="use --attention-dropout 0, or no selective recomputation",
            )
        if args.is_active and value:
            yield UsageError(
                option=option,
                value=value,
                reason="attention exchanges tensors with other ranks in a way that no CUDA "
                "graph captures",
                remedy="drop it, or use --cuda-graph-impl none",
            )


def recompute_is_complete(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Full recomputation needs a method and a number of layers, selective neither."""
    kind, method, layers = (
        "selective" if args.recompute_activations else args.recompute_granularity,
        args.recompute_method,
        args.recompute_num_layers,
    )
    if kind == "selective" and (method is not None or layers is not None):
        yield UsageError(
            option="--recompute-granularity",
            value=kind,
            reason="--recompute-method and --recompute-num-layers belong to full recomputation",
            remedy="drop them, or use --recompute-granularity full",
        )
    if kind == "full" and (method is None or layers is None):
        yield UsageError(
            option="--recompute-granularity",
            value=kind,
            reason="full recomputation needs to know which layers",
            remedy="add --recompute-method uniform --recompute-num-layers 1",
        )
    if not args.distribute_saved_activations:
        return
    if args.tp == 1 or kind != "full" or args.sequence_parallel:
        yield UsageError(
            option="--distribute-saved-activations",
            value=True,
            reason="it spreads fully recomputed activations over tensor-parallel ranks, which "
            "sequence parallelism has done already",
            remedy="drop it",
        )


def experts_choose_for_whole_sequences(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Routing that counts a rank's own tokens drops or moves others than at CP = 1."""
    if args.cp == 1 or not args.num_experts:
        return
    if args.moe_expert_capacity_factor is not None:
        yield UsageError(
            option="--moe-expert-capacity-factor",
            value=args.moe_expert_capacity_factor,
            reason="each rank of --context-parallel-size would drop tokens by the count of its own "
            "part of the sequence, and so others than one rank would",
            remedy="drop it; without a capacity no token is dropped",
        )
    balancing = args.moe_router_load_balancing_type
    if "sinkhorn" in (balancing if isinstance(balancing, list) else [balancing]):
        yield UsageError(
            option="--moe-router-load-balancing-type",
            value="sinkhorn",
            reason="it assigns each rank's own part of the sequence by itself, and so otherwise "
            "than one rank would",
            remedy="use aux_loss, seq_aux_loss, global_aux_loss or none",
        )


def overlaps_fit(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Overlapped communication that needs another option."""
    if args.tp_comm_overlap and (not args.sequence_parallel or args.tp == 1):
        yield UsageError(
            option="--tp-comm-overlap",
            value=True,
            reason="it overlaps the communication of sequence parallelism, which is off",
            remedy="drop it, or add --sequence-parallel with a tensor-parallel size above 1",
        )
    if args.overlap_param_gather and not (
        args.use_distributed_optimizer or args.use_megatron_fsdp or args.optimizer == "dist_muon"
    ):
        yield UsageError(
            option="--overlap-param-gather",
            value=True,
            reason="only the distributed optimizer gathers parameters",
            remedy="drop it, or add --use-distributed-optimizer",
        )
    elif args.overlap_param_gather and not args.overlap_grad_reduce:
        yield UsageError(
            option="--overlap-param-gather",
            value=True,
            reason="Megatron overlaps the gather only where it overlaps the reduction too",
            remedy="add --overlap-grad-reduce",
        )


RULES = (
    no_position_bias,
    mrope_has_sections,
    mla_has_no_groups,
    one_half_precision,
    mtp_positions,
    mamba_divides,
    known_attention,
    logits_are_reported,
    no_dynamic_cp,
    no_inference,
    no_cuda_graphs,
    recompute_is_complete,
    experts_choose_for_whole_sequences,
    overlaps_fit,
)
