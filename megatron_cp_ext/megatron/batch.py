"""Cutting a batch for context parallelism, with the documents it contains kept whole."""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_ext.megatron.documents import boundary_table, stream_positions

Batch = dict[str, Any]
_SEQUENCE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def cut_per_sequence(original: Callable[..., Batch], batch: Batch, *args: Any, **kw: Any) -> Batch:
    """Megatron's zigzag over the sequence, but what says who sees whom stays whole.

    Attention masks speak of all positions on every rank. A packed stream is cut as
    `packed_layout` says, because positions and attention follow that rule too.
    """
    cp_group = kw["cp_group"] if "cp_group" in kw else args[0]
    if batch.get("cu_seqlens") is not None and batch.get("local_cp_size") is None:
        return cut_per_document(original, batch, cp_group)
    mask = batch.pop("attention_mask", None)
    cut = original(batch, *args, **kw)
    cut["attention_mask"] = mask
    return cut


def cut_per_document(_original: Callable[..., Batch], batch: Batch, cp_group: Any) -> Batch:
    """Cut a packed stream as `packed_layout` says. Needs no Transformer Engine."""
    size, rank = dist.get_world_size(cp_group), dist.get_rank(cp_group)
    padded = batch.get("cu_seqlens_padded")
    boundaries = (batch["cu_seqlens"] if padded is None else padded)[0]
    for key in _SEQUENCE_KEYS:
        if batch.get(key) is not None and size > 1:
            positions = stream_positions(boundaries, batch[key].size(1), size, rank)
            batch[key] = batch[key].index_select(1, positions.to(batch[key].device))
    return batch


def boundaries_in_batch(
    args: Namespace,
) -> Callable[..., Batch]:
    """A wrapper of `get_batch_on_this_tp_rank` that adds the boundaries of documents.

    Args:
        args: Megatron's arguments, from which the EOD token is known.
    """

    @functools.cache
    def eod() -> int:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        return build_tokenizer(args).eod

    def get_batch(original: Callable[..., Batch], *rest: Any, **kwargs: Any) -> Batch:
        call = inspect.signature(original).bind(*rest, **kwargs).arguments
        tokens = call["batch"].get("tokens") if call["tp_rank"] == 0 else None
        batch = original(*rest, **kwargs)
        is_end = _share_ends(
            None if tokens is None else tokens == eod(),
            (call["micro_batch_size"], call["seq_length"]),
            source=call["broadcast_src_rank"],
            group=call["broadcast_group"],
        )
        batch["attention_mask"] = boundary_table(is_end)
        return batch

    return get_batch


def _share_ends(
    is_end: Tensor | None, shape: tuple[int, int], *, source: int, group: dist.ProcessGroup
) -> Tensor:
    """Broadcast where documents end, uint8 `[b, s]`, from the rank that has the tokens."""
    if dist.get_world_size(group) == 1:
        assert is_end is not None
        return is_end
    if is_end is None:
        is_end = torch.empty(shape, dtype=torch.uint8, device=torch.cuda.current_device())
    shared = is_end.to(torch.uint8)
    dist.broadcast(shared, source, group=group)
    return shared
