"""The flags that MindSpeed's users know: what each does here, in one table.

A flag works, is a no-op (a hint about memory layout or about one vendor's operator, without
influence on any result), or is refused with the reason. Flags, rules and the README's table are
made from `FLAGS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.features.facts import Facts
from megatron_cp_ext.features.findings import Advice, Arguments, Finding, settle
from megatron_cp_ext.patching import Feature

Status = Literal["works", "no-op", "refused"]


@dataclass(frozen=True)
class Flag:
    """One flag.

    Args:
        name: as the user writes it.
        status: what becomes of it.
        reason: what it does, why it has nothing to do, or why it is refused.
        remedy: for no-ops and refusals, what to do.
        spec: how argparse reads it; None where another feature registers it.
        harmless: the value, apart from the default, that asks for nothing.
        npu_only: whether it speaks of Ascend's operators.
    """

    name: str
    status: Status
    reason: str
    remedy: str = ""
    spec: dict[str, Any] | None = None
    harmless: tuple[object, ...] = field(default=())
    npu_only: bool = False

    @property
    def dest(self) -> str:
        """The attribute that argparse sets."""
        return self.name.removeprefix("--").replace("-", "_")

    def is_given(self, args: Arguments) -> bool:
        """Whether the user asks for anything by it."""
        return getattr(args, self.dest) not in (None, False, *self.harmless)


_SWITCH: dict[str, Any] = {"action": "store_true"}
_ADAPTIVE = "adaptive context parallelism, which it belongs to, is not available in this version"
_INSTEAD_OF_ADAPTIVE = (
    "drop it and use megatron_cp_algo, whose ring sends a chunk only to ranks whose mask needs it"
)
_KV_CACHE = (
    "keys and values are sent again in the backward pass; keeping those of other ranks in memory "
    "is not available in this version"
)
_LAYOUT = "partial results are always merged in fp32, and no layout has to be chosen"
_FUSED = (
    "partial results are always merged in fp32, on CUDA by one Triton kernel where Triton is "
    "installed, elsewhere by torch"
)

# Choices of --context-parallel-algo that MindSpeed has and this plugin does not.
REFUSED_ALGORITHMS = ("adaptive_cp_algo", "hybrid_adaptive_cp_algo")

FLAGS: tuple[Flag, ...] = (
    Flag(
        "--context-parallel-algo",
        "works",
        "megatron_cp_algo (ring), ulysses_cp_algo, hybrid_cp_algo, kvallgather_cp_algo; "
        "adaptive_cp_algo and hybrid_adaptive_cp_algo are refused",
    ),
    Flag("--ulysses-degree-in-cp", "works", "neighbours that exchange heads in hybrid_cp_algo"),
    Flag("--attention-mask-type", "works", "causal, or general for the data loader's mask"),
    Flag(
        "--cp-attention-mask-type",
        "works",
        "the old name of --attention-mask-type",
        "use --attention-mask-type",
        {"choices": ["causal", "general"], "default": None},
    ),
    Flag(
        "--use-cp-send-recv-overlap",
        "works",
        "neighbours in the ring send on separate process groups, so that a rank's sends and "
        "receives do not wait for each other",
    ),
    Flag(
        "--cp-window-size",
        "refused",
        "double rings are not available in this version; 1, a single ring, is accepted",
        "use 1, or hybrid_cp_algo with the Ulysses ranks inside a node",
        {"type": int, "default": 1},
        harmless=(1,),
    ),
    Flag(
        "--context-parallel-kv-cache-policy",
        "refused",
        _KV_CACHE,
        "drop it; with few KV heads kvallgather_cp_algo or ulysses_cp_algo send little",
        {"choices": ["full", "half"], "default": None},
    ),
    Flag(
        "--context-parallel-cache-interval",
        "refused",
        _KV_CACHE,
        "drop it, or leave it at 0",
        {"type": int, "default": 0},
        harmless=(0,),
    ),
    Flag(
        "--use-ulysses-allgather-kv",
        "refused",
        "Ulysses here sends each rank only the KV heads it needs, by all-to-all",
        "drop it, or use kvallgather_cp_algo to gather keys and values",
        _SWITCH,
    ),
    Flag(
        "--kv-head-repeat-before-uly-alltoall",
        "no-op",
        "KV heads are never repeated before the exchange: a rank is sent the heads it needs",
        "drop it",
        _SWITCH,
    ),
    Flag("--megatron-cp-in-bnsd", "no-op", _LAYOUT, "drop it", _SWITCH, npu_only=True),
    Flag("--use-fused-ring-attention-update", "no-op", _FUSED, "drop it", _SWITCH, npu_only=True),
    Flag(
        "--attention-mask-on-cpu",
        "refused",
        "it keeps the mask of adaptive context parallelism in host memory, and " + _ADAPTIVE,
        "drop it, and use --attention-mask-type causal, which makes no mask tensor at all",
        _SWITCH,
    ),
    *(
        Flag(f"--adaptive-cp-{name}", "refused", _ADAPTIVE, _INSTEAD_OF_ADAPTIVE, _SWITCH)
        for name in (
            "without-coarse",
            "dynamic-attn-mask",
            "only-reschedule",
            "manually-set-mask-list",
        )
    ),
)


def flag_rules(args: Arguments, facts: Facts) -> Iterator[Finding]:
    """Refused flags, hints that do nothing here, and the old name of a flag."""
    for flag in FLAGS:
        if not flag.is_given(args):
            continue
        value = getattr(args, flag.dest)
        if flag.status == "refused":
            yield UsageError(option=flag.name, value=value, reason=flag.reason, remedy=flag.remedy)
        elif flag.npu_only and facts.platform != "npu":
            yield Advice(
                flag.name,
                value,
                f"it is about operators of Ascend NPUs, and this is {facts.platform}",
                flag.remedy,
            )
    if args.context_parallel_algo in REFUSED_ALGORITHMS:
        yield UsageError(
            option="--context-parallel-algo",
            value=args.context_parallel_algo,
            reason="adaptive context parallelism is not available in this version",
            remedy="use megatron_cp_algo, which sends a chunk only to ranks whose mask needs it, "
            "or hybrid_cp_algo",
        )
    alias = args.cp_attention_mask_type
    if alias is not None:
        if args.attention_mask_type not in (None, "causal", alias):
            yield UsageError(
                option="--cp-attention-mask-type",
                value=alias,
                reason=f"--attention-mask-type, its new name, says {args.attention_mask_type}",
                remedy="drop it",
            )
        else:
            yield Advice(
                "--cp-attention-mask-type",
                alias,
                "it is the old name of --attention-mask-type",
                f"use --attention-mask-type {alias}",
            )


class MindSpeedFlagsFeature(Feature):
    """Reads the flags of the table that no other feature reads."""

    name = "mindspeed-flags"

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """Every flag of the table that has a spec."""
        group = parser.add_argument_group(title="context parallelism: MindSpeed's other flags")
        for flag in FLAGS:
            if flag.spec is not None:
                text = flag.reason if flag.status == "works" else f"{flag.status}: {flag.reason}"
                group.add_argument(flag.name, help=text[0].upper() + text[1:] + ".", **flag.spec)

    def pre_validate_args(self, args: argparse.Namespace) -> None:
        """The old name of --attention-mask-type is taken for the new one."""
        view = Arguments(args)
        if view.cp_attention_mask_type is not None and view.attention_mask_type == "causal":
            settle(args, "attention_mask_type", view.cp_attention_mask_type)

    def post_validate_args(self, args: argparse.Namespace) -> None:
        """Say once which hints do nothing."""
        view = Arguments(args)
        idle = [flag.name for flag in FLAGS if flag.status == "no-op" and flag.is_given(view)]
        if idle and view.rank == 0:
            print(f"context parallelism: without effect here: {', '.join(idle)}", flush=True)


def markdown_table() -> str:
    """The README's table of these flags."""
    lines = ["| flag | here | what that means |", "|---|---|---|"]
    for flag in FLAGS:
        remedy = f"; {flag.remedy}" if flag.remedy else ""
        lines.append(f"| `{flag.name}` | {flag.status} | {flag.reason}{remedy} |")
    return "\n".join(lines)
