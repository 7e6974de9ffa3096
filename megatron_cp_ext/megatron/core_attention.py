"""Megatron's core attention, over a sequence that several ranks share.

`ContextParallelAttention` takes the place of `DotProductAttention` and `TEDotProductAttention`
wherever a model builds one. Specs refer to those classes directly in many files, some of them
at import, so what is patched is the classes' own `__init__`: an instance becomes ours as it is
built, wherever the reference came from.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_cp_ext.attention import context_parallel_attention
from megatron_cp_ext.comm import during
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.groups import ContextParallelGroups
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.mask import AttentionMask, Window
from megatron_cp_ext.megatron.documents import (
    is_boundary_table,
    mask_of_pairs,
    mask_of_table,
    packed_boundaries,
    packed_layout,
    packed_mask,
)
from megatron_cp_ext.megatron.settings import ContextParallelSettings

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class ContextParallelAttention(DotProductAttention):
    """Core attention of one layer.

    Args:
        config: Megatron's transformer configuration.
        layer_number: of this layer, from 1.
        attn_mask_type: the mask to use where a call names none.
        attention_type: `"self"` or `"cross"`; only self-attention splits its sequence.
        attention_dropout: probability; None for the configuration's.
        softmax_scale: factor on query-key products; None for 1 / sqrt(head size).
        k_channels: size of a query or key head where it is not the configuration's (MLA).
        v_channels: size of a value head where it is not the configuration's (MLA).
        pg_collection: Megatron's process groups; `tp`, `cp` and for a hybrid `hcp` are read.
        settings: algorithm, degrees and kernel.
        other: arguments that concern other implementations, such as `cp_comm_type`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        settings: ContextParallelSettings,
        **other: Any,
    ) -> None:
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "hcp"])
        with _without_context_parallelism(config):
            super().__init__(
                config=config,
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                attention_type=attention_type,
                attention_dropout=attention_dropout,
                softmax_scale=softmax_scale,
                pg_collection=pg_collection,
            )
        if attention_type != "self" and config.context_parallel_size > 1:
            raise UsageError(
                option="--context-parallel-size",
                value=config.context_parallel_size,
                reason="cross-attention has two sequences, and only self-attention is split",
                remedy="train this model with --context-parallel-size 1",
            )
        head_dim = k_channels or self.hidden_size_per_attention_head
        self.hidden_size_per_attention_head_v = v_channels or self.hidden_size_per_attention_head
        # Query-key layer scaling divides the products by the layer number and multiplies them
        # back inside the softmax; it guards fp16 scores and changes no result.
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.window = _layer_window(config, layer_number)
        self.settings = settings
        self.groups = ContextParallelGroups.from_megatron(
            pg_collection,
            ulysses_degree=settings.ulysses_degree,
            send_recv_overlap=settings.send_recv_overlap,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **other: Any,
    ) -> Tensor:
        """Attend `[s_local, b, heads, d]` to the whole sequence: `[s_local, b, heads * dv]`.

        Raises:
            UsageError: an argument that cannot be honoured.
        """
        if attention_bias is not None:
            raise UsageError(
                option="attention_bias",
                value=list(attention_bias.shape),
                reason="additive biases are not computed under context parallelism",
                remedy="use rotary positions, or --context-parallel-size 1",
            )
        mask_type = attn_mask_type or self.attn_mask_type
        if packed_seq_params is not None:
            _require_thd(packed_seq_params)
            cp_size = self.groups.cp.size
            layout = packed_layout(
                packed_boundaries(packed_seq_params), query.size(0) * cp_size, cp_size
            )
            mask = packed_mask(packed_seq_params, causal=mask_type in _CAUSAL, window=self.window)
            out = self._attend(
                query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), layout=layout, mask=mask
            )
            return out.squeeze(1)
        layout = SequenceLayout.zigzag(query.size(0) * self.groups.cp.size, self.groups.cp.size)
        return self._attend(
            query, key, value, layout=layout, mask=self._mask(mask_type, attention_mask, layout)
        )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layout: SequenceLayout,
        mask: AttentionMask,
    ) -> Tensor:
        """`[s_local, b, heads, d]` to `[s_local, b, heads * dv]`."""
        dropout_p = self.attention_dropout.p if self.training else 0.0
        with during(f"layer {self.layer_number}"):
            out = context_parallel_attention(
                query,
                key,
                value,
                algorithm=self.settings.algorithm,
                groups=self.groups,
                layout=layout,
                mask=mask,
                softmax_scale=self.softmax_scale,
                sink=self.softmax_offset,
                dropout_p=dropout_p,
                dropout_seed=_draw_seed() if dropout_p > 0.0 else None,
                deterministic=self.settings.deterministic,
                kernel=self.settings.kernel,
            )
        return out.flatten(2)

    def _mask(
        self, mask_type: AttnMaskType, tensor: Tensor | None, layout: SequenceLayout
    ) -> AttentionMask:
        """The mask of this call; a mask tensor is honoured, never dropped in silence."""
        causal = mask_type in _CAUSAL
        if tensor is None:
            if mask_type == AttnMaskType.arbitrary:
                raise UsageError(
                    option="attn_mask_type",
                    value=mask_type,
                    reason="an arbitrary mask is given as a tensor, and there is none",
                    remedy="pass attention_mask, or use causal or no_mask",
                )
            return AttentionMask.causal(self.window) if causal else AttentionMask.full(self.window)
        if is_boundary_table(tensor):
            return mask_of_table(tensor, self.window)
        if tensor.dtype != torch.bool or tensor.shape[-2:] != (layout.seq_len, layout.seq_len):
            raise UsageError(
                option="attention_mask",
                value=f"{tensor.dtype} {list(tensor.shape)}",
                reason=f"every rank needs the whole mask, bool [b, 1, {layout.seq_len}, "
                f"{layout.seq_len}], True where a token may not attend",
                remedy="do not cut the mask with the batch",
            )
        return mask_of_pairs(tensor, causal=causal, window=self.window)


