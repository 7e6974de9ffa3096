"""`from x import y` copies a reference: patches reach the copies, and undo restores them."""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types

import pytest

from megatron_cp_ext.patching import replace, wrap

SOURCE = """
    PRESSURE = 1000000007
    SIZES = {"small": 1}
    biggest = max

    def flow(rate):
        return rate

    stream = flow

    def through(rate):
        return flow(rate)

    class Pipe:
        length = 10
"""
TARGET = "pipes_bound:flow"


@pytest.fixture
def pipes(make_module):
    return make_module("pipes_bound", SOURCE)


@pytest.fixture
def users(pipes, make_module):
    return make_module(
        "users_bound",
        """
        from pipes_bound import PRESSURE, SIZES, Pipe, flow, flow as renamed

        def use(rate):
            return flow(rate), renamed(rate)
        """,
    )


def double(rate):
    return rate * 2


def plus_one(original, rate):
    return original(rate) + 1


PATCHES = [replace(TARGET, double, owner="a"), wrap(TARGET, plus_one, owner="a")]
KINDS = ["replace", "wrap"]


@pytest.mark.parametrize("patch", PATCHES, ids=KINDS)
def test_all_names_in_all_modules_are_patched_and_restored(pipes, users, manager, patch) -> None:
    original = pipes.flow
    manager.register(patch)
    manager.apply()
    new = 10 if patch.kind == "replace" else 6
    assert users.use(5) == (new, new)
    assert pipes.stream(5) == pipes.through(5) == new
    assert set(manager.applied()[0].rebound) == {
        "pipes_bound:stream",
        "users_bound:flow",
        "users_bound:renamed",
    }
    manager.undo()
    assert pipes.flow is pipes.stream is users.flow is users.renamed is original


@pytest.mark.parametrize("patch", PATCHES, ids=KINDS)
def test_a_module_imported_after_apply_gets_the_patch_and_is_restored_too(
    pipes, make_module, manager, patch
) -> None:
    original = pipes.flow
    manager.register(patch)
    manager.apply()
    late = make_module("late_bound", "from pipes_bound import flow as renamed")
    assert late.renamed is pipes.flow is not original
    manager.undo()
    assert late.renamed is original


def test_a_module_imported_between_two_applies_follows_the_second(
    pipes, users, make_module, manager
) -> None:
    original = pipes.flow
    manager.register(PATCHES[0])
    manager.apply()
    between = make_module("between_bound", "from pipes_bound import flow")
    manager.register(PATCHES[1])
    manager.apply()
    assert between.flow(5) == users.renamed(5) == pipes.stream(5) == 11
    assert "between_bound:flow" in manager.applied()[0].rebound
    manager.undo()
    assert between.flow is users.renamed is pipes.stream is original


def test_the_replacements_own_name_stays_through_everything(pipes, make_module, manager) -> None:
    ours = make_module("ours_bound", "def shared(rate):\n    return 0")
    manager.register(replace(TARGET, ours.shared, owner="a"))
    manager.register(replace("pipes_bound:through", ours.shared, owner="a"))
    shared, flow, through = ours.shared, pipes.flow, pipes.through
    manager.apply()
    late = make_module("late_bound", "from ours_bound import shared\nfrom pipes_bound import *")
    assert late.flow(1) == late.through(1) == 0
    manager.register(PATCHES[1])
    manager.apply()
    assert (late.flow(1), late.through(1), late.shared(1)) == (1, 0, 0)
    assert ours.shared is late.shared is shared
    manager.undo()
    assert ours.shared is late.shared is shared
    assert (late.flow, late.through) == (flow, through)


def test_a_replacement_class_is_rebound_and_its_own_name_stays(pipes, users, manager) -> None:
    ours = types.ModuleType("ours_bound")
    sys.modules["ours_bound"] = ours
    try:
        original = pipes.Pipe
        ours.Hose = type("Hose", (), {"length": 5})
        manager.register(replace("pipes_bound:Pipe", ours.Hose, owner="a"))
        manager.apply()
        assert users.Pipe is pipes.Pipe is ours.Hose
        manager.undo()
        assert users.Pipe is pipes.Pipe is original
        assert ours.Hose.length == 5
    finally:
        del sys.modules["ours_bound"]


def test_a_name_given_another_meaning_meanwhile_is_left_alone(pipes, users, manager) -> None:
    manager.register(PATCHES[0])
    manager.apply()
    users.renamed = "something else"
    manager.undo()
    assert users.renamed == "something else"
    assert users.flow is pipes.flow


def test_mutable_objects_are_rebound_but_plain_values_are_not(pipes, users, manager) -> None:
    """Anyone may hold the number 1000000007; only this module means the pressure by it."""
    users.PRESSURE = pipes.PRESSURE
    manager.register(replace("pipes_bound:PRESSURE", 3, owner="a"))
    manager.register(replace("pipes_bound:SIZES", {"small": 2}, owner="a"))
    manager.apply()
    assert (pipes.PRESSURE, users.PRESSURE) == (3, 1000000007)
    assert users.SIZES is pipes.SIZES == {"small": 2}
    manager.undo()
    assert users.SIZES is pipes.SIZES == {"small": 1}


def test_a_builtin_under_another_name_does_not_change_the_builtin(pipes, manager) -> None:
    builtin = max
    manager.register(replace("pipes_bound:biggest", lambda *values: values[0], owner="a"))
    manager.apply()
    assert pipes.biggest(1, 2) == 1
    assert builtins.max is builtin
    assert max(1, 2) == 2


def test_members_of_classes_are_changed_in_that_class_only(make_module, manager) -> None:
    module = make_module(
        "backends_bound",
        """
        def norm(x):
            return x

        class Backend:
            norm = staticmethod(norm)

        class Other:
            norm = staticmethod(norm)
        """,
    )
    manager.register(replace("backends_bound:Backend.norm", lambda x: "new", owner="a"))
    manager.apply()
    assert (module.Backend.norm(1), module.Other.norm(1), module.norm(1)) == ("new", 1, 1)


def test_searching_for_names_loads_no_lazy_module(pipes, tmp_path, manager) -> None:
    path = tmp_path / "lazy_bound.py"
    path.write_text("raise RuntimeError('loaded')")
    spec = importlib.util.spec_from_file_location("lazy_bound", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    sys.modules["lazy_bound"] = lazy
    try:
        spec.loader.exec_module(lazy)
        manager.register(PATCHES[0])
        manager.apply()
        manager.undo()
        with pytest.raises(RuntimeError, match="loaded"):
            _ = lazy.anything
    finally:
        sys.modules.pop("lazy_bound", None)


def test_odd_entries_among_the_imported_modules_are_passed_over(
    pipes, users, manager, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "none_bound", None)
    monkeypatch.setitem(sys.modules, "class_bound", type("Odd", (), {"flow": pipes.flow}))
    monkeypatch.setitem(sys.modules, "slots_bound", object())
    manager.register(PATCHES[0])
    manager.apply()
    assert users.flow(5) == 10
    assert sys.modules["class_bound"].flow(5) == 5
