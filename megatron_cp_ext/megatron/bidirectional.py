"""What BERT needs to know of a sequence that is cut in a zigzag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.layout import SequenceLayout


def zigzag_position_ids(original: Callable[..., Tensor], self: Any, token_ids: Tensor) -> Tensor:
    """Wrapper of `BertModel.bert_position_ids`: the global positions of `[b, s_local]` tokens."""
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return original(self, token_ids)
    layout = SequenceLayout.zigzag(token_ids.size(1) * size, size)
    positions = layout.positions(parallel_state.get_context_parallel_rank())
    return positions.to(token_ids.device).expand_as(token_ids)


def refuse_binary_head(
    original: Callable[..., None], self: torch.nn.Module, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Wrapper of `BertModel.__init__`: the next-sentence head reads the first token's state."""
    original(self, config, *args, **kwargs)
    if config.context_parallel_size > 1 and self.add_binary_head:
        raise UsageError(
            option="--bert-no-binary-head",
            value="not given",
            reason="the next-sentence head reads the first token, which one rank of "
            "--context-parallel-size alone holds",
            remedy="pass --bert-no-binary-head, or --context-parallel-size 1",
        )