def _require_thd(packed_seq_params: Any) -> None:
    if packed_seq_params.qkv_format != "thd":
        raise UsageError(
            option="packed_seq_params.qkv_format",
            value=packed_seq_params.qkv_format,
            reason="packed sequences are streams of tokens",
            remedy="use thd",
        )


@functools.lru_cache
def constructor_wrapper(
    patched: type[torch.nn.Module], settings: ContextParallelSettings
) -> Callable[..., None]:
    """A wrapper of `patched.__init__` by which new instances of that class become ours.

    Instances of subclasses stay what they are: a subclass that computes attention in its own
    way does not become right by being replaced.

    Args:
        patched: `DotProductAttention` or `TEDotProductAttention`.
        settings: for the new instances. Equal settings give the same wrapper.
    """

    def become(
        original: Callable[..., None], self: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        if type(self) is not patched:
            original(self, *args, **kwargs)
            return
        self.__class__ = ContextParallelAttention
        self.__init__(*args, settings=settings, **kwargs)  # type: ignore[misc]

    return become


@contextlib.contextmanager
def _without_context_parallelism(config: TransformerConfig) -> Iterator[None]:
    """Show Megatron's constructor a size of 1, the only one it accepts."""
    size = config.context_parallel_size
    config.context_parallel_size = 1
    try:
        yield
    finally:
        config.context_parallel_size = size


def _layer_window(config: TransformerConfig, layer_number: int) -> Window | None:
    """The layer's sliding window; Megatron writes -1 for unlimited."""
    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return None
    left, right = config.window_size
    return (None if left < 0 else left, None if right < 0 else right)


def _draw_seed() -> int:
    """A seed for this call's dropout, equal on the ranks that share a sequence.

    It comes from the generator Megatron reserves for what differs between tensor-parallel
    ranks, whose state activation recomputation restores and checkpoints save.
    """
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return int(torch.randint(2**62, (1,), device=torch.cuda.current_device()).item())
