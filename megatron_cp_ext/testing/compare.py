"""Comparison with the oracle: one measure of error, one set of bounds, nothing left unchecked.

The error of a tensor is its largest deviation divided by its largest expected magnitude. Dividing
entry by entry would blow up at the zeros of a gradient, and an average would hide a lost block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_cp_ext.errors import UsageError

GRADIENTS = ("dq", "dk", "dv", "dsink")
NAMES = ("out", "lse", *GRADIENTS)

_EXACT = {torch.float64: 1e-9, torch.float32: 1e-5}
_ROUNDED = (torch.bfloat16, torch.float16)
# A one-rank run further off than this is not a yardstick but a bug.
_CREDIBLE = 0.05


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest deviation over the largest expected magnitude: `max|a - e| / max|e|`.

    Entries that are the same infinity on both sides (the lse of rows that see nothing) agree and
    do not count. Where everything expected is 0, the result is `max|a|`, the absolute error.

    Args:
        actual: what was computed, any dtype; compared in fp64.
        expected: of the same shape.

    Returns:
        The error; inf if a NaN or an infinity stands where the other side has something else.

    Raises:
        ValueError: if the shapes differ.
    """
    deviation, scale = _deviation(actual, expected)
    return _over(deviation.max().item(), scale) if deviation.numel() else 0.0


def relative_errors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """`relative_error` of every expected tensor, by name.

    Raises:
        AssertionError: if the names on both sides are not the same.
        ValueError: if shapes differ.
    """
    _assert_same_names(actual, expected)
    return {name: relative_error(actual[name], expected[name]) for name in expected}


def assert_close_to_oracle(
    actual: Mapping[str, Tensor],
    oracle: Mapping[str, Tensor],
    bound: Mapping[str, float] | float,
) -> None:
    """Assert that every tensor agrees with the oracle's within its bound.

    Rows whose expected lse is -inf must be -inf, and no others. A NaN never passes.

    Args:
        actual: tensors by name, whole sequence, shapes as in `OracleResult`.
        oracle: the same names, usually `oracle_attention(...).tensors()`.
        bound: largest accepted `relative_error`: one for all, or one for each name.

    Raises:
        AssertionError: naming each tensor that is off, its error, bound and worst position, or the
            tensors that are missing on either side.
    """
    _assert_same_names(actual, oracle)
    limits = bound if isinstance(bound, Mapping) else dict.fromkeys(oracle, float(bound))
    without = sorted(set(oracle) - set(limits))
    assert not without, f"no bound given for {without}"
    endless = sorted(name for name in oracle if not math.isfinite(limits[name]))
    assert not endless, f"the bound lets everything pass for {endless}"
    complaints = [
        complaint
        for name in oracle
        if (complaint := _complaint(name, actual[name], oracle[name], bound=limits[name]))
    ]
    assert not complaints, "differs from the oracle:\n" + "\n".join(complaints)


def tolerance(dtype: torch.dtype, kind: str) -> float:
    """The error that is always accepted.

    fp64 and fp32 are exact to 1e-9 and 1e-5. bf16 and fp16 results are rounded twice, each time by
    up to half an epsilon of the largest value: partial results where they are computed, and the
    merged or summed one. Gradients have a third rounding to bear, that of the saved out they are
    computed from. Their lse is kept in fp32 and held to fp32's.

    Args:
        dtype: of query, key and value.
        kind: which tensor: out, lse, dq, dk, dv or dsink.

    Raises:
        UsageError: for another dtype or name.
    """
    if kind not in NAMES:
        raise UsageError(
            option="kind",
            value=kind,
            reason="attention has no such tensor",
            remedy=f"use one of {', '.join(NAMES)}",
        )
    if dtype in _EXACT:
        return _EXACT[dtype]
    if dtype not in _ROUNDED:
        raise UsageError(
            option="dtype",
            value=dtype,
            reason="no tolerance is defined for it",
            remedy="use float64, float32, bfloat16 or float16",
        )
    if kind == "lse":
        return _EXACT[torch.float32]
    roundings = 3 if kind in GRADIENTS else 2
    return roundings * torch.finfo(dtype).eps / 2


def bounds(single_rank_errors: Mapping[str, float], dtype: torch.dtype) -> dict[str, float]:
    """The bounds for a run on several ranks, given the errors of one rank in the same dtype.

    fp64 and fp32: the fixed tolerance. bf16 and fp16: twice the error on one rank, three times for
    gradients, but at least the tolerance. The world size does not enter: the error must not grow
    with it.

    Args:
        single_rank_errors: `relative_errors` of the one-rank run, by tensor name.
        dtype: of query, key and value.

    Raises:
        AssertionError: if the one-rank run is itself too far off to be compared with.
        UsageError: for a name or dtype that `tolerance` does not know.
    """
    result = {}
    for name, error in single_rank_errors.items():
        floor = tolerance(dtype, name)
        limit = floor if dtype in _EXACT else _CREDIBLE
        assert error <= limit, f"{name} of the one-rank run is off by {error:.3e} > {limit:.3e}"
        factor = 3.0 if name in GRADIENTS else 2.0
        result[name] = floor if dtype in _EXACT else max(floor, factor * error)
    return result


def _deviation(actual: Tensor, expected: Tensor) -> tuple[Tensor, float]:
    """Deviation of each entry (0 for equal infinities, inf for NaN), and the scale to divide by."""
    if actual.shape != expected.shape:
        raise ValueError(f"shape {list(actual.shape)} where {list(expected.shape)} is expected")
    a, e = actual.detach().cpu().double(), expected.detach().cpu().double()
    deviation = (a - e).abs().masked_fill(a == e, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    finite = e[e.isfinite()].abs()
    return deviation, finite.max().item() if finite.numel() else 0.0


def _over(deviation: float, scale: float) -> float:
    return deviation / scale if scale > 0.0 else deviation


def _complaint(name: str, actual: Tensor, expected: Tensor, *, bound: float) -> str | None:
    """What is wrong with one tensor, or None."""
    try:
        deviation, scale = _deviation(actual, expected)
    except ValueError as mismatch:
        return f"  {name}: {mismatch}"
    if not deviation.numel():
        return None
    error = _over(deviation.max().item(), scale)
    if error <= bound:
        return None
    where = tuple(int(i) for i in torch.unravel_index(deviation.argmax(), deviation.shape))
    got, want = actual[where].item(), expected[where].item()
    many = int((deviation > bound * (scale or 1.0)).sum())
    return (
        f"  {name}: error {error:.3e} exceeds the bound {bound:.3e} in {many} of "
        f"{deviation.numel()} entries; worst at {list(where)}: "
        f"{got:.9g} where {want:.9g} is expected"
    )


def _assert_same_names(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing = sorted(set(expected) - set(actual))
    assert not missing, f"missing from the results: {missing}"
    unchecked = sorted(set(actual) - set(expected))
    assert not unchecked, f"the oracle has nothing to compare with: {unchecked}"
