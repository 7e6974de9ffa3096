"""Context parallelism without patches, for people who build models from specs."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.megatron.core_attention import ContextParallelAttention
from megatron_cp_ext.megatron.settings import ALGORITHM_NAMES, ContextParallelSettings


def context_parallel_layer_spec(
    layer_spec: ModuleSpec,
    *,
    algorithm: str = "ring",
    ulysses_degree: int = 1,
    kernel: str = "auto",
    deterministic: bool = False,
    send_recv_overlap: bool = False,
) -> ModuleSpec:
    """A copy of a layer spec whose core attention is context parallel.

    The model's configuration must have `context_parallel_size` set, and for a hybrid Megatron's
    process groups must have been made with `hierarchical_context_parallel_sizes` of
    `[ulysses, ring]`.

    Args:
        layer_spec: any spec that somewhere names `DotProductAttention` or
            `TEDotProductAttention`: of a layer, a block or a whole decoder.
        algorithm: `"ring"`, `"ulysses"`, `"hybrid"` or `"kvallgather"`, in either spelling.
        ulysses_degree: size of the Ulysses groups: the context-parallel size for `"ulysses"`, a
            divisor of it for `"hybrid"`, 1 for the others.
        kernel: name of an attention kernel, or `"auto"`.
        deterministic: whether two equal runs must give bitwise equal results.
        send_recv_overlap: send and receive around the ring on separate process groups.

    Raises:
        UsageError: the spec names no core attention that is known.
    """
    settings = ContextParallelSettings(
        algorithm=ALGORITHM_NAMES.get(algorithm, algorithm),
        ulysses_degree=ulysses_degree,
        kernel=kernel,
        deterministic=deterministic,
        send_recv_overlap=send_recv_overlap,
    )
    ours = functools.partial(ContextParallelAttention, settings=settings)
    known = (DotProductAttention, transformer_engine.TEDotProductAttention)
    replaced, count = _replace(layer_spec, known, ours)
    if count == 0:
        raise UsageError(
            option="layer_spec",
            value=layer_spec,
            reason="it names neither DotProductAttention nor TEDotProductAttention",
            remedy="pass a spec that does, such as get_gpt_layer_local_spec()",
        )
    return replaced


def _replace(node: Any, known: tuple[Any, ...], ours: Any) -> tuple[Any, int]:
    """A copy of a tree of specs with every known class replaced, and how many were."""
    if any(node is each for each in known):
        return ours, 1
    if isinstance(node, list | tuple):
        pairs = [_replace(item, known, ours) for item in node]
        return type(node)(item for item, _ in pairs), sum(count for _, count in pairs)
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return node, 0
    replaced, total = copy.copy(node), 0
    for field in dataclasses.fields(node):
        value, count = _replace(getattr(node, field.name), known, ours)
        if count:
            setattr(replaced, field.name, value)
        total += count
    return replaced, total
