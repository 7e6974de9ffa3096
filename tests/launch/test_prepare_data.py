"""launch/prepare_data.py: bytes in, Megatron's indexed dataset out, once."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.text.libraries import NullTokenizer

from megatron_cp_ext.errors import UsageError

SCRIPT = Path(__file__).parents[2] / "launch" / "prepare_data.py"
EOD = 256
TEXTS = {
    "b.txt": "two\nlines, äöü and 漢字\n".encode(),
    "a.txt": b"first by name",
    "sub/c.txt": bytes(range(256)),
    "sub/empty.txt": b"",
    "z.bin": b"\x00\xff",
}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare_data"] = module  # where dataclasses look annotations up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["prepare_data"]


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, text in TEXTS.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    (tmp_path / "texts" / "linked").symlink_to(tmp_path / "texts" / "sub")
    return tmp_path / "texts"


def prepare(tool, *arguments: object) -> str:
    return tool.prepare(tool.make_parser().parse_args([str(a) for a in arguments]))


def read(prefix: Path) -> list[list[int]]:
    return [document.tolist() for document in IndexedDataset(str(prefix))]


def tokens_of(*names: str) -> list[list[int]]:
    return [[*TEXTS[name], EOD] for name in names]


def contents(prefix: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(prefix.parent.iterdir())}


def test_every_file_is_a_document_of_its_bytes_and_eod_in_order(tool, folder, tmp_path) -> None:
    prefix = tmp_path / "new" / "folder" / "data.v1"
    line = prepare(tool, "--input", folder, "--output-prefix", prefix)
    dataset = IndexedDataset(str(prefix))
    assert read(prefix) == tokens_of("a.txt", "b.txt", "sub/c.txt", "z.bin")
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert dataset.index.dtype == np.uint16
    total = sum(len(text) + 1 for text in TEXTS.values() if text)
    assert line == (
        f"written: 4 documents, {total} tokens in {prefix}.bin; use it with --data-path {prefix} "
        "--tokenizer-type NullTokenizer --vocab-size 257"
    )
    assert sorted(contents(prefix)) == ["data.v1.bin", "data.v1.idx", "data.v1.json"]


def test_megatrons_null_tokenizer_means_the_same_by_the_tokens(tool) -> None:
    tokenizer = NullTokenizer(tool.VOCAB_SIZE)
    assert tokenizer.eod == tool.EOD == EOD
    assert tokenizer.vocab_size == EOD + 1
    assert f"--vocab-size {tokenizer.vocab_size}" in tool.MEGATRON_FLAGS


def test_named_files_keep_their_order_and_ignore_the_pattern(tool, folder, tmp_path) -> None:
    prefix = tmp_path / "data"
    paths = [folder / "z.bin", folder / "sub", folder / "a.txt"]
    prepare(tool, "--input", *paths, "--glob", "*.txt", "--output-prefix", prefix)
    assert read(prefix) == tokens_of("z.bin", "sub/c.txt", "a.txt")


@pytest.mark.parametrize(("limit", "lengths"), [(5, [5]), (13, [13]), (14, [13, 1])])
def test_max_bytes_cuts_the_last_document(tool, folder, tmp_path, limit, lengths) -> None:
    prefix = tmp_path / "data"
    prepare(tool, "--input", folder, "--output-prefix", prefix, "--max-bytes", limit)
    whole = tokens_of("a.txt", "b.txt")
    expected = [[*document[:n], EOD] for document, n in zip(whole, lengths, strict=False)]
    assert read(prefix) == expected


def test_the_same_input_gives_the_same_files(tool, folder, tmp_path) -> None:
    for name in ("one", "two"):
        prepare(tool, "--input", folder, "--output-prefix", tmp_path / name / "data")
    assert contents(tmp_path / "one" / "data") == contents(tmp_path / "two" / "data")


def test_an_up_to_date_dataset_is_left_alone(tool, folder, tmp_path, monkeypatch) -> None:
    prefix = tmp_path / "out" / "data"
    arguments = ("--input", folder, "--output-prefix", prefix)
    written = prepare(tool, *arguments)

    def refuse(*_):
        raise AssertionError("built again")

    monkeypatch.setattr(tool, "build", refuse)
    assert prepare(tool, *arguments) == written.replace("written", "up to date")
    with pytest.raises(AssertionError, match="built again"):
        prepare(tool, *arguments, "--force")


def change_text(folder: Path, prefix: Path) -> None:
    (folder / "a.txt").write_bytes(b"other text")


def change_time(folder: Path, prefix: Path) -> None:
    os.utime(folder / "a.txt", ns=(1, 1))


def add_file(folder: Path, prefix: Path) -> None:
    (folder / "new.txt").write_bytes(b"new")


def cut_tokens(folder: Path, prefix: Path) -> None:
    path = prefix.with_name("data.bin")
    path.write_bytes(path.read_bytes()[:-2])


def lose_index(folder: Path, prefix: Path) -> None:
    prefix.with_name("data.idx").unlink()


def break_summary(folder: Path, prefix: Path) -> None:
    prefix.with_name("data.json").write_text('{"source": ')


CHANGES = [change_text, change_time, add_file, cut_tokens, lose_index, break_summary]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_changed_is_made_again(tool, folder, tmp_path, change) -> None:
    prefix = tmp_path / "out" / "data"
    prepare(tool, "--input", folder, "--output-prefix", prefix)
    change(folder, prefix)
    assert prepare(tool, "--input", folder, "--output-prefix", prefix).startswith("written: ")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    assert read(prefix) == [[*path.read_bytes(), EOD] for path in files]


def test_another_limit_is_another_dataset(tool, folder, tmp_path) -> None:
    arguments = ("--input", folder, "--output-prefix", tmp_path / "data")
    prepare(tool, *arguments)
    assert prepare(tool, *arguments, "--max-bytes", 4).startswith("written: 1 documents, 5 tokens")


def test_the_default_text_is_the_standard_library_without_tests_and_packages(
    tool, tmp_path
) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in tool.standard_library_files("*.py")]
    assert files == sorted(files)
    assert {Path("argparse.py"), Path("json/decoder.py")} <= set(files)
    parts = {part for path in files for part in path.parts}
    assert parts.isdisjoint({"site-packages", "test", "tests", "idle_test", "__pycache__"})
    prefix = tmp_path / "stdlib"
    prepare(tool, "--output-prefix", prefix, "--max-bytes", 100_000)
    documents = read(prefix)
    assert sum(map(len, documents)) == 100_000 + len(documents)
    assert bytes(documents[0][:-1]) == (root / files[0]).read_bytes()


def mistake(tool, *arguments: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        prepare(tool, *arguments)
    return caught.value


def test_a_missing_input_is_a_mistake(tool, tmp_path) -> None:
    error = mistake(tool, "--input", tmp_path / "no", "--output-prefix", tmp_path / "data")
    assert (error.option, error.value) == ("--input", tmp_path / "no")
    assert "no such file or folder" in error.reason


def test_a_folder_without_a_matching_file_is_a_mistake(tool, folder, tmp_path) -> None:
    prefix = tmp_path / "data"
    error = mistake(tool, "--input", folder, "--glob", "*.rst", "--output-prefix", prefix)
    assert "no file in it matches *.rst" in error.reason
    assert not list(tmp_path.glob("data*"))


def test_empty_files_alone_are_a_mistake_and_leave_nothing(tool, folder, tmp_path) -> None:
    prefix = tmp_path / "out" / "data"
    error = mistake(tool, "--input", folder / "sub" / "empty.txt", "--output-prefix", prefix)
    assert "there is no text in it" in error.reason
    assert list(prefix.parent.iterdir()) == []


@pytest.mark.parametrize("when", ["before", "while reading"])
def test_a_file_that_cannot_be_read_is_a_mistake(tool, folder, tmp_path, monkeypatch, when) -> None:
    prefix = tmp_path / "out" / "data"
    bad = folder / "bad.txt"
    if when == "before":
        bad.symlink_to(folder / "nowhere")
    else:
        bad.write_bytes(b"secret")
        opened = Path.open

        def refuse(path, *args, **kwargs):
            if path == bad:
                raise PermissionError(13, "Permission denied")
            return opened(path, *args, **kwargs)

        monkeypatch.setattr(Path, "open", refuse)
    error = mistake(tool, "--input", folder, "--output-prefix", prefix)
    assert (error.option, error.value) == ("--input", bad)
    assert "cannot be read" in error.reason
    assert not prefix.parent.exists() or list(prefix.parent.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "below a file"])
def test_an_output_that_cannot_be_written_is_a_mistake(tool, folder, tmp_path, kind) -> None:
    prefix = tmp_path if kind == "folder" else folder / "a.txt" / "data"
    error = mistake(tool, "--input", folder, "--output-prefix", prefix)
    assert (error.option, error.value) == ("--output-prefix", prefix)


def test_a_failed_build_does_not_pass_for_the_one_before(tool, folder, tmp_path) -> None:
    prefix = tmp_path / "data"
    tool.build([b"old"], prefix, "source")

    def texts():
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tool.build(texts(), prefix, "source")
    assert tool.read_summary(prefix) is None
    assert not list(tmp_path.glob("*.part"))


def test_the_command_prints_one_line_or_the_mistake(tool, folder, tmp_path, capsys) -> None:
    arguments = ["--input", str(folder), "--output-prefix", str(tmp_path / "data")]
    assert tool.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("written: 4 documents")
    assert (out.count("\n"), err) == (1, "")
    assert json.loads((tmp_path / "data.json").read_text())["documents"] == 4
    assert tool.main([*arguments, "--glob", "*.rst"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "option: --input" in err
    for wrong in ("0", "-3", "many"):
        with pytest.raises(SystemExit) as caught:
            tool.main([*arguments, "--max-bytes", wrong])
        assert caught.value.code == 2
