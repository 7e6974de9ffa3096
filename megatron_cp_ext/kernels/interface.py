"""The contract between algorithms, which move tensors, and kernels, which compute tiles.

A kernel attends a query shard to a key shard over a list of tiles. It returns partial results
that merge exactly with those of other key shards (`merge.py`), and its backward pass takes the
*merged* out and lse, with which the partial gradients are exact: with P = exp(s - lse),

    dv = P^T dout,   ds = P * (dout v^T - rowsum(dout * out)),   dq = ds k,   dk = ds^T q

every term of which is a sum over key shards (FlashAttention-2, arXiv:2307.08691, section 3.1).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp_ext.kernels.merge import OutputAccumulator, accumulate, batch_slice
from megatron_cp_ext.mask import Tile


@dataclass(frozen=True)
class KernelOptions:
    """What a call asks of a kernel besides its tensors.

    Args:
        softmax_scale: factor on query-key products.
        dropout_p: probability with which an attention weight is dropped.
        dropout_seed: with dropout, the seed that fixes every drop of this call.
        first_head: index of the first query head among all heads that share the seed.
        deterministic: whether two equal calls must give bitwise equal results.
    """

    softmax_scale: float
    dropout_p: float = 0.0
    dropout_seed: int = 0
    first_head: int = 0
    deterministic: bool = False


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64: what partial results are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class AttentionKernel(abc.ABC):
    """A backend of block attention.

    Shapes: query `[sq, b, h, d]`, key `[sk, b, hk, d]`, value `[sk, b, hk, dv]`, where query
    head i attends to KV head i // (h / hk); out and dout `[sq, b, h, dv]`; lse `[b, h, sq]`,
    natural logarithm, -inf for rows that see nothing.
    """

    name: str

    def prepare(self, tiles: Sequence[Tile]) -> Sequence[Tile]:
        """Recut tiles into those the backend can do in one call each; as they are by default."""
        return tiles

    @abc.abstractmethod
    def tile_forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, tile: Tile, options: KernelOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend the tile's own rows: out `[rows, b, h, dv]` in any dtype, lse `[b, h, rows]`."""

    @abc.abstractmethod
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
        """Gradients of the tile's own rows: dq, dk, dv, shaped like query, key and value."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: Sequence[Tile],
        *,
        options: KernelOptions,
        into: OutputAccumulator,
    ) -> None:
        """Attend over all tiles and merge the results into `into`."""
        for tile in self.prepare(tiles):
            q, k, v = _cut(tile, query, key, value)
            out, lse = self.tile_forward(q, k, v, tile=tile, options=options)
            into.merge(out, lse, rows=tile.q_rows, batch=tile.batch)

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: Sequence[Tile],
        *,
        out: Tensor,
        lse: Tensor,
        options: KernelOptions,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add the gradients of all tiles to the accumulators `into` = (dq, dk, dv).

        `out` and `lse` are those of the whole row, merged over all key shards.
        """
        dq, dk, dv = into
        for tile in self.prepare(tiles):
            samples, q_rows, k_rows = batch_slice(tile.batch), tile.q_rows.slice, tile.k_rows.slice
            q, k, v = _cut(tile, query, key, value)
            partial = self.tile_backward(
                dout[q_rows, samples],
                q,
                k,
                v,
                out=out[q_rows, samples],
                lse=lse[samples, :, q_rows],
                tile=tile,
                options=options,
            )
            accumulate(dq[q_rows, samples], partial[0])
            accumulate(dk[k_rows, samples], partial[1])
            accumulate(dv[k_rows, samples], partial[2])


def _cut(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    samples, q_rows, k_rows = batch_slice(tile.batch), tile.q_rows.slice, tile.k_rows.slice
    return query[q_rows, samples], key[k_rows, samples], value[k_rows, samples]
