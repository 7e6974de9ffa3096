"""`megatron-cp bench`: times the algorithms on this machine's CPU ranks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_cp_ext.benchmark import Measurement
    from megatron_cp_ext.mask import AttentionMask

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="megatron-cp bench",
        description="Times forward and backward of attention on gloo ranks, one thread each, "
        "beside one rank that has the whole sequence. Efficiency is that rank's time divided by "
        "the number of ranks, over the algorithm's time.",
    )
    parser.add_argument("--algorithms", nargs="+", default=["ring", "ulysses", "kvallgather"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ulysses-degree", type=int, help="of the hybrid")
    parser.add_argument("--seq-length", type=int, nargs="+", default=[8192])
    parser.add_argument(
        "--mask",
        default="causal",
        help="causal, full, window:TOKENS, or documents:MEAN for packed documents of random "
        "lengths, exponentially distributed (default: causal)",
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64, help="size of a head")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def document_boundaries(seq_len: int, mean: int) -> list[int]:
    """Boundaries of documents of random lengths that fill `seq_len`; the same at every call."""
    draw = random.Random(0)
    bounds = [0]
    while bounds[-1] < seq_len:
        bounds.append(min(seq_len, bounds[-1] + max(1, round(draw.expovariate(1 / mean)))))
    return bounds


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status."""
    options = parser().parse_args(argv)
    from rich.console import Console
    from rich.table import Table

    console = Console()
    rows = []
    for seq_len in options.seq_length:
        measured = _measure(options, seq_len)
        table = Table(title=f"{options.mask}, {seq_len} tokens, {options.ranks} ranks")
        for column in ("", "forward ms", "backward ms", "both ms", "of the limit", "MB sent"):
            table.add_column(column, justify="right" if column else "left")
        for each in measured:
            table.add_row(
                each.algorithm,
                f"{1e3 * each.forward_s:.1f}",
                f"{1e3 * each.backward_s:.1f}",
                f"{1e3 * each.total_s:.1f}",
                f"{each.efficiency:.3f}",
                f"{each.bytes_sent / 1e6:.2f}",
            )
            rows.append({"seq_length": seq_len} | dataclasses.asdict(each))
        console.print(table)
    if options.json is not None:
        arguments = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"arguments": arguments, "measured": rows}, indent=1))
    return 0


def _measure(options: argparse.Namespace, seq_len: int) -> list[Measurement]:
    import torch

    from megatron_cp_ext.benchmark import Workload, measure

    workload = Workload(
        seq_len=seq_len,
        mask=_mask(options.mask, seq_len),
        batch=options.batch,
        heads=options.heads,
        kv_heads=options.kv_heads,
        dim=options.dim,
        dtype=getattr(torch, DTYPES[options.dtype]),
        kernel=options.kernel,
    )
    return measure(
        workload,
        options.algorithms,
        ranks=options.ranks,
        ulysses_degree=options.ulysses_degree,
        repeats=options.repeats,
    )


def _mask(text: str, seq_len: int) -> AttentionMask:
    from megatron_cp_ext.errors import UsageError
    from megatron_cp_ext.mask import AttentionMask  # imports torch

    kind, _, number = text.partition(":")
    if kind in ("causal", "full") and not number:
        return AttentionMask.causal() if kind == "causal" else AttentionMask.full()
    if kind == "window" and number.isdecimal():
        return AttentionMask.causal(window=(int(number), 0))
    if kind == "documents" and number.isdecimal() and int(number) > 0:
        return AttentionMask.documents(document_boundaries(seq_len, int(number)))
    raise UsageError(
        option="--mask",
        value=text,
        reason="it is none of the masks that can be timed",
        remedy="use causal, full, window:TOKENS or documents:MEAN, as in documents:1000",
    )
