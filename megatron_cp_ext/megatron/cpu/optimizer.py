"""The distributed optimizer over torch's Adam.

Megatron prefers the Adam of Transformer Engine or Apex, whose step count belongs to a parameter
group. torch's Adam counts for each parameter, from its first step on, and Megatron's code for it
does not survive loading a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_cp_ext.megatron.cpu.device import OWNER
from megatron_cp_ext.patching.patch import Patch, wrap

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def state_dict_before_first_step(
    original: Callable[..., dict[str, Any]], optimizer: Any
) -> dict[str, Any]:
    """`state_dict`: give a new optimizer the state it will have before its first step.

    Megatron asks for it before loading, to know the shapes, and expects one step count in it.
    """
    inner = optimizer.optimizer
    if not inner.state and isinstance(inner, torch.optim.Adam):
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }
    return original(optimizer)


def load_with_own_step_counts(
    original: Callable[..., None], optimizer: Any, state_dict: dict[str, Any]
) -> None:
    """`load_state_dict`: every parameter gets a step count of its own.

    Megatron hands the same tensor to all of them, and each one's step would advance it.
    """
    original(optimizer, state_dict)
    for state in optimizer.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def copy_loaded_tensors(
    original: Callable[..., None], optimizer: Any, parameter: Any, tensors: dict[str, Any]
) -> None:
    """`_set_main_param_and_optimizer_states`: into parameters that require gradients, too.

    The step count was settled by `load_state_dict`, from the parameter groups; None tells
    Megatron to leave it.
    """
    with torch.no_grad():
        original(optimizer, parameter, {**tensors, "step": None})


def patches() -> list[Patch]:
    """Let the distributed optimizer load checkpoints."""
    return [
        wrap(f"{_OPTIMIZER}.state_dict", state_dict_before_first_step, owner=OWNER),
        wrap(
            f"{_OPTIMIZER}.load_state_dict",
            load_with_own_step_counts,
            owner=OWNER,
            parameters=("state_dict",),
        ),
        wrap(
            f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
            copy_loaded_tensors,
            owner=OWNER,
            parameters=("model_param", "tensors"),
        ),
    ]
