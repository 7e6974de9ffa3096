"""One command line, checked for a machine that need not be this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_cp_ext.features.dry_run import DryRun, Outcome
from megatron_cp_ext.features.facts import Facts


def check_command(
    argv: Sequence[str],
    *,
    world_size: int | None = None,
    platform: str | None = None,
    devices_per_node: int = 8,
    environment: Mapping[str, str] | None = None,
    sample_rank: int = 0,
) -> Outcome:
    """Check a command line.

    Args:
        argv: Megatron's arguments and ours.
        world_size: number of ranks; None for the fewest that the degrees need.
        platform: where it will run; None for what `--cp-platform` says, or cuda.
        devices_per_node: devices that share the fast links of a node.
        environment: what the launch script sets of the variables that Megatron reads; None if
            nothing is known of it.
        sample_rank: the rank whose groups the plan shows.
    """
    platform = platform or _platform_in(argv) or "cuda"
    facts = Facts(
        platform=platform,
        here=False,
        environment=environment or {},
        devices_per_node=devices_per_node,
    )
    dry_run = DryRun(facts)
    return dry_run.check(argv, world_size, sample_rank=sample_rank)


def _platform_in(argv: Sequence[str]) -> str | None:
    """What the command says of its platform itself, unless that is auto."""
    found = None
    for index, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name == "--cp-platform":
            found = value or (argv[index + 1] if index + 1 < len(argv) else None)
    return found if found in ("cpu", "cuda", "npu") else None
