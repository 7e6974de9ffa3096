"""What stands between `megatron.training` and a machine without an accelerator.

Each file redirects one concern of CUDA to the CPU. Everything is declared as patches, so that it
can be listed and undone; nothing here is in force until a feature registers them.
"""

from __future__ import annotations

from megatron_cp_ext.megatron.cpu import device, memory, moe, norm, optimizer, rng, startup, streams
from megatron_cp_ext.patching import Patch


def patches() -> list[Patch]:
    """All patches of the CPU platform."""
    return [
        patch
        for module in (device, streams, memory, rng, norm, moe, optimizer, startup)
        for patch in module.patches()
    ]
