"""What carries bytes: in an order that cannot deadlock, and through host memory where it must."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_ext import AttentionMask, ContextParallelGroups, SequenceLayout
from megatron_cp_ext.algorithms.relay import relay_plan
from megatron_cp_ext.comm import CommGroup, HostStagingWire, SilentWire, wire
from megatron_cp_ext.comm.wire import ProcessGroupWire
from megatron_cp_ext.testing import (
    AttentionCase,
    GlooPool,
    assert_matches_oracle,
    attend_here,
)

GetPool = Callable[[int], GlooPool]

# A message: sender and receiver.
Message = tuple[int, int]


class Batches:
    """Records the batches that one rank gives to its process groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[tuple[str, list[Message]]] = []
        self.me = 0
        monkeypatch.setattr(dist, "P2POp", lambda op, buffer, peer, group: (op, peer, group))
        monkeypatch.setattr(dist, "batch_isend_irecv", self._take)

    def _take(self, operations: list[Any]) -> list[Any]:
        (lane,) = {group for _, _, group in operations}
        messages = [
            (self.me, peer) if op is dist.isend else (peer, self.me) for op, peer, _ in operations
        ]
        self.batches.append((lane, messages))
        return []


def batches_of(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int, *, overlap: bool, mask: AttentionMask
) -> list[tuple[str, list[Message]]]:
    """All batches of one rank in a ring's forward pass."""
    recorded = Batches(monkeypatch)
    recorded.me = rank
    group: Any = CommGroup(
        ranks=tuple(range(size)),
        rank=rank,
        group="first",  # type: ignore[arg-type]
        reverse="second" if overlap else None,  # type: ignore[arg-type]
    )
    plan = relay_plan(SequenceLayout.zigzag(4 * size, size), mask)
    for step in range(1, plan.steps + 1):
        hops = plan.key_hops(step)
        ProcessGroupWire().point_to_point(
            [(torch.zeros(1), hop.to) for hop in hops if hop.source == rank],
            [(torch.zeros(1), hop.source) for hop in hops if hop.to == rank],
            group,
        )
    return recorded.batches


@pytest.mark.parametrize("mask", [AttentionMask.causal(), AttentionMask.full()])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_rings_finish_even_where_each_batch_blocks_until_its_peers_have_come(
    monkeypatch: pytest.MonkeyPatch, size: int, overlap: bool, mask: AttentionMask
) -> None:
    """The strictest device: one batch at a time, over when every message of it has both ends."""
    queues = [
        batches_of(monkeypatch, rank, size, overlap=overlap, mask=mask) for rank in range(size)
    ]
    assert all(queues)
    while any(queues):
        heads = [queue[0] if queue else ("", []) for queue in queues]
        matched = False
        for rank, (lane, messages) in enumerate(heads):
            for message in [m for m in messages if m[0] == rank]:
                peer_lane, expected = heads[message[1]]
                if peer_lane == lane and message in expected:
                    messages.remove(message)
                    expected.remove(message)
                    matched = True
        assert matched, f"stuck: {heads}"
        queues = [queue[1:] if queue and not queue[0][1] else queue for queue in queues]


def test_with_two_groups_a_rank_of_an_even_ring_sends_on_one_and_receives_on_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rank in range(4):
        batches = batches_of(monkeypatch, rank, 4, overlap=True, mask=AttentionMask.full())
        assert {
            (lane, "sends" if sender == rank else "receives")
            for lane, messages in batches
            for sender, _ in messages
        } == (
            {("first", "sends"), ("second", "receives")}
            if rank % 2 == 0
            else {("second", "sends"), ("first", "receives")}
        )


class CountingWire(HostStagingWire):
    """Goes through copies, as where the device is another one, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def to_host(self, tensor: Tensor) -> Tensor:
        self.copied += tensor.numel() * tensor.element_size()
        host = super().to_host(tensor)
        assert not tensor.numel() or host.data_ptr() != tensor.data_ptr()
        return host


def attend_staged(case: AttentionCase, groups: ContextParallelGroups) -> dict[str, Tensor]:
    counting = CountingWire()
    staged = ContextParallelGroups(
        *(replace(g, wire=counting) for g in (groups.cp, groups.ulysses, groups.ring))
    )
    results = attend_here(case, staged)
    assert counting.copied > 0 and groups.traffic.total_bytes > 0
    return results


def test_every_algorithm_goes_through_host_memory(gloo_pool: GetPool) -> None:
    cases = [
        AttentionCase(
            SequenceLayout.zigzag(48, 4),
            mask,
            algorithm=algorithm,
            ulysses_degree=degree,
            send_recv_overlap=overlap,
            kv_heads=2,
            batch=2,
            dtype=dtype,
            with_sink=True,
        )
        for algorithm, degree, overlap in (
            ("ring", 1, False),
            ("ring", 1, True),
            ("ulysses", 4, False),
            ("hybrid", 2, False),
            ("kvallgather", 1, False),
        )
        for mask, dtype in (
            (AttentionMask.causal(), torch.float64),
            (AttentionMask.documents([0, 7, 30, 48], window=(9, 0)), torch.bfloat16),
        )
    ]
    assert_matches_oracle(gloo_pool(4), *cases, execute=attend_staged)


def staged_on_request() -> bool:
    groups = ContextParallelGroups.from_world(host_staging=True)
    return all(
        isinstance(wire.wire_for(group, torch.device("cpu")), HostStagingWire)
        for group in (groups.cp, groups.ring)
    )


def test_host_memory_is_used_on_request(gloo_pool: GetPool) -> None:
    assert all(gloo_pool(2).run(staged_on_request))


class FakeBackend:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


class FakeGroup:
    """A process group with backends for some devices."""

    def __init__(self, **backends: str) -> None:
        self._backends = backends

    def _get_backend(self, device: torch.device) -> FakeBackend:
        if device.type not in self._backends:
            raise RuntimeError(f"no backend for {device}")
        return FakeBackend(self._backends[device.type])


@pytest.mark.parametrize(
    ("backends", "device", "staged"),
    [
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", True),
        ({"cpu": "gloo"}, "xpu", True),
        ({"cuda": "nccl"}, "cuda", False),
        ({"xpu": "hccl"}, "xpu", False),  # as an NPU, of which torch alone knows nothing
        ({"cpu": "gloo", "cuda": "gloo"}, "cpu", False),
    ],
)
def test_host_memory_is_used_where_nothing_else_works_and_that_is_said_once(
    backends: dict[str, str], device: str, staged: bool
) -> None:
    fake: Any = FakeGroup(**backends)
    group = CommGroup(ranks=(0, 1), rank=0, group=fake)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = [wire.wire_for(group, torch.device(device)) for _ in range(3)]
    assert all(isinstance(each, HostStagingWire) == staged for each in chosen)
    assert [device in str(warning.message) for warning in caught] == [True] * staged


def test_a_silent_wire_lets_one_process_play_any_rank() -> None:
    for algorithm, degree in (("ring", 1), ("ulysses", 4), ("hybrid", 2), ("kvallgather", 1)):
        case = AttentionCase(
            SequenceLayout.zigzag(32, 4),
            algorithm=algorithm,
            ulysses_degree=degree,
            dtype=torch.float32,
        )
        groups = ContextParallelGroups.pretended(4, rank=1, ulysses_degree=degree)
        results = attend_here(case, groups)
        assert results["out"].shape == (8, 1, 4, 8)
        assert all(tensor.isfinite().all() for tensor in results.values())
        assert groups.traffic.total_bytes > 0
        assert isinstance(groups.ring.wire or SilentWire(), SilentWire)
