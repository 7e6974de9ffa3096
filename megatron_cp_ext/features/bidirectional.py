"""Bidirectional models: positions of a zigzag, and what they cannot have."""

from __future__ import annotations

import argparse

from megatron_cp_ext.patching import Feature, PatchManager
from megatron_cp_ext.patching.patch import wrap

BERT = "megatron.core.models.bert.bert_model:BertModel"


class BidirectionalFeature(Feature):
    """BERT under context parallelism: its masks are whole, its positions are the zigzag's."""

    name = "bidirectional"

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        """Positions come from the layout; the next-sentence head is refused."""
        if args.context_parallel_size == 1:
            return
        from megatron_cp_ext.megatron import bidirectional

        manager.register(
            wrap(
                f"{BERT}.bert_position_ids",
                bidirectional.zigzag_position_ids,
                owner=self.name,
                parameters=("token_ids",),
            )
        )
        manager.register(
            wrap(
                f"{BERT}.__init__",
                bidirectional.refuse_binary_head,
                owner=self.name,
                parameters=("config", "add_binary_head"),
            )
        )
