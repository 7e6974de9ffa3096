"""Several documents in one sequence: packed streams, and boundaries at EOD tokens."""

from __future__ import annotations

import argparse

from megatron_cp_ext.errors import UsageError, raise_all
from megatron_cp_ext.megatron.settings import is_active
from megatron_cp_ext.patching import Feature, PatchManager
from megatron_cp_ext.patching.patch import wrap

UTILS = "megatron.core.utils"
ROPE = "megatron.core.models.common.embeddings.rope_utils"


class DocumentsFeature(Feature):
    """`--reset-attention-mask`, `--dataloader-inter-document-masking` and thd batches."""

    name = "documents"

    def validate_args(self, args: argparse.Namespace) -> None:
        """Boundaries come with the tokens, which only the first and the last stage have."""
        if not is_active(args):
            return
        errors = []
        stages = args.pipeline_model_parallel_size * (
            args.virtual_pipeline_model_parallel_size or 1
        )
        for option, given in (
            ("--reset-attention-mask", args.reset_attention_mask),
            ("--attention-mask-type", args.attention_mask_type == "general"),
        ):
            if given and stages > 2:
                errors.append(
                    UsageError(
                        option=option,
                        value="general" if option == "--attention-mask-type" else True,
                        reason=f"of {stages} pipeline stages only the first and the last get "
                        "tokens, and the others would not know the mask",
                        remedy="use --dataloader-inter-document-masking, which all stages know, "
                        "or at most two stages",
                    )
                )
        raise_all(errors)

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        """Batches are cut, and positions given, where the tokens really are."""
        if not is_active(args):
            return
        from megatron_cp_ext.megatron import batch, rope
        from megatron_cp_ext.megatron.releases import newest_name

        manager.register(
            wrap(
                newest_name(
                    UTILS,
                    "_get_batch_on_this_cp_rank_per_sequence_balancing",
                    "get_pretrain_batch_on_this_cp_rank",
                ),
                batch.cut_per_sequence,
                owner=self.name,
                parameters=("batch", "cp_group"),
            )
        )
        manager.register(
            wrap(
                newest_name(
                    UTILS,
                    "_get_batch_on_this_cp_rank_per_document_balancing",
                    "get_sft_batch_on_this_cp_rank",
                ),
                batch.cut_per_document,
                owner=self.name,
                parameters=("batch", "cp_group"),
            )
        )
        manager.register(
            wrap(
                f"{ROPE}:_apply_rotary_pos_emb_thd",
                rope.rotate_packed,
                owner=self.name,
                parameters=("t", "cu_seqlens", "freqs", "cp_group"),
            )
        )
        if args.reset_attention_mask and args.attention_mask_type == "causal":
            manager.register(
                wrap(
                    f"{UTILS}:get_batch_on_this_tp_rank",
                    batch.boundaries_in_batch(args),
                    owner=self.name,
                    parameters=("batch", "tp_rank", "broadcast_src_rank", "broadcast_group"),
                )
            )
