"""Everything that touches Megatron: core attention, batches, positions, loss, the CPU platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_cp_ext.megatron.specs import context_parallel_layer_spec

__all__ = ["context_parallel_layer_spec"]


def __getattr__(name: str) -> Any:
    # On demand, because it imports Megatron, and the CPU platform has to come before that.
    if name != "context_parallel_layer_spec":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_cp_ext.megatron.specs import context_parallel_layer_spec

    return context_parallel_layer_spec
