"""Two gaps of a megatron-core wheel, closed on every platform.

Rank 0 runs `make` for the data sets' C++ helper and exits when that fails; the wheel carries the
helper already compiled, but no Makefile. Saving a checkpoint measures memory with psutil, which
the wheel does not ask for.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from megatron_cp_ext.megatron.cpu.memory import resident_bytes
from megatron_cp_ext.patching import Feature, PatchManager
from megatron_cp_ext.patching.patch import wrap

WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def compile_when_missing(original: Callable[[], None]) -> None:
    """`compile_helpers`: run make only where the compiled helper does not import."""
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        original()


def measure_without_psutil(original: Callable[[], int]) -> int:
    """`_process_memory`: ask the operating system where psutil is not installed."""
    if importlib.import_module(WRITER).HAVE_PSUTIL:
        return original()
    return resident_bytes()


class WheelInstallFeature(Feature):
    """Lets `megatron.training` start and save from a plain `pip install megatron-core`."""

    name = "wheel-install"

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        for target, function in (
            ("megatron.core.datasets.utils:compile_helpers", compile_when_missing),
            (f"{WRITER}:_process_memory", measure_without_psutil),
        ):
            manager.register(wrap(target, function, owner=self.name))
