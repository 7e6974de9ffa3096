"""Device names: every request for a CUDA device is answered with the CPU.

Megatron asks for its device in three ways: `torch.cuda.current_device()`, the literal "cuda" as
a `device` argument, and `.cuda()`. The first becomes the CPU device; the other two are caught
where tensors are made or moved. Wrapping those few functions costs a fraction of a microsecond a
call; a `TorchFunctionMode` would be shorter but slow down every operation of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_cp_ext.patching.patch import Patch, replace, wrap

OWNER = "cpu-platform"
CPU = torch.device("cpu")

# Functions of torch with a `device` keyword argument, as Megatron, its data sets and its
# checkpoints use them.
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)
TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")

# What `Tensor.type()` answers for a CUDA tensor; Megatron's optimizer and gradient clipping
# compare with these names.
CPU_TYPE = "torch."
CUDA_TYPE = "torch.cuda."


def is_cuda(value: Any) -> bool:
    """Whether `value`, any argument of a tensor function, names a CUDA device."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def make_on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a factory function with its device and memory pinning taken away."""
    if kwargs:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
    return original(*args, **kwargs)


def move_on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `to` of a tensor or module, with a CUDA device in any place read as the CPU."""
    return original(
        *(CPU if is_cuda(arg) else arg for arg in args),
        **{name: CPU if is_cuda(arg) else arg for name, arg in kwargs.items()},
    )


def stay(tensor_or_module: Any, *_args: Any, **_kwargs: Any) -> Any:
    """`.cuda()` and `.pin_memory()`: everything is where it should be already."""
    return tensor_or_module


def cuda_type_name(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type()`: the name the tensor would have on CUDA; conversions go to the CPU."""
    if args and isinstance(args[0], str):
        args = (args[0].replace(CUDA_TYPE, CPU_TYPE), *args[1:])
    result = original(tensor, *args, **kwargs)
    return result.replace(CPU_TYPE, CUDA_TYPE, 1) if isinstance(result, str) else result


def patches() -> list[Patch]:
    """Redirect device queries, tensor creation and tensor movement."""
    return [
        replace("torch.cuda:current_device", lambda: CPU, owner=OWNER),
        # Megatron builds its process groups and seeds its generators only when this is positive.
        replace("torch.cuda:device_count", lambda: 1, owner=OWNER),
        replace("torch.cuda:set_device", lambda device: None, owner=OWNER),
        *(wrap(f"torch:{name}", make_on_cpu, owner=OWNER) for name in FACTORIES),
        *(wrap(f"torch:Tensor.{name}", make_on_cpu, owner=OWNER) for name in TENSOR_FACTORIES),
        wrap("torch:Tensor.to", move_on_cpu, owner=OWNER),
        wrap("torch:Tensor.type", cuda_type_name, owner=OWNER),
        replace("torch:Tensor.cuda", stay, owner=OWNER),
        replace("torch:Tensor.pin_memory", stay, owner=OWNER),
        wrap("torch.nn:Module.to", move_on_cpu, owner=OWNER),
        wrap("torch.nn:Module.to_empty", move_on_cpu, owner=OWNER),
        replace("torch.nn:Module.cuda", stay, owner=OWNER),
    ]
