"""A launcher whose training is a few lines of Python."""

import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_training.py")


@pytest.fixture
def fake_launcher():
    def launcher(ranks, arguments, *, logs, script):
        return [sys.executable, str(FAKE), *arguments]

    return launcher
