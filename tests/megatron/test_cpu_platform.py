"""The CPU platform: when it acts, what it sets and what it refuses."""

from __future__ import annotations

import argparse
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cp_ext.errors import UsageErrors
from megatron_cp_ext.features.cpu_platform import REFUSED, SETTINGS, CpuPlatformFeature
from megatron_cp_ext.megatron import cpu
from megatron_cp_ext.megatron.cpu import startup
from megatron_cp_ext.patching import PatchManager

# What Megatron's parser gives when nothing is asked for.
GPU_DEFAULTS = {
    "rank": 0,
    "distributed_backend": "nccl",
    "transformer_impl": "transformer_engine",
    "no_persist_layer_norm": False,
    "apply_rope_fusion": True,
    "gradient_accumulation_fusion": True,
    "masked_softmax_fusion": True,
    "cross_entropy_fusion_impl": "native",
    "cuda_graph_impl": "none",
    "async_save": False,
    "profile": False,
    "use_pytorch_profiler": False,
    "fp8": None,
    "fp4": None,
}


def arguments(platform: str = "auto", **given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**GPU_DEFAULTS, "cp_platform": platform, **given})


@pytest.mark.parametrize("accelerator", ["cuda", "npu"])
@pytest.mark.parametrize("wanted", ["auto", "named"])
def test_a_machine_with_an_accelerator_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, accelerator: str, wanted: str
) -> None:
    if accelerator == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    else:
        npu = SimpleNamespace(is_available=lambda: True)
        monkeypatch.setattr(torch, "npu", npu, raising=False)
    imported = []
    monkeypatch.setattr(startup, "import_megatron_uncompiled", lambda: imported.append(True))

    feature, manager = CpuPlatformFeature(), PatchManager()
    args = arguments("auto" if wanted == "auto" else accelerator, fp8="hybrid", profile=True)
    before = copy.deepcopy(vars(args))
    feature.before_import()
    feature.pre_validate_args(args)
    feature.register_early_patches(manager, args)
    feature.validate_args(args)
    feature.post_validate_args(args)
    feature.register_patches(manager, args)
    manager.apply()

    assert vars(args) == {**before, "cp_platform": accelerator}
    assert not manager.applied()
    assert not imported
    assert capsys.readouterr().out == ""


def test_cpu_ranks_can_be_asked_for_beside_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = arguments("cpu")
    CpuPlatformFeature().pre_validate_args(args)
    assert (args.cp_platform, args.distributed_backend) == ("cpu", "gloo")


@pytest.mark.parametrize("missing", ["cuda", "npu"])
def test_an_accelerator_that_is_not_there_is_refused(refused: Any, missing: str) -> None:
    with refused("--cp-platform", reason=missing.upper(), remedy="auto"):
        CpuPlatformFeature().pre_validate_args(arguments(missing))


def test_without_an_accelerator_it_sets_what_differs_and_says_so_in_one_line(capsys: Any) -> None:
    args = arguments(moe_grouped_gemm=True)
    CpuPlatformFeature().pre_validate_args(args)
    for name, value in SETTINGS.items():
        assert getattr(args, name, value) == value
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    for part in ("transformer-impl=local", "apply-rope-fusion=off", "moe-grouped-gemm=off"):
        assert part in lines[0]
    assert "cuda-graph-impl" not in lines[0], "it was none before"

    CpuPlatformFeature().pre_validate_args(args)
    assert capsys.readouterr().out == "", "nothing is left to set"


def test_only_rank_0_says_it(capsys: Any) -> None:
    CpuPlatformFeature().pre_validate_args(arguments(rank=1))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cpu_ranks_cannot_honour_is_refused(refused: Any, name: str) -> None:
    with refused("--" + name.replace("_", "-"), remedy="CPU"):
        CpuPlatformFeature().pre_validate_args(arguments(**{name: "hybrid"}))


def test_all_refusals_come_together() -> None:
    args = arguments(fp8="hybrid", profile=True, transformer_impl="inference_optimized")
    with pytest.raises(UsageErrors) as caught:
        CpuPlatformFeature().pre_validate_args(args)
    options = [error.option for error in caught.value.errors]
    assert options == ["--fp8", "--transformer-impl", "--profile"]
    CpuPlatformFeature().pre_validate_args(arguments(profile=True, use_pytorch_profiler=True))


def test_every_setting_and_refusal_names_an_argument_of_megatron() -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser())
    known = {action.dest for action in parser._actions}
    assert not (set(SETTINGS) | set(REFUSED)) - known


def test_all_patches_can_be_declared_again_and_taken_back() -> None:
    cuda, empty, to = torch.cuda.current_device, torch.empty, torch.Tensor.to
    own = set(vars(torch.Tensor))
    manager = PatchManager()
    for _ in range(2):
        for patch in cpu.patches():
            manager.register(patch)
        manager.apply()
    assert torch.empty is not empty
    assert len(manager.applied()) == len(cpu.patches())
    assert {applied.owner for applied in manager.applied()} == {"cpu-platform"}
    manager.undo()
    assert (torch.cuda.current_device, torch.empty, torch.Tensor.to) == (cuda, empty, to)
    assert set(vars(torch.Tensor)) == own
