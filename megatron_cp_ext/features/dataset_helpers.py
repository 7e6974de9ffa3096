"""Start-up of a megatron-core wheel, on every platform.

Rank 0 runs `make` for the data sets' C++ helper, and exits when that fails. The wheel carries
the helper already compiled, but not the Makefile.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from megatron_cp_ext.patching import Feature, PatchManager
from megatron_cp_ext.patching.patch import wrap


def compile_when_missing(original: Callable[[], None]) -> None:
    """`compile_helpers`: run make only where the compiled helper does not import."""
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        original()


class DatasetHelpersFeature(Feature):
    """Keeps rank 0 alive where the data sets' helper is compiled already."""

    name = "dataset-helpers"

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        manager.register(
            wrap(
                "megatron.core.datasets.utils:compile_helpers",
                compile_when_missing,
                owner=self.name,
            )
        )
