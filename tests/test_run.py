"""`python -m megatron_cp_ext.run`: scripts run as if started directly, with the plugin in place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_cp_ext import run
from megatron_cp_ext.verification import RunSpec, Workload, compare, train
from megatron_cp_ext.verification.compare import Tolerances
from megatron_cp_ext.verification.launch import forked, torchrun

REPORT = """
import json, sys
from pathlib import Path
import neighbour                                     # lies beside the script
from megatron.training.arguments import parse_args   # bound by name, as training scripts do
import megatron.core

if __name__ == "__main__":
    report = {
        "argv": sys.argv,
        "path": sys.path[0],
        "file": __file__,
        "main": vars(sys.modules["__main__"])["parse_args"] is parse_args,
        "wrapped": parse_args.__wrapped__.__module__,
        "core": megatron.core.__file__,
        "neighbour": neighbour.NAME,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(report))
"""

# Trains as the packaged script does, and fails if torch's compiler was loaded on the way.
TRAIN = """
{first}
import sys
from megatron_cp_ext.megatron.pretrain_gpt import main

if __name__ == "__main__":
    main()
    assert "torch._dynamo" not in sys.modules, "this costs every rank seconds at its start"
    from megatron.training import get_args
    assert get_args().cp_platform == "cpu"
"""


def start(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own, from a folder that is neither the script's nor the project's."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_cp_ext.run", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like a Megatron-LM checkout: a script and a `megatron` package of its own."""
    import megatron.core
    import megatron.training

    folder = tmp_path / "checkout"
    (folder / "megatron").mkdir(parents=True)
    for package in (megatron.core, megatron.training):
        source = Path(package.__file__).parent
        (folder / "megatron" / source.name).symlink_to(source)
    (folder / "neighbour.py").write_text("NAME = 'neighbour'\n")
    (folder / "script.py").write_text(REPORT)
    return folder


@pytest.mark.parametrize("relative", [True, False])
def test_a_script_runs_as_if_started_directly(checkout: Path, relative: bool) -> None:
    script = "checkout/script.py" if relative else str(checkout / "script.py")
    ended = start(script, "--flag", "value.py", cwd=checkout.parent)
    assert ended.returncode == 0, ended.stderr
    report = json.loads((checkout / "script.json").read_text())
    assert report == {
        "argv": [script, "--flag", "value.py"],
        "path": str(checkout),
        "file": script,
        "main": True,
        "wrapped": "megatron.training.arguments",
        "core": str(checkout / "megatron" / "core" / "__init__.py"),
        "neighbour": "neighbour",
    }


def test_a_script_that_does_not_exist_is_named(tmp_path: Path) -> None:
    ended = start("missing.py", "--num-layers", "2", cwd=tmp_path)
    assert ended.returncode != 0
    for part in ("option: script", "value:  missing.py", "no such file", "remedy:"):
        assert part in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "found"),
    [([], False), (["--spec", "script.py"], False), (["--help"], False), (["script.py"], True)],
)
def test_only_the_first_argument_can_be_the_script(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], found: bool
) -> None:
    monkeypatch.chdir(checkout)
    assert run.find_script(arguments) == (Path("script.py") if found else None)


def test_a_folder_is_no_script(checkout: Path, refused: Any) -> None:
    (checkout / "folder.py").mkdir()
    with refused("script", reason="no such file"):
        run.find_script([str(checkout / "folder.py")])


def test_the_plugin_stays_importable_from_the_script_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = str(Path(run.__file__).parents[1])
    monkeypatch.setattr(sys, "path", [project, "/elsewhere"])
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    run.search_from(tmp_path)
    assert sys.path == [str(tmp_path), "/elsewhere", project]


def test_help_shows_megatron_s_options_and_ours(tmp_path: Path) -> None:
    ended = start("--help", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for option in ("--tensor-model-parallel-size", "--cp-platform", "--cp-metrics-file"):
        assert option in ended.stdout


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Five steps of the packaged GPT pre-training on mock data."""
    folder = tmp_path_factory.mktemp("packaged")
    return train(RunSpec.parse("none"), Workload(steps=5), folder, launcher=forked, timeout_s=500)


def test_the_packaged_training_learns(packaged: Any) -> None:
    assert packaged.iterations == (1, 2, 3, 4, 5)
    assert packaged.losses[-1] < 0.9 * packaged.losses[0]


@pytest.mark.slow
def test_a_script_that_imports_the_adaptor_trains_alike(packaged: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAIN.format(first="import megatron_cp_ext.adaptor"))

    def plainly(ranks: int, arguments: Any, *, logs: Path, script: Path) -> list[str]:
        command = torchrun(ranks, arguments, logs=logs, script=script)
        at = command.index("megatron_cp_ext.run")
        return command[: at - 1] + command[at + 1 :]  # without "-m megatron_cp_ext.run"

    workload = Workload(steps=5, script=script)
    alike = train(RunSpec.parse("none"), workload, tmp_path, launcher=plainly, timeout_s=500)
    assert (alike.losses, alike.grad_norms) == (packaged.losses, packaged.grad_norms)


@pytest.mark.slow
def test_a_script_trains_alike_on_two_ranks(packaged: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAIN.format(first=""))
    workload = Workload(steps=5, script=script)
    alike = train(RunSpec.parse("none:dp=2"), workload, tmp_path, timeout_s=500)
    comparison = compare(packaged, alike, Tolerances.of("fp32"))
    assert not comparison.failures
