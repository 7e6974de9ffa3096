"""The plan of a training: everything `megatron-cp check` prints, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.mask import AttentionMask
from megatron_cp_ext.planner.memory import Memory, Weights, attention_buffers
from megatron_cp_ext.planner.topology import Topology
from megatron_cp_ext.planner.traffic import AttentionShape, attention_traffic


@dataclass(frozen=True)
class Training:
    """What is to be planned.

    Args:
        topology: how ranks are divided.
        algorithm: short name; None where attention is Megatron's own.
        seq_len: tokens of a sequence.
        mask: the mask of a layer. Documents are not known before the data is, so bytes are those
            of a sequence that is one document: the most there can be.
        mask_name: the mask in words.
        shape: of one attention call on one rank.
        layers: attention layers of the fullest pipeline stage.
        micro_batches: of one step, on each rank.
        kernel: name of the kernel; None where attention is Megatron's own.
        platform: "cpu", "cuda" or "npu".
        weights: parameters of the fullest rank; None where they are not known.
        activations: bytes kept for the backward pass on the fullest rank.
        patches: `target (feature)` of every patch.
        notes: what the figures leave out.
    """

    topology: Topology
    algorithm: str | None
    seq_len: int
    mask: AttentionMask
    mask_name: str
    shape: AttentionShape
    layers: int
    micro_batches: int
    kernel: str | None
    platform: str
    weights: Weights | None
    activations: int
    patches: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """One kind of group.

    Args:
        kind: such as "CP".
        size: ranks in each.
        count: groups of this kind.
        sample: global ranks of the sample rank's group.
    """

    kind: str
    size: int
    count: int
    sample: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """What one context-parallel rank holds and sends.

    Args:
        rank: within the context-parallel group.
        tokens: runs of global positions, `(first, one past the last)`.
        forward: bytes sent in one layer's forward pass of one micro-batch.
        backward: the same in the backward pass.
    """

    rank: int
    tokens: tuple[tuple[int, int], ...]
    forward: int
    backward: int


@dataclass(frozen=True)
class Plan:
    """What a training will do; see `Training` for the meaning of what is repeated from there."""

    world: int
    platform: str
    algorithm: str | None
    kernel: str | None
    mask: str
    seq_len: int
    layers: int
    micro_batches: int
    sample_rank: int
    groups: tuple[Group, ...]
    shards: tuple[Shard, ...]
    bytes_per_step: int
    memory: Memory | None
    patches: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plan = dataclasses.asdict(self)
        if self.memory is not None:
            plan["memory"]["total"] = self.memory.total
        return plan


def make_plan(training: Training, *, sample_rank: int = 0) -> Plan:
    """Work the plan out.

    Args:
        training: what is to be planned.
        sample_rank: the rank whose groups are shown.
    """
    topology, shape = training.topology, training.shape
    layout = SequenceLayout.zigzag(training.seq_len, topology.cp)
    own = training.algorithm is not None
    sent = (
        attention_traffic(
            shape,
            layout,
            training.mask,
            algorithm=training.algorithm or "ring",
            ulysses=topology.ulysses,
        )
        if own
        else []
    )
    shards = tuple(
        Shard(
            rank,
            tuple((run.start, run.stop) for run in layout.shards[rank]),
            sent[rank].forward if own else 0,
            sent[rank].backward if own else 0,
        )
        for rank in range(topology.cp)
    )
    busiest = max(shard.forward + shard.backward for shard in shards)
    ranks = topology.groups_of(sample_rank)
    return Plan(
        world=topology.world,
        platform=training.platform,
        algorithm=training.algorithm,
        kernel=training.kernel,
        mask=training.mask_name,
        seq_len=training.seq_len,
        layers=training.layers,
        micro_batches=training.micro_batches,
        sample_rank=sample_rank,
        groups=tuple(
            Group(kind, size, topology.world // size, ranks[kind])
            for kind, size in topology.sizes().items()
        ),
        shards=shards,
        bytes_per_step=busiest * training.layers * training.micro_batches,
        memory=_memory(training, layout),
        patches=training.patches,
        notes=training.notes,
    )


def _memory(training: Training, layout: SequenceLayout) -> Memory | None:
    if training.weights is None:
        return None
    parameters, gradients, optimizer = training.weights.bytes()
    buffers = 0
    if training.algorithm is not None:
        buffers = attention_buffers(
            training.shape,
            layout,
            training.mask,
            algorithm=training.algorithm,
            ulysses=training.topology.ulysses,
        )
    return Memory(parameters, gradients, optimizer, training.activations, buffers)
