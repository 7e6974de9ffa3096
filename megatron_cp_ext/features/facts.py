"""What rules need to know of the machine: platform, installed packages, device."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

# Import name, and the distributions that provide it.
PACKAGES = {
    "torch": ("torch",),
    "megatron": ("megatron-core",),
    "transformer_engine": ("transformer-engine", "transformer_engine"),
    "flash_attn": ("flash-attn",),
    "torch_npu": ("torch-npu",),
    "mamba_ssm": ("mamba-ssm",),
}

# Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1 below this architecture.
BLACKWELL = 10


@dataclass(frozen=True)
class Facts:
    """The machine that trains.

    Args:
        platform: "cpu", "cuda" or "npu".
        here: whether it is this machine; if not, packages and environment are not known, and a
            rule about them has nothing to say.
        versions: installed packages by import name; those that are missing are left out.
        device_arch: major compute capability of the CUDA device, None without one.
        environment: the variables that Megatron's validation reads.
        devices_per_node: devices that share the fast links of a node.
    """

    platform: str = "cpu"
    here: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)
    device_arch: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    devices_per_node: int = 8

    @classmethod
    def of_this_machine(cls, platform: str) -> Facts:
        """What is found here, for a training that runs here on `platform`."""
        on_cuda = platform == "cuda" and torch.cuda.is_available()
        return cls(
            platform=platform,
            versions=installed_versions(),
            device_arch=torch.cuda.get_device_capability()[0] if on_cuda else None,
            environment=dict(os.environ),
            devices_per_node=torch.cuda.device_count() if on_cuda else 8,
        )


def installed_versions() -> dict[str, str]:
    """Versions of the packages that can be imported, by import name."""
    found = {}
    for module, distributions in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            continue
        found[module] = "of unknown version"
        for name in distributions:
            try:
                found[module] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found
