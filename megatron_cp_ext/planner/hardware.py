"""Figures of devices, for estimates: attention throughput, links, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Args:
        name: as its vendor calls it.
        flops: floating-point operations a second that an attention kernel reaches in bf16.
        link: bytes a second in one direction to a device of the same node.
        network: bytes a second in one direction to a device of another node.
        memory: bytes.
    """

    name: str
    flops: float
    link: float
    network: float
    memory: float


# Measured kernel throughput (FlashAttention-3 and CANN's fused attention), data-sheet links.
DEVICES = {
    "cuda": Device("H100 SXM", flops=600e12, link=450e9, network=50e9, memory=80 * 2**30),
    "npu": Device("Ascend 910B", flops=200e12, link=56e9, network=25e9, memory=64 * 2**30),
}


def hiding_length(
    *, heads: int, kv_heads: int, element_size: int, device: Device, inside_node: bool
) -> int:
    """Tokens of a rank from which a ring's messages hide behind its kernels.

    A step sends `2 K d e c` bytes and computes `2 H d c^2` operations, half of a causal square:
    `c >= (K / H) e F / B`.

    Args:
        heads: query heads.
        kv_heads: KV heads.
        element_size: bytes of an element.
        device: what computes.
        inside_node: whether the ring stays within a node.
    """
    bandwidth = device.link if inside_node else device.network
    return math.ceil(kv_heads / heads * element_size * device.flops / bandwidth)
