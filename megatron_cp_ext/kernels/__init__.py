"""Block attention: one file for each backend, one contract for all (`interface.py`)."""

from megatron_cp_ext.kernels.interface import AttentionKernel, KernelOptions
from megatron_cp_ext.kernels.registry import KERNELS

__all__ = ["KERNELS", "AttentionKernel", "KernelOptions"]
