"""Reads the torchrun line of a launch script, with its variables, arrays and functions expanded.

Only bash understands bash, so the script is run by it, with everything that would start a
process taken away: `torchrun`, `python`, `srun` and their like are shell functions that write
down their arguments, and the search path is an empty folder, so that other programs are not
found. Two things still happen: redirections create files (existing ones are not overwritten),
and programs named by an absolute path run. Read a script that you do not trust before you check
it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_cp_ext.errors import UsageError

TIMEOUT_S = 10

# Programs that start a training; what they are given is written down.
LAUNCHERS = ("torchrun", "python", "python3", "accelerate")
# Programs that start another one, after options of their own.
RUNNERS = ("srun", "mpirun", "nohup", "env", "numactl", "timeout", "nice", "stdbuf", "exec", "eval")

# Harmless helpers that scripts find folders and counts with.
_PRELUDE = r"""
set -C
record() {
  builtin printf '%s\0' "$(( $# + 1 ))" "${CUDA_DEVICE_MAX_CONNECTIONS-}" "$@" >&9
}
run_rest() {
  while (( $# )); do
    if builtin declare -F "recorded_$1" >/dev/null; then "recorded_$1" "${@:2}"; return; fi
    case "$1" in
      */torchrun) recorded_torchrun "${@:2}"; return;;
      */python|*/python3) recorded_python "${@:2}"; return;;
      bash|sh|/bin/bash|/bin/sh)
        shift
        while [[ "${1-}" == -* && "${1-}" != *c* ]]; do shift; done
        if [[ "${1-}" == -*c* ]]; then builtin eval "$2"; fi
        return;;
      *=*) builtin export "$1" 2>/dev/null;;
    esac
    shift
  done
}
bash() { run_rest bash "$@"; }
sh() { run_rest bash "$@"; }
dirname() { local p="${1%/}"; case "$p" in */*) p="${p%/*}"; echo "${p:-/}";; *) echo .;; esac; }
basename() { local p="${1%/}"; p="${p##*/}"; echo "${p%"${2-}"}"; }
realpath() {
  local p="${@: -1}"
  if [[ -d "$p" ]]; then (builtin cd "$p" && builtin pwd -P)
  else echo "$(builtin cd "$(dirname "$p")" && builtin pwd -P)/$(basename "$p")"; fi
}
readlink() { realpath "$@"; }
command_not_found_handle() { return 0; }
"""


@dataclass(frozen=True)
class Launch:
    """A launch of a training, as a script would do it.

    Args:
        arguments: what follows the training script.
        world_size: ranks that the launcher starts; None where its counts are not numbers.
        max_connections: the value of CUDA_DEVICE_MAX_CONNECTIONS; None if it is not set.
    """

    arguments: tuple[str, ...]
    world_size: int | None
    max_connections: str | None


def read_launch(
    script: Path, arguments: Sequence[str] = (), *, environment: Mapping[str, str] | None = None
) -> Launch:
    """The training that a script launches first.

    Args:
        script: a bash script.
        arguments: what the script is given.
        environment: variables for the script, such as those a batch system sets.

    Raises:
        UsageError: it launches none, or cannot be read within ten seconds.
    """
    if not script.is_file():
        raise _refusal(script, "there is no such file", "give the path of a launch script")
    bash = shutil.which("bash")
    if bash is None:
        raise _refusal(script, "only bash can read it, and there is no bash", "install bash")
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        empty = Path(folder) / "empty"
        empty.mkdir()
        try:
            result = subprocess.run(
                [
                    *(bash, "--noprofile", "--norc", "-c"),
                    _program(script, record, empty),
                    str(script),
                    *arguments,
                ],
                env=_environment(environment or {}),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _refusal(
                script,
                f"it does more than start a training: it was not done after {TIMEOUT_S} s",
                "give Megatron's arguments themselves after --",
            ) from error
        calls = list(_calls(record.read_bytes() if record.exists() else b""))
    for connections, *words in calls:
        launch = _launch(words, connections)
        if launch is not None:
            return launch
    said = result.stderr.strip().splitlines()
    raise _refusal(
        script,
        "no torchrun or python line that starts a training was reached"
        + (f"; bash said: {said[-1]}" if said else ""),
        "give Megatron's arguments themselves after --",
    )


def _program(script: Path, record: Path, empty: Path) -> str:
    """The script, inside what takes its programs away."""
    functions = [
        *(f'recorded_{name}() {{ record {name} "$@"; }}' for name in LAUNCHERS),
        *(f'{name}() {{ record {name} "$@"; }}' for name in LAUNCHERS),
        *(f'{name}() {{ run_rest "$@"; }}' for name in RUNNERS if name != "eval"),
    ]
    # A script asks where it lies by $0 or BASH_SOURCE; only the first is known to -c.
    text = script.read_text(errors="replace")
    for name in ("${BASH_SOURCE[0]}", "${BASH_SOURCE}", "$BASH_SOURCE"):
        text = text.replace(name, "$0")
    return "\n".join(
        (
            f"exec 9>{_quoted(record)}",
            _PRELUDE,
            *functions,
            # Whatever the script makes of PATH, it is empty again before the next command.
            f"trap 'PATH={_quoted(empty)}' DEBUG; set -T",
            text,
        )
    )


def _quoted(path: Path) -> str:
    return '"' + str(path).replace('"', "") + '"'


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The user's variables, without those that run code in a new shell."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BASH_")}
    return {**kept, **extra}


def _calls(record: bytes) -> Iterator[list[str]]:
    words = record.decode(errors="replace").split("\0")[:-1]
    index = 0
    while index < len(words):
        count = int(words[index])
        yield words[index + 1 : index + 1 + count]
        index += 1 + count


# Options of torchrun that stand alone; all others take a value.
_SWITCHES = ("--standalone", "--no-python", "--no_python", "--run-path", "--run_path", "--module")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic")


def _launch(words: Sequence[str], connections: str) -> Launch | None:
    """What a recorded call launches; None if it is no training."""
    program, *rest = words
    if program.startswith("python"):
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest = rest[1:]
        if rest[:1] == ["-m"] and rest[1:2] and rest[1].startswith(_MODULES):
            program, rest = "torchrun", rest[2:]
    sizes = {"nnodes": "1", "nproc": "1"}
    if program == "torchrun":
        rest, sizes = _launcher_options(rest)
    if not rest:
        return None
    if rest[0] == "-m":
        rest = rest[2:]
    elif rest[0].endswith(".py"):
        rest = rest[1:]
    else:
        return None
    # `-m megatron_cp_ext.run` may name the script next.
    if rest and rest[0].endswith(".py"):
        rest = rest[1:]
    world = None
    nodes = sizes["nnodes"].split(":")[-1]
    if program == "torchrun" and nodes.isdigit() and sizes["nproc"].isdigit():
        world = int(nodes) * int(sizes["nproc"])
    return Launch(tuple(rest), world, connections or None)


def _launcher_options(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What follows torchrun's options, and its counts."""
    sizes = {"nnodes": "1", "nproc": "1"}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        option, _, value = rest.pop(0).partition("=")
        if option in _SWITCHES:
            if option == "--module":
                rest.insert(0, "-m")
                break
            continue
        if not value and rest:
            value = rest.pop(0)
        name = option.lstrip("-").replace("_", "-")
        if name == "nnodes":
            sizes["nnodes"] = value
        if name == "nproc-per-node":
            sizes["nproc"] = value
    return rest, sizes


def _refusal(script: Path, reason: str, remedy: str) -> UsageError:
    return UsageError(option="launch script", value=script, reason=reason, remedy=remedy)
