"""Importing the package costs nothing and changes nothing; its floors stay apart."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_cp_ext
from megatron_cp_ext.errors import UsageError, UsageErrors, flatten, raise_all

PACKAGE = Path(megatron_cp_ext.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter of its own that sees no accelerator."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **hidden, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_importing_the_package_prints_nothing_and_imports_neither_megatron_nor_torch() -> None:
    done = run_python(
        "import sys, megatron_cp_ext as m\n"
        "heavy = {'torch', 'megatron', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'{heavy}' if heavy else 0)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_public_names_need_no_megatron_and_no_accelerator() -> None:
    done = run_python(
        "import json, sys, megatron_cp_ext as m\n"
        "for name in m.__all__: getattr(m, name)\n"
        "import torch\n"
        "print(json.dumps({'megatron': [x for x in sys.modules if x.split('.')[0] == 'megatron'],\n"
        "                  'cuda': torch.cuda.is_initialized(),\n"
        "                  'group': torch.distributed.is_initialized()}))"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"megatron": [], "cuda": False, "group": False}


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = megatron_cp_ext.no_such_name


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", megatron_cp_ext.__version__)
    assert importlib.metadata.version("megatron-cp-ext") == megatron_cp_ext.__version__


def test_the_command_is_installed() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="megatron-cp")
    assert [callable(script.load()) for script in scripts] == [True]


# Which parts of the package, and of Megatron, each part may import.
NUMERIC = {"layout", "mask", "groups", "attention", "capabilities", "comm", "kernels"}
NUMERIC |= {"algorithms", "errors"}
FORBIDDEN = {
    **{part: {"MEGATRON", "megatron", "features", "cli", "patching"} for part in NUMERIC},
    "patching": {"MEGATRON", "megatron", "features", "cli"} | (NUMERIC - {"errors"}),
    "testing": {"MEGATRON", "megatron", "features", "cli", "patching"},
    "benchmark": {"MEGATRON", "megatron", "features", "cli", "patching"},
    "megatron": {"features", "cli"},
    "features": {"cli"},
}


def imports_of(path: Path) -> Iterator[str]:
    """The parts of this package, or MEGATRON, that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "megatron":
                yield "MEGATRON"
            elif top == "megatron_cp_ext" and rest:
                yield rest.split(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_floor_imports_only_floors_below_it(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert set(imports_of(path)) & FORBIDDEN.get(part, set()) == set()


def usage_error_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("UsageError"):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_mistake_is_reported_with_its_four_parts() -> None:
    calls = dict(usage_error_calls())
    assert calls
    for place, call in calls.items():
        parts = {keyword.arg: keyword.value for keyword in call.keywords}
        assert None in parts or parts.keys() == {"option", "value", "reason", "remedy"}, place
        for name in ("option", "reason", "remedy"):
            value = parts.get(name)
            assert not isinstance(value, ast.Constant) or value.value, (place, name)


def mistake(option: str) -> UsageError:
    return UsageError(option=option, value=4, reason="five are needed", remedy="give five")


def test_a_mistake_reads_as_four_lines() -> None:
    error = mistake("--count")
    assert (error.option, error.value, error.reason, error.remedy) == (
        "--count",
        4,
        "five are needed",
        "give five",
    )
    assert str(error).split("\n") == [
        "",
        "  option: --count",
        "  value:  4",
        "  reason: five are needed",
        "  remedy: give five",
    ]
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("missing", ["option", "value", "reason", "remedy"])
def test_no_part_may_be_left_out(missing: str) -> None:
    parts = {"option": "--count", "value": 4, "reason": "few", "remedy": "more"}
    del parts[missing]
    with pytest.raises(TypeError, match=missing):
        UsageError(**parts)


def test_several_mistakes_are_one_error_and_come_apart_again() -> None:
    errors = [mistake("--one"), mistake("--two")]
    raise_all([])
    with pytest.raises(UsageError) as single:
        raise_all(errors[:1])
    assert single.value is errors[0]
    with pytest.raises(UsageErrors, match=r"2 unsupported option\(s\)") as several:
        raise_all(errors)
    assert flatten(several.value) == errors
    assert flatten(errors[0]) == errors[:1]
