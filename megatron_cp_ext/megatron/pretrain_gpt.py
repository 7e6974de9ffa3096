"""GPT pre-training on `megatron.training`, for installations without a Megatron-LM checkout.

The megatron-core wheel carries the training loop but no script that uses it. This one takes the
flags and data sets of Megatron-LM's `pretrain_gpt.py`. Run it through `-m megatron_cp_ext.run`.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu, utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import argument_utils, get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.megatron.releases import supported

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}

# Flags of Megatron-LM's script that are for other trainings than plain GPT pre-training.
UPSTREAM_ONLY = {
    "hybrid_context_parallel": "it needs per-sample process groups",
    "overlap_moe_expert_parallel_comm": "it needs the schedule-plan form of the forward step",
    "logits_load_dir": "it needs the distillation loss",
    "inprocess_restart": "it needs the in-process restart wrapper",
    "sft": "it needs the data set of conversations",
    "fim_data": "it needs the fill-in-the-middle data set",
}

BATCH_FIELDS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "hybrid_cp_group",
    "local_cp_size",
)
SPIKE_FACTOR = 10  # a loss this many times the largest one seen counts as a spike

straggler_timer = StragglerDetector()

Batch = dict[str, torch.Tensor | None]


def check_args(args: argparse.Namespace) -> None:
    """Refuse flags that only Megatron-LM's own script honours.

    Raises:
        UsageError: one of them is set.
    """
    for name, reason in UPSTREAM_ONLY.items():
        if getattr(args, name, None):
            raise UsageError(
                option="--" + name.replace("_", "-"),
                value=getattr(args, name),
                reason=f"the packaged GPT pre-training does not support it: {reason}",
                remedy="give Megatron-LM's script: -m megatron_cp_ext.run .../pretrain_gpt.py",
            )


# ------------------------------------------------------------------------------------- data


def masks_documents(args: argparse.Namespace) -> bool:
    """Whether samples carry document boundaries, which attention on every pipeline stage needs.

    Releases from 0.19 have the flag.
    """
    return getattr(args, "dataloader_inter_document_masking", False)


def has_mtp(args: argparse.Namespace, vp_stage: int | None) -> bool:
    """Whether a multi-token-prediction layer lives on this rank and virtual stage."""
    config = core_transformer_config_from_args(args)
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def needs_tokens(args: argparse.Namespace, vp_stage: int | None) -> bool:
    """Whether this stage embeds tokens or computes a loss."""
    return is_first_or_last_pipeline_stage(vp_stage) or has_mtp(args, vp_stage)


def builds_dataset(vp_stage: int | None = None) -> bool:
    """Whether this rank reads data; the others of its tensor-parallel group are sent it."""
    args = get_args()
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    return masks_documents(args) or needs_tokens(args, vp_stage)


def dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    """The data set configuration that the command line describes."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = args.per_dataset_sequences_path
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=build_tokenizer(args),
        # which data
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        sequences_per_dataset=json.loads(Path(sequences).read_text()) if sequences else None,
        # what a sample holds
        create_attention_mask=args.create_attention_mask_in_dataloader,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        **supported(GPTDatasetConfig, inter_document_masking=masks_documents(args)),
        # how it will be divided
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        hybrid_context_parallel=args.hybrid_context_parallel,
        # how it is read
        path_to_cache=args.data_cache_path,
        object_storage_cache_path=args.object_storage_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
    )


