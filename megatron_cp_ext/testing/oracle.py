"""Attention as the textbook writes it, in fp64: what every kernel and algorithm is compared with.

With `S = scale * Q K^T`, masked, and `P = exp(S - lse)` where `lse` is the logarithm of the sum of
`exp(S)` over the keys, plus `exp(sink)` if there is a sink:

    out   = Pd V                              Pd = P * keep / (1 - p), the dropped-out P
    dV    = Pd^T dOut
    dP    = (dOut V^T) * keep / (1 - p)
    dS    = P * (dP - D)                      D = rowsum(P * dP) = rowsum(dOut * out)
    dQ    = scale * dS K,  dK = scale * dS^T Q
    dsink = -sum over rows of exp(sink - lse) * D

The gradients are written out, not taken from autograd, so that they share nothing with the code
under test. One query head of one batch entry is worked on at a time: memory is a few `[s, s]`
matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp_ext.errors import UsageError


@dataclass(frozen=True)
class OracleResult:
    """Everything attention computes, in fp64, over the whole sequence.

    Attributes:
        out: `[s, b, h, dv]`; 0 where a row may attend to nothing.
        lse: `[b, h, s]`, natural logarithm of the softmax denominator, the sink included; -inf
            where a row may attend to nothing and there is no sink.
        dq: `[s, b, h, d]`, or None if no `dout` was given; the others likewise.
        dk: `[s, b, hk, d]`.
        dv: `[s, b, hk, dv]`.
        dsink: `[h]`, None without a sink.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None

    def tensors(self, *, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """The tensors that are there, by name, for `assert_close_to_oracle`.

        Args:
            without: names to leave out because the code under test does not expose them.
        """
        named = {name: getattr(self, name) for name in ("out", "lse", "dq", "dk", "dv", "dsink")}
        return {
            name: tensor
            for name, tensor in named.items()
            if tensor is not None and name not in without
        }


def oracle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    dout: Tensor | None = None,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    dropout_keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> OracleResult:
    """Attention and its gradients by explicit softmax in fp64.

    Args:
        q: `[s, b, h, d]`, any floating dtype.
        k: `[sk, b, hk, d]`; hk divides h, query head i uses KV head `i // (h // hk)`.
        v: `[sk, b, hk, dv]`.
        mask: bool, True = may attend, broadcastable to `[b, h, s, sk]`; None lets all attend.
        dout: gradient of `out`, `[s, b, h, dv]`; None computes no gradients.
        softmax_scale: factor on the scores; None means `1 / sqrt(d)`.
        sink: `[h]`, one logit per query head that joins the softmax denominator only.
        dropout_keep: bool `[b, h, s, sk]` (broadcastable), True = this probability is kept.
        dropout_p: the probability of dropping that `dropout_keep` was drawn with; kept
            probabilities are divided by `1 - dropout_p`.

    Raises:
        UsageError: if the shapes or dtypes do not fit together.
    """
    _check(q, k, v, mask, dout=dout, sink=sink, keep=dropout_keep, p=dropout_p)
    queries, batch, heads, dim = q.shape
    keys, _, kv_heads, _ = k.shape
    scale = 1.0 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    full_shape = (batch, heads, queries, keys)
    allowed = None if mask is None else mask.expand(full_shape)
    keep = None if dropout_keep is None else dropout_keep.expand(full_shape)
    q, k, v = q.detach().double(), k.detach().double(), v.detach().double()
    dout = None if dout is None else dout.detach().double()
    sink = None if sink is None else sink.detach().double()

    out = q.new_zeros(queries, batch, heads, v.shape[-1])
    lse = q.new_zeros(batch, heads, queries)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dsink = q.new_zeros(heads)

    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = scale * (q[:, b, h] @ k[:, b, g].T)
            if allowed is not None:
                scores.masked_fill_(~allowed[b, h], -math.inf)
            lse[b, h] = _log_denominator(scores, None if sink is None else sink[h])
            # Rows that see nothing: exp(-inf - 0) = 0, where -inf - (-inf) would be NaN.
            safe_lse = lse[b, h].masked_fill(lse[b, h] == -math.inf, 0.0)
            probs = torch.exp(scores - safe_lse[:, None])
            dropped = _drop(probs, None if keep is None else keep[b, h], dropout_p)
            out[:, b, h] = dropped @ v[:, b, g]
            if dout is None:
                continue
            dv[:, b, g] += dropped.T @ dout[:, b, h]
            dprobs = _drop(
                dout[:, b, h] @ v[:, b, g].T, None if keep is None else keep[b, h], dropout_p
            )
            delta = (probs * dprobs).sum(dim=-1)
            dscores = probs * (dprobs - delta[:, None])
            dq[:, b, h] = scale * (dscores @ k[:, b, g])
            dk[:, b, g] += scale * (dscores.T @ q[:, b, h])
            if sink is not None:
                dsink[h] -= (torch.exp(sink[h] - safe_lse) * delta).sum()

    if dout is None:
        return OracleResult(out, lse)
    return OracleResult(out, lse, dq, dk, dv, None if sink is None else dsink)


def _log_denominator(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Logarithm of the sum of exp over `[s, sk]` scores and the sink; -inf for an empty sum."""
    if sink is not None:
        scores = torch.cat([scores, sink.expand(scores.shape[0], 1)], dim=1)
    highest = scores.amax(dim=-1)
    highest = highest.masked_fill(highest == -math.inf, 0.0)
    return highest + torch.log(torch.exp(scores - highest[:, None]).sum(dim=-1))


def _drop(probs: Tensor, keep: Tensor | None, p: float) -> Tensor:
    return probs if keep is None else probs * keep / (1.0 - p)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    dout: Tensor | None,
    sink: Tensor | None,
    keep: Tensor | None,
    p: float,
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _require(
            tensor.ndim == 4,
            name,
            tensor,
            reason="needs four dimensions",
            remedy="pass [sequence, batch, heads, dim]",
        )
    queries, batch, heads, dim = q.shape
    keys, _, kv_heads, _ = k.shape
    _require(
        k.shape == (keys, batch, kv_heads, dim) and kv_heads > 0 and heads % kv_heads == 0,
        "k",
        k,
        reason=f"does not fit q of shape {list(q.shape)}",
        remedy="pass the batch and dim of q, and a number of heads that divides that of q",
    )
    _require(
        v.shape[:3] == k.shape[:3],
        "v",
        v,
        reason=f"does not fit k of shape {list(k.shape)}",
        remedy="pass the sequence, batch and heads of k",
    )
    for name, bools in (("mask", mask), ("dropout_keep", keep)):
        if bools is not None:
            _require(
                bools.dtype == torch.bool and _expands(bools, (batch, heads, queries, keys)),
                name,
                bools,
                reason=f"is not a bool tensor for {[batch, heads, queries, keys]}",
                remedy="pass a bool tensor that broadcasts to [batch, heads, queries, keys]",
            )
    if dout is not None:
        expected = (queries, batch, heads, v.shape[-1])
        _require(
            dout.shape == expected,
            "dout",
            dout,
            reason="is the gradient of out and needs its shape",
            remedy=f"pass {list(expected)}",
        )
    if sink is not None:
        _require(
            sink.shape == (heads,),
            "sink",
            sink,
            reason="needs one logit per query head",
            remedy=f"pass [{heads}]",
        )
    if not 0.0 <= p < 1.0 or (keep is None) != (p == 0.0):
        raise UsageError(
            option="dropout_p",
            value=p,
            reason="dropout_keep and a dropout_p between 0 and 1 belong together",
            remedy="pass both, or neither",
        )


def _expands(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = tensor.shape
    return len(sizes) <= len(shape) and all(
        size in (1, full) for size, full in zip(reversed(sizes), reversed(shape), strict=False)
    )


def _require(condition: bool, option: str, tensor: Tensor, *, reason: str, remedy: str) -> None:
    if not condition:
        value = f"{tensor.dtype} {list(tensor.shape)}"
        raise UsageError(option=option, value=value, reason=reason, remedy=remedy)
