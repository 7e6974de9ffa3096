"""Training on plain CPUs: chosen by itself where no accelerator is found."""

from __future__ import annotations

import argparse

import torch

from megatron_cp_ext.errors import UsageError, raise_all
from megatron_cp_ext.megatron import cpu
from megatron_cp_ext.megatron.cpu import startup
from megatron_cp_ext.patching import Feature, PatchManager

PLATFORMS = ("auto", "cpu", "cuda", "npu")

# What the CPU platform sets, by Megatron's names. All of it is about speed and memory alone: a
# training without it computes the same numbers, so a command line made for GPUs runs as it is.
SETTINGS: dict[str, object] = {
    "distributed_backend": "gloo",
    # Transformer Engine or Apex
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "cross_entropy_fusion_impl": "native",
    "mla_down_proj_fusion": False,
    "fused_residual_rmsnorm": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "use_te_activation_func": False,
    "te_rng_tracker": False,
    "delay_wgrad_compute": False,
    "tp_comm_overlap": False,
    # CUDA and NCCL
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "optimizer_cuda_graph": False,
    "nccl_ub": False,
    "use_sharp": False,
    # Memory apart from the device's. Here a copy to the host is no copy, so what is written in
    # the background would change while it is written.
    "async_save": False,
    "use_persistent_ckpt_worker": False,
    "optimizer_cpu_offload": False,
    "cpu_offloading_num_layers": 0,
    "fine_grained_activation_offloading": False,
}

# What changes numbers, checkpoints or output, and cannot be had here.
REFUSED: dict[str, str] = {
    "fp8": "8-bit floats need Transformer Engine",
    "fp4": "4-bit floats need Transformer Engine",
    "use_precision_aware_optimizer": "it needs the Adam of Transformer Engine",
    "use_megatron_fsdp": "Megatron's FSDP needs CUDA",
    "use_torch_fsdp2": "Megatron's use of torch's FSDP needs CUDA",
    "moe_enable_deepep": "DeepEP needs CUDA",
    "batch_invariant_mode": "its kernels need CUDA",
    "record_memory_history": "there is no device allocator to record",
}


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


def find_refused(args: argparse.Namespace) -> list[UsageError]:
    """The given options that CPU ranks cannot honour."""
    remedy = "leave it out on CPU ranks"
    errors = [
        UsageError(
            option="--" + name.replace("_", "-"),
            value=getattr(args, name),
            reason=reason,
            remedy=remedy,
        )
        for name, reason in REFUSED.items()
        if getattr(args, name, None)
    ]
    if getattr(args, "transformer_impl", None) == "inference_optimized":
        errors.append(
            UsageError(
                option="--transformer-impl",
                value=args.transformer_impl,
                reason="it needs Transformer Engine",
                remedy="use local, which is set on CPU ranks where nothing is given",
            )
        )
    if getattr(args, "profile", False) and not args.use_pytorch_profiler:
        errors.append(
            UsageError(
                option="--profile",
                value=True,
                reason="Nsight Systems profiles CUDA",
                remedy="add --use-pytorch-profiler",
            )
        )
    return errors


def apply_settings(args: argparse.Namespace) -> list[str]:
    """Set what `SETTINGS` says; return what was different before, for the user to read."""
    changed = []
    for name, value in SETTINGS.items():
        # Megatron removes some names while it validates.
        if hasattr(args, name) and getattr(args, name) != value:
            setattr(args, name, value)
            shown = ("on" if value else "off") if isinstance(value, bool) else value
            changed.append(f"{name.replace('_', '-')}={shown}")
    return changed


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
        raise_all(find_refused(args))
        changed = apply_settings(args)
        if changed and args.rank == 0:
            print(f"training on CPU ranks over gloo, with {', '.join(changed)}", flush=True)

    def register_early_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        if args.cp_platform == "cpu":
            for patch in cpu.patches():
                manager.register(patch)
