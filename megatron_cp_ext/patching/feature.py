"""What a feature manager is: flags, rules and patches of one concern, in one place."""

from __future__ import annotations

import argparse

from megatron_cp_ext.patching.manager import PatchManager


class Feature:
    """Base class of the feature managers. Hooks run in this order; each may be left out.

    The names are those MindSpeed's feature managers use. A feature adds flags in
    `register_args`, and decides from the parsed arguments alone, never from `sys.argv`.
    """

    name: str = ""

    def before_import(self) -> None:
        """Act before Megatron is imported. No argument is parsed yet: only hardware is known."""

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """Add this feature's options to Megatron's parser."""

    def pre_validate_args(self, args: argparse.Namespace) -> None:
        """Prepare arguments that Megatron's own validation is about to read."""

    def register_early_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        """Declare patches that Megatron's own validation already needs."""

    def validate_args(self, args: argparse.Namespace) -> None:
        """Check the arguments Megatron has validated.

        Raises:
            UsageError: a combination is not supported. Reports of all features are
                collected and shown together.
        """

    def post_validate_args(self, args: argparse.Namespace) -> None:
        """Settle arguments once everything is known to be valid."""

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        """Declare patches to be in place before the model is built."""
