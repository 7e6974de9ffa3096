"""The base flags of context parallelism, and the swap of Megatron's core attention."""

from __future__ import annotations

import argparse

from megatron_cp_ext.features.findings import Arguments, settle
from megatron_cp_ext.features.mindspeed_flags import REFUSED_ALGORITHMS
from megatron_cp_ext.features.rules_parallel import COMM_TYPES, DEFAULT_COMM_TYPE
from megatron_cp_ext.kernels import KERNELS
from megatron_cp_ext.megatron.settings import ALGORITHM_CHOICES, ContextParallelSettings, is_active
from megatron_cp_ext.patching import Feature, PatchManager
from megatron_cp_ext.patching.patch import wrap


class ContextParallelFeature(Feature):
    """`--context-parallel-algo` and what every algorithm shares."""

    name = "context_parallel"

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """The flags MindSpeed's users know, and the choice of kernel."""
        group = parser.add_argument_group(title="context parallelism")
        group.add_argument(
            "--context-parallel-algo",
            choices=(*ALGORITHM_CHOICES, *REFUSED_ALGORITHMS),
            default=None,
            help="How attention is computed over a sequence split by --context-parallel-size: "
            "megatron_cp_algo (ring), ulysses_cp_algo, hybrid_cp_algo (Ulysses inside a ring) or "
            "kvallgather_cp_algo. Default: what --cp-comm-type says, or megatron_cp_algo. "
            "adaptive_cp_algo and hybrid_adaptive_cp_algo are refused.",
        )
        group.add_argument(
            "--attention-mask-type",
            choices=["causal", "general"],
            default="causal",
            help="causal: every token sees itself and what came before, in its document with "
            "--reset-attention-mask; no mask tensor is made. general: the data loader's mask of "
            "[b, 1, s, s] is used as it is.",
        )
        group.add_argument(
            "--cp-kernel",
            choices=["auto", *KERNELS],
            default="auto",
            help="Attention kernel of a block. auto takes the fastest that can do what is asked.",
        )

    def pre_validate_args(self, args: argparse.Namespace) -> None:
        """`--cp-comm-type`, where only it is given, chooses the algorithm that communicates so."""
        view = Arguments(args)
        given = view.cp_comm_type
        given = [given] if isinstance(given, str) else given
        if view.cp == 1 or view.context_parallel_algo is not None or not given:
            return
        meant = {COMM_TYPES.get(kind) for kind in given}
        if list(given) != DEFAULT_COMM_TYPE and len(meant) == 1:
            settle(args, "context_parallel_algo", meant.pop())

    def post_validate_args(self, args: argparse.Namespace) -> None:
        """A causal mask needs no tensor; one of `[s, s]` is what long sequences cannot afford."""
        if is_active(args) and args.attention_mask_type == "causal":
            args.create_attention_mask_in_dataloader = False

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        """Core attention becomes ours wherever a model builds it."""
        if not is_active(args):
            return
        from megatron_cp_ext.megatron.core_attention import constructor_wrapper

        settings = ContextParallelSettings.from_args(args)
        for module, patched in _core_attention_classes():
            manager.register(
                wrap(
                    f"{module}:{patched.__name__}.__init__",
                    constructor_wrapper(patched, settings),
                    owner=self.name,
                    parameters=("config", "layer_number", "attn_mask_type", "softmax_scale"),
                )
            )


def _core_attention_classes() -> list[tuple[str, type]]:
    """The classes that compute core attention in Megatron, with their modules.

    Transformer Engine's counts only where it is installed; without it Megatron puts a mock in
    its place.
    """
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import dot_product_attention

    classes = [(dot_product_attention.__name__, dot_product_attention.DotProductAttention)]
    te_attention = transformer_engine.TEDotProductAttention
    if transformer_engine.HAVE_TE and isinstance(te_attention, type):
        classes.append((transformer_engine.__name__, te_attention))
    return classes
