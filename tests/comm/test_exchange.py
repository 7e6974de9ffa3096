"""The operations of `comm`: each delivers what was sent, and counts its bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_cp_ext import ContextParallelGroups
from megatron_cp_ext.comm import (
    CommGroup,
    Traffic,
    all_gather,
    all_to_all,
    reduce_scatter,
    start_transfer,
)
from megatron_cp_ext.testing import GlooPool

GetPool = Callable[[int], GlooPool]

Received = tuple[list[Tensor], int]
WORLD = 3


def world_group(*, overlap: bool = False) -> CommGroup:
    return ContextParallelGroups.from_world(send_recv_overlap=overlap).ring


def gather_numbers(dtype: torch.dtype) -> Received:
    group = world_group()
    gathered = all_gather(torch.full((4,), group.rank, dtype=dtype), group, kind="x")
    return [gathered], group.traffic.bytes["x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_gather(gloo_pool: GetPool, dtype: torch.dtype) -> None:
    for (gathered,), sent in gloo_pool(WORLD).run(gather_numbers, dtype):
        expected = torch.arange(WORLD, dtype=dtype)[:, None].expand(WORLD, 4)
        assert torch.equal(gathered, expected)
        assert sent == (WORLD - 1) * 4 * dtype.itemsize


def reduce_numbers(dtype: torch.dtype) -> Received:
    group = world_group()
    rows = torch.arange(group.size, dtype=dtype)[:, None] + torch.full((1, 5), 10 * group.rank)
    reduced = reduce_scatter(rows.to(dtype), group, kind="x")
    return [reduced], group.traffic.bytes["x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reduce_scatter(gloo_pool: GetPool, dtype: torch.dtype) -> None:
    for rank, ((reduced,), sent) in enumerate(gloo_pool(WORLD).run(reduce_numbers, dtype)):
        assert torch.equal(reduced, torch.full((5,), WORLD * rank + 30, dtype=dtype))
        assert sent == (WORLD - 1) * 5 * dtype.itemsize


def exchange_numbers() -> Received:
    """Rank r sends r + 1 elements worth 10 r + s to rank s, and keeps some for itself."""
    group = world_group()
    me, size = group.rank, group.size
    buffer = torch.cat([torch.full((me + 1,), 10.0 * me + to) for to in range(size)])
    received = all_to_all(
        buffer, [me + 1] * size, [source + 1 for source in range(size)], group, kind="x"
    )
    return [received], group.traffic.bytes["x"]


def test_all_to_all_with_parts_of_different_size(gloo_pool: GetPool) -> None:
    for rank, ((received,), sent) in enumerate(gloo_pool(WORLD).run(exchange_numbers)):
        assert received.tolist() == [10.0 * s + rank for s in range(WORLD) for _ in range(s + 1)]
        assert sent == (WORLD - 1) * (rank + 1) * 4


def transfer_numbers(*, overlap: bool) -> Received:
    """Two messages to the next rank, one to the previous, of which the last is larger."""
    group = world_group(overlap=overlap)
    me, after, before = group.rank, (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sends = [
        (torch.full((2,), 1.0 + me), after),
        (torch.full((2,), 11.0 + me), after),
        (torch.full((7,), 101.0 + me), before),
    ]
    receives = [(torch.empty(2), before), (torch.empty(2), before), (torch.empty(7), after)]
    received = start_transfer(sends, receives, group, kind="x").wait()
    return received, group.traffic.bytes["x"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_transfers(gloo_pool: GetPool, world: int, overlap: bool) -> None:
    results = gloo_pool(world).run(transfer_numbers, overlap=overlap)
    for rank, (received, sent) in enumerate(results):
        before, after = (rank - 1) % world, (rank + 1) % world
        assert [t[0].item() for t in received] == [1.0 + before, 11.0 + before, 101.0 + after]
        assert all((tensor == tensor[0]).all() for tensor in received)
        assert sent == (2 + 2 + 7) * 4


def test_a_group_of_one_sends_nothing() -> None:
    alone, buffer = CommGroup(), torch.arange(3.0)
    assert torch.equal(all_gather(buffer, alone, kind="x"), buffer[None])
    assert torch.equal(reduce_scatter(buffer[None], alone, kind="x"), buffer)
    assert torch.equal(all_to_all(buffer, [3], [3], alone, kind="x"), buffer)
    assert start_transfer([], [], alone, kind="x").wait() == []
    assert alone.traffic.total_bytes == 0


def test_traffic_adds_up_by_kind_and_starts_anew() -> None:
    traffic = Traffic()
    traffic.record("kv", 10)
    traffic.record("kv", 5)
    traffic.record("dkv", 1)
    assert (traffic.bytes["kv"], traffic.operations["kv"], traffic.total_bytes) == (15, 2, 16)
    traffic.reset()
    assert (traffic.total_bytes, traffic.operations.total()) == (0, 0)
