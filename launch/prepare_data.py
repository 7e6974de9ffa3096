"""Makes a Megatron indexed dataset (.bin and .idx) from text files: one document per file.

    python launch/prepare_data.py --output-prefix out/data/stdlib
    python launch/prepare_data.py --input notes/ more.txt --glob '*.txt' --output-prefix out/notes

Tokens are bytes: ids 0 to 255 are byte values and 256 ends a document, which is what Megatron's
`--tokenizer-type NullTokenizer --vocab-size 257` means by them. Without --input the text is the
source code of the running Python's standard library, which every machine has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_cp_ext.errors import UsageError

EOD = 256
VOCAB_SIZE = 257
MEGATRON_FLAGS = f"--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE}"

# Parts of the standard library's folder that are no library or hold test data.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Summary:
    """What a dataset was made from and what it holds.

    Args:
        source: hash of the input files' paths, sizes and times, and of --max-bytes.
        documents: number of documents.
        tokens: number of tokens, the EOD tokens included.
    """

    source: str
    documents: int
    tokens: int


def find_files(inputs: Sequence[Path], pattern: str) -> list[Path]:
    """The input files: those named, and those in the named folders that match, sorted by path.

    Args:
        inputs: files and folders.
        pattern: glob pattern for the names of files inside folders, at any depth.

    Raises:
        UsageError: an input does not exist, or no file is found.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            # A dangling link is kept here, to be reported when it is read.
            found = (p for p in path.rglob(pattern) if p.is_file() or p.is_symlink())
            files += sorted(p for p in found if not p.is_dir())
        elif path.exists():
            files.append(path)
        else:
            raise UsageError(
                option="--input",
                value=path,
                reason="there is no such file or folder",
                remedy="give the path of a text file, or of a folder with text files",
            )
    if not files:
        raise UsageError(
            option="--input",
            value=" ".join(map(str, inputs)),
            reason=f"no file in it matches {pattern}",
            remedy="choose other files with --glob, or another folder",
        )
    return files