def provide_datasets(sizes: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the training, validation and test data.

    Args:
        sizes: samples wanted of each.
        vp_stage: the virtual pipeline stage they are for.

    Returns:
        The three data sets; None on ranks that read no data.
    """
    args = get_args()
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        sizes,
        functools.partial(builds_dataset, vp_stage=vp_stage),
        dataset_config(args),
    )
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    return builder.build()


# Megatron calls the provider on every rank, not only on tensor-parallel rank 0.
provide_datasets.is_distributed = True  # type: ignore[attr-defined]


def read_batch(iterator: Iterator[dict[str, Any]], vp_stage: int | None) -> Batch:
    """The next micro batch, cut to what this tensor- and context-parallel rank works on.

    Args:
        iterator: yields samples on tensor-parallel rank 0, is not read elsewhere.
        vp_stage: the virtual pipeline stage that runs.

    Returns:
        The fields of `BATCH_FIELDS`; token-like ones have shape [b, s / cp], `cu_seqlens` [1, n].
        All are None on an inner pipeline stage, apart from a packed batch's boundaries.
    """
    args = get_args()
    packed, at_an_end = masks_documents(args), needs_tokens(args, vp_stage)
    if not at_an_end and not packed:
        return dict.fromkeys(BATCH_FIELDS)

    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(iterator)
        device = torch.cuda.current_device()
        for name in BATCH_FIELDS:
            value = sample.get(name)
            batch[name] = None if value is None else value.to(device, non_blocking=True)

    batch = get_batch_on_this_tp_rank(
        batch,
        **supported(get_batch_on_this_tp_rank, has_cu_seqlens=packed, is_sft=packed),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp(args, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    # Releases that lack it read one packed sample at a time.
    flatten = getattr(utils, "flatten_batch_for_packed_sequences", None)
    if flatten is not None:
        batch = flatten(batch)
    if not at_an_end:
        boundaries = ("cu_seqlens", "max_seqlen")
        return {name: batch[name] if name in boundaries else None for name in BATCH_FIELDS}

    batch = get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        **supported(
            get_batch_on_this_cp_rank,
            use_per_sequence_balancing=packed,
        ),
    )
    return {name: batch.get(name) for name in BATCH_FIELDS}


def packed_sequences(batch: Batch, seq_length: int) -> PackedSeqParams | None:
    """Document boundaries for the attention layers; None when the batch has none."""
    if batch["cu_seqlens"] is None:
        return None
    boundaries = batch["cu_seqlens"].squeeze(0)
    update_seqlen_stats_from_cu_seqlens(boundaries)  # for the count of floating-point operations
    assert batch["max_seqlen"] is not None
    longest = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **supported(PackedSeqParams, tokens_per_sample=seq_length),
    )


# ------------------------------------------------------------------------------------- step


def compute_loss(
    loss_mask: torch.Tensor | None, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the masked token losses of a micro batch.

    Args:
        loss_mask: [b, s], 1 where a token counts; on the last pipeline stage never None.
        losses: [b, s], cross entropy of every token.

    Returns:
        The sum, the number of tokens in it, and both together for reporting.
    """
    assert loss_mask is not None, "only the last pipeline stage has losses"
    args = get_args()
    mask = loss_mask.flatten().float()
    loss = torch.dot(losses.flatten().float(), mask)
    tokens = mask.detach().sum().to(torch.int)
    check_loss(args, loss)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def check_loss(args: argparse.Namespace, loss: torch.Tensor) -> None:
    """Stop, or re-run, on a loss that is not a number, infinite, or a spike, as flags say."""
    machine = get_rerun_state_machine()
    # The forward pass is deterministic, so a repetition must agree exactly.
    validate = functools.partial(machine.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        validate(rejection_func=torch.isnan, message="the loss is not a number", fatal=True)
        validate(rejection_func=torch.isinf, message="the loss is infinite", fatal=True)
    if args.check_for_spiky_loss:
        is_spike = functools.partial(
            machine.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss"
        )
        validate(rejection_func=is_spike, message="the loss spikes", fatal=False)


def forward_step(iterator: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    """One forward pass; the loss function is handed back for the last pipeline stage to call."""
    args, timer = get_args(), get_timers()("batch-generator", log_level=2)
    timer.start()
    with straggler_timer(bdata=True):
        batch = read_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
        packed = packed_sequences(batch, args.seq_length)
    timer.stop()
    with straggler_timer:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=packed,
        )
    return output, functools.partial(compute_loss, batch["loss_mask"])


def embedding_ranks(pipeline: list[int]) -> list[int]:
    """Ranks of a pipeline that hold the word embedding or a tied copy of it."""
    args = get_args()
    ranks = {pipeline[0]}
    if len(pipeline) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pipeline[-1])
        ranks.update(get_mtp_ranks(pipeline, core_transformer_config_from_args(args)))
    return sorted(ranks)


def model_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What tells `pretrain` the model: its configuration or, before 0.19, a function."""
    configure = getattr(argument_utils, "gpt_config_from_args", None)
    if configure is not None:
        return {"cfg_container": pretrain_cfg_container_from_args(args, configure(args))}
    from megatron_cp_ext.megatron import gpt_model

    gpt_model.check_args(args)
    return {
        "cfg_container": pretrain_cfg_container_from_args(args),
        "model_provider": gpt_model.provide_model,
    }


def main() -> None:
    """Train as the command line says."""
    args = parse_and_validate_args(args_defaults=DEFAULTS)
    check_args(args)
    pretrain(
        train_valid_test_dataset_provider=provide_datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        get_embedding_ranks=embedding_ranks,
        **model_arguments(args),
    )
