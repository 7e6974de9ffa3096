"""The worker pool: results come back, failures are told apart, and no process is left behind."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.testing.pool import GlooPool, WorkerError, WorkerTimeout

GetPool = Callable[[int], GlooPool]


@pytest.fixture(scope="module")
def pool() -> Iterator[GlooPool]:
    with GlooPool(2) as pool:
        yield pool


class Watch:
    """Handles on running processes, opened while they live, so that pids cannot be mistaken."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._handles = [os.pidfd_open(pid) for pid in pids]

    def all_end_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        try:
            return all(self._ends(handle, deadline) for handle in self._handles)
        finally:
            for handle in self._handles:
                os.close(handle)

    @staticmethod
    def _ends(handle: int, deadline: float) -> bool:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


# Called on the workers.


def describe(value: int, *, scale: int = 1) -> tuple[int, int, str, int]:
    return dist.get_rank(), dist.get_world_size(), dist.get_backend(), value * scale


def sum_over_ranks(shards: list[torch.Tensor]) -> torch.Tensor:
    total = shards[dist.get_rank()].clone()
    dist.all_reduce(total)
    return total


def with_history(size: int) -> dict[str, torch.Tensor]:
    leaf = torch.ones(size, requires_grad=True)
    return {"leaf": leaf, "result": leaf * 3}


def fail_on(rank: int, *, others: str) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the culprit")
    if others == "wait for it":
        dist.barrier()


def refuse() -> None:
    raise UsageError(option="--x", value=3, reason="no such thing", remedy="leave it out")


def die(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    dist.barrier()


def hang(rank: int) -> None:
    if dist.get_rank() == rank:
        wait_for_ever()


def wait_for_ever() -> None:
    threading.Event().wait()


def unpicklable_result() -> object:
    return lambda: None


def draw() -> float:
    return torch.rand(()).item()


def make_subgroup_and_use_it() -> float:
    group = dist.new_group([0, 1])
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def threads() -> tuple[int, int, int]:
    """Threads torch uses, in the main thread and in a backward pass; threads of this process."""
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: seen.append(torch.get_num_threads()))
    (leaf * 2).sum().backward()
    return torch.get_num_threads(), seen[0], len(os.listdir("/proc/self/task"))


def working_directory() -> str:
    return os.getcwd()


# The promises.


def test_function_runs_on_every_rank_and_results_come_in_rank_order(gloo_pool: GetPool) -> None:
    for world_size in (1, 3):
        results = gloo_pool(world_size).run(describe, 7, scale=3)
        assert results == [(rank, world_size, "gloo", 21) for rank in range(world_size)]


def test_cached_pool_is_the_same_and_starts_at_its_first_call(gloo_pool: GetPool) -> None:
    assert gloo_pool(2) is gloo_pool(2)
    fresh = GlooPool(2)
    assert not fresh.running
    fresh.close()


def test_tensors_travel_by_value(pool: GlooPool) -> None:
    shards = [torch.randn(5, dtype=torch.float64).bfloat16() for _ in range(2)]
    for total in pool.run(sum_over_ranks, shards):
        assert total.dtype == torch.bfloat16
        torch.testing.assert_close(total, shards[0] + shards[1], rtol=0, atol=0)


def test_large_arguments_and_results_do_not_block(pool: GlooPool) -> None:
    shards = [torch.full((4_000_000,), float(rank)) for rank in range(2)]
    totals = pool.run(sum_over_ranks, shards)
    assert all(torch.equal(total, torch.ones(4_000_000)) for total in totals)


def test_results_that_require_grad_can_be_returned(pool: GlooPool) -> None:
    for result in pool.run(with_history, 4):
        assert torch.equal(result["leaf"].detach(), torch.ones(4))
        assert torch.equal(result["result"].detach(), torch.full((4,), 3.0))


def test_partial_functions_are_accepted(pool: GlooPool) -> None:
    assert [result[3] for result in pool.run(partial(describe, 5))] == [5, 5]


def test_same_processes_serve_many_calls(pool: GlooPool) -> None:
    assert pool.run(os.getpid) == pool.run(os.getpid)


def test_every_call_starts_from_the_same_seed(pool: GlooPool) -> None:
    first, second = pool.run(draw), pool.run(draw)
    assert first == second
    assert first[0] == first[1]


def test_groups_made_by_a_call_do_not_pile_up(pool: GlooPool) -> None:
    pool.run(make_subgroup_and_use_it)
    before = pool.run(threads)
    for _ in range(5):
        assert pool.run(make_subgroup_and_use_it) == [2.0, 2.0]
    assert pool.run(threads) == before


def test_workers_use_one_thread_each(pool: GlooPool) -> None:
    assert [result[:2] for result in pool.run(threads)] == [(1, 1), (1, 1)]


