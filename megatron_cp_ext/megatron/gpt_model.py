"""The GPT model for Megatron releases before 0.19, whose `pretrain` asks the script for a model.

From 0.19 on `megatron.training` builds it itself, from `gpt_config_from_args`.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.yaml_arguments import core_transformer_config_from_yaml

from megatron_cp_ext.errors import UsageError


def check_args(args: argparse.Namespace) -> None:
    """Refuse models that these releases build from specs of their own.

    Raises:
        UsageError: one of them is asked for.
    """
    for name in ("heterogeneous_layers_config_path", "modelopt_enabled"):
        if getattr(args, name, None):
            raise UsageError(
                option="--" + name.replace("_", "-"),
                value=getattr(args, name),
                reason="with Megatron releases before 0.19 the packaged GPT pre-training builds "
                "plain GPT models only",
                remedy="give Megatron-LM's script: -m megatron_cp_ext.run .../pretrain_gpt.py",
            )


def layer_spec(args: argparse.Namespace, config: Any, vp_stage: int | None) -> Any:
    """The specification of the decoder's layers on this pipeline stage."""
    if args.spec is not None:
        return import_module(args.spec)
    if args.experimental_attention_variant is not None:
        return get_transformer_block_with_experimental_attention_variant_spec(
            config=config, vp_stage=vp_stage
        )
    return get_gpt_decoder_block_spec(config, vp_stage=vp_stage, **_layer_options(args))


def provide_model(
    pre_process: bool = True,
    post_process: bool = True,
    *,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build this rank's part of the model that the command line describes.

    Args:
        pre_process: it embeds the tokens.
        post_process: it computes the logits and the loss.
        vp_stage: virtual pipeline stage.
        config: the TransformerConfig; made from the arguments when None.
        pg_collection: the process groups.
    """
    args = get_args()
    if config is None:
        config = (
            core_transformer_config_from_args(args)
            if args.yaml_cfg is None
            else core_transformer_config_from_yaml(args, "language_model")
        )
    mtp = None
    if args.mtp_num_layers is not None:
        last_layer = get_gpt_decoder_layer_specs(config, **_layer_options(args))[-1]
        mtp = get_gpt_mtp_block_spec(
            config,
            last_layer,
            use_transformer_engine=args.transformer_impl == "transformer_engine",
            vp_stage=vp_stage,
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(args, config, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def _layer_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "use_transformer_engine": args.transformer_impl == "transformer_engine",
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
    }
