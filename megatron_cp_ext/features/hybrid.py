"""The hybrid's degree, and the process groups Megatron makes for it."""

from __future__ import annotations

import argparse

from megatron_cp_ext.features.findings import Arguments, settle
from megatron_cp_ext.megatron.settings import algorithm_of
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
        """Ask Megatron for the groups; either of the two options can say their sizes."""
        view = Arguments(args)
        size, sizes = view.cp, view.hierarchical_context_parallel_sizes
        if algorithm_of(view) != "hybrid":
            return
        if view.ulysses_degree_in_cp is None and sizes and len(sizes) == 2:
            settle(args, "ulysses_degree_in_cp", sizes[0])
        degree = view.ulysses_degree_in_cp
        if degree and degree > 0 and size % degree == 0 and not sizes:
            settle(args, "hierarchical_context_parallel_sizes", [degree, size // degree])
