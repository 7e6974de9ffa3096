"""Query heads that share KV heads in unequal numbers, for kernels that know equal groups only.

Where a Ulysses group splits 28 query heads with 7 KV heads in two, each rank has 14 query heads
in groups of 4, 4, 4 and 2. The KV heads are repeated here, in the tile that is being computed and
nowhere else: what travels and what is kept has each KV head once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp_ext.kernels.interface import AttentionKernel, KernelOptions, accumulation_dtype
from megatron_cp_ext.layout import Run
from megatron_cp_ext.mask import Tile


class SharedHeadsKernel(AttentionKernel):
    """A kernel with KV heads repeated for it.

    Args:
        kernel: what computes the tiles.
        kv_index: for each query head its KV head, ascending, every KV head at least once.
    """

    def __init__(self, kernel: AttentionKernel, kv_index: Sequence[int]) -> None:
        self.name = kernel.name
        self._kernel, self._kv_index = kernel, list(kv_index)
        bounds = [kv_index.index(head) for head in range(kv_index[-1] + 1)] + [len(kv_index)]
        self._groups = [Run(a, b) for a, b in itertools.pairwise(bounds)]

    def prepare(self, tiles: Sequence[Tile]) -> Sequence[Tile]:
        """What the kernel makes of them."""
        return self._kernel.prepare(tiles)

    def tile_forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, tile: Tile, options: KernelOptions
    ) -> tuple[Tensor, Tensor]:
        """See the contract in `interface.py`."""
        return self._kernel.tile_forward(
            query, self._repeat(key), self._repeat(value), tile=tile, options=options
        )

    def tile_backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        tile: Tile,
        options: KernelOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the contract in `interface.py`."""
        dq, dk, dv = self._kernel.tile_backward(
            dout,
            query,
            self._repeat(key),
            self._repeat(value),
            out=out,
            lse=lse,
            tile=tile,
            options=options,
        )
        return dq, self._sum(dk), self._sum(dv)

    def _repeat(self, tensor: Tensor) -> Tensor:
        """`[s, b, hk, d]` to `[s, b, h, d]`."""
        return tensor[:, :, self._kv_index]

    def _sum(self, gradient: Tensor) -> Tensor:
        """`[s, b, h, d]` to `[s, b, hk, d]`; one sum after the other, so that it is repeatable."""
        dtype = accumulation_dtype(gradient.dtype)
        sums = [gradient[:, :, g.slice].sum(2, dtype=dtype) for g in self._groups]
        return torch.stack(sums, dim=2)
