"""Ways of being wrong: functions that put a fault into the code, for one case on one rank.

Each takes the monkeypatch that will undo it, the case, and the rank, and returns the case that the
rank is to believe it has been given.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_cp_ext import AttentionMask, SequenceLayout, comm
from megatron_cp_ext.algorithms.function import sink_gradient
from megatron_cp_ext.algorithms.heads import HeadSplit
from megatron_cp_ext.kernels import KERNELS, AttentionKernel
from megatron_cp_ext.kernels.merge import OutputAccumulator
from megatron_cp_ext.layout import Run
from megatron_cp_ext.mask import Tile
from megatron_cp_ext.testing import AttentionCase

Mutation = Callable[[pytest.MonkeyPatch, AttentionCase, int], AttentionCase]


# Where mutations are put in.


def around_kernels(patch: pytest.MonkeyPatch, method: str, change: Callable[..., None]) -> None:
    """Replace a method of every kernel by `change(original, kernel, *args, **kwargs)`."""
    for kernel_class in {type(kernel) for kernel in KERNELS.values()}:
        original = getattr(kernel_class, method)
        patch.setattr(kernel_class, method, functools.partialmethod(swap(change, original)))


def swap(change: Callable[..., None], original: Callable[..., None]) -> Callable[..., None]:
    def mutated(self: AttentionKernel, *args: Any, **kwargs: Any) -> None:
        change(functools.partial(original, self), *args, **kwargs)

    return mutated


def rebind(patch: pytest.MonkeyPatch, original: object, mutated: object) -> None:
    """Put `mutated` wherever a module of the package holds `original`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron_cp_ext"):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    patch.setattr(module, attribute, mutated)


def spoil_what_is_sent(
    patch: pytest.MonkeyPatch, kind: str, spoil: Callable[[Tensor], None]
) -> None:
    """Let `spoil` change a copy of every buffer of one kind that goes to other ranks."""

    def spoilt(value: Any) -> Any:
        if isinstance(value, Tensor):
            copy = value.clone()
            spoil(copy)
            return copy
        return [(spoilt(buffer), to) for buffer, to in value]

    def mutate(original: Callable[..., Any]) -> Callable[..., Any]:
        def mutated(outgoing: Any, *args: Any, **kwargs: Any) -> Any:
            return original(
                spoilt(outgoing) if kwargs["kind"] == kind else outgoing, *args, **kwargs
            )

        return mutated

    for name in comm.__all__:
        operation = getattr(comm, name)
        if inspect.isfunction(operation) and "kind" in inspect.signature(operation).parameters:
            rebind(patch, operation, mutate(operation))


# The mutations.


def nothing(patch: pytest.MonkeyPatch, case: AttentionCase, rank: int) -> AttentionCase:
    return case


def without_a_block(tiles: Sequence[Tile]) -> list[Tile]:
    """All tiles but the keys of the last one's second half."""
    *others, last = tiles
    columns = last.k_rows.length // 2
    kept = last.part(Run(0, last.q_rows.length), Run(0, columns))
    return [*others, kept] if columns else others


