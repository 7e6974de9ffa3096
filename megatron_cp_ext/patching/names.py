"""Finds the module-level names of an object.

`from x import y` copies a reference, so changing `x.y` alone leaves the copies behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Name:
    """One name in one module's namespace."""

    module: str
    namespace: dict[str, Any]
    attribute: str

    def holds(self, value: Any) -> bool:
        """Whether the name stands for this very object."""
        return self.namespace.get(self.attribute) is value

    def bind(self, value: Any) -> None:
        """Make the name stand for `value`."""
        self.namespace[self.attribute] = value

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute}"


def find_names(objects: Iterable[Any]) -> dict[int, list[Name]]:
    """Search all imported modules for names that stand for one of `objects`.

    Returns:
        The names of each object, by the object's `id`.
    """
    found: dict[int, list[Name]] = {id(value): [] for value in objects}
    if not found:
        return found
    for module_name, module in list(sys.modules.items()):
        try:
            # Plain attribute access would make a lazily imported module load itself.
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        if not isinstance(namespace, dict):
            continue
        for attribute, value in list(namespace.items()):
            if id(value) in found:
                found[id(value)].append(Name(module_name, namespace, attribute))
    return found
