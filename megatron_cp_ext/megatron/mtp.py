"""Multi-token prediction over a sequence that several ranks share.

Megatron rolls labels, loss masks and tokens by one position for each further token to predict,
and divides each prediction's loss by the count of its own rolled mask. Under context parallelism
it takes that count, and the one before rolling, from the rank's own tokens. The last position of
a sequence is always rolled out of the mask, so the ranks' counts are never equal.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_cp_ext.comm import CommGroup, all_gather
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.megatron.documents import packed_boundaries, packed_layout
from megatron_cp_ext.megatron.loss import summed


def roll(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Wrapper of `roll_tensor`: roll the whole sequence as one rank would, and keep own tokens.

    Tokens, labels and masks are small, so gathering them costs less than one layer's keys, and
    the result is right for every layout: Megatron's own knows the zigzag alone, and cuts packed
    documents where they are only if all their lengths are multiples of twice the group's size.

    Returns:
        The rank's part `[b, s_local]` and the sum over the whole rolled tensor.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    tensor, group = given["tensor"], given["cp_group"]
    if tensor is None or group is None or group.size() == 1:
        return original(*call.args, **call.kwargs)
    dim, cp = given["dims"], CommGroup.of(group)
    total = tensor.size(dim) * cp.size
    params = given["packed_seq_params"]
    if params is None:
        layout = SequenceLayout.zigzag(total, cp.size)
    else:
        layout = packed_layout(packed_boundaries(params), total, cp.size)
    given["tensor"] = _gather(tensor, cp, layout, dim)
    given["cp_group"] = None
    rolled, count = original(*call.args, **call.kwargs)
    return layout.shard(rolled, cp.rank, dim), count


def _gather(tensor: Tensor, cp: CommGroup, layout: SequenceLayout, dim: int) -> Tensor:
    """The whole tensor from the ranks' parts."""
    parts = all_gather(_as_bytes(tensor.contiguous()).flatten(), cp, kind="tokens")
    return layout.unshard([part.view(tensor.dtype).view(tensor.shape) for part in parts], dim)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Booleans as bytes, which every backend can send."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def process_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrapper of `process_mtp_loss`: counts of tokens are the whole sequence's.

    With `roll` in place Megatron divides the rank's losses by the sequence's rolled count R. What
    is left is a factor: the group's size, by which gradients are divided when they are averaged
    over its ranks, or with `--calculate-per-token-loss` the count N before rolling, because
    gradients are divided by the main loss's count later. Megatron gets it in a copy of the
    configuration, as part of the loss's own scale, and is told not to look for N itself.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    group, config = given["cp_group"], given["config"]
    if group is not None and group.size() > 1:
        factor = group.size() if not config.calculate_per_token_loss else _count(given)
        given["config"] = config = copy.copy(config)
        config.mtp_loss_scaling_factor = config.mtp_loss_scaling_factor * factor
        config.calculate_per_token_loss = False
    return original(*call.args, **call.kwargs)


def _count(given: dict[str, Any]) -> Tensor | int:
    """Tokens of the whole sequence in the loss, before rolling for the first further token.

    Args:
        given: the arguments of `process_mtp_loss`.
    """
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    labels, mask = given["labels"], given["loss_mask"]
    if labels is not None:
        if mask is None:
            return labels.numel() * given["cp_group"].size()
        return summed(mask.sum(), given["cp_group"])
    tokens = given.get("input_ids")
    if tokens is None:
        return 0  # there is no loss
    # Labels are then the tokens rolled by one, and the mask is rolled with them.
    mask = torch.ones_like(tokens) if mask is None else mask
    options = {name: given[name] for name in ("cp_group", "packed_seq_params")}
    return roll_tensor(mask, **options)[1]


def log_whole_loss(cp_size: int) -> Callable[..., None]:
    """A wrapper of the function that keeps MTP losses for logging.

    It is given a rank's share of a loss and the mean over all ranks is logged, where the sum
    over those that share a sequence is meant.

    Args:
        cp_size: number of ranks that share a sequence.
    """

    def save(original: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        original(loss * cp_size, *args, **kwargs)

    return save


def logging_target() -> str:
    """Where this version of Megatron keeps MTP losses for logging, as a patch's target."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    # Until 0.18 it keeps the loss alone, later also how many tokens were predicted right.
    names = ("save_metrics_to_tracker", "save_loss_to_tracker")
    name = next((n for n in names if hasattr(MTPLossLoggingHelper, n)), names[0])
    return f"{MTPLossLoggingHelper.__module__}:MTPLossLoggingHelper.{name}"
