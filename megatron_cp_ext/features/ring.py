"""The ring's own flag: sending and receiving on separate process groups."""

from __future__ import annotations

import argparse

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.megatron.settings import algorithm_of, ring_size
from megatron_cp_ext.patching import Feature


class RingFeature(Feature):
    """`--use-cp-send-recv-overlap`."""

    name = "ring"

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """MindSpeed's flag."""
        parser.add_argument_group(title="ring attention").add_argument(
            "--use-cp-send-recv-overlap",
            action="store_true",
            help="Send and receive keys and values around the ring on separate process groups, "
            "so that the two directions do not wait for each other.",
        )

    def validate_args(self, args: argparse.Namespace) -> None:
        """The flag means nothing where no ring is."""
        if args.use_cp_send_recv_overlap and ring_size(args) == 1:
            raise UsageError(
                option="--use-cp-send-recv-overlap",
                value=True,
                reason=f"algorithm {algorithm_of(args)} with --context-parallel-size "
                f"{args.context_parallel_size} sends nothing around a ring",
                remedy="drop it, or use --context-parallel-algo megatron_cp_algo or hybrid_cp_algo",
            )
