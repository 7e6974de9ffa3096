"""The ring's own flag: sending and receiving on separate process groups."""

from __future__ import annotations

import argparse

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
