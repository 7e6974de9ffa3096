"""Training on plain CPUs: chosen by itself where no accelerator is found."""

from __future__ import annotations

import argparse

import torch

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.megatron import cpu
from megatron_cp_ext.megatron.cpu import startup
from megatron_cp_ext.patching import Feature, PatchManager

PLATFORMS = ("auto", "cpu", "cuda", "npu")

# What the CPU platform sets: option, value.
SETTINGS: tuple[tuple[str, object], ...] = (
    ("transformer_impl", "local"),
    ("distributed_backend", "gloo"),
    ("no_persist_layer_norm", True),
    ("apply_rope_fusion", False),
    ("gradient_accumulation_fusion", False),
    ("masked_softmax_fusion", False),
)


def has_npu() -> bool:
    """Whether torch_npu is loaded and sees a device."""
    npu = getattr(torch, "npu", None)
    return npu is not None and npu.is_available()


def resolve_platform(wanted: str) -> str:
    """The platform to run on.

    Args:
        wanted: the value of `--cp-platform`.

    Returns:
        "cpu", "cuda" or "npu".

    Raises:
        UsageError: the accelerator asked for is not there.
    """
    found = [
        name for name, there in (("npu", has_npu()), ("cuda", torch.cuda.is_available())) if there
    ]
    if wanted == "auto":
        return found[0] if found else "cpu"
    if wanted != "cpu" and wanted not in found:
        raise UsageError(
            option="--cp-platform",
            value=wanted,
            reason=f"torch finds no {wanted.upper()} device on this machine",
            remedy="leave it at auto, or choose cpu",
        )
    return wanted


class CpuPlatformFeature(Feature):
    """Runs `megatron.training` on gloo ranks without CUDA, Transformer Engine or Apex."""

    name = "cpu-platform"

    def before_import(self) -> None:
        if resolve_platform("auto") == "cpu":
            startup.import_megatron_uncompiled()

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(title="context parallelism: platform")
        group.add_argument(
            "--cp-platform",
            choices=PLATFORMS,
            default="auto",
            help="Devices to train on. auto: an accelerator if torch finds one, else CPU ranks "
            "over gloo, with the options that need CUDA, Transformer Engine or Apex turned off.",
        )

    def pre_validate_args(self, args: argparse.Namespace) -> None:
        args.cp_platform = resolve_platform(args.cp_platform)
        if args.cp_platform != "cpu":
            return
        changed = []
        for name, value in SETTINGS:
            if hasattr(args, name) and getattr(args, name) != value:
                setattr(args, name, value)
                changed.append(f"{name}={value}")
        if changed and args.rank == 0:
            print(f"no accelerator: training on CPU ranks, with {', '.join(changed)}", flush=True)

    def register_early_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        if args.cp_platform == "cpu":
            for patch in cpu.patches():
                manager.register(patch)
