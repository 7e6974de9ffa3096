"""Many patches together: conflicts, stacking, listing, repeated apply, and errors half-way."""

from __future__ import annotations

import functools

import pytest

from megatron_cp_ext.patching import AppliedPatch, PatchError, PatchManager, replace, wrap

SOURCE = """
    def flow(rate):
        return [rate]

    def drain():
        return "drained"

    class Pipe:
        def length(self):
            return 10
"""


@pytest.fixture
def pipes(make_module):
    return make_module("pipes_managed", SOURCE)


def tag(label: str, original, *args, **kwargs):
    """A wrapper that adds its label to what the original returns."""
    return [label, *original(*args, **kwargs)]


def tagged(label: str, owner: str = "a"):
    return wrap("pipes_managed:flow", functools.partial(tag, label), owner=owner)


def test_declaring_alone_changes_nothing(pipes, manager) -> None:
    original = pipes.flow
    manager.register(tagged("x"))
    assert pipes.flow is original
    assert manager.applied() == []


def test_two_replacements_of_one_target_name_both_features(pipes, manager) -> None:
    manager.register(replace("pipes_managed:flow", len, owner="valves"))
    with pytest.raises(PatchError) as caught:
        manager.register(replace("pipes_managed:flow", sum, owner="taps"))
    message = str(caught.value)
    assert "features valves and taps both replace pipes_managed:flow" in message
    assert "plumbing 3.1" in message
    manager.apply()
    assert pipes.flow is len


@pytest.mark.parametrize("applied_before", [False, True])
def test_two_replacements_conflict_under_two_names_too(
    pipes, make_module, manager, applied_before
) -> None:
    """`users:stream` is `pipes:flow`: to replace the one is to replace the other."""
    users = make_module("users_managed", "from pipes_managed import flow as stream")
    original = pipes.flow
    manager.register(replace("pipes_managed:flow", lambda rate: 1, owner="valves"))
    if applied_before:
        manager.apply()
    manager.register(replace("users_managed:stream", lambda rate: 2, owner="taps"))
    with pytest.raises(PatchError, match=r"features valves and taps both replace users_managed"):
        manager.apply()
    expected = [1, 1] if applied_before else [[0], [0]]
    assert [pipes.flow(0), users.stream(0)] == expected
    manager.undo()
    assert pipes.flow is users.stream is original


def test_a_class_reached_through_two_modules_is_one_target(pipes, make_module, manager) -> None:
    make_module("users_managed", "from pipes_managed import Pipe as Hose")

    def more(original, self):
        return original(self) + 1

    manager.register(wrap("pipes_managed:Pipe.length", more, owner="valves"))
    manager.register(wrap("users_managed:Hose.length", more, owner="taps"))
    manager.apply()
    assert pipes.Pipe().length() == 12


def test_wrappers_stack_the_first_declared_innermost(pipes, manager) -> None:
    manager.register(tagged("inner", owner="a"))
    manager.register(tagged("outer", owner="b"))
    manager.apply()
    assert pipes.flow(1) == ["outer", "inner", 1]


def test_wrappers_go_around_a_replacement_declared_later(pipes, manager) -> None:
    manager.register(tagged("around", owner="a"))
    manager.register(replace("pipes_managed:flow", lambda rate: [-rate], owner="b"))
    manager.apply()
    assert pipes.flow(1) == ["around", -1]


def test_patches_are_listed_in_the_order_they_were_declared(pipes, make_module, manager) -> None:
    make_module("users_managed", "from pipes_managed import flow as stream")
    manager.register(tagged("x", owner="valves"))
    manager.register(replace("pipes_managed:drain", len, owner="taps"))
    manager.register(tagged("y", owner="taps"))
    manager.apply()
    rebound = ("users_managed:stream",)
    assert manager.applied() == [
        AppliedPatch("pipes_managed:flow", "wrap", "valves", rebound),
        AppliedPatch("pipes_managed:drain", "replace", "taps", ()),
        AppliedPatch("pipes_managed:flow", "wrap", "taps", rebound),
    ]


