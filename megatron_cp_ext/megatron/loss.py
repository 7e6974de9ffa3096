"""The mean loss over the whole sequence, where Megatron takes each context-parallel rank's own.

A loss function gives a rank's sum of losses L_i and count of tokens N_i. Without
`--calculate-per-token-loss` Megatron trains on L_i / N_i and averages gradients over the ranks of
the context-parallel group, n of them:

    Megatron    1/n * sum_i L_i / N_i        the sequence's mean only if all N_i are equal
    here        1/n * sum_i n * L_i / N      with N = sum_i N_i, which is sum_i L_i / N

Masked tokens make the counts unequal: ends of documents, padding, prompts. With the flag Megatron
divides by the count of the global batch, and nothing is changed here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Report = dict[str, Any]


def calculate_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrapper of `forward_step_calc_loss`, which calls the loss function of the script.

    Loss functions of the older kind, which give a mean instead of a sum and a count, are left
    alone: they have to divide by the count of the whole sequence themselves.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    given = call.arguments
    loss_func = given["loss_func"]
    if (
        loss_func is not None
        and not given["collect_non_loss_data"]
        and not given["config"].calculate_per_token_loss
    ):
        group = context_parallel_group(given["model"])
        given["loss_func"] = lambda *outputs: over_whole_sequence(loss_func(*outputs), group)
    return original(*call.args, **call.kwargs)


def over_whole_sequence(outputs: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[Any, ...]:
    """What the loss function should have given for Megatron to come to the right mean.

    Args:
        outputs: the rank's sum, its count of tokens, and a report for logging; or, from a loss
            function of the older kind, a mean and a report.
        group: the context-parallel group.

    Returns:
        The sum times the group's size, the sequence's count, and the report.
    """
    if len(outputs) != 3:
        return outputs
    loss, tokens, report = outputs
    if not torch.is_grad_enabled():
        # Evaluation may average the ranks' ratios, where training sums counts first.
        report = {name: _sum_and_count(value, group) for name, value in report.items()}
    return loss * dist.get_world_size(group), summed(tokens, group), report


def summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a tensor over a group, as a tensor of its own."""
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def _sum_and_count(value: Any, group: dist.ProcessGroup) -> Any:
    """A report's pair of sum and count, summed; anything else as it is."""
    is_pair = isinstance(value, Tensor) and value.numel() == 2
    return summed(value, group) if is_pair else value


def context_parallel_group(model: Any) -> dist.ProcessGroup:
    """The context-parallel group of a model; Megatron's global one for a model without groups."""
    from megatron.core import parallel_state

    while model is not None:
        group = getattr(getattr(model, "pg_collection", None), "cp", None)
        if group is not None:
            return group
        model = getattr(model, "module", None)
    return parallel_state.get_context_parallel_group()
