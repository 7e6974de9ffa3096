"""The hybrid's degree, and the process groups Megatron makes for it."""

from __future__ import annotations

import argparse

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.megatron.settings import algorithm_of, ulysses_degree
from megatron_cp_ext.patching import Feature


class HybridFeature(Feature):
    """`--ulysses-degree-in-cp`, and Megatron's hierarchical groups of [ulysses, ring]."""

    name = "hybrid"

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """MindSpeed's flag."""
        parser.add_argument_group(title="hybrid context parallelism").add_argument(
            "--ulysses-degree-in-cp",
            type=int,
            default=None,
            help="Neighbouring ranks that exchange heads in hybrid_cp_algo. The ring takes the "
            "rest of --context-parallel-size.",
        )

    def pre_validate_args(self, args: argparse.Namespace) -> None:
        """Check the degree, then ask Megatron for the groups."""
        size, degree = args.context_parallel_size, args.ulysses_degree_in_cp
        if algorithm_of(args) != "hybrid":
            if degree is not None:
                raise UsageError(
                    option="--ulysses-degree-in-cp",
                    value=degree,
                    reason=f"algorithm {algorithm_of(args)} does not read it",
                    remedy="drop it, or use --context-parallel-algo hybrid_cp_algo",
                )
            return
        degree = ulysses_degree(args)
        fitting = [d for d in range(2, size) if size % d == 0]
        if degree not in fitting:
            raise UsageError(
                option="--ulysses-degree-in-cp",
                value=degree,
                reason=f"a hybrid cuts --context-parallel-size {size} into a Ulysses degree and a "
                "ring, both larger than 1",
                remedy=f"use one of {fitting}"
                if fitting
                else "use ulysses_cp_algo or megatron_cp_algo, or a context-parallel size that "
                "is not prime, such as 4",
            )
        wanted = [degree, size // degree]
        given = args.hierarchical_context_parallel_sizes
        if given is not None and list(given) != wanted:
            raise UsageError(
                option="--hierarchical-context-parallel-sizes",
                value=given,
                reason=f"--ulysses-degree-in-cp {degree} of --context-parallel-size {size} needs "
                f"groups of {wanted}, innermost first",
                remedy="drop it, or make the two agree",
            )
        args.hierarchical_context_parallel_sizes = wanted
