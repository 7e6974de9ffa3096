"""`megatron-cp`: finds its commands, and is quick to help."""

import subprocess
import sys

import pytest

from megatron_cp_ext import __version__
from megatron_cp_ext.cli import main as cli


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"megatron-cp-ext {__version__}\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_lists_every_command(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    assert f"  {command} " in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["verify", "--help"]])
def test_help_does_not_wait_for_torch(argv):
    program = (
        "import sys; from megatron_cp_ext.cli.main import main\n"
        f"try: main({argv})\n"
        "except SystemExit: print('loaded', [m for m in ('torch', 'megatron', 'numpy', "
        "'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.splitlines()[-1] == "loaded []"


def test_run_is_the_same_as_the_module(tmp_path, monkeypatch):
    from megatron_cp_ext import run

    seen = []
    monkeypatch.setattr(run, "main", lambda: seen.append(list(sys.argv)))
    monkeypatch.setattr(sys, "argv", ["megatron-cp"])
    assert cli.main(["run", "script.py", "--tensor-model-parallel-size", "2", "--", "x"]) == 0
    assert seen == [[run.__file__, "script.py", "--tensor-model-parallel-size", "2", "--", "x"]]
    assert cli.main(["run", "--mock-data"]) == 0
    assert seen[1][1:] == ["--mock-data"]


def test_a_missing_script_is_wrong_usage(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["megatron-cp"])
    assert cli.main(["run", "nowhere.py"]) == 2
    assert "there is no such file" in capsys.readouterr().err
