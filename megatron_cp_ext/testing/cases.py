"""A case of context-parallel attention: made from a seed, judged by the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_cp_ext.kernels import KernelOptions
from megatron_cp_ext.kernels.random import keep_mask
from megatron_cp_ext.layout import Run, SequenceLayout
from megatron_cp_ext.mask import AttentionMask, Tile
from megatron_cp_ext.testing.oracle import OracleResult, oracle_attention


@dataclass(frozen=True)
class AttentionCase:
    """One call of `context_parallel_attention` with all that determines its numbers.

    Args:
        layout: which positions each rank holds; its size is the number of ranks.
        mask: what may attend to what.
        algorithm: name of the algorithm.
        ulysses_degree: size of the Ulysses groups.
        send_recv_overlap: whether rings send and receive on separate groups.
        batch: samples.
        heads: query heads.
        kv_heads: key and value heads.
        qk_dim: size of a query or key head.
        v_dim: size of a value head.
        dtype: of the tensors.
        softmax_scale: factor on query-key products; None for 1 / sqrt(qk_dim).
        deterministic: whether two equal runs must be bitwise equal.
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
    send_recv_overlap: bool = False
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    qk_dim: int = 8
    v_dim: int = 8
    dtype: torch.dtype = torch.float64
    softmax_scale: float | None = None
    deterministic: bool = False
    with_sink: bool = False
    dropout_p: float = 0.0
    kernel: str = "auto"
    magnitude: float = 1.0
    seed: int = 1234

    def __str__(self) -> str:
        parts = [
            f"{self.algorithm} on {self.layout.cp_size} ranks",
            f"Ulysses degree {self.ulysses_degree}" if self.ulysses_degree > 1 else "",
            "overlapped" if self.send_recv_overlap else "",
            f"{self.layout.seq_len} tokens x {self.batch}",
            f"{self.heads}q/{self.kv_heads}kv heads of {self.qk_dim}/{self.v_dim}",
            str(self.dtype).removeprefix("torch."),
            _describe(self.mask),
            f"scale {self.softmax_scale}" if self.softmax_scale is not None else "",
            "sink" if self.with_sink else "",
            f"dropout {self.dropout_p}" if self.dropout_p else "",
            f"kernel {self.kernel}" if self.kernel != "auto" else "",
            f"magnitude {self.magnitude:g}" if self.magnitude != 1.0 else "",
            f"seed {self.seed}",
            _describe_shards(self.layout),
        ]
        return ", ".join(part for part in parts if part)

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
            softmax_scale=self.softmax_scale,
            sink=tensors.get("sink"),
            dropout_keep=self._dropout_keep(),
            dropout_p=self.dropout_p,
        )

    def on_one_rank(self) -> AttentionCase:
        """The same numbers without context parallelism."""
        alone = SequenceLayout.contiguous(self.layout.seq_len, 1)
        return replace(
            self, layout=alone, algorithm="ring", ulysses_degree=1, send_recv_overlap=False
        )

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
        samples = [dense_pairs(sample, seq_len) for sample in mask.samples]
        return torch.stack([pairs.view(1, seq_len, seq_len) for pairs in samples])
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


def covered_pairs(tiles: Sequence[Tile], rows: int, columns: int, *, batch: int = 1) -> Tensor:
    """How many of the tiles hold each pair of a query and a key shard: `[b, rows, columns]`."""
    count = torch.zeros(batch, 1, rows, columns, dtype=torch.int64)
    for tile in tiles:
        samples = slice(None) if tile.batch is None else slice(*tile.batch)
        count[samples, :, slice(*tile.q_rows), slice(*tile.k_rows)] += tile.allowed().long()
    return count.squeeze(1)


def _describe(mask: AttentionMask) -> str:
    if mask.samples is not None:
        return f"samples [{'; '.join(_describe(sample) for sample in mask.samples)}]"
    band = f"band {'' if mask.lo is None else mask.lo}..{'' if mask.hi is None else mask.hi}"
    spans = None if mask.spans is None else [tuple(span) for span in mask.spans]
    return " ".join(
        part
        for part in (
            band,
            "" if spans is None else f"documents {spans}",
            "" if mask.pairs is None else f"dense {list(mask.pairs.shape)}",
        )
        if part
    )


def _describe_shards(layout: SequenceLayout) -> str:
    """The shards, unless they are Megatron's own zigzag."""
    size = layout.cp_size
    if layout.seq_len % (2 * size) == 0 and layout == SequenceLayout.zigzag(layout.seq_len, size):
        return ""
    return f"shards {[[tuple(run) for run in runs] for runs in layout.shards]}"
