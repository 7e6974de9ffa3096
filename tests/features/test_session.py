"""The features' hooks run around Megatron's own parsing and validation."""

from __future__ import annotations

import argparse
import importlib
import sys
from types import SimpleNamespace

import pytest

from megatron_cp_ext.errors import UsageError, UsageErrors
from megatron_cp_ext.features import session as session_module
from megatron_cp_ext.features.session import Session
from megatron_cp_ext.patching import Feature, PatchManager, replace

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 1 --lr 0.1 "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-rope-fusion --no-masked-softmax-fusion"
).split()
HOOKS = ["pre_validate_args", "register_early_patches", "validate_args"]
HOOKS += ["post_validate_args", "register_patches"]


class Spy(Feature):
    """Notes which hook ran when, and whether Megatron's validation had run by then."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        self.name, self.calls = name, calls

    def before_import(self) -> None:
        self.calls.append(("before_import", self.name))

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(f"--{self.name}-level", type=int, default=3)

    def pre_validate_args(self, args: argparse.Namespace) -> None:
        self.note("pre_validate_args", args)

    def register_early_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        self.note("register_early_patches", args)

    def validate_args(self, args: argparse.Namespace) -> None:
        self.note("validate_args", args)

    def post_validate_args(self, args: argparse.Namespace) -> None:
        self.note("post_validate_args", args)

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        self.note("register_patches", args)

    def note(self, hook: str, args: argparse.Namespace) -> None:
        validated = hasattr(args, "data_parallel_size")
        assert validated == (HOOKS.index(hook) >= HOOKS.index("validate_args")), hook
        self.calls.append((hook, self.name))


@pytest.fixture
def arguments(monkeypatch):
    """Megatron's arguments module, with a command line of a small model."""
    module = importlib.import_module("megatron.training.arguments")
    monkeypatch.setattr(sys, "argv", ["train.py", *MODEL])
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    return module


@pytest.fixture
def start(arguments):
    """`start(*features)` installs a session of these features; it is taken back at the end."""
    sessions = []

    def start(*features: Feature) -> Session:
        sessions.append(Session(list(features)))
        sessions[-1].install()
        return sessions[-1]

    yield start
    for session in reversed(sessions):
        session.manager.undo()


def targets(session: Session) -> list[str]:
    return [patch.target for patch in session.manager.applied()]


def test_installing_patches_parsing_and_validation_and_nothing_else(start) -> None:
    assert sorted(targets(start(*session_module.all_features()))) == [
        "megatron.training.arguments:parse_args",
        "megatron.training.arguments:validate_args",
        "megatron.training.yaml_arguments:validate_yaml",
    ]


def test_a_process_has_one_session(monkeypatch, arguments) -> None:
    monkeypatch.setattr(session_module, "all_features", list)
    session_module.install.cache_clear()
    session = session_module.install()
    try:
        assert session_module.install() is session
        assert len(targets(session)) == 3
    finally:
        session.manager.undo()
        session_module.install.cache_clear()


def test_flags_of_all_features_are_parsed_with_megatrons_own(start, arguments) -> None:
    start(Spy("first", []), Spy("second", []))
    sys.argv += ["--first-level", "5"]
    args = arguments.parse_args()
    assert (args.first_level, args.second_level, args.hidden_size) == (5, 3, 16)


def test_a_scripts_own_flags_are_parsed_too(start, arguments) -> None:
    start(Spy("first", []))
    sys.argv += ["--of-the-script", "x", "--unknown-to-all"]

    def provider(parser):
        parser.add_argument("--of-the-script")
        return parser

    args = arguments.parse_args(provider, ignore_unknown_args=True)
    assert (args.of_the_script, args.first_level) == ("x", 3)
    args = arguments.parse_args(extra_args_provider=provider, ignore_unknown_args=True)
    assert args.of_the_script == "x"


def test_a_flag_that_exists_already_is_an_error(start, arguments) -> None:
    start(Spy("first", []), Spy("first", []))
    with pytest.raises(argparse.ArgumentError, match="--first-level"):
        arguments.parse_args()


def test_hooks_run_in_order_around_megatrons_validation(start, arguments) -> None:
    calls: list[tuple[str, str]] = []
    start(Spy("first", calls), Spy("second", calls))
    assert calls == [("before_import", "first"), ("before_import", "second")]
    calls.clear()
    args = arguments.parse_args()
    assert calls == []
    assert arguments.validate_args(args, {}) is args
    assert calls == [(hook, name) for hook in HOOKS for name in ("first", "second")]


