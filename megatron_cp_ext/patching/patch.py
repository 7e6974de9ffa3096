"""What a patch is: a target, what takes its place, and what the target must look like."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

ABSENT = object()


class PatchError(RuntimeError):
    """A patch cannot be applied: its target is missing, changed, or claimed twice."""


@dataclass(frozen=True)
class Patch:
    """One change of one importable object.

    Args:
        target: `"package.module:attribute"` or `"package.module:Class.method"`.
        kind: `"replace"` puts `function` in the target's place. `"wrap"` calls
            `function(original, *args, **kwargs)` whenever the target is called.
        function: the replacement, or the wrapper. A replacement need not be callable.
        owner: name of the feature that asks for the patch; shown in listings and errors.
        parameters: names the target's signature must have. Upstream renames show up here
            as an error instead of as a silently ignored argument.
    """

    target: str
    kind: Literal["replace", "wrap"]
    function: Any
    owner: str
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.kind in ("replace", "wrap"), self.kind
        assert self.target.count(":") == 1, f"target must read module:attribute, got {self.target}"
        assert self.kind == "replace" or callable(self.function), self.target


def replace(target: str, function: Any, *, owner: str, parameters: tuple[str, ...] = ()) -> Patch:
    """A patch that puts `function` in the target's place."""
    return Patch(target, "replace", function, owner, parameters)


def wrap(
    target: str, function: Callable[..., Any], *, owner: str, parameters: tuple[str, ...] = ()
) -> Patch:
    """A patch that calls `function(original, *args, **kwargs)` in the target's place."""
    return Patch(target, "wrap", function, owner, parameters)


@dataclass(frozen=True)
class Target:
    """A resolved target: the object that holds the attribute, and what it holds now."""

    name: str
    parent: Any
    attribute: str
    value: Any
    raw: Any  # what the parent's own __dict__ holds: ABSENT when the attribute is inherited

    @classmethod
    def resolve(cls, name: str, *, version: str) -> Target:
        """Import the target's module and walk to its attribute.

        Raises:
            PatchError: the module or the attribute does not exist.
        """
        module_name, path = name.split(":")
        *parents, attribute = path.split(".")
        try:
            parent: Any = importlib.import_module(module_name)
            for step in parents:
                parent = getattr(parent, step)
            value = getattr(parent, attribute)
        except (ImportError, AttributeError) as error:
            raise PatchError(f"patch target {name} does not exist in {version}: {error}") from error
        return cls(name, parent, attribute, value, vars(parent).get(attribute, ABSENT))

    def check_parameters(self, patch: Patch, *, version: str) -> None:
        """Raise PatchError unless the target's signature has the patch's parameters."""
        if not patch.parameters:
            return
        present = inspect.signature(self.value).parameters
        missing = [p for p in patch.parameters if p not in present]
        if missing:
            raise PatchError(
                f"patch target {self.name} of {version} has no parameter "
                f"{', '.join(missing)} (feature {patch.owner}); its signature is "
                f"{inspect.signature(self.value)}"
            )

    def rewrap(self, function: Any) -> Any:
        """`function` as the same kind of class attribute (static, class, plain) as the target."""
        if isinstance(self.raw, staticmethod):
            return staticmethod(function)
        if isinstance(self.raw, classmethod):
            return classmethod(function)
        return function

    @property
    def underlying(self) -> Any:
        """The plain function behind a static or class method, else the value itself."""
        if isinstance(self.raw, staticmethod | classmethod):
            return self.raw.__func__
        return self.value


def bind_wrapper(original: Any, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `wrapper(original, ...)` and looks like `original`."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    try:
        return functools.wraps(original)(wrapped)
    except AttributeError:  # C functions may refuse attribute look-ups
        return wrapped
