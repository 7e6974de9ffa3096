"""The loss under context parallelism: the same mean over tokens as on one rank."""

from __future__ import annotations

import argparse

from megatron_cp_ext.patching import Feature, PatchManager
from megatron_cp_ext.patching.patch import wrap

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
MTP = "megatron.core.transformer.multi_token_prediction"
ROUTER = "megatron.core.transformer.moe.router"


class LossFeature(Feature):
    """`--no-cp-loss-correction`: on by default, as Megatron's own loss depends on how it is cut."""

    name = "loss"

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """The one flag."""
        parser.add_argument_group(title="context parallelism: loss").add_argument(
            "--no-cp-loss-correction",
            action="store_false",
            dest="cp_loss_correction",
            help="Leave the loss as Megatron computes it under context parallelism: averaged over "
            "each rank's own tokens first, so that it differs from that of one rank where loss "
            "masks are uneven, and always for multi-token prediction.",
        )

    def post_validate_args(self, args: argparse.Namespace) -> None:
        """Say which loss it is."""
        if args.context_parallel_size > 1 and args.rank == 0:
            print(_in_words(args), flush=True)

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        """Correct what is computed, and refuse what cannot be, on every rank alike."""
        if args.context_parallel_size == 1 or not args.cp_loss_correction:
            return
        from megatron_cp_ext.megatron import loss, moe, mtp

        patches = [
            wrap(
                f"{SCHEDULES}:forward_step_calc_loss",
                loss.calculate_loss,
                owner=self.name,
                parameters=("model", "loss_func", "config", "collect_non_loss_data"),
            )
        ]
        if args.mtp_num_layers:
            patches += [
                wrap(
                    f"{MTP}:roll_tensor",
                    mtp.roll,
                    owner=self.name,
                    parameters=("tensor", "shifts", "dims", "cp_group", "packed_seq_params"),
                ),
                wrap(
                    f"{MTP}:process_mtp_loss",
                    mtp.process_loss,
                    owner=self.name,
                    parameters=("labels", "loss_mask", "config", "cp_group", "packed_seq_params"),
                ),
                wrap(
                    mtp.logging_target(),
                    mtp.log_whole_loss(args.context_parallel_size),
                    owner=self.name,
                    parameters=("loss", "avg_group"),
                ),
            ]
        if args.num_experts:
            patches.append(
                wrap(
                    f"{ROUTER}:TopKRouter.forward",
                    moe.refuse_uneven_padding,
                    owner=self.name,
                    parameters=("input", "padding_mask"),
                )
            )
        for patch in patches:
            manager.register(patch)


def _in_words(args: argparse.Namespace) -> str:
    if args.cp_loss_correction:
        return (
            "context parallelism: losses are averaged over the tokens of whole sequences "
            "(--no-cp-loss-correction for Megatron's own way)"
        )
    return (
        "context parallelism: losses are averaged as Megatron does, over each rank's own tokens "
        "(--no-cp-loss-correction)"
    )
