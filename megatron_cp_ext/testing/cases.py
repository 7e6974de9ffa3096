"""A case of context-parallel attention: made from a seed, run on a pool, judged by the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_cp_ext.attention import context_parallel_attention
from megatron_cp_ext.groups import ContextParallelGroups
from megatron_cp_ext.kernels import KernelOptions
from megatron_cp_ext.kernels.random import keep_mask
from megatron_cp_ext.layout import Run, SequenceLayout
from megatron_cp_ext.mask import AttentionMask, Tile
from megatron_cp_ext.testing.compare import assert_close_to_oracle, bounds, relative_errors
from megatron_cp_ext.testing.oracle import OracleResult, oracle_attention
from megatron_cp_ext.testing.pool import GlooPool


@dataclass(frozen=True)
class AttentionCase:
    """One call of `context_parallel_attention` with all that determines its numbers.

    Args:
        layout: which positions each rank holds; its size is the number of ranks.
        mask: what may attend to what.
        algorithm: name of the algorithm.
        ulysses_degree: size of the Ulysses groups.
        batch: samples.
        heads: query heads.
        kv_heads: key and value heads.
        qk_dim: size of a query or key head.
        v_dim: size of a value head.
        dtype: of the tensors.
        with_sink: whether there is a sink.
        dropout_p: attention dropout.
        kernel: name of the kernel.
        magnitude: standard deviation of queries and keys, to make scores large.
        seed: of the random tensors.
    """

    layout: SequenceLayout
    mask: AttentionMask = field(default_factory=AttentionMask.causal)
    algorithm: str = "ring"
    ulysses_degree: int = 1
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    qk_dim: int = 8
    v_dim: int = 8
    dtype: torch.dtype = torch.float64
    with_sink: bool = False
    dropout_p: float = 0.0
    kernel: str = "auto"
    magnitude: float = 1.0
    seed: int = 1234

    def tensors(self) -> dict[str, Tensor]:
        """query, key, value, dout and sink (if any) of the whole sequence, the same on any rank."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        s, b = self.layout.seq_len, self.batch
        drawn = {
            "query": draw(s, b, self.heads, self.qk_dim) * self.magnitude,
            "key": draw(s, b, self.kv_heads, self.qk_dim) * self.magnitude,
            "value": draw(s, b, self.kv_heads, self.v_dim),
            "dout": draw(s, b, self.heads, self.v_dim),
        }
        if self.with_sink:
            drawn["sink"] = draw(self.heads)
        return {name: tensor.to(self.dtype) for name, tensor in drawn.items()}

    def oracle(self) -> OracleResult:
        """The right answer, from the tensors as rounded to the case's dtype."""
        tensors = self.tensors()
        return oracle_attention(
            tensors["query"],
            tensors["key"],
            tensors["value"],
            dense_pairs(self.mask, self.layout.seq_len),
            dout=tensors["dout"],
            sink=tensors.get("sink"),
            dropout_keep=self._dropout_keep(),
            dropout_p=self.dropout_p,
        )

    def on_one_rank(self) -> AttentionCase:
        """The same numbers without context parallelism."""
        alone = SequenceLayout.contiguous(self.layout.seq_len, 1)
        return replace(self, layout=alone, algorithm="ring", ulysses_degree=1)

    def _dropout_keep(self) -> Tensor | None:
        """Which weights are kept, as one block over the whole sequence."""
        everything = Run(0, self.layout.seq_len)
        return keep_mask(
            Tile(everything, everything, 0, 0),
            KernelOptions(softmax_scale=1.0, dropout_p=self.dropout_p, dropout_seed=self.seed),
            slice(0, self.heads),
            self.batch,
            torch.device("cpu"),
        )


def dense_pairs(mask: AttentionMask, seq_len: int) -> Tensor:
    """Which pairs attend, `[s, s]` or `[b, 1, s, s]`, from the mask's definition, without tiles."""
    if mask.samples is not None:
        return torch.stack([dense_pairs(sample, seq_len)[None] for sample in mask.samples])
    position = torch.arange(seq_len)
    difference = position[None, :] - position[:, None]
    allowed = torch.ones(seq_len, seq_len, dtype=torch.bool)
    if mask.lo is not None:
        allowed &= difference >= mask.lo
    if mask.hi is not None:
        allowed &= difference <= mask.hi
    if mask.spans is not None:
        document = torch.full((seq_len,), -1)
        for index, span in enumerate(mask.spans):
            document[span.start : span.stop] = index
        allowed &= (document[:, None] == document[None, :]) & (document[:, None] >= 0)
    return allowed if mask.pairs is None else allowed & mask.pairs


def run_on_this_rank(
    case: AttentionCase, groups: ContextParallelGroups | None = None
) -> tuple[dict[str, Tensor], int]:
    """Forward and backward of this rank's shard: the results by name, and the bytes it sent."""
    if groups is None:
        alone = case.layout.cp_size == 1
        groups = (
            ContextParallelGroups.single()
            if alone
            else ContextParallelGroups.from_world(case.ulysses_degree)
        )
    rank, layout, tensors = groups.cp.rank, case.layout, case.tensors()
    query, key, value = (
        layout.shard(tensors[name], rank).requires_grad_() for name in ("query", "key", "value")
    )
    sink = tensors["sink"].requires_grad_() if case.with_sink else None
    out, lse = context_parallel_attention(
        query,
        key,
        value,
        algorithm=case.algorithm,
        groups=groups,
        layout=layout,
        mask=case.mask,
        sink=sink,
        dropout_p=case.dropout_p,
        dropout_seed=case.seed,
        kernel=case.kernel,
        return_lse=True,
    )
    out.backward(layout.shard(tensors["dout"], rank))
    results = {"out": out, "lse": lse, "dq": query.grad, "dk": key.grad, "dv": value.grad}
    if sink is not None:
        results["dsink"] = sink.grad
    return {name: tensor.detach() for name, tensor in results.items()}, groups.traffic.total_bytes


def join(case: AttentionCase, shards: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole-sequence tensors from those of the ranks; the sink's gradients are summed."""
    joined = {
        name: case.layout.unshard([shard[name] for shard in shards], dim=2 if name == "lse" else 0)
        for name in ("out", "lse", "dq", "dk", "dv")
    }
    if case.with_sink:
        joined["dsink"] = torch.stack([shard["dsink"] for shard in shards]).sum(0)
    return joined


def run_case(
    pool: GlooPool | None, case: AttentionCase, *, timeout: float = 60
) -> dict[str, Tensor]:
    """Run a case on a pool of as many ranks as its layout, or here if it has one."""
    if case.layout.cp_size == 1:
        return join(case, [run_on_this_rank(case)[0]])
    assert pool is not None
    shards = [result[0] for result in pool.run(run_on_this_rank, case, timeout=timeout)]
    return join(case, shards)


def assert_matches_oracle(pool: GlooPool | None, case: AttentionCase) -> None:
    """Run a case and compare out, lse, dq, dk, dv and dsink with the oracle.

    The bound is the design's: a floor for each dtype, or twice (thrice for gradients) the error
    of the same dtype on one rank.

    Raises:
        AssertionError: naming what is off.
    """
    oracle = case.oracle().tensors()
    single = relative_errors(run_case(None, case.on_one_rank()), oracle)
    assert all(math.isfinite(error) for error in single.values()), single
    assert_close_to_oracle(run_case(pool, case), oracle, bounds(single, case.dtype))
