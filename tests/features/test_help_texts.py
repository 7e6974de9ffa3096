"""Help texts that argparse cannot format are repaired, others are left alone."""

from __future__ import annotations

import argparse

import pytest

from megatron_cp_ext.features.help_texts import HelpTextsFeature


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("room (1.10 = 10%).", "room (1.10 = 10%)."),
        ("100% of %s", "100% of %s"),
        ("%(missing)s", "%(missing)s"),
        ("by default %(default)s, 5%%", "by default 3, 5%"),
        ("plain", "plain"),
    ],
)
def test_help_can_be_shown(text: str, shown: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default=3, help=text)
    parser.add_argument("--silent", help=argparse.SUPPRESS)
    HelpTextsFeature().register_args(parser)
    assert shown in parser.format_help()
