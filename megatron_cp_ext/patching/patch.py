"""What a patch is: a target, what takes its place, and what the target must look like."""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

ABSENT = object()

# Equal values of these types are often one object, so identity does not tell a copy of a
# target from a stranger.
_VALUES = (bool, int, float, complex, str, bytes, tuple, frozenset, types.NoneType)


class PatchError(RuntimeError):
    """A patch cannot be applied: its target is missing, changed, or claimed twice."""


@dataclass(frozen=True)
class Patch:
    """One change of one importable object.

    Args:
        target: `"package.module:attribute"` or `"package.module:Class.method"`.
        kind: `"replace"` puts `function` in the target's place. `"wrap"` calls
            `function(original, *args, **kwargs)` whenever the target is called; for a class
            method the arguments begin with the class.
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
    """A resolved target: the object that holds the attribute, and what it holds now.

    Args:
        name: the target as the patch writes it.
        path: the objects walked through, from the module to the one that is changed.
        attribute: the name that is changed in it.
        value: the object found; for a static or class method the function behind it.
        own: what the changed object's namespace holds, ABSENT when the attribute is inherited.
        method_type: staticmethod or classmethod when the attribute is one, else None.
    """

    name: str
    path: tuple[Any, ...]
    attribute: str
    value: Any
    own: Any
    method_type: type | None

    @classmethod
    def resolve(cls, name: str, *, version: str) -> Target:
        """Import the target's module and walk to its attribute.

        Raises:
            PatchError: the module or the attribute does not exist.
        """
        module_name, path = name.split(":")
        *parents, attribute = path.split(".")
        try:
            walked: list[Any] = [importlib.import_module(module_name)]
            for step in parents:
                walked.append(getattr(walked[-1], step))
            value = getattr(walked[-1], attribute)
        except (ImportError, AttributeError) as error:
            raise PatchError(f"patch target {name} does not exist in {version}: {error}") from error
        parent = walked[-1]
        method_type = None
        if isinstance(parent, type):
            found = inspect.getattr_static(parent, attribute, None)
            if isinstance(found, staticmethod | classmethod):
                value, method_type = found.__func__, type(found)
        own = getattr(parent, "__dict__", {}).get(attribute, ABSENT)
        return cls(name, tuple(walked), attribute, value, own, method_type)

    @property
    def parent(self) -> Any:
        """The module or class that is changed."""
        return self.path[-1]

    def check(self, patch: Patch, *, version: str) -> None:
        """Raise PatchError unless the target looks as the patch expects it to."""
        if not patch.parameters:
            return
        about = f"patch target {self.name} of {version} (feature {patch.owner})"
        try:
            signature = inspect.signature(self.value)
        except (TypeError, ValueError) as error:
            raise PatchError(f"{about} has no signature to check: {error}") from error
        missing = [p for p in patch.parameters if p not in signature.parameters]
        if missing:
            raise PatchError(
                f"{about} has no parameter {', '.join(missing)}; its signature is {signature}"
            )

    @property
    def copied_by_import(self) -> bool:
        """Whether other modules' names for this object can be told by identity.

        True for what `from module import attribute` copies. Members of a class are reached
        through the class; plain values and built-ins are shared with code that has nothing
        to do with the target.
        """
        return (
            isinstance(self.parent, types.ModuleType)
            and not isinstance(self.value, _VALUES)
            and all(self.value is not builtin for builtin in vars(builtins).values())
        )

    def set(self, value: Any) -> None:
        """Make `value` the target, as the same kind of method if it is one."""
        if self.method_type is not None and not isinstance(value, self.method_type):
            value = self.method_type(value)
        setattr(self.parent, self.attribute, value)

    def restore(self) -> None:
        """Make the parent hold exactly what it held when the target was resolved."""
        if self.own is not ABSENT:
            setattr(self.parent, self.attribute, self.own)
        elif self.attribute in vars(self.parent):
            delattr(self.parent, self.attribute)


def bind_wrapper(original: Any, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `wrapper(original, ...)` and looks like `original`."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return wrapped


def copy_function(function: types.FunctionType) -> types.FunctionType:
    """The same function as an object of its own.

    A module's target gets such a copy of its replacement. The replacement also has a name in
    the module that defines it, and may serve several targets; only an object that stands for
    one target alone can be found and taken back wherever it was imported to.
    """
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copy, function)  # type: ignore[return-value]
