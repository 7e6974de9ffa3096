"""The local spec's normalization under sequence parallelism.

Megatron refuses torch's LayerNorm and RMSNorm there and asks for Apex. All that is missing is a
mark: under sequence parallelism each tensor-parallel rank normalizes its own tokens, so the
gradients of the norm's parameters must be summed over the group, and Megatron does that for every
parameter whose `sequence_parallel` attribute is set.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from megatron_cp_ext.megatron.cpu.device import OWNER
from megatron_cp_ext.patching.patch import Patch, wrap


def build_norm(original: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """`WrappedTorchNorm.__new__`: build the norm, then mark its parameters."""
    if not config.sequence_parallel:
        return original(cls, config, *args, **kwargs)
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm = original(cls, plain, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


def patches() -> list[Patch]:
    """Let `WrappedTorchNorm` serve sequence parallelism."""
    return [
        wrap(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            build_norm,
            owner=OWNER,
            parameters=("config", "hidden_size", "eps"),
        )
    ]
