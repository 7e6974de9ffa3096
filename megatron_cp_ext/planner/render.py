"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.planner.plan import Group, Plan, Shard

SHOWN_SHARDS = 8
SHOWN_RANKS = 8


def print_plan(plan: Plan, console: Console, *, patches: bool = True) -> None:
    """Print a plan.

    Args:
        plan: what to print.
        console: where to.
        patches: whether to list every patch, or only count them.
    """
    algorithm = plan.algorithm or "none (Megatron's own attention)"
    facts = [
        f"{plan.world} ranks on {plan.platform}",
        f"{plan.seq_len} tokens",
        f"algorithm {algorithm}",
        f"{plan.mask} mask",
        *([f"kernel {plan.kernel}"] if plan.kernel else []),
    ]
    _say(console, ", ".join(facts))
    console.print(_groups(plan))
    console.print(_shards(plan))
    if plan.algorithm is not None:
        _say(
            console,
            f"attention sends at most {bytes_text(plan.bytes_per_step)} from a rank in a step: "
            f"{plan.layers} layers, {plan.micro_batches} micro-batches",
        )
    if plan.memory is not None:
        memory = plan.memory
        parts = ", ".join(
            f"{name} {bytes_text(size)}"
            for name, size in (
                ("parameters", memory.parameters),
                ("gradients", memory.gradients),
                ("optimizer", memory.optimizer),
                ("activations", memory.activations),
                ("attention buffers", memory.attention),
            )
        )
        _say(console, f"memory of the fullest rank, about {bytes_text(memory.total)}: {parts}")
    for note in plan.notes:
        _say(console, f"note: {note}")
    if patches:
        _say(console, f"{len(plan.patches)} patches:")
        for patch in plan.patches:
            _say(console, f"  {patch}")
    else:
        _say(console, f"{len(plan.patches)} patches (listed with --patches and in --json)")


def print_outcome(
    errors: Sequence[UsageError],
    advice: Sequence[object],
    plan: Plan | None,
    *,
    patches: bool = False,
    strict: bool = False,
) -> None:
    """Print what a check found: the plan if there is one, then advice, then mistakes."""
    console = Console(width=100, highlight=False)
    if plan is not None:
        print_plan(plan, console, patches=patches)
    for each in advice:
        console.print(f"\n[yellow]{'mistake (--strict)' if strict else 'advice'}[/yellow]", end="")
        _say(console, str(each))
    for error in errors:
        console.print("\n[red]mistake[/red]", end="")
        _say(console, str(error))
    mistakes = len(errors) + (len(advice) if strict else 0)
    verdict = f"{mistakes} mistake(s): this would not start" if errors else "this would start"
    if strict and not errors and mistakes:
        verdict = f"{mistakes} piece(s) of advice, which --strict does not let pass"
    _say(console, f"\n{verdict}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _groups(plan: Plan) -> Table:
    table = Table("group", "size", "count", f"global ranks, that of rank {plan.sample_rank}")
    for group in plan.groups:
        table.add_row(group.kind, str(group.size), str(group.count), _ranks(group))
    return table


def _ranks(group: Group) -> str:
    ranks = group.sample
    if len(ranks) <= SHOWN_RANKS:
        return " ".join(map(str, ranks))
    return f"{' '.join(map(str, ranks[: SHOWN_RANKS - 1]))} ... {ranks[-1]}"


def _shards(plan: Plan) -> Table:
    table = Table("CP rank", "tokens", "sent forward", "sent backward", title=None)
    for shard in _some(plan.shards):
        if shard is None:
            table.add_row("...", "", "", "")
            continue
        runs = ", ".join(f"{start}-{stop - 1}" for start, stop in shard.tokens)
        table.add_row(str(shard.rank), runs, bytes_text(shard.forward), bytes_text(shard.backward))
    table.caption = "bytes of one layer and micro-batch"
    return table


def _some(shards: Sequence[Shard]) -> list[Shard | None]:
    if len(shards) <= SHOWN_SHARDS:
        return list(shards)
    return [*shards[: SHOWN_SHARDS - 1], None, shards[-1]]


def bytes_text(size: float) -> str:
    """`1536` as `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
