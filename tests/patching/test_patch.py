"""One patch of one target: what it does to each kind of target, and how it is refused."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest

from megatron_cp_ext.patching import Patch, PatchError, PatchManager, replace, wrap

SOURCE = """
    import functools

    LIMIT = 7
    ENABLED = False

    def flow(rate, *, unit="l/s"):
        "How much comes through."
        return f"{rate} {unit}"

    class Base:
        def name(self):
            return "base"

        @staticmethod
        def add(a, b):
            return a + b

        @classmethod
        def kind(cls, suffix=""):
            return cls.__name__ + suffix

        @property
        def size(self):
            return 1

    class Pipe(Base):
        def length(self, factor=1):
            return 10 * factor

    class Slotted:
        __slots__ = ("x",)
"""


@pytest.fixture
def pipes(make_module):
    return make_module("pipes_under_test", SOURCE)


def namespaces(module) -> dict[str, dict[str, Any]]:
    """What the module and each of its classes hold, to be compared by identity."""
    spaces = {"module": dict(vars(module))}
    for name, value in vars(module).items():
        if isinstance(value, type):
            spaces[name] = dict(vars(value))
    return spaces


def assert_same(before, after) -> None:
    assert before.keys() == after.keys()
    for space, values in before.items():
        assert values.keys() == after[space].keys()
        assert all(after[space][name] is value for name, value in values.items()), space


def apply(manager: PatchManager, *patches: Patch) -> None:
    for patch in patches:
        manager.register(patch)
    manager.apply()


def test_a_replacement_takes_the_targets_place(pipes, manager) -> None:
    apply(manager, replace("pipes_under_test:flow", lambda rate: rate + 1, owner="a"))
    assert pipes.flow(1) == 2


def test_a_wrapper_gets_the_original_and_all_arguments(pipes, manager) -> None:
    seen = []

    def wrapper(original, *args, **kwargs):
        seen.append((args, kwargs))
        return original(*args, **kwargs).upper()

    apply(manager, wrap("pipes_under_test:flow", wrapper, owner="a"))
    assert pipes.flow(3, unit="gal/h") == "3 GAL/H"
    assert seen == [((3,), {"unit": "gal/h"})]


def test_a_wrapped_function_keeps_its_looks(pipes, manager) -> None:
    signature = inspect.signature(pipes.flow)
    apply(manager, wrap("pipes_under_test:flow", lambda original, *a, **k: None, owner="a"))
    assert inspect.signature(pipes.flow) == signature
    assert (pipes.flow.__name__, pipes.flow.__doc__) == ("flow", "How much comes through.")


def test_a_replacement_keeps_its_own_looks_defaults_and_closure(pipes, manager) -> None:
    factor = 3

    def narrow(rate: int, extra: int = 4, *, scale: int = 5) -> int:
        "Less of it."
        return (rate + extra) * scale * factor

    apply(manager, replace("pipes_under_test:flow", narrow, owner="a"))
    assert pipes.flow(1) == 75
    assert inspect.signature(pipes.flow) == inspect.signature(narrow)
    assert pipes.flow.__doc__ == "Less of it."


def test_a_replacement_may_be_any_object(pipes, manager) -> None:
    class Other:
        pass

    partial = functools.partial(int, "12")
    apply(
        manager,
        replace("pipes_under_test:LIMIT", 9, owner="a"),
        replace("pipes_under_test:Pipe", Other, owner="a"),
        replace("pipes_under_test:flow", partial, owner="a"),
    )
    assert pipes.LIMIT == 9
    assert pipes.Pipe is Other
    assert pipes.flow() == 12


def test_methods_of_classes_get_self(pipes, manager) -> None:
    pipe = pipes.Pipe()
    apply(
        manager,
        replace("pipes_under_test:Base.name", lambda self: type(self).__name__, owner="a"),
        wrap(
            "pipes_under_test:Pipe.length",
            lambda original, self, *a, **k: original(self, *a, **k) + 1,
            owner="a",
        ),
    )
    assert pipe.name() == "Pipe"
    assert pipe.length(factor=2) == 21


@pytest.mark.parametrize("cls", ["Base", "Pipe"], ids=["own", "inherited"])
@pytest.mark.parametrize("kind", ["replace", "wrap"])
def test_static_methods_stay_static(pipes, manager, cls, kind) -> None:
    function = {
        "replace": lambda a, b: a * b,
        "wrap": lambda original, *args: original(*args) * 100,
    }[kind]
    expected = {"replace": 12, "wrap": 700}[kind]
    apply(manager, Patch(f"pipes_under_test:{cls}.add", kind, function, "a"))
    assert getattr(pipes, cls).add(3, 4) == expected
    assert getattr(pipes, cls)().add(3, 4) == expected


@pytest.mark.parametrize("cls", ["Base", "Pipe"], ids=["own", "inherited"])
@pytest.mark.parametrize("kind", ["replace", "wrap"])
def test_class_methods_get_the_class(pipes, manager, cls, kind) -> None:
    function = {
        "replace": lambda klass, suffix="": f"new {klass.__name__}{suffix}",
        "wrap": lambda original, klass, *args, **kwargs: "new " + original(klass, *args, **kwargs),
    }[kind]
    apply(manager, Patch(f"pipes_under_test:{cls}.kind", kind, function, "a"))
    assert pipes.Pipe.kind("!") == "new Pipe!"
    assert pipes.Pipe().kind(suffix="?") == "new Pipe?"


def test_a_patch_of_an_inherited_method_leaves_the_parent_class_alone(pipes, manager) -> None:
    apply(
        manager,
        wrap("pipes_under_test:Pipe.name", lambda original, self: original(self) + "+", owner="a"),
    )
    assert pipes.Pipe().name() == "base+"
    assert pipes.Base().name() == "base"


def test_a_property_can_be_replaced(pipes, manager) -> None:
    apply(manager, replace("pipes_under_test:Base.size", property(lambda self: 2), owner="a"))
    assert pipes.Pipe().size == 2


ALL_KINDS = (
    replace("pipes_under_test:flow", lambda rate: None, owner="a"),
    wrap("pipes_under_test:flow", lambda original, *args: None, owner="b"),
    replace("pipes_under_test:LIMIT", 8, owner="a"),
    replace("pipes_under_test:Slotted", dict, owner="a"),
    wrap("pipes_under_test:Base.name", lambda original, self: "x", owner="a"),
    wrap("pipes_under_test:Pipe.name", lambda original, self: "y", owner="a"),
    replace("pipes_under_test:Base.add", lambda a, b: 0, owner="a"),
    wrap("pipes_under_test:Pipe.add", lambda original, a, b: 0, owner="a"),
    replace("pipes_under_test:Base.kind", lambda cls: "x", owner="a"),
    wrap("pipes_under_test:Pipe.kind", lambda original, cls: "x", owner="a"),
    replace("pipes_under_test:Base.size", property(lambda self: 2), owner="a"),
)


def test_undo_leaves_every_namespace_as_it_was(pipes, manager) -> None:
    before = namespaces(pipes)
    apply(manager, *ALL_KINDS)
    patched = namespaces(pipes)
    assert "kind" in patched["Pipe"]
    assert "kind" not in before["Pipe"]
    manager.undo()
    assert_same(before, namespaces(pipes))
    assert manager.applied() == []
    manager.undo()
    assert_same(before, namespaces(pipes))


def test_undone_patches_can_be_declared_anew(pipes, manager) -> None:
    patch = replace("pipes_under_test:flow", lambda rate: "new", owner="a")
    apply(manager, patch)
    manager.undo()
    assert pipes.flow(1) == "1 l/s"
    manager.apply()
    assert pipes.flow(1) == "1 l/s"
    apply(manager, patch)
    assert pipes.flow(1) == "new"


@pytest.mark.parametrize(
    "target",
    [
        "no_such_module_at_all:flow",
        "pipes_under_test.sub:flow",
        "pipes_under_test:no_such_function",
        "pipes_under_test:NoClass.name",
        "pipes_under_test:Base.no_such_method",
    ],
)
def test_a_missing_target_is_an_error_that_names_the_version(pipes, manager, target) -> None:
    manager.register(replace(target, None, owner="a"))
    with pytest.raises(PatchError) as caught:
        manager.apply()
    assert target in str(caught.value)
    assert "does not exist in plumbing 3.1" in str(caught.value)


def test_a_target_without_the_expected_parameter_is_an_error(pipes, manager) -> None:
    before = namespaces(pipes)
    manager.register(
        wrap("pipes_under_test:flow", print, owner="valves", parameters=("rate", "flux"))
    )
    with pytest.raises(PatchError) as caught:
        manager.apply()
    message = str(caught.value)
    assert "no parameter flux" in message
    assert "feature valves" in message
    assert "plumbing 3.1" in message
    assert "(rate, *, unit='l/s')" in message
    assert_same(before, namespaces(pipes))


def test_the_signature_is_checked_against_the_original_not_the_patch_before(pipes, manager) -> None:
    apply(manager, replace("pipes_under_test:flow", lambda: None, owner="a"))
    apply(
        manager,
        wrap("pipes_under_test:flow", lambda f, *a: f(), owner="b", parameters=("rate", "unit")),
    )
    assert pipes.flow(1) is None


@pytest.mark.parametrize("target", ["Base.name", "Base.add", "Pipe.kind", "Pipe"])
def test_signatures_of_methods_and_classes_are_checked(pipes, manager, target) -> None:
    manager.register(
        replace(f"pipes_under_test:{target}", print, owner="a", parameters=("nothing",))
    )
    with pytest.raises(PatchError, match="no parameter nothing"):
        manager.apply()


def test_a_target_whose_signature_is_unknown_is_an_error_where_one_is_expected(manager) -> None:
    manager.register(wrap("builtins:min", print, owner="a", parameters=("x",)))
    with pytest.raises(PatchError, match="has no signature to check"):
        manager.apply()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("LIMIT", "not callable"),
        ("Base.size", "not callable"),
        ("Pipe", "a class; wrap a method of it"),
    ],
)
def test_what_cannot_be_called_through_is_not_wrapped(pipes, manager, target, reason) -> None:
    before = namespaces(pipes)
    manager.register(wrap(f"pipes_under_test:{target}", print, owner="valves"))
    with pytest.raises(PatchError, match=f"feature valves cannot wrap .*{reason}"):
        manager.apply()
    assert_same(before, namespaces(pipes))


@pytest.mark.parametrize(
    ("target", "kind", "function"),
    [("no_colon", "replace", None), ("a:b", "wrap", 3), ("a:b", "around", print)],
)
def test_a_malformed_patch_cannot_be_made(target, kind, function) -> None:
    with pytest.raises(AssertionError):
        Patch(target, kind, function, "a")
