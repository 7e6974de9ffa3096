"""What `megatron.training` does before the model exists."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_cp_ext.megatron.cpu.device import OWNER
from megatron_cp_ext.patching.patch import Patch, replace, wrap

# From this architecture on, Megatron does not ask for CUDA_DEVICE_MAX_CONNECTIONS.
_NO_CONNECTION_LIMIT = 10


def leave_uncompiled(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """`torch.compile`, as a plain decorator or with options, that compiles nothing."""
    return (lambda given: given) if function is None else function


def import_megatron_uncompiled() -> None:
    """Import Megatron with its fused element-wise functions left as plain Python.

    `megatron.core.jit` takes `torch.compile` for its decorator, which loads torch's compiler in
    every rank: seconds at each start, for functions that on CPUs are not to be compiled anyway.
    Decorators run once, so this is no patch that could be undone; `torch.compile` itself is back
    in its place afterwards.
    """
    original = torch.compile
    torch.compile = leave_uncompiled  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core.jit")
    finally:
        torch.compile = original


def optimizer_patches() -> list[Patch]:
    """Take torch's optimizers out of the decorators that load torch's compiler.

    At their first call these import it, to tell it to leave them alone: more than a second.
    `step` keeps what else its decorator does, which is to turn gradients off.
    """
    optim = torch.optim
    return [
        *(
            replace(
                f"torch.optim:Optimizer.{name}",
                inspect.unwrap(getattr(optim.Optimizer, name)),
                owner=OWNER,
            )
            for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
        ),
        *(
            replace(
                f"torch.optim:{kind.__name__}.step",
                torch.no_grad()(inspect.unwrap(kind.step)),
                owner=OWNER,
            )
            for kind in (optim.Adam, optim.SGD)
        ),
    ]


def initialize_without_cuda(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`initialize_megatron`, told that a missing CUDA device is intended."""
    if "torch._dynamo" in sys.modules:  # Megatron was imported before this plugin
        torch.compiler.set_stance("force_eager")
    kwargs["allow_no_cuda"] = True
    return original(*args, **kwargs)


def patches() -> list[Patch]:
    """Let start-up pass without a CUDA device."""
    return [
        *optimizer_patches(),
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
            lambda *_args, **_kwargs: None,  # whose parameters differ between releases
            owner=OWNER,
        ),
    ]
