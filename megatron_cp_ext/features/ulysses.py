"""Rules of algorithms that exchange heads: Ulysses, and the Ulysses part of a hybrid."""

from __future__ import annotations

import argparse

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.megatron.settings import algorithm_of, ulysses_degree
from megatron_cp_ext.patching import Feature


class UlyssesFeature(Feature):
    """Every rank of a Ulysses group needs query heads of its own."""

    name = "ulysses"

    def validate_args(self, args: argparse.Namespace) -> None:
        """Heads on each tensor-parallel rank against the Ulysses degree."""
        degree = ulysses_degree(args)
        heads = args.num_attention_heads // args.tensor_model_parallel_size
        if heads >= degree:
            return
        fitting = [d for d in range(1, heads + 1) if args.context_parallel_size % d == 0]
        flag = (
            "--ulysses-degree-in-cp"
            if algorithm_of(args) == "hybrid"
            else "--context-parallel-size"
        )
        raise UsageError(
            option=flag,
            value=degree,
            reason=f"{args.num_attention_heads} heads over --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} leave {heads} for {degree} Ulysses ranks",
            remedy=f"use --context-parallel-algo hybrid_cp_algo with --ulysses-degree-in-cp of "
            f"{fitting}, or megatron_cp_algo or kvallgather_cp_algo",
        )
