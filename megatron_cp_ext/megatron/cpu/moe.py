"""Mixture of experts: token counts for the all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_cp_ext.megatron.cpu.device import OWNER
from megatron_cp_ext.patching.patch import Patch, wrap


def counts_to_numpy(
    original: Callable[..., Any],
    tensor: Any,
    as_numpy: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`maybe_move_tensor_to_cpu`: keep its promise of numpy for a tensor that is on the CPU.

    Megatron converts only what it moves, and torch's all-to-all takes no tensor of counts.
    """
    result = original(tensor, as_numpy, *args, **kwargs)
    return result.numpy() if as_numpy and isinstance(result, torch.Tensor) else result


def patches() -> list[Patch]:
    """Let the all-to-all token dispatcher work."""
    return [
        wrap(
            "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
            counts_to_numpy,
            owner=OWNER,
            parameters=("tensor", "as_numpy"),
        )
    ]