def test_workers_follow_the_working_directory(
    pool: GlooPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pool.run(working_directory) == [str(tmp_path)] * 2


def test_workers_find_modules_added_after_they_started(
    pool: GlooPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(os.getpid)
    name = f"late_module_{random.getrandbits(32):08x}"
    (tmp_path / f"{name}.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert pool.run(__import__(name).answer) == [42, 42]


def test_exception_names_the_rank_and_carries_the_remote_traceback(pool: GlooPool) -> None:
    with pytest.raises(WorkerError, match="rank 1 failed: KeyError: 'the culprit'") as caught:
        pool.run(fail_on, 1, others="return")
    assert "in fail_on" in str(caught.value)
    assert 'raise KeyError("the culprit")' in str(caught.value)
    assert caught.value.rank == 1
    assert list(caught.value.failures) == [1]
    assert pool.run(draw)


def test_failure_on_every_rank_is_reported_for_every_rank(pool: GlooPool) -> None:
    with pytest.raises(WorkerError, match="remedy: leave it out") as caught:
        pool.run(refuse)
    assert {rank: failure.kind for rank, failure in caught.value.failures.items()} == {
        0: "UsageError",
        1: "UsageError",
    }
    assert "reason: no such thing" in caught.value.failures[0].message


def test_ranks_stuck_behind_a_failed_one_are_killed_and_replaced(pool: GlooPool) -> None:
    old = pool.run(os.getpid)
    watch = Watch(old)
    with pytest.raises(WorkerError, match="rank 0 failed: KeyError") as caught:
        pool.run(fail_on, 0, others="wait for it", timeout=60)
    assert "rank(s) [1] were still running" in str(caught.value)
    assert watch.all_end_within(5)
    assert not pool.running
    assert set(pool.run(os.getpid)).isdisjoint(old)


@pytest.mark.parametrize(
    ("code", "how"), [(3, "ended with exit code 3"), (-9, "was killed by SIGKILL")]
)
def test_death_of_a_rank_is_an_error(pool: GlooPool, code: int, how: str) -> None:
    with pytest.raises(WorkerError, match=f"rank 1 failed: died: {how}") as caught:
        pool.run(die, 1, code)
    assert caught.value.rank == 1
    assert pool.run(draw)


def test_death_of_an_idle_rank_is_an_error_of_the_next_call(pool: GlooPool) -> None:
    victim = pool.run(os.getpid)[0]
    watch = Watch([victim])
    os.kill(victim, signal.SIGKILL)
    assert watch.all_end_within(5)
    with pytest.raises(WorkerError, match="rank 0 failed: died"):
        pool.run(draw)
    assert pool.run(draw)


def test_hanging_rank_is_killed_in_time_and_its_place_shown(pool: GlooPool) -> None:
    watch = Watch(pool.run(os.getpid))
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"rank\(s\) \[1\] of 2 did not finish") as caught:
        pool.run(hang, 1, timeout=0.5)
    assert time.monotonic() - start < 5
    assert "in wait_for_ever" in str(caught.value)
    assert watch.all_end_within(5)
    assert pool.run(draw)


def test_result_that_cannot_be_pickled_is_an_error(pool: GlooPool) -> None:
    with pytest.raises(WorkerError, match="pickle"):
        pool.run(unpicklable_result)
    assert pool.run(draw)


def test_function_that_cannot_be_pickled_leaves_the_pool_alone(pool: GlooPool) -> None:
    before = pool.run(os.getpid)
    with pytest.raises(Exception, match=r"pickle|local object"):
        pool.run(lambda: None)
    assert pool.run(os.getpid) == before


def test_world_size_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one rank"):
        GlooPool(0)


def test_close_ends_the_workers() -> None:
    with GlooPool(2) as pool:
        watch = Watch(pool.run(os.getpid))
    assert watch.all_end_within(0)


def test_workers_end_with_the_last_reference_to_the_pool() -> None:
    pool = GlooPool(2)
    watch = Watch(pool.run(os.getpid))
    del pool
    assert watch.all_end_within(5)


SCRIPT = """
    import os, sys, threading
    from megatron_cp_ext.testing.pool import GlooPool

    def say_hello_and_hang():
        os.write(1, b"hello\\n")
        threading.Event().wait()

    if __name__ == "__main__":
        pool = GlooPool(2)
        print(*pool.run(os.getpid), flush=True)
        sys.stdin.readline()
        {then}
"""


@contextmanager
def script(folder: Path, then: str) -> Iterator[tuple[subprocess.Popen[str], Watch]]:
    """Run a script that owns a pool, in a process group of its own; watch it and its workers."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(SCRIPT).format(then=then))
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2, process.communicate(timeout=30)[1]
        yield process, Watch([process.pid, *workers])
    finally:
        # Nothing is left to kill unless the test has failed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_no_worker_outlives_a_script_that_ends_without_closing(tmp_path: Path) -> None:
    with script(tmp_path, "pass") as (process, watch):
        _, errors = process.communicate("\n", timeout=30)
        assert watch.all_end_within(5)
    assert process.returncode == 0
    assert errors == ""


def test_no_worker_outlives_a_killed_parent(tmp_path: Path) -> None:
    with script(tmp_path, "pool.run(say_hello_and_hang)") as (process, watch):
        wait_until_both_hang(process)
        process.kill()
        assert watch.all_end_within(5)


def test_ctrl_c_is_the_parents_business(pool: GlooPool) -> None:
    workers = pool.run(os.getpid)
    for worker in workers:
        os.kill(worker, signal.SIGINT)
    assert pool.run(os.getpid) == workers


def test_ctrl_c_ends_parent_and_workers(tmp_path: Path) -> None:
    with script(tmp_path, "pool.run(say_hello_and_hang)") as (process, watch):
        wait_until_both_hang(process)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert watch.all_end_within(5)
    assert process.returncode == -signal.SIGINT
    assert errors.count("KeyboardInterrupt") == 1


def wait_until_both_hang(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert [process.stdout.readline() for _ in range(2)] == ["hello\n"] * 2
