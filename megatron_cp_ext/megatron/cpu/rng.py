"""Random numbers: Megatron's CUDA generator states live in torch's CPU generator.

Dropout and initialisation draw from the one default generator of the CPU, so whatever Megatron
keeps for the GPU's generator (the tracker's states, the checkpoint's `cuda_rng_state`) is a state
of that generator. Nothing else may draw from it: on a GPU, data loading has its own, and ranks
that load data would otherwise fall out of step with those that do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_cp_ext.megatron.cpu.device import OWNER
from megatron_cp_ext.patching.patch import Patch, replace, wrap

_TRACKER = "megatron.core.tensor_parallel.random"
_DEFAULT = "default-rng"  # Megatron's name for the state that is in no tracker


def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    """A copy of the CPU generator's state."""
    return torch.get_rng_state()


def set_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    """Set the CPU generator's state."""
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.default_generator.manual_seed(int(seed))


@contextlib.contextmanager
def fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Draw from the tracker's state `name` inside the block, and come back to the present one.

    Megatron's own version warns when the CPU's generator advanced inside the block, which here
    is the purpose of it.

    Args:
        tracker: the `CudaRNGStatesTracker`.
        name: the state to draw from.

    Raises:
        KeyError: the tracker has no such state.
    """
    if name not in tracker.states_:
        raise KeyError(f"the random number tracker has no state {name!r}")
    outer_name, outer_state = tracker._current_state_name, torch.get_rng_state()
    if outer_name != _DEFAULT:
        tracker.states_[outer_name] = outer_state
    torch.set_rng_state(tracker.states_[name])
    tracker._current_state_name = name
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        # The block may itself have drawn from the outer state, in a fork of its own.
        torch.set_rng_state(tracker.states_.get(outer_name, outer_state))
        tracker._current_state_name = outer_name


def load_with_own_generator(
    original: Callable[..., None], loader: Any, *args: Any, **kwargs: Any
) -> None:
    """`DataLoader.__init__`: draw worker seeds from a generator that nothing else uses.

    Pinned memory is left out as well: torch would warn on every rank that it has none.
    """
    kwargs["pin_memory"] = False
    if kwargs.get("generator") is None:
        kwargs["generator"] = torch.Generator().manual_seed(torch.initial_seed())
    original(loader, *args, **kwargs)


def patches() -> list[Patch]:
    """Redirect the CUDA generator to the CPU's and keep data loading away from it."""
    return [
        replace("torch.cuda.random:get_rng_state", get_state, owner=OWNER),
        replace("torch.cuda.random:set_rng_state", set_state, owner=OWNER),
        replace("torch.cuda.random:manual_seed", manual_seed, owner=OWNER),
        replace(
            f"{_TRACKER}:_get_cuda_rng_state",
            get_state,
            owner=OWNER,
            parameters=("device", "clone", "graph_safe"),
        ),
        replace(
            f"{_TRACKER}:_set_cuda_rng_state",
            set_state,
            owner=OWNER,
            parameters=("new_state", "device", "graph_safe"),
        ),
        replace(
            f"{_TRACKER}:CudaRNGStatesTracker.fork", fork, owner=OWNER, parameters=("self", "name")
        ),
        wrap("torch.utils.data:DataLoader.__init__", load_with_own_generator, owner=OWNER),
    ]
