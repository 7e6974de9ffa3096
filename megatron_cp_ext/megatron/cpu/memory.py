"""Memory statistics: the resident set of this process in place of the device allocator's."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

from megatron_cp_ext.megatron.cpu.device import OWNER
from megatron_cp_ext.patching.patch import Patch, replace

_STATM = Path("/proc/self/statm")


def peak_bytes(_device: Any = None) -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def resident_bytes(_device: Any = None) -> int:
    """Resident set of this process now, in bytes; its peak where the system does not tell."""
    if not _STATM.exists():
        return peak_bytes()
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def memory_stats(_device: Any = None) -> dict[str, int]:
    """The entries of `torch.cuda.memory_stats()` that Megatron logs."""
    now, peak = resident_bytes(), peak_bytes()
    return {
        "allocated_bytes.all.current": now,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": now,
        "reserved_bytes.all.peak": peak,
        "allocation.all.current": 0,
    }


def patches() -> list[Patch]:
    """Replace the memory queries of `torch.cuda`."""
    return [
        replace("torch.cuda.memory:memory_allocated", resident_bytes, owner=OWNER),
        replace("torch.cuda.memory:memory_reserved", resident_bytes, owner=OWNER),
        replace("torch.cuda:device_memory_used", resident_bytes, owner=OWNER),
        replace("torch.cuda.memory:max_memory_allocated", peak_bytes, owner=OWNER),
        replace("torch.cuda.memory:max_memory_reserved", peak_bytes, owner=OWNER),
        replace("torch.cuda.memory:memory_stats", memory_stats, owner=OWNER),
        replace("torch.cuda.memory:reset_peak_memory_stats", lambda device=None: None, owner=OWNER),
    ]
