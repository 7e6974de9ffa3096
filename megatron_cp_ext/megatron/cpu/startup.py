"""What `megatron.training` does before the model exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_cp_ext.megatron.cpu.device import OWNER
from megatron_cp_ext.patching.patch import Patch, replace, wrap

# From this architecture on, Megatron does not ask for CUDA_DEVICE_MAX_CONNECTIONS.
_NO_CONNECTION_LIMIT = 10


def initialize_without_cuda(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`initialize_megatron`, told that a missing CUDA device is intended."""
    # Megatron's fused element-wise functions were given to torch.compile when they were
    # imported. Compiling takes longer than a short run, and needs a C++ compiler.
    torch.compiler.set_stance("force_eager")
    kwargs["allow_no_cuda"] = True
    return original(*args, **kwargs)


def patches() -> list[Patch]:
    """Let start-up pass without a CUDA device."""
    return [
        replace(
            "megatron.training.utils.common_utils:get_device_arch_version",
            lambda: _NO_CONNECTION_LIMIT,
            owner=OWNER,
        ),
        wrap(
            "megatron.training.initialize:initialize_megatron",
            initialize_without_cuda,
            owner=OWNER,
            parameters=("allow_no_cuda",),
        ),
        replace(
            "megatron.training.initialize:_warmup_jit_function",
            lambda tp_size=None: None,
            owner=OWNER,
            parameters=("tp_size",),
        ),
    ]
