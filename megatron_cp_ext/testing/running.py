"""Cases of context-parallel attention on a pool of ranks: run many in one call, judge them all.

A call of a pool costs far more than a small case, so cases are run in batches. A failure names
the case and, on the ranks, the place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_ext.attention import context_parallel_attention
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.groups import ContextParallelGroups, ring_ranks, ulysses_ranks
from megatron_cp_ext.testing.cases import AttentionCase
from megatron_cp_ext.testing.compare import assert_close_to_oracle, bounds, relative_errors
from megatron_cp_ext.testing.pool import GlooPool

Results = dict[str, Tensor]
Execute = Callable[[AttentionCase, ContextParallelGroups], Results]


@dataclass(frozen=True)
class Refusal:
    """A case that was refused, on every rank alike and before anything was sent.

    Args:
        option: what the error names.
        message: the whole error.
    """

    option: str
    message: str


def attend_here(
    case: AttentionCase, groups: ContextParallelGroups, *, device: str = "cpu"
) -> Results:
    """Forward and backward of this rank's shard: out, lse, dq, dk, dv and dsink by name.

    Computed on `device`, returned on the CPU.
    """
    rank, layout = groups.cp.rank, case.layout
    tensors = {name: tensor.to(device) for name, tensor in case.tensors().items()}
    query, key, value = (
        layout.shard(tensors[name], rank).requires_grad_() for name in ("query", "key", "value")
    )
    sink = tensors["sink"].requires_grad_() if case.with_sink else None
    out, lse = context_parallel_attention(
        query,
        key,
        value,
        algorithm=case.algorithm,
        groups=groups,
        layout=layout,
        mask=case.mask,
        softmax_scale=case.softmax_scale,
        sink=sink,
        dropout_p=case.dropout_p,
        dropout_seed=case.seed,
        deterministic=case.deterministic,
        kernel=case.kernel,
        return_lse=True,
    )
    out.backward(layout.shard(tensors["dout"], rank))
    results = {"out": out, "lse": lse, "dq": query.grad, "dk": key.grad, "dv": value.grad}
    if sink is not None:
        results["dsink"] = sink.grad
    return {name: tensor.detach().cpu() for name, tensor in results.items()}


def join(case: AttentionCase, shards: Sequence[Results]) -> Results:
    """Whole-sequence tensors from those of the ranks; the sink's gradients are summed."""
    joined = {
        name: case.layout.unshard([shard[name] for shard in shards], dim=2 if name == "lse" else 0)
        for name in ("out", "lse", "dq", "dk", "dv")
    }
    if case.with_sink:
        joined["dsink"] = torch.stack([shard["dsink"] for shard in shards]).sum(0)
    return joined


def run_cases(
    pool: GlooPool | None,
    cases: Sequence[AttentionCase],
    *,
    ranks: Sequence[int] | None = None,
    execute: Execute = attend_here,
    timeout: float = 120,
) -> list[Results | Refusal]:
    """Run cases of one size, one after the other.

    Args:
        pool: at least as many ranks as the cases' layouts have; None for one rank, this process.
        cases: what to run.
        ranks: which ranks of the pool make the context-parallel group, in order; all if None.
        execute: what each rank does with a case, a picklable function.
        timeout: seconds for all of them.

    Returns:
        For each case the whole-sequence results, or the refusal.

    Raises:
        WorkerError: a case failed on a rank with anything but a UsageError, or was refused after
            something had been sent; it names the case.
        AssertionError: some ranks refused what others did.
    """
    if pool is None:
        per_rank = [_run_here(cases, ranks=None, execute=execute)]
    else:
        answers = pool.run(_run_here, cases, ranks=ranks, execute=execute, timeout=timeout)
        per_rank = [answers[rank] for rank in (range(pool.world_size) if ranks is None else ranks)]
    outcomes: list[Results | Refusal] = []
    for case, shards in zip(cases, zip(*per_rank, strict=True), strict=True):
        if any(isinstance(shard, Refusal) for shard in shards):
            assert all(shard == shards[0] for shard in shards), f"{case}:\nnot alike: {shards}"
            outcomes.append(shards[0])
        else:
            outcomes.append(join(case, shards))
    return outcomes


