"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.testing.pool import GlooPool


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors gain nothing from threads, and threads that wait take the cores of ranks."""
    torch.set_num_threads(1)


@pytest.fixture
def refused() -> Callable[..., AbstractContextManager[None]]:
    """`with refused("option", remedy="use 2"):` a complete UsageError about it is raised inside."""

    @contextmanager
    def expect(option: str, *, reason: str = "", remedy: str = "") -> Iterator[None]:
        with pytest.raises(UsageError) as caught:
            yield
        error = caught.value
        assert error.option == option
        assert error.reason and reason in error.reason
        assert error.remedy and remedy in error.remedy
        lines = [line.split(":")[0].strip() for line in str(error).strip().splitlines()]
        assert lines == ["option", "value", "reason", "remedy"]

    return expect


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
