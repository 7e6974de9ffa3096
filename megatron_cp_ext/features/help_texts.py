"""`--help` works: a help text of Megatron 0.19.2 has a bare percent sign, argparse rejects it."""

from __future__ import annotations

import argparse

from megatron_cp_ext.patching import Feature


def repair_help(action: argparse.Action) -> None:
    """Double the percent signs of a help text that argparse cannot format."""
    if not action.help or "%" not in action.help:
        return
    try:
        _ = action.help % {**vars(action), "prog": ""}
    except (ValueError, TypeError, KeyError):
        action.help = action.help.replace("%", "%%")


class HelpTextsFeature(Feature):
    """Repairs what Megatron's parser says about itself."""

    name = "help-texts"

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            repair_help(action)
