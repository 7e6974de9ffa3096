"""What stands between `megatron.training` and a machine without an accelerator.

Each file redirects one concern of CUDA to the CPU. Everything is declared as patches, so that it
can be listed and undone; nothing here is in force until a feature registers them.
"""

from __future__ import annotations

import functools

from megatron_cp_ext.megatron.cpu import device, memory, moe, norm, optimizer, rng, startup, streams
from megatron_cp_ext.patching import Patch


@functools.cache
def patches() -> tuple[Patch, ...]:
    """All patches of the CPU platform; always the same ones, so that they can be declared again."""
    modules = (device, streams, memory, rng, norm, moe, optimizer, startup)
    return tuple(patch for module in modules for patch in module.patches())
