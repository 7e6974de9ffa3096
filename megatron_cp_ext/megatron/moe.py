"""Auxiliary losses of mixtures of experts over a sequence that several ranks share.

Megatron counts an expert's tokens over the context-parallel group, and scales the load balancing
and z losses so that their gradients equal those of one rank. That rests on every rank's having
equally many tokens, which a padding mask of the router breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_cp_ext.errors import UsageError


def refuse_uneven_padding(
    original: Callable[..., Any],
    router: Any,
    input: Tensor,
    padding_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrapper of `TopKRouter.forward`: no padding mask where it would change a loss.

    Raises:
        UsageError: the mask would weigh the ranks' shares of a loss wrongly.
    """
    if padding_mask is not None and router.training:
        config = router.config
        per_token = config.calculate_per_token_loss
        uneven = []
        if config.moe_z_loss_coeff and not per_token:
            uneven.append("--moe-z-loss-coeff")
        if router.is_aux_loss_enabled() and per_token:
            uneven.append("--moe-aux-loss-coeff with --calculate-per-token-loss")
        if uneven:
            raise UsageError(
                option="padding_mask",
                value=list(padding_mask.shape),
                reason=f"{' and '.join(uneven)} is averaged over each context-parallel rank's own "
                "tokens, and padding leaves the ranks with unequal numbers of them",
                remedy="call the model without padding_mask, or set the coefficient to 0",
            )
    return original(router, input, padding_mask, *args, **kwargs)
