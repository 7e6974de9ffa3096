"""Rules about what computes attention, the masks it is given, and the platform it runs on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_cp_ext import capabilities
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.features.facts import BLACKWELL, Facts
from megatron_cp_ext.features.findings import Advice, Arguments, Finding
from megatron_cp_ext.megatron.settings import ALGORITHM_NAMES, algorithm_of
from megatron_cp_ext.planner.hardware import DEVICES, hiding_length

# Oldest versions this plugin has code for; a package that is missing is another matter.
OLDEST = {"torch": (2, 6), "transformer_engine": (1, 7), "flash_attn": (2, 0), "torch_npu": (2, 6)}
_INSTALL = {
    "transformer_engine": 'pip install "transformer-engine[pytorch]"',
    "flash_attn": "pip install flash-attn",
    "torch_npu": "pip install torch-npu",
}

# From this many positions on, the data loader's mask of [s, s] booleans takes a gigabyte.
LONG_MASK = 32768


def local_heads(args: Arguments) -> tuple[int, int]:
    """Query and KV heads on each tensor-parallel rank, at least one each."""
    kv_heads = args.num_attention_heads if args.multi_latent_attention else args.kv_heads
    return max(1, args.num_attention_heads // args.tp), max(1, (kv_heads or 1) // args.tp)


def ulysses_degree_of(args: Arguments) -> int:
    """Size of the Ulysses groups, 1 for algorithms without and for a hybrid without a degree."""
    algorithm = algorithm_of(args)
    if algorithm == "ulysses":
        return args.cp
    return (args.ulysses_degree_in_cp or 1) if algorithm == "hybrid" else 1


def value_dim_differs(args: Arguments) -> bool:
    """Whether a value head is of another size than a key head, as in MLA."""
    if not args.multi_latent_attention:
        return False
    query_dim = args.size("qk_head_dim", 128) + args.size("qk_pos_emb_head_dim", 64)
    return query_dim != args.size("v_head_dim", 128)


def features_of(args: Arguments) -> list[str]:
    """What the kernels must be able to do, in the words of `capabilities.FEATURES`."""
    heads, kv_heads = local_heads(args)
    degree = ulysses_degree_of(args)
    dtype = "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"
    used = {
        "causal": args.attention_mask_type != "general",
        "dense": args.attention_mask_type == "general",
        "window": args.window_size is not None,
        "documents": args.reset_attention_mask or args.dataloader_inter_document_masking,
        "sink": args.softmax_type not in (None, "vanilla"),
        "gqa": kv_heads < heads,
        "few_kv_heads": kv_heads < degree,
        "uneven_heads": heads % degree != 0,
        "v_dim": value_dim_differs(args),
        "dropout": bool(args.attention_dropout),
        "deterministic": args.deterministic_mode,
        dtype: True,
    }
    return [feature for feature, is_used in used.items() if is_used]


def chosen_kernel(args: Arguments, facts: Facts) -> str:
    """The kernel that attention will get.

    Raises:
        UsageError: none can do what is asked.
    """
    return capabilities.require(
        algorithm=algorithm_of(args),
        kernel=args.cp_kernel or "auto",
        features=features_of(args),
        platform=facts.platform,
    )


def kernel_can(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Some kernel must do what the model needs; a slow one gets a word."""
    known = algorithm_of(args) in ALGORITHM_NAMES.values()
    if not args.is_active or not known or args.num_attention_heads is None:
        return
    asked = args.cp_kernel or "auto"
    try:
        kernel = chosen_kernel(args, facts)
    except UsageError as error:
        dropout = "dropout" in str(error.value)
        yield UsageError(
            option="--attention-dropout" if dropout else "--cp-kernel",
            value=args.attention_dropout if dropout else asked,
            reason=f"{error.value}: {error.reason}",
            remedy=f"{error.remedy}, or use --attention-dropout 0" if dropout else error.remedy,
        )
        return
    if asked == "auto" and kernel == "reference" and args.attention_dropout:
        yield Advice(
            "--attention-dropout",
            args.attention_dropout,
            "only kernel reference has dropout, which computes every score explicitly: slow, "
            "and memory grows with the square of a chunk",
            "use --attention-dropout 0; Megatron's default is 0.1",
        )
    elif asked == "auto" and kernel == "reference" and facts.platform == "cuda":
        yield Advice(
            "--cp-kernel",
            asked,
            "only kernel reference can do this, which computes every score explicitly",
            "train short sequences only",
        )


