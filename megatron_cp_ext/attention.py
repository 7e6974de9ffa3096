"""`context_parallel_attention`: attention over a sequence that several ranks share."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_cp_ext import capabilities
from megatron_cp_ext.algorithms import ALGORITHMS, AttentionCall
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.groups import ContextParallelGroups
from megatron_cp_ext.kernels import KERNELS, KernelOptions
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.mask import AttentionMask


def _between_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a function out of the graphs of torch.compile, which breaks there and goes on after.

    Exchanges between ranks are planned on the host, in code that no graph should hold. This is
    `torch.compiler.disable` without what that costs at import: it loads torch's compiler, seconds
    in every rank, also where nothing is compiled.
    """

    reason = "attention exchanges tensors with other ranks, which is planned on the host"

    @functools.cache
    def disabled() -> Callable[..., Any]:
        return torch.compiler.disable(function, reason=reason)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return disabled()(*args, **kwargs)
        return function(*args, **kwargs)

    # What torch.compiler.disable sets, and Dynamo reads before it traces into a function.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return call


@_between_graphs
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    algorithm: str,
    groups: ContextParallelGroups,
    layout: SequenceLayout,
    mask: AttentionMask,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    deterministic: bool = False,
    kernel: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Attend this rank's queries to the keys of the whole sequence.

    Collective over `groups.cp`: every rank calls it with its own shard and otherwise equal
    arguments, and runs the backward pass too.

    Args:
        query: `[s_local, b, heads, d]`.
        key: `[s_local, b, kv_heads, d]`, where kv_heads divides heads.
        value: `[s_local, b, kv_heads, dv]`.
        algorithm: `"ring"`, `"ulysses"`, `"hybrid"` or `"kvallgather"`.
        groups: who exchanges what.
        layout: which positions each rank holds.
        mask: what may attend to what.
        softmax_scale: factor on query-key products; None for 1 / sqrt(d).
        sink: `[heads]`, a logit for each query head that is added to the denominator only
            (StreamingLLM, arXiv:2309.17453). Its gradient on each rank covers the rank's share.
        dropout_p: probability of dropping an attention weight.
        dropout_seed: seed of the drops, the same on every rank; required with dropout.
        deterministic: whether two equal calls must give bitwise equal results.
        kernel: name of a kernel, or `"auto"`.
        return_lse: also return the log-sum-exp of the scaled scores, sink included.

    Returns:
        `[s_local, b, heads, dv]` in the query's dtype; with `return_lse` also `[b, heads,
        s_local]` in fp32 (fp64 for fp64), not differentiable.

    Raises:
        UsageError: a ValueError, on every rank alike and before any communication, if the
            arguments do not fit together or the combination is not supported.
    """
    _check_shapes(query, key, value, sink=sink, groups=groups, layout=layout, mask=mask)
    if groups.cp.size > 1:
        _check_not_captured(query.device)
    options = _kernel_options(
        softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(query.size(-1)),
        dropout_p,
        dropout_seed,
        deterministic=deterministic,
    )
    if algorithm in ALGORITHMS:
        ALGORITHMS[algorithm].check(groups, layout, query.size(2))
    chosen_kernel = capabilities.require(
        algorithm=algorithm,
        kernel=kernel,
        features=_features(
            query, key, value, sink=sink, groups=groups, layout=layout, mask=mask, options=options
        ),
        platform=query.device.type,
    )
    call = AttentionCall(
        layout=layout,
        mask=mask,
        kernel=KERNELS[chosen_kernel],
        options=options,
        groups=groups,
        return_lse=return_lse,
    )
    out, lse = ALGORITHMS[algorithm].attend(query, key, value, sink=sink, call=call)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


_DTYPE_FEATURES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def _features(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sink: Tensor | None,
    groups: ContextParallelGroups,
    layout: SequenceLayout,
    mask: AttentionMask,
    options: KernelOptions,
) -> list[str]:
    """What this call needs, in the words of `capabilities.FEATURES`."""
    heads, kv_heads, degree = query.size(2), key.size(2), groups.ulysses.size
    tokens = [sum(span.length for span in m.spans or ()) for m in mask.samples or (mask,)]
    used = {
        "padding": any(0 < count < layout.seq_len for count in tokens),
        "gqa": kv_heads < heads,
        "few_kv_heads": kv_heads < degree,
        "uneven_heads": heads % degree != 0,
        "few_heads": heads < degree,
        "v_dim": value.size(-1) != query.size(-1),
        "sink": sink is not None,
        "dropout": options.dropout_p > 0,
        "deterministic": options.deterministic,
        "any_scale": options.softmax_scale <= 0,
        _DTYPE_FEATURES[query.dtype]: True,
    }
    return [*mask.features(), *(feature for feature, is_used in used.items() if is_used)]


def _kernel_options(
    softmax_scale: float, dropout_p: float, dropout_seed: int | None, *, deterministic: bool
) -> KernelOptions:
    if not 0.0 <= dropout_p < 1.0:
        raise UsageError(
            option="dropout_p",
            value=dropout_p,
            reason="it is a probability of dropping, below 1",
            remedy="use a value from 0 up to, but not including, 1",
        )
    if dropout_p > 0.0 and dropout_seed is None:
        raise UsageError(
            option="dropout_seed",
            value=None,
            reason="all ranks must drop by the same seed, and no one else can choose it",
            remedy="pass an integer that is equal on every rank and new at every call",
        )
    return KernelOptions(
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed or 0,
        deterministic=deterministic,
    )


def _check_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sink: Tensor | None,
    groups: ContextParallelGroups,
    layout: SequenceLayout,
    mask: AttentionMask,
) -> None:
    """Raise UsageError unless tensors, layout, mask and groups fit together."""
    if layout.cp_size != groups.cp.size:
        raise UsageError(
            option="layout",
            value=f"{layout.cp_size} ranks",
            reason=f"the context-parallel group has {groups.cp.size}",
            remedy="make the layout for the group's size",
        )
    expected = layout.local_length(groups.cp.rank)
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    problem, remedy = None, "pass [s_local, b, heads, dim] for each"
    if not query.dim() == key.dim() == value.dim() == 4:
        problem = "they must have four dimensions"
    elif not query.size(0) == key.size(0) == value.size(0) == expected:
        problem = f"rank {groups.cp.rank} holds {expected} tokens of {layout.seq_len}"
        remedy = "pass this rank's shard, as layout.shard cuts it"
    elif not query.size(1) == key.size(1) == value.size(1):
        problem = "their batch sizes differ"
    elif not key.size(2) or key.size(2) != value.size(2) or query.size(2) % key.size(2):
        problem = "query heads must be a multiple of KV heads, which key and value share"
    elif query.size(3) != key.size(3):
        problem = "query and key heads must have the same size"
    elif not query.dtype == key.dtype == value.dtype or query.dtype not in _DTYPE_FEATURES:
        dtypes = f"{query.dtype}, {key.dtype}, {value.dtype}"
        problem = f"dtypes {dtypes}: all must be one of fp64, fp32, bf16, fp16"
        remedy = "cast them"
    elif sink is not None and list(sink.shape) != [query.size(2)]:
        problem = f"the sink has shape {list(sink.shape)}"
        remedy = f"pass one logit for each query head, [{query.size(2)}]"
    if problem is not None:
        raise UsageError(option="query, key, value", value=shapes, reason=problem, remedy=remedy)
    _check_mask(mask, layout, query.size(1))


def _check_not_captured(device: torch.device) -> None:
    """Raise UsageError inside a CUDA graph capture, whose replays would plan nothing anew."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            option="torch.cuda.graph",
            value="capturing",
            reason="attention exchanges tensors with other ranks by a plan made at every call",
            remedy="capture what is before and after attention, in graphs of their own",
        )


def _check_mask(mask: AttentionMask, layout: SequenceLayout, batch: int) -> None:
    for sample in mask.samples or (mask,):
        if sample.pairs is not None and sample.pairs.size(-1) != layout.seq_len:
            raise UsageError(
                option="mask",
                value=list(sample.pairs.shape),
                reason=f"the sequence has {layout.seq_len} tokens",
                remedy="pass the mask of the whole sequence on every rank",
            )
        if sample.pairs is not None and sample.pairs.dim() == 4:
            samples = sample.pairs.size(0)
            if samples not in (1, batch):
                raise UsageError(
                    option="mask",
                    value=list(sample.pairs.shape),
                    reason=f"the batch has {batch} samples, and the mask {samples}",
                    remedy=f"pass a mask of [{batch}, 1, s, s], or one for all, [s, s]",
                )
        if sample.spans and sample.spans[-1].stop > layout.seq_len:
            raise UsageError(
                option="mask",
                value=f"documents up to position {sample.spans[-1].stop}",
                reason=f"the sequence has {layout.seq_len} tokens",
                remedy="end the documents within the sequence",
            )
    if mask.samples is not None and len(mask.samples) != batch:
        raise UsageError(
            option="mask",
            value=f"{len(mask.samples)} samples",
            reason=f"the batch has {batch}",
            remedy="pass one mask for each sample",
        )
