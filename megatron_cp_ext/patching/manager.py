"""Applies declared patches, rebinds copies of their targets, lists them and undoes them."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_cp_ext.patching.names import Name, find_names
from megatron_cp_ext.patching.patch import (
    Patch,
    PatchError,
    Target,
    bind_wrapper,
    copy_function,
)


@dataclass(frozen=True)
class AppliedPatch:
    """A line of the listing: what stands in a target's place, and where else it was bound."""

    target: str
    kind: str
    owner: str
    rebound: tuple[str, ...]


@dataclass
class _Site:
    """One patched object.

    Args:
        target: the object as it was before any patch.
        installed: what stands in its place now; the object itself while there is no patch.
        patches: its patches, in the order they were declared.
        names: its other module-level names, which now stand for `installed`.
    """

    target: Target
    installed: Any
    patches: list[Patch] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)

    def serves(self, target: Target) -> bool:
        """Whether a patch of `target` changes the object of this site."""
        if target.parent is self.target.parent and target.attribute == self.target.attribute:
            return True
        return (
            target.copied_by_import
            and self.target.copied_by_import
            and target.value is self.installed
        )

    def encloses(self, target: Target) -> bool:
        """Whether `target` is a part of the object of this site, as a method of its class."""
        return any(step is self.installed for step in target.path)

    @property
    def searchable(self) -> bool:
        """Whether every name bound to `installed` means this site's object.

        Not so for a replacement that is not a function, such as a class: it is installed
        itself, and its own name in the module that defines it must stay.
        """
        return self.target.copied_by_import and all(
            self.installed is not patch.function for patch in self.patches
        )

    def current_names(self, found: dict[int, list[Name]]) -> list[Name]:
        """The module-level names that stand for `installed`.

        Args:
            found: names by `id`, searched for the searchable sites.
        """
        if self.searchable:
            return found[id(self.installed)]
        return [name for name in self.names if name.holds(self.installed)]

    def put(self) -> None:
        """Make the target hold what this site says; without a patch, what it held at first."""
        if self.patches:
            self.target.set(self.installed)
        else:
            self.target.restore()


class PatchManager:
    """Collects patches, applies them together, and can take all of them back.

    A patch of `a:f` changes every module-level name of the object `f`, also those in other
    modules. Names inside classes, containers and closures are not searched, nor are copies of
    plain values such as True or 1, which cannot be told from one another.

    Args:
        version: what the targets belong to, for example `"megatron-core 0.19.2"`; every
            error names it, because a missing target is nearly always another version.
    """

    def __init__(self, version: str = "the installed version") -> None:
        self.version = version
        self._declared: list[Patch] = []
        self._sites: list[_Site] = []

    def register(self, patch: Patch) -> None:
        """Declare a patch. Declaring an equal patch again changes nothing.

        Raises:
            PatchError: another feature already replaces the same target.
        """
        if patch in self._declared:
            return
        self._refuse_second_replacement(
            [other for other in self._declared if other.target == patch.target], patch
        )
        self._declared.append(patch)

    def apply(self) -> None:
        """Put every declared patch in place. Applying again changes nothing.

        All targets are resolved and checked before the first one is changed, and when one
        cannot be changed the others are taken back, so an error leaves everything as it was.

        Raises:
            PatchError: a target is missing, has another signature, cannot be wrapped or
                changed, or is replaced twice, be it under two names.
        """
        sites = self._plan()
        moves = [(old, new) for old, new in sites if old.patches != new.patches]
        for _, new in moves:
            new.installed = self._build(new)
        self._put(moves)
        found = find_names(old.installed for old, _ in moves if old.searchable)
        for old, new in moves:
            new.names = old.current_names(found)
            for name in new.names:
                name.bind(new.installed)
        self._sites = [new for _, new in sites]

    def undo(self) -> None:
        """Restore every target and every other name of it, and forget the declarations.

        Names in modules imported while the patches were in place are restored as well, except
        those of a replacement that is not a function, such as a class.
        """
        for site in reversed(self._sites):
            site.target.restore()
        found = find_names(site.installed for site in self._sites if site.searchable)
        for site in self._sites:
            for name in site.current_names(found):
                name.bind(site.target.value)
        self._sites.clear()
        self._declared.clear()

    def declared(self) -> list[Patch]:
        """All patches declared so far, applied or not."""
        return list(self._declared)

    def applied(self) -> list[AppliedPatch]:
        """All patches now in place, in the order they were declared."""
        return [
            AppliedPatch(patch.target, patch.kind, patch.owner, tuple(map(str, site.names)))
            for patch in self._declared
            for site in self._sites
            if patch in site.patches
        ]

    def _plan(self) -> list[tuple[_Site, _Site]]:
        """Every site as it is and as the declared patches want it, all of them checked."""
        sites = [(site, _Site(site.target, site.installed, [], site.names)) for site in self._sites]
        by_name = {patch.target: new for old, new in sites for patch in old.patches}
        for patch in self._declared:
            if patch.target not in by_name:
                target = Target.resolve(patch.target, version=self.version)
                known = [new for _, new in sites if new.serves(target)]
                if not known:
                    known = [_Site(target, target.value)]
                    sites.append((_Site(target, target.value), known[0]))
                by_name[patch.target] = known[0]
            site = by_name[patch.target]
            site.target.check(patch, version=self.version)
            self._refuse_second_replacement(site.patches, patch)
            site.patches.append(patch)

        for _, outer in sites:
            for _, inner in sites:
                if outer.encloses(inner.target):
                    raise PatchError(
                        f"feature {inner.patches[0].owner} patches {inner.target.name} of "
                        f"{self.version}, a part of {outer.target.name}, which feature "
                        f"{outer.patches[0].owner} patches as a whole"
                    )
        return sites

    def _refuse_second_replacement(self, others: Sequence[Patch], patch: Patch) -> None:
        for other in others:
            if other.kind == patch.kind == "replace":
                same = "" if other.target == patch.target else f" (also known as {other.target})"
                raise PatchError(
                    f"features {other.owner} and {patch.owner} both replace "
                    f"{patch.target}{same} of {self.version}; one of them must be turned off"
                )

    def _build(self, site: _Site) -> Any:
        """The replacement inside its wrappers, the first declared innermost."""
        result = site.target.value
        for patch in site.patches:
            if patch.kind == "replace":
                result = patch.function
                if site.target.copied_by_import and isinstance(result, types.FunctionType):
                    result = copy_function(result)
        for patch in site.patches:
            if patch.kind == "replace":
                continue
            if isinstance(result, type) or not callable(result):
                what = "a class; wrap a method of it" if callable(result) else "not callable"
                raise PatchError(
                    f"feature {patch.owner} cannot wrap {patch.target} of {self.version}: it is "
                    f"{what}"
                )
            result = bind_wrapper(result, patch.function)
        return result

    def _put(self, moves: Sequence[tuple[_Site, _Site]]) -> None:
        """Change all targets, or none."""
        done: list[_Site] = []
        try:
            for old, new in moves:
                new.put()
                done.append(old)
        except (AttributeError, TypeError) as error:
            for old in reversed(done):
                old.put()
            raise PatchError(
                f"patch target {new.target.name} of {self.version} cannot be changed: {error}"
            ) from error
