"""Attention by a kernel alone, shard by shard as in a ring, in one process on any device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_cp_ext.algorithms.function import sink_gradient
from megatron_cp_ext.kernels import AttentionKernel, KernelOptions
from megatron_cp_ext.kernels.interface import accumulation_dtype
from megatron_cp_ext.kernels.merge import OutputAccumulator
from megatron_cp_ext.mask import Tile
from megatron_cp_ext.testing.cases import AttentionCase

Place = Callable[[Tensor], Tensor]


def attend_by_tiles(
    kernel: AttentionKernel,
    case: AttentionCase,
    *,
    place: Place = lambda tensor: tensor,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """One kernel call for each pair of a query and a key shard: out, lse, dq, dk, dv, dsink.

    Args:
        kernel: what computes; the case's own choice and its algorithm do not matter.
        case: what is computed.
        place: changes how tensors lie in memory before the kernel sees them.
        device: where it is computed; results come back to the CPU.
    """
    layout, dtype = case.layout, accumulation_dtype(case.dtype)
    tensors = {name: place(tensor.to(device)) for name, tensor in case.tensors().items()}
    scale = case.softmax_scale
    options = KernelOptions(1.0 / math.sqrt(case.qk_dim) if scale is None else scale)
    ranks = range(layout.cp_size)
    q, k, v, dout = (
        [place(layout.shard(tensors[name], rank)) for rank in ranks]
        for name in ("query", "key", "value", "dout")
    )
    states = [OutputAccumulator.empty(q[rank], case.v_dim, dtype) for rank in ranks]
    gradients = [[torch.zeros_like(t, dtype=dtype) for t in shards] for shards in (q, k, v)]

    def pairs() -> Iterator[tuple[int, int, Sequence[Tile]]]:
        for i in ranks:
            for j in ranks:
                yield i, j, case.mask.tiles(layout.shards[i], layout.shards[j])

    for i, j, tiles in pairs():
        kernel.forward(q[i], k[j], v[j], tiles, options=options, into=states[i])
    if case.with_sink:
        for state in states:
            state.add_sink(tensors["sink"])
    out = [place(state.out.to(case.dtype)) for state in states]
    for i, j, tiles in pairs():
        kernel.backward(
            dout[i],
            q[i],
            k[j],
            v[j],
            tiles,
            out=out[i],
            lse=states[i].lse,
            options=options,
            into=(gradients[0][i], gradients[1][j], gradients[2][j]),
        )
    results = {"out": layout.unshard(out), "lse": layout.unshard([s.lse for s in states], dim=2)}
    for name, shards in zip(("dq", "dk", "dv"), gradients, strict=True):
        results[name] = layout.unshard(shards)
    if case.with_sink:
        of_ranks = [sink_gradient(dout[i], out[i], states[i].lse, tensors["sink"]) for i in ranks]
        results["dsink"] = torch.stack(of_ranks).sum(0)
    return {name: tensor.cpu() for name, tensor in results.items()}
