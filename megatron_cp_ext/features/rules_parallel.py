"""Rules about degrees: how ranks, tokens, heads, layers and batches are divided."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.features.facts import Facts
from megatron_cp_ext.features.findings import Arguments, Finding
from megatron_cp_ext.megatron.settings import ALGORITHM_NAMES, algorithm_of

# Megatron's --cp-comm-type, in both spellings, and the algorithm that communicates so.
COMM_TYPES = {
    "p2p": "ring",
    "a2a": "ulysses",
    "a2a+p2p": "hybrid",
    "allgather": "kvallgather",
    "all_gather": "kvallgather",
}
DEFAULT_COMM_TYPE = ["p2p"]

_DEGREES = {
    "--tensor-model-parallel-size": "tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "--context-parallel-size": "context_parallel_size",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
    "--micro-batch-size": "micro_batch_size",
    "--global-batch-size": "global_batch_size",
    "--seq-length": "seq_length",
    "--num-layers": "num_layers",
    "--num-attention-heads": "num_attention_heads",
    "--hidden-size": "hidden_size",
}


def degrees_are_positive(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Zero or fewer of anything: nothing else can be said then."""
    for option, name in _DEGREES.items():
        value = getattr(args, name)
        if value is not None and value < 1:
            yield UsageError(
                option=option, value=value, reason="it is a count", remedy="use 1 or more"
            )
    if args.group_query_attention and args.size("num_query_groups") < 1:
        yield UsageError(
            option="--num-query-groups",
            value=args.num_query_groups,
            reason="it is the count of KV heads",
            remedy="use 1 or more",
        )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def world_size_fits(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """TP x PP x CP must divide the world."""
    world, model = args.size("world_size"), args.tp * args.pp * args.cp
    if world % model == 0:
        return
    fitting = divisors(world // (args.tp * args.pp)) if world % (args.tp * args.pp) == 0 else []
    remedy = f"use a world size that is a multiple of {model}"
    if fitting:
        remedy += f", or one of {fitting} for --context-parallel-size"
    else:
        remedy += f", or degrees whose product is one of {divisors(world)}"
    yield UsageError(
        option="--context-parallel-size",
        value=args.cp,
        reason=f"TP {args.tp} x PP {args.pp} x CP {args.cp} = {model} ranks do not divide the "
        f"world of {world}",
        remedy=remedy,
    )


def sequence_fits(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Two chunks for each CP rank, and equal shares of a chunk pair for each TP rank."""
    length = args.seq_length
    if length is None:
        return
    parts = 2 * args.cp if args.cp > 1 else 1
    sharing = args.tp if args.sequence_parallel and args.tp > 1 else 1
    # Local tokens are length / cp, of which each tensor-parallel rank takes an equal part.
    step = math.lcm(parts, args.cp * sharing)
    if length % step == 0:
        return
    nearest = max(1, round(length / step)) * step
    if length % parts:
        reason = (
            f"--context-parallel-size {args.cp} cuts the sequence into {parts} equal chunks, two "
            "for each rank"
        )
    else:
        reason = (
            f"--sequence-parallel divides the {length // args.cp} tokens of a rank among "
            f"{args.tp} tensor-parallel ranks"
        )
    yield UsageError(
        option="--seq-length",
        value=length,
        reason=reason,
        remedy=f"use a multiple of {step}, for example {nearest}",
    )


def positions_reach(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Megatron wants as many positions as tokens, whatever the kind of position."""
    length, most = args.seq_length, args.max_position_embeddings
    if length is not None and most is not None and most < length:
        yield UsageError(
            option="--max-position-embeddings",
            value=most,
            reason=f"a sequence has {length} tokens (--seq-length)",
            remedy=f"use {length} or more",
        )


def heads_fit_tensor_parallelism(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Query heads and KV heads over tensor-parallel ranks."""
    heads, kv_heads, tp = args.num_attention_heads, args.kv_heads, args.tp
    if heads is None:
        return
    if args.hidden_size is not None and args.kv_channels is None and args.hidden_size % heads:
        yield UsageError(
            option="--num-attention-heads",
            value=heads,
            reason=f"it does not divide --hidden-size {args.hidden_size}",
            remedy=f"use a divisor of {args.hidden_size}, or give the size of a head as "
            "--kv-channels",
        )
    if heads % tp:
        fitting = [d for d in divisors(heads) if args.size("world_size") % d == 0]
        yield UsageError(
            option="--tensor-model-parallel-size",
            value=tp,
            reason=f"it does not divide {heads} attention heads",
            remedy=f"use one of {fitting}",
        )
    if kv_heads is None or args.multi_latent_attention:
        return
    if heads % kv_heads:
        yield UsageError(
            option="--num-query-groups",
            value=kv_heads,
            reason=f"{heads} query heads are not a multiple of it",
            remedy=f"use one of {divisors(heads)}",
        )
    if kv_heads % tp and tp % kv_heads:
        yield UsageError(
            option="--num-query-groups",
            value=kv_heads,
            reason=f"it is neither a multiple nor a divisor of --tensor-model-parallel-size {tp}",
            remedy=f"use a multiple or a divisor of {tp}",
        )


def heads_fit_ulysses(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Every rank of a Ulysses group needs a query head of its own; KV heads may be fewer."""
    algorithm, heads = algorithm_of(args), args.num_attention_heads
    degree = {"ulysses": args.cp, "hybrid": args.ulysses_degree_in_cp}.get(algorithm)
    if degree is None or heads is None or heads // args.tp >= degree:
        return
    local = heads // args.tp
    fitting = [d for d in divisors(args.cp) if 1 < d <= local and d < args.cp]
    remedy = "use megatron_cp_algo or kvallgather_cp_algo"
    if fitting:
        remedy += f", or hybrid_cp_algo with --ulysses-degree-in-cp of one of {fitting}"
    yield UsageError(
        option="--ulysses-degree-in-cp" if algorithm == "hybrid" else "--context-parallel-size",
        value=degree,
        reason=f"{heads} heads over --tensor-model-parallel-size {args.tp} leave {local} for "
        f"{degree} Ulysses ranks, and each needs one",
        remedy=remedy,
    )


def hybrid_has_two_factors(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """A Ulysses degree and a ring, both larger than one, and only for a hybrid."""
    degree, algorithm = args.ulysses_degree_in_cp, algorithm_of(args)
    if algorithm != "hybrid":
        if degree is not None and algorithm in ALGORITHM_NAMES.values():
            yield UsageError(
                option="--ulysses-degree-in-cp",
                value=degree,
                reason=f"algorithm {algorithm} does not read it",
                remedy="drop it, or use --context-parallel-algo hybrid_cp_algo",
            )
        return
    fitting = [d for d in divisors(args.cp) if 1 < d < args.cp]
    if degree in fitting:
        return
    yield UsageError(
        option="--ulysses-degree-in-cp",
        value=degree,
        reason=f"a hybrid cuts --context-parallel-size {args.cp} into a Ulysses degree and a "
        "ring, both larger than 1",
        remedy=f"use one of {fitting}"
        if fitting
        else "use ulysses_cp_algo or megatron_cp_algo, or a context-parallel size that is not "
        "prime, such as 4",
    )


def hierarchy_is_consistent(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Megatron's hierarchical groups must be [ulysses, ring] of the hybrid, or not be given."""
    sizes, option = (
        args.hierarchical_context_parallel_sizes,
        "--hierarchical-context-parallel-sizes",
    )
    if not sizes:
        return
    if math.prod(sizes) != args.cp:
        yield UsageError(
            option=option,
            value=list(sizes),
            reason=f"their product is {math.prod(sizes)}, and --context-parallel-size is {args.cp}",
            remedy="drop it: the sizes follow from --ulysses-degree-in-cp",
        )
        return
    algorithm, degree = algorithm_of(args), args.ulysses_degree_in_cp
    if algorithm != "hybrid":
        if args.is_active:
            yield UsageError(
                option=option,
                value=list(sizes),
                reason=f"algorithm {algorithm} has no levels",
                remedy="drop it, or use --context-parallel-algo hybrid_cp_algo",
            )
        return
    if degree and args.cp % degree == 0 and list(sizes) != [degree, args.cp // degree]:
        yield UsageError(
            option=option,
            value=list(sizes),
            reason=f"--ulysses-degree-in-cp {degree} of --context-parallel-size {args.cp} needs "
            f"groups of {[degree, args.cp // degree]}, innermost first",
            remedy="drop it, or make the two agree",
        )


def comm_type_agrees(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """`--cp-comm-type` says the same as the algorithm, for all layers."""
    given = args.cp_comm_type
    given = [given] if isinstance(given, str) else given
    if not given:
        return
    option, shown = "--cp-comm-type", " ".join(map(str, given))
    if args.cp == 1:
        if "a2a+p2p" in given and args.hierarchical_context_parallel_sizes is None:
            yield UsageError(
                option=option,
                value=shown,
                reason="there are no two levels of ranks with --context-parallel-size 1",
                remedy="drop it, or raise --context-parallel-size to 4 or more",
            )
        return
    unknown = [kind for kind in given if kind not in COMM_TYPES]
    if unknown:
        yield UsageError(
            option=option,
            value=shown,
            reason=f"there is no {', '.join(map(str, unknown))}",
            remedy=f"use one of {', '.join(COMM_TYPES)}, or --context-parallel-algo alone",
        )
        return
    meant = {COMM_TYPES[kind] for kind in given}
    if len(meant) > 1:
        yield UsageError(
            option=option,
            value=shown,
            reason="one algorithm serves all layers",
            remedy="name one type, or use --context-parallel-algo alone",
        )
        return
    if len(given) > 1 and args.num_layers is not None and len(given) != args.num_layers:
        yield UsageError(
            option=option,
            value=shown,
            reason=f"there are {len(given)} types for {args.num_layers} layers",
            remedy=f"name one type for all layers: {given[0]}",
        )
    algorithm = algorithm_of(args)
    if list(given) != DEFAULT_COMM_TYPE and meant != {algorithm}:
        (wanted,) = meant
        long_name = {short: name for name, short in ALGORITHM_NAMES.items()}[wanted]
        yield UsageError(
            option=option,
            value=shown,
            reason=f"it means {long_name}, and --context-parallel-algo says "
            f"{args.context_parallel_algo}",
            remedy=f"drop it, or use --context-parallel-algo {long_name}",
        )


def batch_fits(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Samples of a step over data-parallel ranks and micro-batches."""
    micro, model = args.micro_batch_size, args.tp * args.pp * args.cp
    if micro is None:
        if args.step_batch_size_schedule is None:
            yield UsageError(
                option="--micro-batch-size",
                value=None,
                reason="Megatron has no default for it",
                remedy="use 1 for long sequences",
            )
        return
    world = args.size("world_size")
    if world % model:
        return
    step = micro * (world // model)
    for option, total, each in (
        ("--global-batch-size", args.global_batch_size, step),
        (
            "--eval-global-batch-size",
            args.eval_global_batch_size,
            args.size("eval_micro_batch_size", micro) * (world // model),
        ),
    ):
        if total is not None and total % each:
            yield UsageError(
                option=option,
                value=total,
                reason=f"{world // model} data-parallel ranks take micro-batches of "
                f"{each // (world // model)}, together {each} samples",
                remedy=f"use a multiple of {each}",
            )


def layers_fit_pipeline(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Layers over pipeline stages, real and virtual."""
    irregular = (
        args.decoder_first_pipeline_num_layers,
        args.decoder_last_pipeline_num_layers,
        args.pipeline_model_parallel_layout,
        args.hybrid_layer_pattern,
    )
    if args.num_layers is None or any(value is not None for value in irregular):
        return
    layers = args.num_layers
    layers += bool(args.account_for_embedding_in_pipeline_split)
    layers += bool(args.account_for_loss_in_pipeline_split)
    if layers % args.pp:
        yield UsageError(
            option="--pipeline-model-parallel-size",
            value=args.pp,
            reason=f"{layers} layers do not divide into that many stages",
            remedy=f"use one of {[d for d in divisors(layers) if d <= args.size('world_size')]}",
        )
        return
    yield from _virtual_stages(args, layers // args.pp)


def _virtual_stages(args: Arguments, per_stage: int) -> Iterator[Finding]:
    per_virtual = args.num_layers_per_virtual_pipeline_stage
    count = args.num_virtual_stages_per_pipeline_rank
    if per_virtual is None and count is None:
        return
    option = "--num-layers-per-virtual-pipeline-stage"
    if per_virtual is None:
        option = "--num-virtual-stages-per-pipeline-rank"
    if per_virtual is not None and count is not None:
        yield UsageError(
            option=option,
            value=per_virtual,
            reason=f"--num-virtual-stages-per-pipeline-rank {count} says it another way",
            remedy="drop one of the two",
        )
        return
    number = per_virtual if count is None else count
    if number < 1 or per_stage % number:
        yield UsageError(
            option=option,
            value=number,
            reason=f"it does not divide the {per_stage} layers of a stage",
            remedy=f"use one of {divisors(per_stage)}",
        )
        return
    virtual = per_stage // number if count is None else count
    fewest = 2 if args.overlap_p2p_comm in (None, True) else 3
    if virtual > 1 and args.pp < fewest:
        yield UsageError(
            option=option,
            value=number,
            reason=f"interleaved stages need {fewest} pipeline ranks or more, and there are "
            f"{args.pp}",
            remedy="drop it, or raise --pipeline-model-parallel-size",
        )


def experts_fit(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Experts over expert-parallel ranks, and those over the world."""
    experts, ep = args.num_experts, args.size("expert_model_parallel_size")
    if not experts:
        if ep > 1:
            yield UsageError(
                option="--expert-model-parallel-size",
                value=ep,
                reason="there are no experts",
                remedy="drop it, or give --num-experts",
            )
        return
    if experts % ep:
        yield UsageError(
            option="--expert-model-parallel-size",
            value=ep,
            reason=f"it does not divide {experts} experts",
            remedy=f"use one of {divisors(experts)}",
        )
    etp = args.size("expert_tensor_parallel_size", args.tp)
    world, needed = args.size("world_size"), etp * ep * args.pp
    if world % needed:
        yield UsageError(
            option="--expert-model-parallel-size",
            value=ep,
            reason=f"expert TP {etp} x EP {ep} x PP {args.pp} = {needed} ranks do not divide the "
            f"world of {world}",
            remedy="set --expert-tensor-parallel-size 1, or lower --expert-model-parallel-size",
        )
    if args.size("moe_router_topk", 2) > experts:
        yield UsageError(
            option="--moe-router-topk",
            value=args.size("moe_router_topk", 2),
            reason=f"there are {experts} experts",
            remedy=f"use at most {experts}",
        )
    if args.tp > 1 and not args.sequence_parallel:
        yield UsageError(
            option="--num-experts",
            value=experts,
            reason=f"with --tensor-model-parallel-size {args.tp} Megatron trains experts only "
            "under sequence parallelism",
            remedy="add --sequence-parallel",
        )
    if args.moe_grouped_gemm and (
        facts.platform == "cpu" or (facts.device_arch is not None and facts.device_arch < 8)
    ):
        yield UsageError(
            option="--moe-grouped-gemm",
            value=True,
            reason="its kernels need a CUDA device of compute capability 8 or more",
            remedy="drop it",
        )


RULES = (
    world_size_fits,
    sequence_fits,
    positions_reach,
    heads_fit_tensor_parallelism,
    heads_fit_ulysses,
    hybrid_has_two_factors,
    hierarchy_is_consistent,
    comm_type_agrees,
    batch_fits,
    layers_fit_pipeline,
    experts_fit,
)
