"""torch.compile around attention: the graph breaks there, and the numbers stay.

CUDA graphs are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from megatron_cp_ext import (
    AttentionMask,
    ContextParallelGroups,
    SequenceLayout,
    attention,
    context_parallel_attention,
)
from megatron_cp_ext.testing import GlooPool

Refused = Callable[..., AbstractContextManager[None]]

SEQ_LEN, HEADS, DIM = 16, 2, 4


def block(x: Tensor, weight: Tensor, groups: ContextParallelGroups, algorithm: str) -> Tensor:
    """Some arithmetic before and after attention, as in a layer."""
    q = torch.nn.functional.gelu(x @ weight) * 2
    out = context_parallel_attention(
        q,
        x.sin(),
        x,
        algorithm=algorithm,
        groups=groups,
        layout=SequenceLayout.zigzag(SEQ_LEN, groups.cp.size),
        mask=AttentionMask.causal(),
    )
    return (out.cos() * x).sum(-1) + 1


def results(function: Callable[..., Tensor], groups: ContextParallelGroups, algorithm: str) -> list:
    x = torch.randn(
        SEQ_LEN // groups.cp.size, 1, HEADS, DIM, generator=torch.Generator().manual_seed(3)
    ).requires_grad_()
    weight = torch.eye(DIM).mul(0.5).requires_grad_()
    out = function(x, weight, groups, algorithm)
    out.square().sum().backward()
    return [out.detach(), x.grad, weight.grad]


def graphs_of(groups: ContextParallelGroups, algorithm: str) -> int:
    """Compile the block, compare with eager, and say how many graphs there were."""
    import torch._dynamo

    torch._dynamo.reset()
    count = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal count
        count += 1
        return graph.forward

    expected = results(block, groups, algorithm)
    for backend in (counting, "aot_eager"):
        torch._dynamo.reset()
        actual = results(torch.compile(block, backend=backend), groups, algorithm)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)
    return count


def test_a_graph_before_attention_and_one_after_give_eager_numbers() -> None:
    assert graphs_of(ContextParallelGroups.single(), "ring") == 2


def compile_on_ranks() -> int:
    return graphs_of(ContextParallelGroups.from_world(), "ring")


@pytest.mark.slow
def test_ranks_that_compile_exchange_as_those_that_do_not(
    gloo_pool: Callable[[int], GlooPool],
) -> None:
    assert gloo_pool(2).run(compile_on_ranks) == [2, 2]


def test_one_graph_without_a_break_is_refused_by_name() -> None:
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="exchanges tensors with other ranks"):
        results(compiled, ContextParallelGroups.single(), "ring")


def test_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attention._check_not_captured(torch.device("cpu"))
    with refused("torch.cuda.graph", remedy="graphs of their own"):
        attention._check_not_captured(torch.device("cuda"))
