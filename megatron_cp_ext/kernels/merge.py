"""Merging of partial attention results by their log-sum-exp, in fp32.

Two partial results (o1, l1) and (o2, l2) of the same query rows over disjoint keys combine as

    l = log(exp(l1) + exp(l2)),   o = exp(l1 - l) o1 + exp(l2 - l) o2

(Ring Attention, arXiv:2310.01889; FlashAttention's online softmax). A row that saw nothing has
l = -inf and o = 0, and stays out of the sum.

On CUDA this is one Triton kernel (`merge_triton.py`), where Triton is installed and can compile.
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import torch
from torch import Tensor

from megatron_cp_ext.layout import Run

# Device types whose tensors Triton's kernels take.
FUSED_ON = {"cuda"}


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
        first = batch is None and self._is_untouched(rows)
        fused = _fused(held_out)
        if fused is not None:
            fused.merge(held_out, held_lse, out, lse, first=first)
        elif first:
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


def accumulate(into: Tensor, part: Tensor) -> None:
    """`into += part` for gradients `[s, b, h, d]`, `part` in any dtype."""
    fused = _fused(into)
    if fused is None:
        into += part
    else:
        fused.add(into, part)


def _fused(accumulator: Tensor) -> ModuleType | None:
    """The kernels that take this accumulator, if any do."""
    if accumulator.device.type not in FUSED_ON or accumulator.dtype != torch.float32:
        return None
    return _triton_kernels(accumulator.device)


@functools.cache
def _triton_kernels(device: torch.device) -> ModuleType | None:
    """Triton's kernels, or None where there is no Triton or it cannot compile."""
    try:
        from megatron_cp_ext.kernels import merge_triton

        probe = torch.zeros(1, 1, 1, 1, device=device)
        merge_triton.add(probe, probe)
    except ImportError:
        return None
    except Exception as error:  # no C compiler, no libcuda, a device that is too old
        warnings.warn(
            f"context parallelism: Triton cannot compile here, so partial results are merged by "
            f"torch, in more passes: {error}",
            stacklevel=2,
        )
        return None
    return merge_triton


def _weight(lse: Tensor, merged: Tensor) -> Tensor:
    """exp(lse - merged), 0 where lse is -inf, merged too or not; a NaN stays one."""
    return torch.exp(lse - merged).masked_fill_(lse == -torch.inf, 0.0)


def finite_lse(lse: Tensor) -> Tensor:
    """`lse` with 0 for the -inf of rows that see nothing, so that exp(-inf - lse) is 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
