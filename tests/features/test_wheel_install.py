"""What a megatron-core wheel lacks is made up for, and only that."""

from __future__ import annotations

import argparse
import importlib
import sys

import pytest
import torch

from megatron_cp_ext.features import wheel_install
from megatron_cp_ext.features.wheel_install import WRITER, WheelInstallFeature
from megatron_cp_ext.patching import PatchManager

HELPER = "megatron.core.datasets.helpers_cpp"


def test_make_is_not_run_where_the_compiled_helper_imports() -> None:
    importlib.import_module(HELPER)
    wheel_install.compile_when_missing(lambda: pytest.fail("make was run"))


def test_make_is_run_where_the_compiled_helper_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HELPER, None)  # what makes an import fail
    runs = []
    wheel_install.compile_when_missing(lambda: runs.append(True))
    assert runs == [True]


@pytest.mark.parametrize("installed", [True, False])
def test_memory_is_measured_with_psutil_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(importlib.import_module(WRITER), "HAVE_PSUTIL", installed)
    measured = wheel_install.measure_without_psutil(lambda: 7)
    assert (measured == 7) == installed
    assert installed or measured > 2**20


@pytest.mark.parametrize("cuda", [True, False])
def test_it_acts_on_every_platform(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    manager = PatchManager()
    WheelInstallFeature().register_patches(manager, argparse.Namespace())
    manager.apply()
    utils = importlib.import_module("megatron.core.datasets.utils")
    try:
        utils.compile_helpers()  # Megatron's own would exit: the wheel has no Makefile
        assert {applied.target.split(":")[1] for applied in manager.applied()} == {
            "compile_helpers",
            "_process_memory",
        }
    finally:
        manager.undo()
