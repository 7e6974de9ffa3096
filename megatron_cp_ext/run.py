"""Runs a Megatron training script with the plugin in place.

    torchrun --nproc-per-node N -m megatron_cp_ext.run [script.py] ARGS

With a script, it runs as if it had been started directly: its folder is first on the module
search path, so a Megatron-LM checkout uses its own `megatron` package. Without one, the packaged
GPT pre-training runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import megatron_cp_ext
from megatron_cp_ext.errors import UsageError

PACKAGED = "megatron_cp_ext.megatron.pretrain_gpt"


def find_script(arguments: list[str]) -> Path | None:
    """The script that `arguments` start with, or None.

    Raises:
        UsageError: it does not exist.
    """
    if not arguments or arguments[0].startswith("-") or not arguments[0].endswith(".py"):
        return None
    script = Path(arguments[0])
    if not script.is_file():
        raise UsageError(
            option="script",
            value=script,
            reason="there is no such file",
            remedy="give the path of a training script, or none for the packaged GPT pre-training",
        )
    return script


def search_from(folder: Path) -> None:
    """Make `folder` the first place where modules are looked for, as for a script inside it."""
    if sys.flags.safe_path:  # python -P: sys.path[0] is not the working directory
        sys.path.insert(0, str(folder))
    else:
        sys.path[0] = str(folder)
    if importlib.util.find_spec("megatron_cp_ext") is None:
        sys.path.append(str(Path(megatron_cp_ext.__file__).parents[1]))


def prepare() -> Callable[[], None]:
    """Install the plugin for the script named on the command line, or the packaged one.

    Returns:
        What runs it.

    Raises:
        UsageError: the script does not exist.
    """
    script = find_script(sys.argv[1:])
    if script is not None:
        search_from(script.resolve().parent)
        sys.argv = sys.argv[1:]

    # Both import megatron, so they need the path above.
    importlib.import_module("megatron_cp_ext.adaptor")
    if script is None:
        # Not through runpy: processes that Megatron spawns import the main module again, and
        # this one is light.
        return importlib.import_module(PACKAGED).main
    return functools.partial(_run_script, script)


def _run_script(script: Path) -> None:
    runpy.run_path(str(script), run_name="__main__")


def main() -> None:
    """Install the plugin, then run the script named on the command line, or the packaged one."""
    prepare()()


if __name__ == "__main__":
    main()
