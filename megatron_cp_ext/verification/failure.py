"""Finds, in the logs of a failed run, the error that a person wants to read."""

from __future__ import annotations

import re
from pathlib import Path

LINES = 30
TRACEBACK = "Traceback (most recent call last):"

# torch puts the rank before each line of a traceback once the process group exists.
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
TORCH_WARNING = re.compile(r"^(\[rank\d+\]:)?\[[IWE]\d*[ \d:.\-]+ .*\] |^[WE]\d{4} \d\d:\d\d")
# Python's own, with the source line it may quote below.
WARNING = re.compile(r"^\S+:\d+: \w*Warning: .*\n(  .*\n)?", re.M)
ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.S
)
USAGE_ERROR = re.compile(r"^(\w+\.)*UsageErrors?: ", re.M)
ARGPARSE_ERROR = re.compile(r"^\S+: error: ", re.M)
# What the other ranks say once one of them is gone.
BYSTANDER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|SignalException|"
    r"DistNetworkError|connection was closed|Socket closed",
    re.I,
)


def excerpt(launcher_log: Path, rank_logs: Path) -> str:
    """The error of the rank that failed first, or what comes closest to it.

    Args:
        launcher_log: output of the launcher.
        rank_logs: folder with `.../RANK/stderr.log`.
    """
    launcher_text = _read(launcher_log)
    root = ROOT_CAUSE.search(launcher_text)
    root_rank = int(root[1]) if root else None
    texts = {
        int(path.parent.name): _cleaned(_read(path))
        for path in sorted(rank_logs.glob("**/stderr.log"))
        if path.parent.name.isdecimal()
    }

    def unlikely(rank: int) -> tuple[bool, bool, bool, int]:
        """Sorts the rank that tells most to the front."""
        text = texts[rank]
        error = _last_error(text)
        return (not text, bool(BYSTANDER.search(error)), rank != root_rank, rank)

    ranked = sorted(texts, key=unlikely)
    if root and int(root[2]) < 0 and (not ranked or TRACEBACK not in texts[ranked[0]]):
        heading = f"rank {root[1]} was killed by signal {-int(root[2])}"
        return "\n".join([heading, *_tail(texts.get(int(root[1]), ""))])
    if ranked and texts[ranked[0]]:
        return "\n".join([f"rank {ranked[0]}:", *_tail(_last_error(texts[ranked[0]]))])
    return "\n".join(_tail(_last_error(_cleaned(launcher_text))))


def _last_error(text: str) -> str:
    """The last error and what follows it; the whole text when none is found.

    A user's mistake explains itself, so neither the way to it through the program nor
    argparse's list of all options is shown.
    """
    start = text.rfind(TRACEBACK)
    error = text[start:] if start >= 0 else text
    mistake = (USAGE_ERROR if start >= 0 else ARGPARSE_ERROR).search(error)
    return error[mistake.start() :] if mistake else error


def _tail(text: str) -> list[str]:
    """The last lines; a long traceback keeps its first line too."""
    lines = text.splitlines()
    if len(lines) <= LINES:
        return lines
    return [*lines[:1], f"... {len(lines) - LINES} lines ...", *lines[1 - LINES :]]


def _cleaned(text: str) -> str:
    """Without rank prefixes, warnings and blank lines."""
    text = WARNING.sub("", text)
    lines = [line for line in text.splitlines() if not TORCH_WARNING.match(line)]
    return "\n".join(RANK_PREFIX.sub("", line) for line in lines if line.strip())


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
