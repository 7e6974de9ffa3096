"""Merging of partial attention results by their log-sum-exp, in fp32.

Two partial results (o1, l1) and (o2, l2) of the same query rows over disjoint keys combine as

    l = log(exp(l1) + exp(l2)),   o = exp(l1 - l) o1 + exp(l2 - l) o2

(Ring Attention, arXiv:2310.01889; FlashAttention's online softmax). A row that saw nothing has
l = -inf and o = 0, and stays out of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp_ext.layout import Run


def batch_slice(batch: Run | None) -> slice:
    """Some samples, or all for None, as a slice of the batch dimension."""
    return slice(None) if batch is None else batch.slice


class OutputAccumulator:
    """The output of a query shard while results of key shards arrive.

    Args:
        out: zeros `[s, b, h, dv]` in the accumulation dtype.
        lse: -inf `[b, h, s]` in the same dtype.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse
        self._written: list[Run] = []

    @classmethod
    def empty(cls, query: Tensor, v_dim: int, dtype: torch.dtype) -> OutputAccumulator:
        """An accumulator for query `[s, b, h, d]` that has seen nothing."""
        s, b, h, _ = query.shape
        return cls(
            torch.zeros(s, b, h, v_dim, dtype=dtype, device=query.device),
            torch.full((b, h, s), -torch.inf, dtype=dtype, device=query.device),
        )

    def merge(self, out: Tensor, lse: Tensor, *, rows: Run, batch: Run | None = None) -> None:
        """Merge a partial result of some rows, and of some samples.

        Args:
            out: `[rows, samples, h, dv]`, any dtype.
            lse: `[samples, h, rows]`.
            rows: which rows of the shard.
            batch: which samples; None for all.
        """
        samples = batch_slice(batch)
        held_out = self.out[rows.slice, samples]
        held_lse = self.lse[samples, :, rows.slice]
        if batch is None and self._is_untouched(rows):
            # The first result of a row is the row: no arithmetic, and no rounding.
            held_out.copy_(out)
            held_lse.copy_(lse)
        else:
            merged = torch.logaddexp(held_lse, lse.to(held_lse.dtype))
            weight = _weight(lse, merged)
            held_out.lerp_(out.to(held_out.dtype), weight.permute(2, 0, 1).unsqueeze(-1))
            held_lse.copy_(merged)
        self._written.append(rows)

    def add_sink(self, sink: Tensor) -> None:
        """Add one logit for each head, `[h]`, to the denominators. Call once, at the end."""
        merged = torch.logaddexp(self.lse, sink.to(self.lse.dtype)[None, :, None])
        self.out *= _weight(self.lse, merged).permute(2, 0, 1).unsqueeze(-1)
        self.lse = merged

    def _is_untouched(self, rows: Run) -> bool:
        return all(w.stop <= rows.start or rows.stop <= w.start for w in self._written)


def _weight(lse: Tensor, merged: Tensor) -> Tensor:
    """exp(lse - merged), 0 where lse is -inf, merged too or not; a NaN stays one."""
    return torch.exp(lse - merged).masked_fill_(lse == -torch.inf, 0.0)


def finite_lse(lse: Tensor) -> Tensor:
    """`lse` with 0 for the -inf of rows that see nothing, so that exp(-inf - lse) is 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
