"""Context parallelism for Megatron-LM: ring, Ulysses, hybrid and KV-all-gather attention.

The public names are loaded when they are first used, so importing the package costs nothing,
patches nothing and needs no accelerator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_cp_ext import capabilities as capabilities
    from megatron_cp_ext.attention import context_parallel_attention
    from megatron_cp_ext.groups import ContextParallelGroups
    from megatron_cp_ext.layout import SequenceLayout
    from megatron_cp_ext.mask import AttentionMask

__version__ = "0.1.0"

__all__ = [
    "AttentionMask",
    "ContextParallelGroups",
    "SequenceLayout",
    "capabilities",
    "context_parallel_attention",
]

_HOMES = {
    "AttentionMask": "megatron_cp_ext.mask",
    "ContextParallelGroups": "megatron_cp_ext.groups",
    "SequenceLayout": "megatron_cp_ext.layout",
    "context_parallel_attention": "megatron_cp_ext.attention",
}


def __getattr__(name: str) -> Any:
    if name == "capabilities":
        return importlib.import_module("megatron_cp_ext.capabilities")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