def test_early_patches_are_in_place_for_megatrons_validation(start, arguments) -> None:
    class Early(Feature):
        def register_early_patches(self, manager, args) -> None:
            manager.register(
                replace("megatron.training.arguments:_print_args", self.show, owner="early")
            )

        def show(self, title, args) -> None:
            self.title = title

    early = Early()
    start(early)
    arguments.validate_args(arguments.parse_args())
    assert early.title == "arguments"


class Objector(Feature):
    """Refuses its level."""

    def __init__(self, *options: str) -> None:
        self.options = options
        self.later_hooks: list[str] = []

    def validate_args(self, args: argparse.Namespace) -> None:
        errors = [
            UsageError(option=option, value=1, reason="too low", remedy="raise it")
            for option in self.options
        ]
        raise errors[0] if len(errors) == 1 else UsageErrors(errors)

    def post_validate_args(self, args: argparse.Namespace) -> None:
        self.later_hooks.append("post")

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        self.later_hooks.append("patches")


def test_the_mistakes_of_all_features_are_reported_together(start, arguments) -> None:
    features = [Objector("--one"), Spy("fine", []), Objector("--two", "--three")]
    session = start(*features)
    with pytest.raises(UsageErrors) as caught:
        arguments.validate_args(arguments.parse_args())
    assert [error.option for error in caught.value.errors] == ["--one", "--two", "--three"]
    assert isinstance(caught.value, ValueError)
    for option in ("--one", "--two", "--three"):
        assert f"option: {option}\n" in str(caught.value)
    assert features[0].later_hooks == features[2].later_hooks == []
    assert len(targets(session)) == 3


def test_a_single_mistake_is_reported_as_itself(start, arguments) -> None:
    start(Objector("--one"))
    with pytest.raises(UsageError) as caught:
        arguments.validate_args(arguments.parse_args())
    assert caught.value.option == "--one"
    assert not isinstance(caught.value, UsageErrors)


class Chooser(Feature):
    """Patches what the arguments ask for, with a new function each time."""

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--choice", default="none")

    def register_patches(self, manager: PatchManager, args: argparse.Namespace) -> None:
        if args.choice != "none":
            manager.register(
                replace(
                    f"megatron.training.arguments:{args.choice}",
                    lambda *_: args.choice,
                    owner="chooser",
                )
            )


def test_patches_follow_from_the_validated_arguments(start, arguments) -> None:
    session = start(Chooser())
    args = arguments.parse_args()
    args.choice = "_print_args"
    arguments.validate_args(args)
    assert targets(session)[3:] == ["megatron.training.arguments:_print_args"]
    assert arguments._print_args() == "_print_args"


def test_arguments_validated_anew_are_decided_anew(start, arguments) -> None:
    original = arguments._print_args
    session = start(Chooser())
    for choice in ("_print_args", "_print_args", "_eval_pattern", "none"):
        args = arguments.parse_args()
        args.choice = choice
        arguments.validate_args(args)
        chosen = [] if choice == "none" else [f"megatron.training.arguments:{choice}"]
        assert targets(session)[3:] == chosen
        assert len(targets(session)) == 3 + len(chosen)
    assert arguments._print_args is original


def test_with_a_yaml_file_our_options_have_their_defaults(start, arguments, tmp_path) -> None:
    """Megatron drops all parsed options then, also those a feature is about to read."""
    config = tmp_path / "config.yaml"
    config.write_text("disable_msc_deprecated: false\nenable_msc: false\nsecond_level: 7\n")
    start(Spy("first", []), Spy("second", []))
    sys.argv += ["--yaml-cfg", str(config), "--first-level", "5"]
    args = arguments.parse_args()
    assert (args.first_level, args.second_level) == (3, 7)
    assert not hasattr(args, "hidden_size")


def test_with_a_yaml_file_features_see_the_namespace_megatron_goes_on_with(
    start, arguments, monkeypatch
) -> None:
    yaml_arguments = importlib.import_module("megatron.training.yaml_arguments")

    def merge(args, defaults=None):
        return SimpleNamespace(**vars(args), **vars(args.group), data_parallel_size=1)

    monkeypatch.setattr(yaml_arguments, "validate_yaml", merge)
    seen = []

    class Reader(Feature):
        def validate_args(self, args) -> None:
            seen.append(args)

        def post_validate_args(self, args) -> None:
            args.settled = args.size * 2

        def register_patches(self, manager, args) -> None:
            seen.append(args)

    session = start(Reader())
    try:
        args = yaml_arguments.validate_yaml(SimpleNamespace(group=SimpleNamespace(size=2)), {})
    finally:
        session.manager.undo()
    assert args.settled == 4
    assert seen == [args, args]
    assert all(found is args for found in seen)
