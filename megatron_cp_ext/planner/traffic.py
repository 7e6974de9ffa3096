"""Bytes that attention sends: every rank, one call, forward and backward.

The counts follow the plans that the algorithms carry out, so they equal what `groups.traffic`
counts in a real run, to the byte. Ring and KV all-gather send keys and values in the input's
dtype and their gradients in fp32 (fp64 for fp64); Ulysses sends everything in the input's.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp_ext.algorithms.gathering import gathers_needed_only
from megatron_cp_ext.algorithms.heads import HeadSplit
from megatron_cp_ext.algorithms.relay import RelayPlan, relay_plan
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.mask import AttentionMask


@dataclass(frozen=True)
class AttentionShape:
    """One attention call on one tensor-parallel rank.

    Args:
        heads: query heads.
        kv_heads: KV heads.
        qk_dim: size of a query or key head.
        v_dim: size of a value head.
        batch: samples.
        element_size: bytes of an element of the input.
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    batch: int = 1
    element_size: int = 2

    @property
    def gradient_size(self) -> int:
        """Bytes of an element of a gradient that is summed over ranks."""
        return max(4, self.element_size)

    @property
    def kv_row(self) -> int:
        """Elements of one token's keys and values in one sample."""
        return self.kv_heads * (self.qk_dim + self.v_dim)


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends in one attention call."""

    forward: int
    backward: int

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.forward + other.forward, self.backward + other.backward)


def attention_traffic(
    shape: AttentionShape,
    layout: SequenceLayout,
    mask: AttentionMask,
    *,
    algorithm: str,
    ulysses: int = 1,
) -> list[Sent]:
    """What each context-parallel rank sends in one call.

    Args:
        shape: of the call.
        layout: which tokens each rank holds.
        mask: what may attend to what; it decides what a ring sends.
        algorithm: `"ring"`, `"ulysses"`, `"hybrid"` or `"kvallgather"`.
        ulysses: size of the Ulysses groups.
    """
    if algorithm == "ring":
        return _ring(shape.kv_row, shape, layout, mask)
    if algorithm == "kvallgather":
        return _gather(shape, layout, relay_plan(layout, mask))
    split = HeadSplit.of(shape.heads, shape.kv_heads, ulysses)
    exchanged = [_exchange(shape, layout, split, rank) for rank in range(layout.cp_size)]
    if ulysses == layout.cp_size:
        return exchanged
    travelled = [
        _ring(split.kv[place].length * (shape.qk_dim + shape.v_dim), shape, grouped, mask)
        for place in range(ulysses)
        for grouped in [layout.grouped(ulysses)]
    ]
    return [
        sent + travelled[rank % ulysses][rank // ulysses] for rank, sent in enumerate(exchanged)
    ]


def _ring(
    kv_row: int, shape: AttentionShape, layout: SequenceLayout, mask: AttentionMask
) -> list[Sent]:
    plan = relay_plan(layout, mask)
    keys, gradients = [0] * layout.cp_size, [0] * layout.cp_size
    for step in range(1, plan.steps + 1):
        for hop in plan.key_hops(step):
            keys[hop.source] += hop.chunk.run.length
        for hop in plan.gradient_hops(step):
            gradients[hop.source] += hop.chunk.run.length
    row = shape.batch * kv_row
    return [
        Sent(
            forward=k * row * shape.element_size,
            backward=k * row * shape.element_size + g * row * shape.gradient_size,
        )
        for k, g in zip(keys, gradients, strict=True)
    ]


def _gather(shape: AttentionShape, layout: SequenceLayout, plan: RelayPlan) -> list[Sent]:
    """Everything to everyone, or the chunks that are needed, as `gathering.py` decides."""
    ranks = range(layout.cp_size)
    if gathers_needed_only(plan, layout):
        keys, gradients = [0] * layout.cp_size, [0] * layout.cp_size
        for chunk in plan.chunks:
            keys[chunk.owner] += chunk.run.length * (len(chunk.path) - 1)
            for rank in chunk.path[1:]:
                gradients[rank] += chunk.run.length
    else:
        keys = [layout.local_length(rank) * (layout.cp_size - 1) for rank in ranks]
        gradients = keys
    row = shape.batch * shape.kv_row
    return [
        Sent(
            forward=keys[rank] * row * shape.element_size,
            backward=keys[rank] * row * shape.element_size
            + gradients[rank] * row * shape.gradient_size,
        )
        for rank in ranks
    ]


def _exchange(shape: AttentionShape, layout: SequenceLayout, split: HeadSplit, rank: int) -> Sent:
    """The all-to-alls: shards of heads out, the rank's own heads of other shards back."""
    degree = len(split.query)
    first = rank - rank % degree
    me = rank % degree
    others = [place for place in range(degree) if place != me]
    own = layout.local_length(rank)
    foreign = sum(layout.local_length(first + place) for place in others)

    q_out = own * sum(split.query[place].length for place in others)
    kv_out = own * sum(split.kv[place].length for place in others)
    q_back = foreign * split.query[me].length
    kv_back = foreign * split.kv[me].length
    unit = shape.batch * shape.element_size
    dims = shape.qk_dim + shape.v_dim
    forward = q_out * shape.qk_dim + kv_out * dims + q_back * shape.v_dim
    backward = q_out * shape.v_dim + kv_back * dims + q_back * shape.qk_dim
    return Sent(forward * unit, backward * unit)
