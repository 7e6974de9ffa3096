"""A training script in which one rank fails at one place.

    faulty.py RANK PLACE FAULT MEGATRON_ARGS

PLACE is forward or backward, for the kernel, or save. FAULT is one of those in `fail`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_cp_ext.kernels.interface import AttentionKernel
from megatron_cp_ext.megatron.pretrain_gpt import main

RANK, PLACE, FAULT = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.argv[1:4] = []

# In the first iteration, but not where it begins.
CALL = 6


def fail() -> None:
    if FAULT == "raise":
        raise RuntimeError("injected fault")
    if FAULT == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "linger":
        # A thread that never ends holds up Python's own end of the process.
        threading.Thread(target=threading.Event().wait).start()
        raise RuntimeError("injected fault")


def failing(owner: Any, name: str, call: int) -> None:
    original, calls = getattr(owner, name), 0

    def replacement(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and dist.get_rank() == RANK:
            fail()
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


if PLACE == "save":
    failing(dist_checkpointing, "save", 1)
else:
    failing(AttentionKernel, PLACE, CALL)

main()
