"""Estimates of memory, against sums done by hand."""

from __future__ import annotations

import pytest

from megatron_cp_ext import AttentionMask, SequenceLayout
from megatron_cp_ext.planner.hardware import DEVICES, hiding_length
from megatron_cp_ext.planner.memory import Memory, Weights, attention_buffers
from megatron_cp_ext.planner.traffic import AttentionShape

SHAPE = AttentionShape(heads=8, kv_heads=2, qk_dim=64, v_dim=64)
CAUSAL = AttentionMask.causal()


def test_weights_in_half_precision_have_main_weights_beside_them() -> None:
    assert Weights(1000).bytes() == (2000, 4000, 12000)
    assert Weights(1000, half=False).bytes() == (4000, 4000, 8000)


def test_a_distributed_optimizer_shards_dense_and_expert_state_apart() -> None:
    weights = Weights(1000, experts=600, shards=10, expert_shards=2)
    assert weights.bytes() == (3200, 6400, 12 * (100 + 300))


def test_the_total_is_the_sum() -> None:
    assert Memory(1, 2, 3, 4, 5).total == 15


def buffers(algorithm: str, ranks: int, *, ulysses: int = 1, seq_len: int = 4096) -> int:
    layout = SequenceLayout.zigzag(seq_len, ranks)
    return attention_buffers(SHAPE, layout, CAUSAL, algorithm=algorithm, ulysses=ulysses)


def test_a_rings_buffers_do_not_grow_with_the_ring_at_equal_shards() -> None:
    assert buffers("ring", 4, seq_len=4096) == buffers("ring", 8, seq_len=8192)


def test_a_gathers_buffers_grow_with_the_sequence() -> None:
    assert buffers("kvallgather", 8, seq_len=8192) > 1.7 * buffers("kvallgather", 4, seq_len=4096)


def test_one_rank_has_accumulators_only() -> None:
    # dq for 8 heads, dk and dv for 2, of 64 elements in fp32
    assert buffers("ring", 1, seq_len=10) == 10 * (8 * 64 + 2 * 128) * 4


def test_ulysses_holds_every_tensor_twice() -> None:
    assert buffers("ulysses", 4, ulysses=4) > buffers("ring", 1, seq_len=1024)


@pytest.mark.parametrize(("inside", "bandwidth"), [(True, 450e9), (False, 50e9)])
def test_the_length_that_hides_the_ring(inside: bool, bandwidth: float) -> None:
    tokens = hiding_length(
        heads=32, kv_heads=8, element_size=2, device=DEVICES["cuda"], inside_node=inside
    )
    # A step's messages, 2 K d e c bytes, take as long as its 2 H d c^2 operations.
    sending = 2 * 8 * 128 * 2 * tokens / bandwidth
    computing = 2 * 32 * 128 * tokens**2 / 600e12
    assert computing == pytest.approx(sending, rel=1e-3)
