"""`context_parallel_attention`: what it returns, what it accepts, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_cp_ext import (
    AttentionMask,
    ContextParallelGroups,
    SequenceLayout,
    context_parallel_attention,
)
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.layout import Run
from megatron_cp_ext.testing import GlooPool

GetPool = Callable[[int], GlooPool]
Refused = Callable[..., AbstractContextManager[None]]
Call = dict[str, Any]

ALGORITHMS = ("ring", "ulysses", "hybrid", "kvallgather")
S, B, H, KV, D = 16, 2, 4, 2, 8


def correct_call(algorithm: str = "ring", degree: int = 1) -> Call:
    """Arguments of a call on this rank that is all right."""
    alone = not torch.distributed.is_initialized()
    groups = ContextParallelGroups.single() if alone else ContextParallelGroups.from_world(degree)
    layout = SequenceLayout.zigzag(S, groups.cp.size)
    generator = torch.Generator().manual_seed(groups.cp.rank)
    s = S // groups.cp.size

    def draw(heads: int) -> Tensor:
        return torch.randn(s, B, heads, D, generator=generator).requires_grad_()

    return {
        "query": draw(H),
        "key": draw(KV),
        "value": draw(KV),
        "algorithm": algorithm,
        "groups": groups,
        "layout": layout,
        "mask": AttentionMask.causal(),
    }


# What it returns.


def describe_outputs(algorithm: str, degree: int, dtype: torch.dtype) -> list[Any]:
    call = correct_call(algorithm, degree)
    call |= {name: call[name].detach().to(dtype) for name in ("query", "key", "value")}
    call["value"] = call["value"][..., :5].clone().requires_grad_()
    out = context_parallel_attention(**call)
    same, lse = context_parallel_attention(**call, return_lse=True)
    return [
        list(out.shape),
        out.dtype,
        out.requires_grad,
        torch.equal(out, same),
        list(lse.shape),
        lse.dtype,
        lse.requires_grad,
    ]


WAYS = [("ring", 1), ("ulysses", 2), ("hybrid", 2), ("kvallgather", 1)]


@pytest.mark.parametrize(("algorithm", "degree"), WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_output_is_of_the_querys_dtype_and_the_values_size_and_lse_is_exact(
    gloo_pool: GetPool, algorithm: str, degree: int, dtype: torch.dtype
) -> None:
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    expected = [[S // 2, B, H, 5], dtype, True, True, [B, H, S // 2], lse_dtype, False]
    assert gloo_pool(2).run(describe_outputs, algorithm, degree, dtype) == [expected] * 2


def gradients(algorithm: str, degree: int, how: str) -> list[Tensor | None]:
    """Gradients of q, k, v for one way of arranging inputs and outputs."""
    call = correct_call(algorithm, degree)
    leaves = [call[name] for name in ("query", "key", "value")]
    if how == "strided":
        # Nothing is contiguous, neither inputs nor the gradient of the output.
        for name in ("query", "key", "value"):
            call[name] = torch.stack([call[name], torch.zeros_like(call[name])], -1)[..., 0]
    elif how == "frozen query":
        call["query"] = call["query"].detach()
    elif how == "frozen keys":
        call["key"] = call["key"].detach()
    out = context_parallel_attention(**call)
    weight = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    if how == "strided":
        (out.transpose(0, 3) * weight.transpose(0, 3)).sum().backward()
    elif how == "expanded":
        out.sum().backward()
    elif how == "ones":
        (out * torch.ones_like(out)).sum().backward()
    else:
        (out * weight).sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(("algorithm", "degree"), WAYS)
def test_tensors_may_lie_in_memory_in_any_way(
    gloo_pool: GetPool, algorithm: str, degree: int
) -> None:
    for one, other in (("plain", "strided"), ("ones", "expanded")):
        expected = gloo_pool(2).run(gradients, algorithm, degree, one)
        for left, right in zip(
            expected, gloo_pool(2).run(gradients, algorithm, degree, other), strict=True
        ):
            for gradient, same in zip(left, right, strict=True):
                torch.testing.assert_close(same, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("algorithm", "degree"), WAYS)
@pytest.mark.parametrize(("how", "frozen"), [("frozen query", 0), ("frozen keys", 1)])
def test_what_needs_no_gradient_gets_none_and_the_rest_is_unchanged(
    gloo_pool: GetPool, algorithm: str, degree: int, how: str, frozen: int
) -> None:
    expected = gloo_pool(2).run(gradients, algorithm, degree, "plain")
    for left, right in zip(
        expected, gloo_pool(2).run(gradients, algorithm, degree, how), strict=True
    ):
        assert right[frozen] is None
        for index in {0, 1, 2} - {frozen}:
            assert torch.equal(left[index], right[index])


def two_layers(algorithm: str, degree: int) -> tuple[Tensor, Tensor]:
    """A second attention on top of the first, with another mask: output and gradient."""
    call = correct_call(algorithm, degree)
    leaf = call["query"].detach().double().requires_grad_()
    first = call | dict.fromkeys(("query", "key", "value"), leaf)
    middle = context_parallel_attention(**first)
    second = call | dict.fromkeys(("query", "key", "value"), middle)
    out = context_parallel_attention(**second | {"mask": AttentionMask.full(window=(3, 2))})
    (out * out).sum().backward()
    return out.detach(), leaf.grad


def test_layers_stack_and_all_algorithms_agree(gloo_pool: GetPool) -> None:
    expected = gloo_pool(2).run(two_layers, *WAYS[0])
    for way in WAYS[1:]:
        for left, right in zip(expected, gloo_pool(2).run(two_layers, *way), strict=True):
            torch.testing.assert_close(right, left, rtol=0, atol=1e-12)


def test_without_gradients_the_output_is_the_same() -> None:
    call = correct_call()
    expected = context_parallel_attention(**call)
    with torch.no_grad():
        assert torch.equal(context_parallel_attention(**call), expected)
    assert not context_parallel_attention(
        **call | {name: call[name].detach() for name in ("query", "key", "value")}
    ).requires_grad


# What it refuses.


def cut(name: str, dim: int, size: int) -> Callable[[Call], Call]:
    return lambda call: {name: call[name].narrow(dim, 0, size)}


def give(**changes: Any) -> Callable[[Call], Call]:
    return lambda call: changes


TENSORS = "query, key, value"
# What is wrong with a call: how to make it so, and the option, reason and remedy of the error.
MISTAKES: dict[str, tuple[Callable[[Call], Call], str, str, str]] = {
    "three dimensions": (
        lambda c: {"query": c["query"].flatten(2)},
        TENSORS,
        "four dimensions",
        "[s_local, b, heads, dim]",
    ),
    "whole sequence": (
        lambda c: {n: c[n].repeat(2, 1, 1, 1) for n in ("query", "key", "value")},
        TENSORS,
        "tokens of 16",
        "layout.shard",
    ),
    "keys too short": (cut("key", 0, 3), TENSORS, "tokens of 16", "layout.shard"),
    "batches differ": (cut("value", 1, 1), TENSORS, "batch sizes differ", "[s_local"),
    "heads not a multiple": (cut("query", 2, 3), TENSORS, "multiple of KV heads", "[s_local"),
    "no KV heads": (
        lambda c: {n: c[n][:, :, :0] for n in ("key", "value")},
        TENSORS,
        "multiple of KV heads",
        "[s_local",
    ),
    "KV heads differ": (cut("value", 2, 1), TENSORS, "key and value share", "[s_local"),
    "dims differ": (cut("key", 3, 7), TENSORS, "same size", "[s_local"),
    "dtypes differ": (
        lambda c: {"key": c["key"].double()},
        TENSORS,
        "one of fp64",
        "cast",
    ),
    "integers": (
        lambda c: {n: c[n].long() for n in ("query", "key", "value")},
        TENSORS,
        "one of fp64",
        "cast",
    ),
    "sink of another size": (give(sink=torch.zeros(3)), TENSORS, "sink has shape [3]", "[4]"),
    "sink of two dimensions": (give(sink=torch.zeros(4, 1)), TENSORS, "shape [4, 1]", "[4]"),
    "layout of another size": (
        give(layout=SequenceLayout.zigzag(48, 3)),
        "layout",
        "context-parallel group has",
        "for the group's size",
    ),
    "unknown algorithm": (
        give(algorithm="spiral"),
        "algorithm",
        "no such algorithm",
        "ring, ulysses, hybrid, kvallgather",
    ),
    "unknown kernel": (give(kernel="flush"), "kernel", "no such kernel", "auto"),
    "kernel without dropout": (
        give(kernel="aten_cpu", dropout_p=0.1, dropout_seed=1),
        "kernel",
        "no dropout",
        "reference",
    ),
    "dropout of one": (
        give(dropout_p=1.0, dropout_seed=1),
        "dropout_p",
        "below 1",
        "not including, 1",
    ),
    "negative dropout": (give(dropout_p=-0.1, dropout_seed=1), "dropout_p", "below 1", "from 0"),
    "dropout without a seed": (
        give(dropout_p=0.1),
        "dropout_seed",
        "same seed",
        "equal on every rank",
    ),
    "dense mask of another size": (
        give(mask=AttentionMask.dense(torch.ones(8, 8).bool())),
        "mask",
        "16 tokens",
        "whole sequence",
    ),
    "dense mask of another batch": (
        give(mask=AttentionMask.dense(torch.ones(3, 1, 16, 16).bool())),
        "mask",
        "batch has 2",
        "[2, 1, s, s]",
    ),
    "documents beyond the sequence": (
        give(mask=AttentionMask.documents([0, 17])),
        "mask",
        "16 tokens",
        "within the sequence",
    ),
    "samples of another number": (
        give(mask=AttentionMask.per_sample([AttentionMask.causal(), *[AttentionMask.full()] * 2])),
        "mask",
        "batch has 2",
        "one mask for each sample",
    ),
}


def make_every_mistake() -> list[tuple[str, str, str, str]]:
    """Option, reason and remedy of the error for each mistake; nothing may be sent."""
    errors = []
    for name, (change, *_) in MISTAKES.items():
        call = correct_call()
        try:
            context_parallel_attention(**call | change(call))
        except UsageError as error:
            assert call["groups"].traffic.total_bytes == 0, name
            errors.append((name, error.option, error.reason, error.remedy))
    return errors


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(refused: Refused, mistake: str) -> None:
    change, option, reason, remedy = MISTAKES[mistake]
    call = correct_call()
    with refused(option, reason=reason, remedy=remedy):
        context_parallel_attention(**call | change(call))


def test_mistakes_are_refused_on_every_rank_alike_before_anything_is_sent(
    gloo_pool: GetPool,
) -> None:
    by_rank = gloo_pool(2).run(make_every_mistake)
    for errors in by_rank:
        assert [(name, option) for name, option, *_ in errors] == [
            (name, option) for name, (_, option, *_) in MISTAKES.items()
        ]
    for left, right in zip(*by_rank, strict=True):
        assert left[:2] + left[3:] == right[:2] + right[3:]
        assert left[2].replace("rank 0", "rank 1") == right[2]


def refuse_groups(algorithm: str, degree: int, change: Call) -> tuple[str, str, str, int]:
    call = correct_call(algorithm, degree) | change
    with pytest.raises(UsageError) as caught:
        context_parallel_attention(**call)
    error = caught.value
    return error.option, error.reason, error.remedy, call["groups"].traffic.total_bytes


@pytest.mark.parametrize(
    ("algorithm", "degree", "change", "reason", "remedy"),
    [
        ("ring", 2, {}, "exchanges no heads", "hybrid or ulysses"),
        ("kvallgather", 2, {}, "exchanges no heads", "hybrid or ulysses"),
        ("ulysses", 1, {}, "whole context-parallel group", "use 2"),
        (
            "ulysses",
            2,
            {name: torch.zeros(S // 2, B, 1, D) for name in ("query", "key", "value")},
            "there are 1",
            "hybrid with a degree of [1]",
        ),
        (
            "hybrid",
            2,
            {name: torch.zeros(S // 2, B, 1, D) for name in ("query", "key", "value")},
            "there are 1",
            "ring or kvallgather",
        ),
    ],
)
def test_groups_that_an_algorithm_cannot_use_are_refused_on_every_rank(
    gloo_pool: GetPool, algorithm: str, degree: int, change: Call, reason: str, remedy: str
) -> None:
    for option, why, what_works, sent in gloo_pool(2).run(refuse_groups, algorithm, degree, change):
        assert option == "ulysses_degree"
        assert reason in why
        assert remedy in what_works
        assert sent == 0


def test_gathering_shards_of_different_length_is_refused(gloo_pool: GetPool) -> None:
    for option, why, what_works, sent in gloo_pool(2).run(refuse_uneven):
        assert (option, sent) == ("layout", 0)
        assert "one length" in why
        assert "ring" in what_works


def refuse_uneven() -> tuple[str, str, str, int]:
    layout = SequenceLayout(5, ((Run(0, 3),), (Run(3, 5),)))
    groups = ContextParallelGroups.from_world()
    q = torch.zeros(layout.local_length(groups.cp.rank), B, H, D)
    change = {"layout": layout, "query": q, "key": q, "value": q}
    return refuse_groups("kvallgather", 1, change)


def test_a_sequence_that_does_not_fit_is_refused_with_one_that_does(refused: Refused) -> None:
    with refused("sequence length", reason="8 equal parts", remedy="for example 32"):
        SequenceLayout.zigzag(30, 4)
