"""Times attention on gloo ranks, each algorithm beside one rank that has the whole sequence.

The limit is that one rank's time divided by the number of ranks, with the same threads on each:
no algorithm that computes the same can be faster. Repeats are interleaved, so that a noisy
machine hurts all alike, and medians are reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_cp_ext.attention import context_parallel_attention
from megatron_cp_ext.groups import ContextParallelGroups
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.mask import AttentionMask
from megatron_cp_ext.testing import GlooPool

LIMIT = "one rank"


@dataclass(frozen=True)
class Workload:
    """One attention call.

    Args:
        seq_len: tokens of the whole sequence.
        mask: what may attend to what.
        batch: samples.
        heads: query heads.
        kv_heads: key and value heads.
        dim: size of a head.
        dtype: of the tensors.
        kernel: name of the kernel.
        seed: of the random tensors.
    """

    seq_len: int
    mask: AttentionMask
    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    kernel: str = "auto"
    seed: int = 1


@dataclass(frozen=True)
class Measurement:
    """What was measured of one algorithm, or of one rank alone.

    Args:
        algorithm: its name, or `LIMIT`.
        ranks: how many took part.
        forward_s: seconds of the forward pass on the slowest rank, median.
        backward_s: seconds of the backward pass, likewise.
        total_s: seconds of both together, likewise.
        bytes_sent: by one rank in both passes, mean over the ranks.
        efficiency: the limit divided by `total_s`; 1 for one rank alone.
    """

    algorithm: str
    ranks: int
    forward_s: float
    backward_s: float
    total_s: float
    bytes_sent: float
    efficiency: float


Times = tuple[float, float]


def measure(
    workload: Workload,
    algorithms: Sequence[str],
    *,
    ranks: int,
    ulysses_degree: int | None = None,
    repeats: int = 5,
    timeout_s: float = 3600.0,
) -> list[Measurement]:
    """Time algorithms on this machine's CPUs, one thread for each rank.

    Args:
        workload: the attention call.
        algorithms: which to time.
        ranks: processes that share the sequence.
        ulysses_degree: of the hybrid.
        repeats: timed runs of each; one more warms up.
        timeout_s: seconds for all of it.

    Returns:
        One rank alone first, then the algorithms.

    Raises:
        WorkerError: a rank failed, for example because a combination is refused.
    """
    with GlooPool(ranks) as pool:
        by_rank = pool.run(
            _measure_here, workload, algorithms, ulysses_degree, repeats, timeout=timeout_s
        )
    times = by_rank[0][0]  # the slowest rank's, which all ranks know
    sent = {name: statistics.mean(rank[1][name] for rank in by_rank) for name in algorithms}
    alone = statistics.median(sum(pair) for pair in times[LIMIT])
    return [
        Measurement(
            algorithm=name,
            ranks=1 if name == LIMIT else ranks,
            forward_s=statistics.median(forward for forward, _ in pairs),
            backward_s=statistics.median(backward for _, backward in pairs),
            total_s=(total := statistics.median(sum(pair) for pair in pairs)),
            bytes_sent=sent.get(name, 0.0),
            efficiency=1.0 if name == LIMIT else alone / ranks / total,
        )
        for name, pairs in times.items()
    ]


def _measure_here(
    workload: Workload, algorithms: Sequence[str], ulysses_degree: int | None, repeats: int
) -> tuple[dict[str, list[Times]], dict[str, int]]:
    """On every rank: the slowest rank's times of each run, and the bytes this rank sends."""
    size, rank = dist.get_world_size(), dist.get_rank()
    degrees = {"ulysses": size, "hybrid": ulysses_degree or 1}
    runs: dict[str, tuple[Callable[[], Times], ContextParallelGroups]] = {}
    alone = SequenceLayout.contiguous(workload.seq_len, 1)
    single = ContextParallelGroups.single()
    if rank == 0:
        runs[LIMIT] = (_prepare(workload, "ring", single, alone, 0), single)
    else:  # the others wait, so that one rank has the machine that one rank would have
        runs[LIMIT] = (lambda: (0.0, 0.0), single)
    for name in algorithms:
        groups = ContextParallelGroups.from_world(degrees.get(name, 1))
        layout = _layout(workload, size)
        runs[name] = (_prepare(workload, name, groups, layout, rank), groups)

    times: dict[str, list[Times]] = {name: [] for name in runs}
    sent: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for name, (run, groups) in runs.items():
            groups.traffic.reset()
            dist.barrier()
            slowest = torch.tensor(run(), dtype=torch.float64)
            sent[name] = groups.traffic.total_bytes
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if repeat > 0:
                times[name].append((slowest[0].item(), slowest[1].item()))
    return times, sent


def _layout(workload: Workload, size: int) -> SequenceLayout:
    """What a training would use: packed documents are each in a zigzag of their own."""
    if workload.mask.spans is None:
        return SequenceLayout.zigzag(workload.seq_len, size)
    stops = {span.stop for span in workload.mask.spans} | {workload.seq_len}
    return SequenceLayout.zigzag_documents([0, *sorted(stops)], size)


def _prepare(
    workload: Workload,
    algorithm: str,
    groups: ContextParallelGroups,
    layout: SequenceLayout,
    rank: int,
) -> Callable[[], Times]:
    """A function that runs forward and backward once and returns the seconds of each."""
    generator = torch.Generator().manual_seed(workload.seed + rank)

    def draw(heads: int) -> torch.Tensor:
        shape = (layout.local_length(rank), workload.batch, heads, workload.dim)
        return torch.randn(shape, generator=generator).to(workload.dtype)

    leaves = [draw(heads) for heads in (workload.heads, workload.kv_heads, workload.kv_heads)]
    for leaf in leaves:
        leaf.requires_grad_()
    dout = draw(workload.heads)

    def run() -> Times:
        start = time.perf_counter()
        out = context_parallel_attention(
            *leaves,
            algorithm=algorithm,
            groups=groups,
            layout=layout,
            mask=workload.mask,
            kernel=workload.kernel,
        )
        middle = time.perf_counter()
        out.backward(dout)
        end = time.perf_counter()
        for leaf in leaves:
            leaf.grad = None
        return middle - start, end - middle

    return run
