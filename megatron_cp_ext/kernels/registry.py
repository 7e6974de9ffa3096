"""The kernels there are, and which one a call gets."""

from __future__ import annotations

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.kernels.aten_cpu import AtenCpuKernel
from megatron_cp_ext.kernels.interface import AttentionKernel, KernelOptions, Shapes
from megatron_cp_ext.kernels.reference import ReferenceKernel

# In the order `auto` tries them; `reference` takes anything, so `auto` always finds one.
KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel for kernel in (AtenCpuKernel(), ReferenceKernel())
}


def select_kernel(name: str, shapes: Shapes, options: KernelOptions) -> AttentionKernel:
    """The kernel called `name`, or for `"auto"` the first that can do what is asked.

    Raises:
        UsageError: no such kernel, or it cannot do that.
    """
    if name == "auto":
        return next(k for k in KERNELS.values() if k.refuses(shapes, options) is None)
    if name not in KERNELS:
        raise UsageError(
            option="kernel",
            value=name,
            reason="there is no such kernel",
            remedy=f"use auto or one of {', '.join(KERNELS)}",
        )
    reason = KERNELS[name].refuses(shapes, options)
    if reason is not None:
        able = [k.name for k in KERNELS.values() if k.refuses(shapes, options) is None]
        raise UsageError(
            option="kernel",
            value=name,
            reason=f"this kernel cannot do that: {reason}",
            remedy=f"use auto or one of {', '.join(able)}",
        )
    return KERNELS[name]
