"""Random numbers that depend on where they are used, not on when they are drawn.

A weight's drop is a hash of (seed, sample, head, query position, key position), so the same
weight is dropped whichever rank computes it, in whatever order, and again in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp_ext.kernels.interface import KernelOptions
from megatron_cp_ext.mask import Tile

# Odd multipliers of the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), as int64.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)
_BITS = 53  # as many as a float64 holds exactly


def keep_mask(
    tile: Tile, options: KernelOptions, heads: slice, batch: int, device: torch.device
) -> Tensor | None:
    """Which weights dropout keeps: bool `[batch, heads, q, k]`; None without dropout.

    Args:
        tile: the block of queries and keys.
        options: dropout probability, seed, and the first head's global index.
        heads: which of the call's query heads.
        batch: number of samples in the block.
        device: where to compute.
    """
    if options.dropout_p == 0.0:
        return None
    first_sample = 0 if tile.batch is None else tile.batch.start
    index = torch.full((), options.dropout_seed, dtype=torch.int64, device=device)
    for start, count, axis in (
        (first_sample, batch, 0),
        (options.first_head + heads.start, heads.stop - heads.start, 1),
        (tile.q_pos, tile.q_rows.length, 2),
        (tile.k_pos, tile.k_rows.length, 3),
    ):
        shape = [1, 1, 1, 1]
        shape[axis] = count
        coordinate = torch.arange(start, start + count, device=device).view(shape)
        index = _mix(index + (coordinate + 1) * _GAMMA)
    return _unit(index) >= options.dropout_p


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser; int64 arithmetic wraps as uint64 does."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _unit(x: Tensor) -> Tensor:
    """Uniform in [0, 1), float64."""
    return _shift(x, 64 - _BITS).to(torch.float64) * 2.0**-_BITS


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
