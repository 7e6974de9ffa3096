"""How attention is computed under context parallelism, settled from the validated arguments."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megatron_cp_ext.errors import UsageError

# Both spellings of each algorithm: MindSpeed's, and the name used from Python.
ALGORITHM_NAMES = {
    "megatron_cp_algo": "ring",
    "ulysses_cp_algo": "ulysses",
    "hybrid_cp_algo": "hybrid",
    "kvallgather_cp_algo": "kvallgather",
}
ALGORITHM_CHOICES = (*ALGORITHM_NAMES, *ALGORITHM_NAMES.values())


@dataclass(frozen=True)
class ContextParallelSettings:
    """What the core-attention modules of a model have in common.

    Args:
        algorithm: `"ring"`, `"ulysses"`, `"hybrid"` or `"kvallgather"`.
        ulysses_degree: size of the Ulysses groups; 1 for algorithms without.
        kernel: name of the kernel, or `"auto"`.
        deterministic: whether two equal runs must give bitwise equal results.
        send_recv_overlap: whether to send and receive around the ring on separate groups.
    """

    algorithm: str = "ring"
    ulysses_degree: int = 1
    kernel: str = "auto"
    deterministic: bool = False
    send_recv_overlap: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ContextParallelSettings:
        """Read Megatron's arguments, ours included, once they are validated."""
        return cls(
            algorithm=algorithm_of(args),
            ulysses_degree=ulysses_degree(args),
            kernel=args.cp_kernel,
            deterministic=args.deterministic_mode,
            send_recv_overlap=args.use_cp_send_recv_overlap,
        )


def is_active(args: argparse.Namespace) -> bool:
    """Whether attention is ours: under context parallelism, or where an algorithm is named."""
    return args.context_parallel_size > 1 or args.context_parallel_algo is not None


def algorithm_of(args: argparse.Namespace) -> str:
    """The algorithm by its short name; ring where none was chosen."""
    given = args.context_parallel_algo or "megatron_cp_algo"
    return ALGORITHM_NAMES.get(given, given)


def ulysses_degree(args: argparse.Namespace) -> int:
    """Size of the Ulysses groups that the arguments ask for.

    Raises:
        UsageError: a hybrid without a degree.
    """
    algorithm = algorithm_of(args)
    if algorithm == "ulysses":
        return args.context_parallel_size
    if algorithm != "hybrid":
        return 1
    if args.ulysses_degree_in_cp is None:
        raise UsageError(
            option="--ulysses-degree-in-cp",
            value=None,
            reason="a hybrid needs the number of neighbouring ranks that exchange heads",
            remedy="pass a divisor of the context-parallel size, larger than 1 and smaller than it",
        )
    return args.ulysses_degree_in_cp


def ring_size(args: argparse.Namespace) -> int:
    """Number of ranks among which keys and values travel."""
    return args.context_parallel_size // ulysses_degree(args)
