"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from megatron_cp_ext.testing.pool import GlooPool


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[Callable[[int], GlooPool]]:
    """`gloo_pool(world_size)`: the session's pool of that size; it starts at its first call."""
    pools: dict[int, GlooPool] = {}

    def get(world_size: int) -> GlooPool:
        if world_size not in pools:
            pools[world_size] = GlooPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
