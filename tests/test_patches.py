"""The source patches and the command that applies them, on files made here.

No Megatron-LM checkout is needed: a copy of the table of fingerprints gets a line for a file of
the test's own, which has the same imports at the same place.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PATCHES = REPOSITORY / "patches"
LINE = "import megatron_cp_ext.adaptor\n"
NAMES = ["core_v0.17", "core_v0.18", "core_v0.19", "main"]


def rows() -> list[list[str]]:
    """The table's lines: hash before, hash after, patch, trees."""
    lines = (PATCHES / "fingerprints.tsv").read_text().splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def anchor(name: str) -> int:
    """The line after which a patch adds its own."""
    header = (PATCHES / f"{name}.patch").read_text().splitlines()[2]
    match = re.fullmatch(r"@@ -(\d+),0 \+(\d+) @@", header)
    assert match, header
    assert int(match[2]) == int(match[1]) + 1
    return int(match[1])


def script(name: str) -> str:
    """A stand-in for the release's pretrain_gpt.py: its first megatron import where it has it."""
    before = [f"# line {n}\n" for n in range(1, anchor(name) - 1)]
    return "".join(
        [*before, "import torch\n", "\n", "from gpt_builders import gpt_builder\n", "# end\n"]
    )


def patched(name: str) -> str:
    return script(name).replace("from gpt_builders", LINE + "from gpt_builders")


class Checkout:
    """A folder with a pretrain_gpt.py, and the command with a table that knows it.

    Args:
        root: an empty folder.
        name: which patch it gets.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.name, self.folder = name, root / "a checkout"
        self.folder.mkdir()
        self.script = self.folder / "pretrain_gpt.py"
        self.script.write_text(script(name))
        self.project = root / "project"
        shutil.copytree(REPOSITORY / "launch", self.project / "launch")
        shutil.copytree(PATCHES, self.project / "patches")
        self.table = self.project / "patches" / "fingerprints.tsv"
        self.know(digest(patched(name)))

    def know(self, result: str) -> None:
        row = [digest(script(self.name)), result, f"{self.name}.patch", "made here"]
        with self.table.open("a") as file:
            file.write("\t".join(row) + "\n")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.project / "launch" / "patch_megatron.sh"), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def __call__(self, command: str) -> tuple[int, str]:
        done = self.run(command, str(self.folder))
        return done.returncode, (done.stdout + done.stderr).split(":")[0]


@pytest.fixture(params=NAMES)
def checkout(request, tmp_path) -> Checkout:
    return Checkout(tmp_path, request.param)


@pytest.fixture
def one(tmp_path) -> Checkout:
    return Checkout(tmp_path, "core_v0.19")


def test_every_patch_has_a_line_in_the_table_and_every_line_a_patch() -> None:
    assert sorted(path.stem for path in PATCHES.glob("*.patch")) == NAMES
    assert [row[2] for row in rows()] == [f"{name}.patch" for name in NAMES]
    for before, after, _, trees in rows():
        assert re.fullmatch(r"[0-9a-f]{64}", before) and re.fullmatch(r"[0-9a-f]{64}", after)
        assert trees
    hashes = [h for row in rows() for h in row[:2]]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_is_one_added_line_and_nothing_of_the_script(name) -> None:
    lines = (PATCHES / f"{name}.patch").read_text().splitlines(keepends=True)
    assert lines[:2] == ["--- a/pretrain_gpt.py\n", "+++ b/pretrain_gpt.py\n"]
    assert anchor(name) > 1
    assert lines[3:] == ["+" + LINE]


def test_the_line_comes_before_the_first_import_of_megatron(checkout) -> None:
    assert checkout("apply") == (0, "patched")
    assert checkout.script.read_text() == patched(checkout.name)
    imports = re.findall(r"^(?:from|import) (\w+)", checkout.script.read_text(), re.MULTILINE)
    assert imports == ["torch", "megatron_cp_ext", "gpt_builders"]


def test_apply_and_revert_are_idempotent_and_undo_each_other(checkout) -> None:
    assert checkout("status") == (1, "not patched")
    assert checkout("revert") == (0, "not patched")
    assert checkout("apply") == (0, "patched")
    assert checkout("status") == (0, "patched")
    assert checkout("apply") == (0, "already patched")
    assert checkout.script.read_text() == patched(checkout.name)
    assert checkout("revert") == (0, "as it was")
    assert checkout.script.read_text() == script(checkout.name)


def test_permissions_stay(one) -> None:
    one.script.chmod(0o754)
    one("apply")
    assert one.script.stat().st_mode & 0o777 == 0o754


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_an_unknown_tree_is_refused_and_left_alone(one, command) -> None:
    text = script(one.name) + "# edited\n"
    one.script.write_text(text)
    done = one.run(command, str(one.folder))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {one.script} is not known\n  it is none of: ")
    for known in ("core_v0.17.0", "core_v0.18.2", "core_v0.19.0", "main at"):
        assert known in done.stderr
    assert "-m megatron_cp_ext.run" in done.stderr
    assert one.script.read_text() == text
    assert one("status") == (2, "not known")


def test_a_tree_patched_by_hand_is_told_so(one) -> None:
    one.script.write_text(LINE + script(one.name))
    done = one.run("apply", str(one.folder))
    assert done.returncode == 1
    assert "it has the line already" in done.stderr


def test_a_patch_with_another_result_than_the_tables_changes_nothing(one) -> None:
    one.table.write_text("")
    one.know(digest("something else"))
    done = one.run("apply", str(one.folder))
    assert done.returncode == 1
    assert "does not give the file" in done.stderr
    assert one.script.read_text() == script(one.name)


def test_a_patch_that_does_not_apply_changes_nothing(one) -> None:
    patch = one.project / "patches" / f"{one.name}.patch"
    patch.write_text(patch.read_text().replace("+import", "-import"))
    done = one.run("apply", str(one.folder))
    assert done.returncode == 1
    assert "error: git could not apply" in done.stderr
    assert one.script.read_text() == script(one.name)


def test_inside_another_repository_the_right_file_is_patched(one) -> None:
    for folder in (one.folder.parent, one.folder):
        subprocess.run(["git", "init", "-q", str(folder)], check=True, timeout=60)
    assert one("apply") == (0, "patched")
    assert one.script.read_text() == patched(one.name)


def test_wrong_calls_say_what_is_right(one, tmp_path) -> None:
    for arguments, message in (
        ([], "give a command and a checkout"),
        (["apply"], "give a command and a checkout"),
        (["aply", str(one.folder)], "unknown command: aply"),
        (["apply", str(tmp_path / "nowhere")], "there is no "),
    ):
        done = one.run(*arguments)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {message}")
        assert len(done.stderr.splitlines()) == 2
    assert "revert CHECKOUT" in one.run("--help").stdout