def test_applying_twice_changes_nothing(pipes, make_module, manager) -> None:
    make_module("users_managed", "from pipes_managed import flow as stream")
    patch = tagged("once")
    manager.register(patch)
    manager.register(replace("pipes_managed:drain", lambda: "dry", owner="a"))
    manager.apply()
    installed, listing = dict(vars(pipes)), manager.applied()
    manager.register(patch)
    manager.apply()
    assert pipes.flow(1) == ["once", 1]
    assert all(vars(pipes)[name] is value for name, value in installed.items())
    assert manager.applied() == listing
    assert listing[0].rebound == ("users_managed:stream",)


def test_patches_declared_after_an_apply_join_those_in_place(pipes, manager) -> None:
    original = dict(vars(pipes))
    manager.register(tagged("first"))
    manager.apply()
    manager.register(tagged("second"))
    manager.register(replace("pipes_managed:drain", lambda: "dry", owner="b"))
    manager.apply()
    assert pipes.flow(1) == ["second", "first", 1]
    assert pipes.drain() == "dry"
    manager.register(replace("pipes_managed:flow", lambda rate: [rate, "new"], owner="c"))
    manager.apply()
    assert pipes.flow(1) == ["second", "first", 1, "new"]
    manager.undo()
    assert all(vars(pipes)[name] is value for name, value in original.items())


@pytest.mark.parametrize("kind", ["missing", "signature", "unwrappable", "unchangeable"])
@pytest.mark.parametrize("applied_before", [False, True])
def test_an_error_leaves_everything_as_it_was(pipes, manager, kind, applied_before) -> None:
    if applied_before:
        manager.register(tagged("before"))
        manager.apply()
    before, listing = dict(vars(pipes)), manager.applied()
    manager.register(tagged("after"))
    manager.register(replace("pipes_managed:Pipe.length", lambda self: 0, owner="b"))
    bad = {
        "missing": replace("pipes_managed:nothing", None, owner="b"),
        "signature": replace("pipes_managed:drain", None, owner="b", parameters=("speed",)),
        "unwrappable": wrap("pipes_managed:__name__", print, owner="b"),
        "unchangeable": replace("builtins:str.upper", len, owner="b"),
    }[kind]
    manager.register(bad)
    with pytest.raises(PatchError) as caught:
        manager.apply()
    assert bad.target in str(caught.value)
    assert "plumbing 3.1" in str(caught.value)
    assert all(vars(pipes)[name] is value for name, value in before.items())
    assert pipes.Pipe().length() == 10
    assert manager.applied() == listing
    with pytest.raises(PatchError):
        manager.apply()


def test_undo_after_an_error_restores_what_was_applied_before(pipes, manager) -> None:
    original = pipes.flow
    manager.register(tagged("x"))
    manager.apply()
    manager.register(replace("pipes_managed:nothing", None, owner="b"))
    with pytest.raises(PatchError):
        manager.apply()
    manager.undo()
    assert pipes.flow is original


@pytest.mark.parametrize("class_first", [True, False])
def test_a_patch_inside_a_replaced_class_is_refused(pipes, manager, class_first) -> None:
    """Whichever class it landed in, the other one would be left without it."""

    class Hose:
        def length(self):
            return 5

    original = pipes.Pipe
    patches = [
        replace("pipes_managed:Pipe", Hose, owner="hoses"),
        wrap("pipes_managed:Pipe.length", lambda original, self: 0, owner="lengths"),
    ]
    for patch in patches if class_first else reversed(patches):
        manager.register(patch)
        if patch is patches[0] and class_first:
            manager.apply()
    with pytest.raises(PatchError) as caught:
        manager.apply()
    assert "feature lengths patches pipes_managed:Pipe.length" in str(caught.value)
    assert "feature hoses patches as a whole" in str(caught.value)
    assert pipes.Pipe is (Hose if class_first else original)
    assert Hose().length() == 5


def test_undoing_twice_leaves_alone_what_others_have_patched_since(pipes, manager) -> None:
    manager.register(tagged("x"))
    manager.apply()
    manager.undo()
    pipes.flow = len
    manager.undo()
    manager.apply()
    assert pipes.flow is len


def test_two_managers_undone_in_reverse_order_leave_no_trace(pipes) -> None:
    original = pipes.flow
    lower, upper = PatchManager(), PatchManager()
    lower.register(tagged("lower"))
    lower.apply()
    upper.register(tagged("upper"))
    upper.apply()
    assert pipes.flow(1) == ["upper", "lower", 1]
    upper.undo()
    assert pipes.flow(1) == ["lower", 1]
    lower.undo()
    assert pipes.flow is original
