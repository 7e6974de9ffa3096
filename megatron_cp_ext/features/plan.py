"""`--cp-print-plan` and `--cp-dry-run`, and the plan that follows from Megatron's arguments."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
from collections.abc import Iterable
from typing import Any

from megatron_cp_ext.features.facts import Facts
from megatron_cp_ext.features.findings import Arguments
from megatron_cp_ext.features.rules_kernel import (
    chosen_kernel,
    local_heads,
    ulysses_degree_of,
)
from megatron_cp_ext.mask import AttentionMask
from megatron_cp_ext.megatron.settings import algorithm_of
from megatron_cp_ext.patching import Feature, Patch, PatchManager
from megatron_cp_ext.planner.memory import Weights
from megatron_cp_ext.planner.plan import Plan, Training, make_plan
from megatron_cp_ext.planner.topology import Topology
from megatron_cp_ext.planner.traffic import AttentionShape

# What Megatron's estimate counts for a parameter without a distributed optimizer, and for one
# whose optimizer state is spread over so many ranks that none of it is left.
_WHOLE, _WITHOUT_STATE = 18, 6
_MANY = 10**12


class PlanFeature(Feature):
    """Prints the plan on rank 0 before the model is built, and stops there if asked to."""

    name = "plan"

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(title="context parallelism: plan")
        group.add_argument(
            "--cp-print-plan",
            action="store_true",
            help="Print, before the model is built, which ranks form which group, the tokens "
            "each context-parallel rank holds, the kernel, the patches, and bytes and memory.",
        )
        group.add_argument(
            "--cp-dry-run",
            action="store_true",
            help="Print the plan and stop with exit status 0 on every rank.",
        )

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        """Act last, when the other features have declared their patches."""
        if args.rank == 0 and (args.cp_print_plan or args.cp_dry_run):
            from rich.console import Console

            from megatron_cp_ext.planner.render import print_plan

            facts = Facts.of_this_machine(args.cp_platform)
            plan = plan_of(args, facts, manager.declared())
            print_plan(plan, Console(width=100, highlight=False))
        if args.cp_dry_run:
            raise SystemExit(0)


def plan_of(
    args: argparse.Namespace, facts: Facts, patches: Iterable[Patch], *, sample_rank: int = 0
) -> Plan:
    """The plan of validated arguments.

    Args:
        args: Megatron's arguments, validated.
        facts: of the machine that will train.
        patches: what the features have declared.
        sample_rank: the rank whose groups are shown.
    """
    view = Arguments(args)
    own = view.is_active
    ulysses = ulysses_degree_of(view) if own else 1
    topology = Topology(
        world=view.world_size,
        tp=view.tp,
        cp=view.cp,
        pp=view.pp,
        ulysses=ulysses,
        ep=view.size("expert_model_parallel_size"),
        etp=view.size("expert_tensor_parallel_size", view.tp),
        pipeline_before_data=bool(view.use_tp_pp_dp_mapping),
    )
    mask, mask_name = _mask(view)
    micro_batches = max(1, view.global_batch_size // (view.micro_batch_size * topology.dp))
    weights, activations, notes = _estimate(args, topology, micro_batches)
    declared = (f"{patch.target} ({patch.owner})" for patch in patches)
    training = Training(
        topology=topology,
        algorithm=algorithm_of(view) if own else None,
        seq_len=view.seq_length,
        mask=mask,
        mask_name=mask_name,
        shape=_shape(view),
        layers=-(-view.num_layers // view.pp),
        micro_batches=micro_batches,
        kernel=chosen_kernel(view, facts) if own else None,
        platform=facts.platform,
        weights=weights,
        activations=activations,
        patches=tuple(dict.fromkeys(declared)),
        notes=tuple(notes),
    )
    return make_plan(training, sample_rank=sample_rank)


def _shape(args: Arguments) -> AttentionShape:
    heads, kv_heads = local_heads(args)
    if args.multi_latent_attention:
        qk_dim = args.qk_head_dim + args.qk_pos_emb_head_dim
        v_dim = args.v_head_dim
    else:
        qk_dim = v_dim = args.kv_channels
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        batch=args.micro_batch_size,
        element_size=2 if args.bf16 or args.fp16 else 4,
    )


def _mask(args: Arguments) -> tuple[AttentionMask, str]:
    """The mask of a layer without a window if there are some, else of every layer."""
    words = []
    if args.reset_attention_mask or args.dataloader_inter_document_masking:
        words.append("documents")
    if args.attention_mask_type == "general":
        return AttentionMask.full(), " ".join(["general", *words])
    window = args.window_size
    if window is not None:
        words.append(f"window {window[0]}")
    if window is None or args.window_attn_skip_freq is not None:
        return AttentionMask.causal(), " ".join(["causal", *words])
    left, right = (None if side < 0 else side for side in window)
    return AttentionMask.causal((left, right)), " ".join(["causal", *words])


def _estimate(
    args: argparse.Namespace, topology: Topology, micro_batches: int
) -> tuple[Weights | None, int, list[str]]:
    """Megatron's own estimates, with the local part of the sequence; and what they leave out."""
    from megatron.training import theoretical_memory_usage as usage

    notes = []
    local = copy.copy(args)
    local.seq_length = args.seq_length // topology.cp
    if getattr(args, "padded_vocab_size", None) is None:
        vocabulary = getattr(args, "vocab_size", None)
        if vocabulary is None:
            vocabulary = 128256
            notes.append("--vocab-size is not given; memory is that of 128256 tokens")
        step = args.make_vocab_size_divisible_by * topology.tp
        local.padded_vocab_size = -(-vocabulary // step) * step
    if getattr(args, "hybrid_layer_pattern", None):
        return None, 0, [*notes, "there is no memory estimate for Mamba layers"]
    if topology.pp > 1:
        notes.append("memory is that of the first pipeline stage")
    with contextlib.redirect_stdout(io.StringIO()):
        weights = _weights(local, usage, topology)
        if args.recompute_granularity == "full":
            activations = _recomputed(local, micro_batches)
            notes.append("full recomputation: activations are the layers' inputs and one layer")
        else:
            estimate = (
                usage.compute_activation_memory
                if args.sequence_parallel or topology.tp == 1
                else usage.compute_activation_memory_without_sp
            )
            activations = round(estimate(local, micro_batches))
            if args.recompute_granularity is None and topology.tp == 1:
                notes.append("activations as Megatron estimates them, without attention scores")
    return weights, activations, notes


def _weights(local: argparse.Namespace, usage: Any, topology: Topology) -> Weights:
    """Parameters of the fullest rank, out of Megatron's estimate of bytes.

    Asked without a distributed optimizer it answers 18 bytes for every parameter. Asked with
    one whose experts are spread over a world without end, it answers 18 for the dense part,
    still, and 6 for the experts.
    """
    probe = copy.copy(local)
    probe.use_distributed_optimizer = False
    everything = usage.compute_weight_and_optimizer_memory(probe) / _WHOLE
    probe.use_distributed_optimizer, probe.data_parallel_size = True, 1
    probe.world_size = local.world_size * _MANY
    mixed = usage.compute_weight_and_optimizer_memory(probe)
    dense = (mixed - _WITHOUT_STATE * everything) / (_WHOLE - _WITHOUT_STATE)
    distributed = local.use_distributed_optimizer
    return Weights(
        dense=dense,
        experts=max(0.0, everything - dense),
        half=bool(local.bf16 or local.fp16),
        shards=topology.dp * topology.cp if distributed else 1,
        expert_shards=topology.expert_dp if distributed else 1,
    )


def _recomputed(local: argparse.Namespace, micro_batches: int) -> int:
    """Bytes of every layer's input, for the micro-batches in flight, and of one whole layer."""
    element = 2 if local.bf16 or local.fp16 else 4
    share = local.tensor_model_parallel_size if local.sequence_parallel else 1
    tokens = local.seq_length * local.micro_batch_size
    in_flight = min(micro_batches, local.pipeline_model_parallel_size)
    layers = -(-local.num_layers // local.pipeline_model_parallel_size)
    inputs = tokens * local.hidden_size * element * layers * in_flight // share
    # Korthikanti et al., arXiv:2205.05198, table 2, without the scores: 34 s b h at 4 h in the MLP.
    layer = tokens * (18 * local.hidden_size + 4 * local.ffn_hidden_size)
    return inputs + layer // local.tensor_model_parallel_size
