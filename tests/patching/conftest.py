"""Throw-away modules to patch."""

from __future__ import annotations

import importlib
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_cp_ext.patching import PatchManager

MakeModule = Callable[[str, str], types.ModuleType]


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeModule]:
    """`make_module(name, source)` writes, imports and returns a module; it is gone afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made: list[str] = []

    def make(name: str, source: str) -> types.ModuleType:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def manager() -> Iterator[PatchManager]:
    """A manager whose patches are taken back at the end, whatever the test did."""
    manager = PatchManager("plumbing 3.1")
    yield manager
    manager.undo()
