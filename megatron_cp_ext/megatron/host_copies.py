"""Small tensors as tuples on the host, copied from the device once.

Document boundaries are needed on the host by every layer. Reading them from a GPU makes it wait,
so what was read of a tensor is kept as long as the tensor lives and is not written to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class TensorMemory:
    """Values derived from tensors, each computed once for as long as its tensor lives."""

    def __init__(self) -> None:
        self._derived: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor, key: Hashable, compute: Callable[[], Any]) -> Any:
        """`compute()`, computed once for this tensor, its present contents, and the key."""
        version, values = self._derived.get(tensor, (None, {}))
        if version != tensor._version:
            values = {}
            self._derived[tensor] = (tensor._version, values)
        if key not in values:
            values[key] = compute()
        return values[key]

    def integers(self, tensor: Tensor) -> tuple[int, ...]:
        """The elements of an integer tensor."""
        return self.of(tensor, "integers", lambda: tuple(tensor.flatten().tolist()))