def standard_library_files(pattern: str) -> list[Path]:
    """The running Python's own library, without tests and without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return [
        path
        for path in find_files([root], pattern)
        if NOT_LIBRARY.isdisjoint(path.relative_to(root).parts)
    ]


def fingerprint(files: Iterable[Path], max_bytes: int | None) -> str:
    """A hash that changes when the files do, without reading them.

    Raises:
        UsageError: a file cannot be read.
    """
    digest = hashlib.sha256(f"bytes + EOD {EOD}, at most {max_bytes}\n".encode())
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def documents(files: Iterable[Path], max_bytes: int | None) -> Iterator[bytes]:
    """The text of each file that is not empty, at most `max_bytes` in all; the last may be cut.

    Raises:
        UsageError: a file cannot be read.
    """
    left = max_bytes
    for path in files:
        try:
            with path.open("rb") as file:
                text = file.read(-1 if left is None else left)
        except OSError as error:
            raise unreadable(path, error) from error
        if text:
            yield text
        if left is not None:
            left -= len(text)
            if left == 0:
                return


def unreadable(path: Path, error: OSError) -> UsageError:
    """The report of a file that cannot be read."""
    return UsageError(
        option="--input",
        value=path,
        reason=f"it cannot be read: {error.strerror}",
        remedy="make it readable, or leave it out with --glob",
    )


def with_suffix(prefix: Path, suffix: str) -> Path:
    """`prefix` with a suffix added, also where it has a dot already."""
    return prefix.with_name(prefix.name + suffix)


def read_summary(prefix: Path) -> Summary | None:
    """The summary of a complete dataset at `prefix`, or None."""
    try:
        summary = Summary(**json.loads(with_suffix(prefix, ".json").read_text()))
        complete = with_suffix(prefix, ".bin").stat().st_size == 2 * summary.tokens
    except (OSError, ValueError, TypeError):
        return None
    return summary if complete and with_suffix(prefix, ".idx").is_file() else None


def build(texts: Iterable[bytes], prefix: Path, source: str) -> Summary:
    """Write the dataset at `prefix`, with a summary beside it.

    Args:
        texts: the documents.
        prefix: where to write `prefix.bin`, `prefix.idx` and `prefix.json`.
        source: what `fingerprint` said of the input.

    Raises:
        UsageError: there is no text, or the place cannot be written to.
    """
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        # Taken away first and written last, so that it stands for a complete dataset.
        with_suffix(prefix, ".json").unlink(missing_ok=True)
        summary = Summary(source, *write_dataset(texts, prefix))
        with_suffix(prefix, ".json").write_text(json.dumps(asdict(summary)) + "\n")
    except OSError as error:
        raise UsageError(
            option="--output-prefix",
            value=prefix,
            reason=f"the dataset cannot be written there: {error}",
            remedy="give a path in a folder that can be written to",
        ) from error
    return summary


def write_dataset(texts: Iterable[bytes], prefix: Path) -> tuple[int, int]:
    """Write `prefix.bin` and `prefix.idx`, both or none; return how many documents and tokens.

    Raises:
        UsageError: there is no text.
        OSError: the files cannot be written.
    """
    # It loads torch, which takes seconds; an up-to-date dataset is recognized without. What it
    # says about missing GPU packages has no bearing here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        import numpy as np
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    parts = {suffix: with_suffix(prefix, suffix + ".part") for suffix in (".bin", ".idx")}
    count = tokens = 0
    builder = IndexedDatasetBuilder(str(parts[".bin"]), dtype=np.uint16)
    try:
        for text in texts:
            document = np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(EOD))
            builder.add_document(document, [document.size])
            count += 1
            tokens += document.size
        if count == 0:
            raise UsageError(
                option="--input",
                value="every file",
                reason="there is no text in it",
                remedy="give files that are not empty",
            )
        builder.finalize(str(parts[".idx"]))
        for suffix, part in parts.items():
            os.replace(part, with_suffix(prefix, suffix))
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    return count, tokens


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    number = int(text)
    if number <= 0:
        raise ValueError(text)
    return number


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description="Make a Megatron indexed dataset from text files, one document per file, "
        "with bytes as tokens.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="text files, and folders with text files "
        "(default: the source code of Python's standard library)",
    )
    parser.add_argument(
        "--glob",
        metavar="PATTERN",
        help="which files of a folder to take (default: '*', and '*.py' for the standard library)",
    )
    parser.add_argument(
        "--output-prefix",
        type=Path,
        required=True,
        metavar="P",
        help="write P.bin and P.idx, with P.json, which tells whether they are up to date",
    )
    parser.add_argument(
        "--max-bytes",
        type=positive,
        metavar="N",
        help="take at most N bytes of text, the last document cut short (default: all)",
    )
    parser.add_argument(
        "--force", action="store_true", help="make it again even if it is up to date"
    )
    return parser


def prepare(args: argparse.Namespace) -> str:
    """Make the dataset unless it is up to date; return the line that says so.

    Raises:
        UsageError: an argument is wrong.
    """
    prefix: Path = args.output_prefix
    if not prefix.name or prefix.is_dir():
        raise UsageError(
            option="--output-prefix",
            value=prefix,
            reason="it is a folder",
            remedy=f"add the dataset's name, for example {prefix / 'text'}",
        )
    if args.input is None:
        files = standard_library_files(args.glob or "*.py")
    else:
        files = find_files(args.input, args.glob or "*")
    source = fingerprint(files, args.max_bytes)
    summary = read_summary(prefix)
    state = "up to date"
    if args.force or summary is None or summary.source != source:
        summary = build(documents(files, args.max_bytes), prefix, source)
        state = "written"
    return (
        f"{state}: {summary.documents} documents, {summary.tokens} tokens in {prefix}.bin; "
        f"use it with --data-path {prefix} {MEGATRON_FLAGS}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 for a wrong argument."""
    args = make_parser().parse_args(argv)
    try:
        print(prepare(args))
    except UsageError as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
