"""Memory of one rank, estimated."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp_ext.algorithms.gathering import gathers_needed_only
from megatron_cp_ext.algorithms.relay import RelayPlan, relay_plan
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.mask import AttentionMask
from megatron_cp_ext.planner.traffic import AttentionShape


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank.

    Args:
        parameters: weights in the training dtype.
        gradients: main gradients.
        optimizer: main weights and moments.
        activations: what the forward pass keeps for the backward pass.
        attention: buffers of other ranks' tokens and fp32 accumulators, at the peak of one layer.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    attention: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(
            (self.parameters, self.gradients, self.optimizer, self.activations, self.attention)
        )


@dataclass(frozen=True)
class Weights:
    """Parameters of the fullest rank.

    Args:
        dense: all but routed experts.
        experts: routed experts.
        half: whether training is in a 16-bit type, with main weights in fp32 beside it.
        shards: ranks over which the optimizer's state of the dense part is divided, 1 without a
            distributed optimizer.
        expert_shards: the same for the experts.
    """

    dense: float
    experts: float = 0.0
    half: bool = True
    shards: int = 1
    expert_shards: int = 1

    def bytes(self) -> tuple[int, int, int]:
        """Bytes of parameters, of fp32 gradients and of Adam's state."""
        count = self.dense + self.experts
        sharded = self.dense / self.shards + self.experts / self.expert_shards
        # Adam's two moments, and the main weights where training is in 16 bits: 4 bytes each.
        state = (12 if self.half else 8) * sharded
        return round((2 if self.half else 4) * count), round(4 * count), round(state)


def attention_buffers(
    shape: AttentionShape,
    layout: SequenceLayout,
    mask: AttentionMask,
    *,
    algorithm: str,
    ulysses: int = 1,
) -> int:
    """Bytes that one layer's attention needs besides its input and output, at its peak.

    That is the backward pass: dq, dk and dv in fp32, and what has come from other ranks.
    """
    longest = max(layout.local_length(rank) for rank in range(layout.cp_size))
    batch, e, e_g = shape.batch, shape.element_size, shape.gradient_size
    share = 1
    total = 0
    if ulysses > 1:
        # The gathered heads of q, k, v, out and dout stand beside the local shards.
        total += batch * longest * e * (3 * shape.heads * shape.v_dim + 2 * shape.kv_row)
        layout, share = layout.grouped(ulysses), ulysses
        longest = max(layout.local_length(rank) for rank in range(layout.cp_size))
    kv_row = max(shape.kv_row // share, shape.qk_dim + shape.v_dim)
    q_row = max(shape.heads // share, 1) * shape.qk_dim
    total += batch * longest * (q_row + kv_row) * e_g
    if layout.cp_size == 1:
        return total
    plan = relay_plan(layout, mask)
    if algorithm == "kvallgather":
        held = layout.seq_len
        if gathers_needed_only(plan, layout):
            held = max(_needed(plan, rank) for rank in range(layout.cp_size)) + longest
        # Gathered and put into order; their gradients, and the same arranged to be sent.
        return total + 2 * batch * held * kv_row * (e + e_g)
    visiting = (
        max(
            sum(chunk.run.length for chunk in plan.visiting(rank, step))
            for rank in range(layout.cp_size)
            for step in range(1, plan.steps + 1)
        )
        if plan.steps
        else 0
    )
    # Those that are here and those arriving, and the gradients of both.
    return total + 2 * batch * visiting * kv_row * (e + e_g)


def _needed(plan: RelayPlan, rank: int) -> int:
    """Tokens of other ranks that `rank` needs."""
    return sum(chunk.run.length for chunk in plan.chunks if rank in chunk.path[1:])
