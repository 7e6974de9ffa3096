"""A rank that fails ends the run, soon, and says where it was."""

from __future__ import annotations

import argparse

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.patching import Feature, PatchManager
from megatron_cp_ext.patching.patch import wrap

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
TRAINING = "megatron.training.training"
CHECKPOINTING = "megatron.training.checkpointing"
DEFAULT_TIMEOUT_S = 300.0


class FailureFeature(Feature):
    """`--cp-timeout-seconds`, and errors that name rank, iteration, layer and step."""

    name = "failure"

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """The one flag."""
        parser.add_argument_group(title="context parallelism: failures").add_argument(
            "--cp-timeout-seconds",
            type=float,
            default=DEFAULT_TIMEOUT_S,
            metavar="SECONDS",
            help="How long a rank waits for another in a context-parallel transfer before it ends "
            "the run. Everything else waits for --distributed-timeout-minutes.",
        )

    def validate_args(self, args: argparse.Namespace) -> None:
        """A time must be one."""
        if not 0 < args.cp_timeout_seconds < float("inf"):
            raise UsageError(
                option="--cp-timeout-seconds",
                value=args.cp_timeout_seconds,
                reason="a transfer takes some time, and a wait without end is never reported",
                remedy=f"use a number of seconds above 0, for example {DEFAULT_TIMEOUT_S:g}",
            )

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        """Name what happens; bound how long it may take."""
        if args.context_parallel_size == 1:
            return
        from megatron_cp_ext.megatron import failure

        blocks = {
            f"{TRAINING}:train_step": failure.training_step,
            f"{SCHEDULES}:forward_step": lambda given: "forward pass",
            f"{SCHEDULES}:backward_step": lambda given: "backward pass",
            f"{CHECKPOINTING}:save_checkpoint": lambda given: (
                f"saving the checkpoint of iteration {given['iteration']}"
            ),
            f"{CHECKPOINTING}:load_checkpoint": lambda given: "loading a checkpoint",
        }
        for target, name in blocks.items():
            manager.register(wrap(target, failure.named_block(name), owner=self.name))
        manager.register(
            wrap(
                "megatron.core.parallel_state:create_group",
                failure.bounded_group(args.cp_timeout_seconds),
                owner=self.name,
                parameters=("timeout", "group_desc"),
            )
        )
        # With it Megatron, or what restarts it in the process, deals with errors and signals.
        if not args.exit_signal_handler and not getattr(args, "inprocess_restart", False):
            manager.register(wrap(f"{TRAINING}:train", failure.train, owner=self.name))