def lose_a_block_of_keys(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int, *, methods: Sequence[str]
) -> AttentionCase:
    def lose(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        *tensors, tiles = args
        lost = without_a_block(tiles) if rank == case.layout.cp_size - 1 and tiles else tiles
        original(*tensors, lost, **kwargs)

    for method in methods:
        around_kernels(patch, method, lose)
    return case


def skip_a_step(patch: pytest.MonkeyPatch, case: AttentionCase, rank: int) -> AttentionCase:
    calls = itertools.count()

    def skip(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if next(calls) != 1:
            original(*args, **kwargs)

    around_kernels(patch, "forward", skip)
    around_kernels(patch, "backward", skip)
    return case


def swapped(layout: SequenceLayout) -> SequenceLayout:
    """Ranks 0 and 1 have exchanged their first chunks."""
    (a, *rest_a), (b, *rest_b), *others = layout.shards
    return replace(layout, shards=((b, *rest_a), (a, *rest_b), *others))


def cut_two_chunks_the_other_way(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int
) -> AttentionCase:
    return replace(case, layout=swapped(case.layout))


def believe_two_chunks_swapped(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int
) -> AttentionCase:
    """The tensors are cut rightly; the mask takes them for other positions."""
    original = SequenceLayout.shard

    def shard(self: SequenceLayout, tensor: Tensor, rank: int, dim: int = 0) -> Tensor:
        return original(case.layout, tensor, rank, dim)

    patch.setattr(SequenceLayout, "shard", shard)
    return replace(case, layout=swapped(case.layout))


def scale_a_gradient(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int, *, index: int, factor: float
) -> AttentionCase:
    def scale(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        total = kwargs["into"][index]
        before = total.clone()
        original(*args, **kwargs)
        total.copy_(before + factor * (total - before))

    around_kernels(patch, "backward", scale)
    return case


def lose_gradients_on_the_way(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int
) -> AttentionCase:
    spoil_what_is_sent(patch, "dkv", Tensor.zero_)
    return case


def keep_one_of_the_gradients_of_a_shared_head(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int
) -> AttentionCase:
    """All heads arrive rightly, but the last rank's share of the backward pass does not."""
    calls = itertools.count()
    forward_calls = 4  # query, key and value, out, lse

    def spoil(buffer: Tensor) -> None:
        if next(calls) >= forward_calls and rank == case.layout.cp_size - 1:
            buffer.zero_()

    spoil_what_is_sent(patch, "heads", spoil)
    return case


def lose_keys_on_the_way(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int
) -> AttentionCase:
    def spoil(buffer: Tensor) -> None:
        if rank == 0:
            buffer[-1] = 0

    spoil_what_is_sent(patch, "kv", spoil)
    return case


def scale_scores_otherwise(
    patch: pytest.MonkeyPatch,
    case: AttentionCase,
    rank: int,
    *,
    factor: float,
    methods: Sequence[str] = ("forward", "backward"),
) -> AttentionCase:
    def scale(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        options = kwargs["options"]
        other = replace(options, softmax_scale=options.softmax_scale * factor)
        original(*args, **kwargs | {"options": other})

    for method in methods:
        around_kernels(patch, method, scale)
    return case


def attend_with_the_next_ranks_heads(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int
) -> AttentionCase:
    original = HeadSplit.of

    def of(heads: int, kv_heads: int, degree: int) -> HeadSplit:
        split = original(heads, kv_heads, degree)
        return replace(split, query=(*split.query[1:], split.query[0]))

    patch.setattr(HeadSplit, "of", staticmethod(of))
    patch.setattr(HeadSplit, "kv_index", lambda self, rank: None)
    return case


def merge_with_another_weight(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int, *, shift: float
) -> AttentionCase:
    original = OutputAccumulator.merge

    def merge(self: OutputAccumulator, out: Tensor, lse: Tensor, **kwargs: Any) -> None:
        untouched = not self.lse.isfinite().any()
        original(self, out, lse if untouched else lse + shift, **kwargs)

    patch.setattr(OutputAccumulator, "merge", merge)
    return case


def move_the_band(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int, *, lo: int = 0, hi: int = 0
) -> AttentionCase:
    band = case.mask
    moved = replace(
        band,
        lo=None if band.lo is None else band.lo + lo,
        hi=None if band.hi is None else band.hi + hi,
    )
    return replace(case, mask=moved)


def move_a_document(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int, *, bounds: Sequence[int]
) -> AttentionCase:
    return replace(case, mask=AttentionMask.documents(bounds))


def leave_the_sink_without_gradient(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int
) -> AttentionCase:
    def zero(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
        return torch.zeros_like(sink)

    rebind(patch, sink_gradient, zero)
    return case


def forget_the_sink(patch: pytest.MonkeyPatch, case: AttentionCase, rank: int) -> AttentionCase:
    patch.setattr(OutputAccumulator, "add_sink", lambda self, sink: None)
    return case


def add_the_sink_twice(patch: pytest.MonkeyPatch, case: AttentionCase, rank: int) -> AttentionCase:
    original = OutputAccumulator.add_sink

    def twice(self: OutputAccumulator, sink: Tensor) -> None:
        original(self, sink)
        original(self, sink)

    patch.setattr(OutputAccumulator, "add_sink", twice)
    return case


def drop_by_another_seed(
    patch: pytest.MonkeyPatch, case: AttentionCase, rank: int
) -> AttentionCase:
    def seed(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        options = kwargs["options"]
        other = replace(options, dropout_seed=options.dropout_seed + rank)
        original(*args, **kwargs | {"options": other})

    around_kernels(patch, "forward", seed)
    around_kernels(patch, "backward", seed)
    return case
