"""`megatron-cp COMMAND ...`: finds the command's file and hands it the rest of the line.

A command is a module of this package with `main(argv) -> exit status`, and a line in COMMANDS.
It is imported only when it is called, so `--help` need not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from megatron_cp_ext import __version__
from megatron_cp_ext.errors import UsageError

USAGE_STATUS = 2
INTERRUPTED_STATUS = 130

COMMANDS = {
    "bench": "time the algorithms beside one rank that has the whole sequence",
    "check": "check and plan a launch command for any number of ranks, without devices",
    "doctor": "what is installed, which kernels work, and whether every patch fits",
    "run": "run a Megatron training script, or the packaged GPT pre-training, with the plugin",
    "verify": "train with and without context parallelism and compare the numbers",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named first in `argv`; return the exit status."""
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="megatron-cp",
        usage="megatron-cp [-h] [--version] COMMAND [ARGUMENT ...]",
        description="Context parallelism for Megatron-LM.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
        + "\n\nmegatron-cp COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-cp-ext {__version__}")
    parser.add_argument(
        "command", choices=COMMANDS, metavar="COMMAND", help="one of: " + ", ".join(COMMANDS)
    )
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Only the first word is parsed here: argparse would swallow a `--` among the others.
    command = parser.parse_args(arguments[:1]).command
    module = importlib.import_module(f"megatron_cp_ext.cli.{command}")
    try:
        return module.main(arguments[1:])
    except UsageError as error:
        print(f"megatron-cp {command}: {error}", file=sys.stderr)
        return USAGE_STATUS
    except KeyboardInterrupt:
        print(f"megatron-cp {command}: interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS


if __name__ == "__main__":
    sys.exit(main())
