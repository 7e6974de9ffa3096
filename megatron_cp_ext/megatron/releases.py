"""Differences between Megatron releases, told by what the installed one has.

A release number says little: vendors back-port, and main is ahead of its number. So names are
looked for, and arguments are passed where the signature takes them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

# Releases of megatron-core whose wheels pass `./launch/test.sh versions`.
TESTED_VERSIONS = ("0.18.2", "0.19.2")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` has a parameter of that name."""
    return name in inspect.signature(function).parameters


def supported(function: Callable[..., Any], **optional: Any) -> dict[str, Any]:
    """Those of `optional` that `function` takes by name."""
    return {name: value for name, value in optional.items() if takes(function, name)}


def newest_name(module: str, *names: str) -> str:
    """The target `module:name` for the first of `names`, newest first, that the module has.

    Where it has none this is the newest, and patching it fails with an error about it.
    """
    found = importlib.import_module(module)
    return f"{module}:{next((name for name in names if hasattr(found, name)), names[0])}"


def installed_version() -> str:
    """The release of the `megatron.core` in use, which a checkout may bring instead of a wheel."""
    try:
        info = importlib.import_module("megatron.core.package_info")
    except ModuleNotFoundError:
        return "(not installed)"
    # Not its __version__, which may end with a commit.
    *numbers, pre_release = info.VERSION
    return ".".join(map(str, numbers)) + pre_release


def describe_version(version: str) -> str:
    """How errors about patch targets name Megatron: this release, and those known to fit."""
    return f"megatron-core {version} (tested: {', '.join(TESTED_VERSIONS)})"