def packages_are_there(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """What the flags ask for must be importable, and not too old."""
    if not facts.here:
        return
    asked = {}
    if facts.platform == "cuda" and args.transformer_impl == "transformer_engine":
        asked["transformer_engine"] = ("--transformer-impl", "transformer_engine", "local")
    if args.cp_kernel and args.cp_kernel.startswith("flash_attn"):
        asked["flash_attn"] = ("--cp-kernel", args.cp_kernel, "auto")
    if facts.platform == "npu":
        asked["torch_npu"] = ("--cp-platform", "npu", "cpu")
    for package, (option, value, other) in asked.items():
        if package not in facts.versions:
            yield UsageError(
                option=option,
                value=value,
                reason=f"{package} is not importable on this machine",
                remedy=f"{_INSTALL[package]}, or use {option} {other}",
            )
    for package, oldest in OLDEST.items():
        version = facts.versions.get(package, "")
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers and numbers < oldest and (package == "torch" or package in asked):
            wanted = ".".join(map(str, oldest))
            yield UsageError(
                option=asked.get(package, ("--cp-platform",))[0],
                value=f"{package} {version}",
                reason=f"versions before {wanted} lack what is called here",
                remedy=f'pip install "{package.replace("_", "-")}>={wanted}"',
            )


def backend_is_left_alone(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Megatron's choice of attention kernel chooses nothing here."""
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    if not args.is_active:
        if backend == "local" and (not args.spec or args.spec[0] != "local"):
            yield UsageError(
                option="--attention-backend",
                value=backend,
                reason="Megatron takes it with --spec local only",
                remedy="drop it; --transformer-impl local chooses Megatron's own attention",
            )
        return
    for option, value in (
        ("--attention-backend", backend if backend not in (None, "auto") else None),
        ("--flash-attention-version", args.flash_attention_version),
    ):
        if value is not None:
            yield UsageError(
                option=option,
                value=value,
                reason="attention is not computed by Megatron's backends here, so it would "
                "choose nothing",
                remedy="drop it, and use --cp-kernel to choose a kernel",
            )
    if args.use_flash_attn:
        yield Advice(
            "--use-flash-attn",
            True,
            "it chooses nothing here",
            "drop it; --cp-kernel auto takes the fastest kernel there is",
        )


def dropout_is_a_probability(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Dropping everything leaves nothing."""
    value = args.attention_dropout
    if value is not None and not 0 <= value < 1:
        yield UsageError(
            option="--attention-dropout",
            value=value,
            reason="it is a probability of dropping, below 1",
            remedy="use 0",
        )


def mask_is_there(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """A general mask is made by the data loader, and is as large as the square of the sequence."""
    if not args.is_active or args.attention_mask_type != "general":
        return
    if args.dataloader_inter_document_masking:
        yield UsageError(
            option="--attention-mask-type",
            value="general",
            reason="with --dataloader-inter-document-masking the data loader makes no mask "
            "tensor; boundaries say it all",
            remedy="use --attention-mask-type causal",
        )
    elif args.create_attention_mask_in_dataloader is False:
        yield UsageError(
            option="--attention-mask-type",
            value="general",
            reason="--no-create-attention-mask-in-dataloader leaves it without a mask",
            remedy="use --attention-mask-type causal, or let the data loader make the mask",
        )
    elif (args.seq_length or 0) >= LONG_MASK:
        size = args.seq_length**2 / 2**30
        yield Advice(
            "--attention-mask-type",
            "general",
            f"every sample's mask takes {size:.0f} GiB on every rank",
            "use causal; --reset-attention-mask keeps documents apart without a mask tensor",
        )


def losses_are_weighed(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Megatron divides the loss by the tokens of a CP rank, of which masks leave unequal counts."""
    uneven = [
        option
        for option, given in (
            ("--eod-mask-loss", args.eod_mask_loss),
            ("--sft", args.sft),
            ("--fim-data", args.fim_data),
        )
        if given
    ]
    corrected = args.cp_loss_correction is not False
    if args.cp > 1 and uneven and not args.calculate_per_token_loss and not corrected:
        yield Advice(
            uneven[0],
            True,
            "loss masks leave the ranks unequal counts of tokens, by which Megatron divides "
            "each rank's loss",
            "add --calculate-per-token-loss, or drop --no-cp-loss-correction",
        )


def connections_are_limited(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Before Blackwell, Megatron wants one hardware queue, to order communication and kernels."""
    if facts.platform != "cuda" or (args.tp == 1 and args.cp == 1):
        return
    if (facts.device_arch or 0) >= BLACKWELL or args.use_megatron_fsdp or args.use_torch_fsdp2:
        return
    value = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value == "1" or args.overlap_moe_expert_parallel_comm:
        return
    parts = (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        value,
        "with tensor or context parallelism Megatron demands 1 on GPUs before Blackwell",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1 in the launch script",
    )
    if facts.here:
        yield UsageError(option=parts[0], value=parts[1], reason=parts[2], remedy=parts[3])
    else:
        yield Advice(*parts)


def overlap_has_a_ring(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Two directions need a ring to go round."""
    known = algorithm_of(args) in ALGORITHM_NAMES.values()
    degree = ulysses_degree_of(args)
    rings = algorithm_of(args) in ("ring", "hybrid") and args.cp > degree
    if args.use_cp_send_recv_overlap and known and not rings:
        yield UsageError(
            option="--use-cp-send-recv-overlap",
            value=True,
            reason=f"algorithm {algorithm_of(args)} with --context-parallel-size {args.cp} "
            "sends nothing around a ring",
            remedy="drop it, or use --context-parallel-algo megatron_cp_algo or hybrid_cp_algo",
        )


def chunks_hide_the_ring(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """A step of the ring must compute as long as it sends: c >= (K / H) e F / B."""
    degree = ulysses_degree_of(args)
    ring = args.cp // degree
    if (
        algorithm_of(args) not in ("ring", "hybrid")
        or ring < 2
        or facts.platform not in DEVICES
        or None in (args.seq_length, args.num_attention_heads)
    ):
        return
    heads, kv_heads = local_heads(args)
    device = DEVICES[facts.platform]
    inside = args.tp * args.cp <= facts.devices_per_node
    needed = hiding_length(
        heads=heads,
        kv_heads=max(kv_heads, degree),
        element_size=2 if args.bf16 or args.fp16 else 4,
        device=device,
        inside_node=inside,
    )
    tokens = args.seq_length // ring
    if tokens >= needed:
        return
    link = "within a node" if inside else "between nodes"
    yield Advice(
        "--seq-length",
        args.seq_length,
        f"a step of the ring computes on {tokens} tokens, and needs {needed} to hide its "
        f"messages {link} ({device.name})",
        f"use {needed * ring} tokens or more, a smaller context-parallel size, or a larger "
        "Ulysses degree (hybrid_cp_algo)",
    )


RULES = (
    kernel_can,
    packages_are_there,
    backend_is_left_alone,
    dropout_is_a_probability,
    mask_is_there,
    losses_are_weighed,
    connections_are_limited,
    overlap_has_a_ring,
    chunks_hide_the_ring,
)
