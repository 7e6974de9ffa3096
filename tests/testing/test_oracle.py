"""The oracle agrees with autograd, with torch's own attention, and with hand-made small cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.testing.compare import assert_close_to_oracle
from megatron_cp_ext.testing.oracle import OracleResult, oracle_attention

S, B, H, D, DV = 11, 2, 4, 6, 5
DROPOUT_P = 0.3


def inputs(*, kv_heads: int = H) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1234)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return {
        "q": draw(S, B, H, D),
        "k": draw(S, B, kv_heads, D),
        "v": draw(S, B, kv_heads, DV),
        "dout": draw(S, B, H, DV),
        "sink": draw(H),
        "keep": torch.rand(B, H, S, S, generator=generator) >= DROPOUT_P,
        "random_mask": torch.rand(B, 1, S, S, generator=generator) < 0.6,
    }


def by_autograd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    dout: Tensor,
    scale: float,
    sink: Tensor | None,
    keep: Tensor | None,
) -> dict[str, Tensor]:
    """Another formulation: softmax over keys and a sink column, gradients from autograd."""
    leaves = {"dq": q, "dk": k, "dv": v} | ({} if sink is None else {"dsink": sink})
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    q, k, v = leaves["dq"], leaves["dk"], leaves["dv"]
    repeats = H // k.shape[2]
    k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    column = leaves["dsink"] if sink is not None else torch.full((H,), -math.inf).double()
    scores = torch.cat([scores, column[None, :, None, None].expand(B, H, S, 1)], dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., :-1]
    if keep is not None:
        probs = probs * keep / (1 - DROPOUT_P)
    out = torch.einsum("bhst,tbhd->sbhd", probs, v)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    result = {"out": out.detach(), "lse": torch.logsumexp(scores, dim=-1).detach()}
    return result | dict(zip(leaves, grads, strict=True))


MASKS = {
    "none": None,
    "causal": torch.ones(S, S, dtype=torch.bool).tril(),
    "window": torch.ones(S, S, dtype=torch.bool).tril().triu(-3),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("with_dropout", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_agrees_with_autograd(
    mask: str, kv_heads: int, with_sink: bool, with_dropout: bool, scale: float | None
) -> None:
    x = inputs(kv_heads=kv_heads)
    sink = x["sink"] if with_sink else None
    keep = x["keep"] if with_dropout else None
    result = oracle_attention(
        x["q"],
        x["k"],
        x["v"],
        MASKS[mask],
        dout=x["dout"],
        softmax_scale=scale,
        sink=sink,
        dropout_keep=keep,
        dropout_p=DROPOUT_P if with_dropout else 0.0,
    )
    expected = by_autograd(
        x["q"],
        x["k"],
        x["v"],
        MASKS[mask],
        dout=x["dout"],
        scale=D**-0.5 if scale is None else scale,
        sink=sink,
        keep=keep,
    )
    assert_close_to_oracle(result.tensors(), expected, 1e-13)


def test_agrees_with_torch_attention_for_a_mask_that_differs_between_batch_entries() -> None:
    x = inputs(kv_heads=2)
    mask = x["random_mask"] | torch.eye(S, dtype=torch.bool)
    k, v = (x[name].repeat_interleave(2, dim=2) for name in ("k", "v"))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.permute(1, 2, 0, 3) for tensor in (x["q"], k, v)), attn_mask=mask
    ).permute(2, 0, 1, 3)
    result = oracle_attention(x["q"], x["k"], x["v"], mask)
    torch.testing.assert_close(result.out, expected, rtol=0, atol=1e-13)


def test_gradients_agree_with_finite_differences() -> None:
    x = inputs(kv_heads=2)
    names = {"q": "dq", "k": "dk", "v": "dv", "sink": "dsink"}
    mask = MASKS["causal"]

    def loss(changed: dict[str, Tensor]) -> float:
        y = x | changed
        out = oracle_attention(y["q"], y["k"], y["v"], mask, sink=y["sink"]).out
        return (out * x["dout"]).sum().item()

    result = oracle_attention(x["q"], x["k"], x["v"], mask, dout=x["dout"], sink=x["sink"])
    gradients = result.tensors()
    step = 1e-5
    for name, gradient in names.items():
        direction = torch.randn(x[name].shape, generator=torch.Generator().manual_seed(5)).double()
        plus = loss({name: x[name] + step * direction})
        minus = loss({name: x[name] - step * direction})
        slope = (gradients[gradient] * direction).sum().item()
        assert (plus - minus) / (2 * step) == pytest.approx(slope, rel=1e-7)


def mask_with_empty_rows() -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask[[2, 7]] = False
    return mask


def test_rows_that_see_nothing_are_zero_and_minus_infinity_without_nan() -> None:
    x = inputs(kv_heads=2)
    result = oracle_attention(x["q"], x["k"], x["v"], mask_with_empty_rows(), dout=x["dout"])
    empty = torch.tensor([2, 7])
    assert not result.out[empty].any()
    assert not result.dq[empty].any()
    assert torch.equal((result.lse == -math.inf).nonzero()[:, 2].unique(), empty)
    assert all(not tensor.isnan().any() for tensor in result.tensors().values())

    # Nor do they give anything to keys and values: the other rows alone give the same.
    rest = torch.tensor([row for row in range(S) if row not in (2, 7)])
    alone = oracle_attention(
        x["q"][rest],
        x["k"],
        x["v"],
        mask_with_empty_rows()[rest],
        dout=x["dout"][rest],
    )
    torch.testing.assert_close(result.dk, alone.dk, rtol=0, atol=1e-14)
    torch.testing.assert_close(result.dv, alone.dv, rtol=0, atol=1e-14)


def test_rows_that_see_only_the_sink_have_its_logit_as_lse() -> None:
    x = inputs()
    result = oracle_attention(
        x["q"], x["k"], x["v"], mask_with_empty_rows(), dout=x["dout"], sink=x["sink"]
    )
    torch.testing.assert_close(result.lse[:, :, 2], x["sink"].expand(B, H), rtol=0, atol=1e-15)
    assert not result.out[2].any()
    assert not result.dq[2].any()
    assert all(tensor.isfinite().all() for tensor in result.tensors().values())


def test_a_mask_that_forbids_everything_gives_zeros() -> None:
    x = inputs()
    nothing = torch.zeros(1, 1, dtype=torch.bool)
    result = oracle_attention(x["q"], x["k"], x["v"], nothing, dout=x["dout"])
    assert (result.lse == -math.inf).all()
    assert all(not result.tensors(without=("lse",))[name].any() for name in ("out", "dq", "dk"))


def test_grouped_query_heads_use_their_own_kv_head() -> None:
    x = inputs(kv_heads=2)
    x["v"][:, :, 1] = 0
    out = oracle_attention(x["q"], x["k"], x["v"], None).out
    assert out[:, :, :2].abs().min() > 0
    assert not out[:, :, 2:].any()


def test_huge_scores_do_not_overflow() -> None:
    x = inputs()
    result = oracle_attention(x["q"] * 1e4, x["k"], x["v"], MASKS["causal"], dout=x["dout"])
    assert all(tensor.isfinite().all() for tensor in result.tensors().values())


def test_low_precision_inputs_are_computed_in_fp64() -> None:
    x = inputs()
    low = {name: x[name].bfloat16() for name in ("q", "k", "v")}
    result = oracle_attention(**low, mask=None)
    exact = oracle_attention(**{name: low[name].double() for name in low}, mask=None)
    assert result.out.dtype == result.lse.dtype == torch.float64
    assert torch.equal(result.out, exact.out)


def test_gradients_are_left_out_without_dout() -> None:
    x = inputs()
    result = oracle_attention(x["q"], x["k"], x["v"], None, sink=x["sink"])
    assert list(result.tensors()) == ["out", "lse"]
    assert isinstance(result, OracleResult)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"q": torch.zeros(S, B, H)}, "q"),
        ({"k": torch.zeros(S, B, 3, D)}, "k"),
        ({"k": torch.zeros(S, 1, H, D)}, "k"),
        ({"v": torch.zeros(S - 1, B, H, DV)}, "v"),
        ({"mask": torch.ones(S, S)}, "mask"),
        ({"mask": torch.ones(S, S - 1, dtype=torch.bool)}, "mask"),
        ({"dout": torch.zeros(S, B, H, DV + 1)}, "dout"),
        ({"sink": torch.zeros(H + 1)}, "sink"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"dropout_keep": torch.ones(S, S, dtype=torch.bool)}, "dropout_p"),
        ({"dropout_keep": torch.ones(S, S, dtype=torch.bool), "dropout_p": 1.0}, "dropout_p"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], option: str) -> None:
    x = inputs()
    arguments = {name: x[name] for name in ("q", "k", "v")} | {"mask": None} | change
    with pytest.raises(UsageError) as caught:
        oracle_attention(**arguments)
    assert caught.value.option == option