def run_case(
    pool: GlooPool | None, case: AttentionCase, *, ranks: Sequence[int] | None = None
) -> Results:
    """Run one case.

    Raises:
        AssertionError: it was refused.
    """
    (outcome,) = run_cases(pool, [case], ranks=ranks)
    assert not isinstance(outcome, Refusal), f"{case} was refused:{outcome.message}"
    return outcome


def assert_matches_oracle(
    pool: GlooPool | None,
    *cases: AttentionCase,
    ranks: Sequence[int] | None = None,
    execute: Execute = attend_here,
    unsplit: Execute = attend_here,
    timeout: float = 120,
) -> None:
    """Run cases and compare out, lse, dq, dk, dv and dsink of each with the oracle.

    The bound is the design's: a floor for each dtype, or twice (thrice for gradients) the error
    of the same dtype on one rank, computed by `unsplit`. The other arguments are those of
    `run_cases`.

    Raises:
        AssertionError: naming each case that is off or refused, and what is off.
    """
    outcomes = run_cases(pool, cases, ranks=ranks, execute=execute, timeout=timeout)
    complaints = []
    for case, outcome in zip(cases, outcomes, strict=True):
        complaint = disagreement(case, outcome, unsplit=unsplit)
        if complaint is not None:
            complaints.append(f"{case}:\n{complaint}")
    assert not complaints, "\n".join(
        [f"{len(complaints)} of {len(cases)} cases are wrong:", *complaints]
    )


def disagreement(
    case: AttentionCase, outcome: Results | Refusal, *, unsplit: Execute = attend_here
) -> str | None:
    """How a case's outcome differs from the oracle's, None if it does not."""
    if isinstance(outcome, Refusal):
        return f"refused:{outcome.message}"
    oracle, bound = _oracle_and_bounds(case.on_one_rank(), unsplit)
    try:
        assert_close_to_oracle(outcome, oracle, bound)
    except AssertionError as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=512)
def _oracle_and_bounds(alone: AttentionCase, unsplit: Execute) -> tuple[Results, dict[str, float]]:
    """The right answer and the accepted errors; the same for every algorithm and layout."""
    oracle = alone.oracle().tensors()
    (here,) = run_cases(None, [alone], execute=unsplit)
    assert not isinstance(here, Refusal), f"{alone} was refused:{here.message}"
    return oracle, bounds(relative_errors(here, oracle), alone.dtype)


def _run_here(
    cases: Sequence[AttentionCase], *, ranks: Sequence[int] | None, execute: Execute
) -> list[Results | Refusal]:
    """All cases on this rank; an empty list on a rank that takes no part."""
    made: dict[tuple[int, bool], ContextParallelGroups | None] = {}
    outcomes: list[Results | Refusal] = []
    for case in cases:
        key = case.ulysses_degree, case.send_recv_overlap
        if key not in made:
            made[key] = _groups(case, ranks)
        groups = made[key]
        if groups is None:
            continue
        groups.traffic.reset()
        try:
            outcomes.append(execute(case, groups))
        except UsageError as error:
            if groups.traffic.total_bytes:
                raise RuntimeError(f"{case}: refused after sending:{error}") from error
            outcomes.append(Refusal(error.option, str(error)))
        except Exception as error:
            raise RuntimeError(f"{case}: {error}") from error
    return outcomes


def _groups(case: AttentionCase, ranks: Sequence[int] | None) -> ContextParallelGroups | None:
    """The groups of a case, None on a rank outside; collective over the pool."""
    if case.layout.cp_size == 1 and ranks is None:
        return ContextParallelGroups.single()
    if ranks is None:
        return ContextParallelGroups.from_world(
            case.ulysses_degree, send_recv_overlap=case.send_recv_overlap
        )
    degree = case.ulysses_degree
    mine: list[dist.ProcessGroup | None] = []
    for partition in (
        [list(range(len(ranks)))],
        ulysses_ranks(len(ranks), degree),
        ring_ranks(len(ranks), degree),
    ):
        mine.append(None)
        for places in partition:
            members = [ranks[place] for place in places]
            group = dist.new_group(members) if len(members) > 1 else None
            if dist.get_rank() in members:
                mine[-1] = group
    if dist.get_rank() not in ranks:
        return None
    return ContextParallelGroups.build(*mine, send_recv_overlap=case.send_recv_overlap)
