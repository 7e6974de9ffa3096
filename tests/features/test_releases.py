"""Megatron releases: the tested ones are silent, others get a warning or a clear error."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest

from megatron_cp_ext.features.session import Session
from megatron_cp_ext.megatron import releases
from megatron_cp_ext.patching import Feature, PatchError, wrap

INFO = "megatron.core.package_info"


@pytest.fixture
def pretend(monkeypatch):
    """`pretend(0, 20, 0, "rc1")`: the installed Megatron says it is this one."""

    def version(*numbers: int | str) -> None:
        monkeypatch.setitem(sys.modules, INFO, SimpleNamespace(VERSION=numbers))

    return version


@pytest.fixture
def start(monkeypatch):
    """`start(feature...)` installs a session whose command line is empty."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("RANK", "0")
    sessions = []

    def start(*features: Feature) -> Session:
        sessions.append(Session(list(features)))
        sessions[-1].install()
        return sessions[-1]

    yield start
    for session in sessions:
        session.manager.undo()


def parse() -> list[str]:
    """Parse the empty command line; what was said about versions meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.import_module("megatron.training.arguments").parse_args()
    return [str(w.message) for w in caught if "is tested with megatron-core" in str(w.message)]


def test_the_installed_release_is_the_wheels_and_a_tested_one() -> None:
    assert releases.installed_version() == importlib.metadata.version("megatron-core")
    assert releases.installed_version() in releases.TESTED_VERSIONS


def test_a_missing_megatron_is_named_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, INFO, None)
    assert releases.installed_version() == "(not installed)"


@pytest.mark.parametrize("version", releases.TESTED_VERSIONS)
def test_tested_releases_are_silent(pretend, start, version) -> None:
    pretend(*map(int, version.split(".")), "")
    start()
    assert parse() == []


def test_another_release_gets_one_warning_that_says_which_are_tested(pretend, start) -> None:
    pretend(0, 20, 0, "rc1")
    start()
    (warning,) = parse()
    for part in ("this is 0.20.0rc1", *releases.TESTED_VERSIONS, "megatron-cp verify"):
        assert part in warning


def test_only_rank_0_warns(pretend, start, monkeypatch) -> None:
    pretend(0, 20, 0, "")
    monkeypatch.setenv("RANK", "1")
    start()
    assert parse() == []


def test_a_missing_target_names_the_installed_and_the_tested_releases(pretend, start) -> None:
    pretend(0, 20, 0, "")
    session = start()
    session.manager.register(wrap("megatron.core.utils:gone", print, owner="a"))
    with pytest.raises(PatchError) as caught:
        session.manager.apply()
    for part in ("megatron.core.utils:gone does not exist", "0.20.0", *releases.TESTED_VERSIONS):
        assert part in str(caught.value)


def test_arguments_are_passed_where_the_signature_takes_them() -> None:
    def old(batch, is_sft):
        return batch, is_sft

    assert releases.supported(old, is_sft=True, has_cu_seqlens=True) == {"is_sft": True}
    assert not releases.takes(old, "has_cu_seqlens")


def test_the_newest_name_that_exists_is_the_target(monkeypatch) -> None:
    module = ModuleType("some_release")
    module.middle = module.old = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_release", module)
    assert releases.newest_name("some_release", "new", "middle", "old") == "some_release:middle"
    assert releases.newest_name("some_release", "new", "newer") == "some_release:new"
