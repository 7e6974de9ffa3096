"""The kernels there are, by name. Which one a call gets is for `capabilities` to say."""

from __future__ import annotations

from megatron_cp_ext import capabilities
from megatron_cp_ext.kernels.aten_cpu import AtenCpuKernel
from megatron_cp_ext.kernels.interface import AttentionKernel
from megatron_cp_ext.kernels.reference import ReferenceKernel

KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel for kernel in (AtenCpuKernel(), ReferenceKernel())
}
assert tuple(KERNELS) == capabilities.KERNELS
