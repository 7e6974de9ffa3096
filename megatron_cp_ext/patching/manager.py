"""Applies declared patches, rebinds copies of their targets, lists them and undoes them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from megatron_cp_ext.patching.patch import (
    ABSENT,
    Patch,
    PatchError,
    Target,
    bind_wrapper,
)


@dataclass(frozen=True)
class AppliedPatch:
    """A line of the listing: what stands in a target's place, and where else it was bound."""

    target: str
    kind: str
    owner: str
    rebound: tuple[str, ...]


@dataclass
class _Application:
    """One target as it stands now, with all its patches, and how to restore it."""

    target: Target
    patches: list[Patch]
    installed: Any
    rebound: list[tuple[Any, str]] = field(default_factory=list)


class PatchManager:
    """Collects patches, applies them together, and can take all of them back.

    Args:
        version: what the targets belong to, for example `"megatron-core 0.19.2"`; every
            error names it, because a missing target is nearly always another version.
    """

    def __init__(self, version: str = "the installed version") -> None:
        self.version = version
        self._declared: list[Patch] = []
        self._applied: dict[str, _Application] = {}

    def register(self, patch: Patch) -> None:
        """Declare a patch. Declaring an equal patch again changes nothing.

        Raises:
            PatchError: another feature already replaces the same target.
        """
        if patch in self._declared:
            return
        if patch.kind == "replace":
            for other in self._declared:
                if other.target == patch.target and other.kind == "replace":
                    raise PatchError(
                        f"features {other.owner} and {patch.owner} both replace "
                        f"{patch.target} of {self.version}; one of them must be turned off"
                    )
        self._declared.append(patch)

    def apply(self) -> None:
        """Put every declared patch in place. Applying again changes nothing.

        All targets are resolved and checked before the first one is changed, so an error
        leaves everything as it was.

        Raises:
            PatchError: a target is missing or has another signature.
        """
        by_target: dict[str, list[Patch]] = {}
        for patch in self._declared:
            by_target.setdefault(patch.target, []).append(patch)

        pending: list[tuple[Target, list[Patch]]] = []
        for name, patches in by_target.items():
            applied = self._applied.get(name)
            if applied is not None and applied.patches == patches:
                continue
            target = applied.target if applied else Target.resolve(name, version=self.version)
            for patch in patches:
                target.check_parameters(patch, version=self.version)
            pending.append((target, patches))

        swaps: dict[int, tuple[Any, _Application]] = {}
        for target, patches in pending:
            before = self._applied.get(target.name)
            old = before.installed if before else target.underlying
            application = self._install(target, patches)
            application.rebound = before.rebound if before else []
            self._applied[target.name] = application
            swaps[id(old)] = (old, application)
        _rebind(swaps)

    def undo(self) -> None:
        """Restore every target and every rebound name, and forget the declarations."""
        for application in reversed(self._applied.values()):
            target = application.target
            for holder, attribute in application.rebound:
                if vars(holder).get(attribute) is application.installed:
                    setattr(holder, attribute, target.underlying)
            if target.raw is ABSENT:
                delattr(target.parent, target.attribute)
            else:
                setattr(target.parent, target.attribute, target.raw)
        self._applied.clear()
        self._declared.clear()

    def applied(self) -> list[AppliedPatch]:
        """All patches now in place, in the order they were declared."""
        return [
            AppliedPatch(
                patch.target,
                patch.kind,
                patch.owner,
                tuple(
                    f"{holder.__name__}:{attribute}" for holder, attribute in application.rebound
                ),
            )
            for application in self._applied.values()
            for patch in application.patches
        ]

    def _install(self, target: Target, patches: list[Patch]) -> _Application:
        """Build the replacement and its wrappers, first declared innermost, and set it."""
        installed = target.underlying
        for patch in patches:
            if patch.kind == "replace":
                installed = patch.function
        for patch in patches:
            if patch.kind == "wrap":
                installed = bind_wrapper(installed, patch.function)
        setattr(target.parent, target.attribute, target.rewrap(installed))
        return _Application(target, patches, installed)


def _rebind(swaps: dict[int, tuple[Any, _Application]]) -> None:
    """Give modules that hold an old object under any name the new one.

    `from x import y` copies a reference, so changing `x.y` alone leaves the copy behind.
    Only module namespaces are searched, through `vars()`, which triggers no lazy import.
    """
    if not swaps:
        return
    for module in list(sys.modules.values()):
        try:
            namespace = vars(module)
        except TypeError:
            continue
        for attribute, value in list(namespace.items()):
            swap = swaps.get(id(value))
            if swap is None or swap[0] is not value:
                continue
            application = swap[1]
            if module is application.target.parent:
                continue
            namespace[attribute] = application.installed
            if (module, attribute) not in application.rebound:
                application.rebound.append((module, attribute))
