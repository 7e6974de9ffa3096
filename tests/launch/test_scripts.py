"""The launch scripts, run in a copy of their folder with stand-ins for what they call.

The stand-in Pythons answer the scripts' questions with the running Python, but note down
`-m venv` and `-m pip` instead of doing it, so that nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOLS = "bash cat chmod cmp cp dirname env flock grep mkdir rm uname".split()

PYTHON = """\
case "$1" in
    -c) exec {real} "$@" ;;
    -V) echo Python 3.12.1 ;;
    -m)
        echo "{name} ${{*:2}}" >>{log}
        if [ "$2" = venv ]; then
            rm -rf "${{@: -1}}"
            mkdir -p "${{@: -1}}/bin"
            cp {venv_python} "${{@: -1}}/bin/python"
        elif [ "$2" = pip ]; then
            exit $(cat {status})
        fi
        ;;
    *) echo "{name} $*" >>{log} ;;
esac
"""


class House:
    """A copy of the repository's launch scripts, with a PATH that holds only stand-ins.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.project, self.bin = root, root / "project", root / "bin"
        self.log, self.status = root / "log", root / "pip_status"
        for folder in (self.project / "megatron_cp_ext", self.bin):
            folder.mkdir(parents=True)
        shutil.copytree(REPOSITORY / "launch", self.project / "launch")
        shutil.copytree(REPOSITORY / ".ci", self.project / ".ci")
        for name in (
            "constraints.txt",
            "setup.py",
            "pyproject.toml",
            "megatron_cp_ext/__init__.py",
        ):
            shutil.copy(REPOSITORY / name, self.project / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.log.touch()
        self.status.write_text("0")
        self.venv_python = self.python("venv-python", root)

    def stub(self, name: str, body: str, folder: Path | None = None) -> Path:
        """Put a shell script on the PATH, or into a folder."""
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{body}")
        path.chmod(0o755)
        return path

    def python(self, name: str, folder: Path | None = None, answer: str = "") -> Path:
        """A stand-in Python; with an answer, one that says only this to any question."""
        body = answer or PYTHON.format(
            real=sys.executable,
            name=name,
            log=self.log,
            status=self.status,
            venv_python=self.root / "venv-python",
        )
        return self.stub(name, body, folder)

    def command(self, script: str, *arguments: str) -> dict:
        """What `subprocess` needs to run a script of the project."""
        return {
            "args": [str(self.project / script), *arguments],
            "env": {"PATH": str(self.bin), "HOME": str(self.root), "LOG": str(self.log)},
            "cwd": self.root,
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(**self.command(script, *arguments), timeout=60, check=False)

    def calls(self) -> list[str]:
        """What the stand-ins were asked to do, since the last look."""
        lines = self.log.read_text().splitlines()
        self.log.write_text("")
        return lines


@pytest.fixture
def house(tmp_path) -> House:
    return House(tmp_path)


FAILING = "exit 127\n"
INSTALLS = [
    "venv-python pip install --quiet --disable-pip-version-check --no-input "
    f"--constraint constraints.txt {what}"
    for what in ("setuptools", "--no-build-isolation --editable .[test]")
]


def made_with(house: House, python: str) -> list[str]:
    return [f"{python} venv --clear {house.project}/.venv", *INSTALLS]


def test_setup_makes_the_environment_once(house) -> None:
    house.python("python3.12")
    done = house.run("launch/setup.sh")
    assert done.returncode == 0, done.stderr
    assert house.calls() == made_with(house, "python3.12")
    again = house.run("launch/setup.sh")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert house.calls() == []


@pytest.mark.parametrize("name", ["constraints.txt", "setup.py", "pyproject.toml"])
def test_setup_installs_again_when_what_decides_it_changed(house, name) -> None:
    house.python("python3.12")
    house.run("launch/setup.sh")
    house.calls()
    with (house.project / name).open("a") as file:
        file.write("# changed\n")
    assert house.run("launch/setup.sh").returncode == 0
    assert house.calls() == INSTALLS


def test_setup_installs_again_when_the_version_changed(house) -> None:
    house.python("python3.12")
    house.run("launch/setup.sh")
    house.calls()
    init = house.project / "megatron_cp_ext" / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9'))
    house.run("launch/setup.sh")
    assert house.calls() == INSTALLS


def test_setup_makes_a_broken_environment_anew(house) -> None:
    house.python("python3.12")
    house.run("launch/setup.sh")
    house.calls()
    (house.project / ".venv" / "bin" / "python").unlink()
    (house.project / ".venv" / "bin" / "python").symlink_to(house.root / "gone")
    assert house.run("launch/setup.sh").returncode == 0
    assert house.calls() == made_with(house, "python3.12")


def test_setups_at_the_same_time_install_once(house) -> None:
    house.python("python3.12")
    running = [subprocess.Popen(**house.command("launch/setup.sh")) for _ in range(3)]
    assert [process.communicate(timeout=60)[1] for process in running] == ["", "", ""]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert house.calls() == made_with(house, "python3.12")


def test_setup_passes_over_shims_that_fail(house) -> None:
    house.python("python3.12", answer=FAILING)
    house.python("python3")
    assert house.run("launch/setup.sh").returncode == 0
    assert house.calls() == made_with(house, "python3")


def test_setup_takes_uvs_python(house) -> None:
    found = house.python("uv-python", house.root / "uv")
    house.stub(
        "uv",
        f'[ "$*" = "python find --system --no-python-downloads 3.12" ] && echo {found}\n',
    )
    assert house.run("launch/setup.sh").returncode == 0
    assert house.calls() == made_with(house, "uv-python")


def test_setup_takes_pyenvs_python(house) -> None:
    house.python("python3.12", house.root / "pyenv" / "versions" / "3.12.9" / "bin")
    house.stub("pyenv", f'[ "$*" = root ] && echo {house.root}/pyenv\n')
    house.stub("uv", "exit 2\n")
    house.python("python3.12", answer=FAILING)
    assert house.run("launch/setup.sh").returncode == 0
    assert house.calls() == made_with(house, "python3.12")


@pytest.mark.parametrize("present", ["nothing", "older", "failing shim"])
def test_without_python_3_12_setup_says_how_to_get_it(house, present) -> None:
    if present == "older":
        house.python("python3", answer="exit 1\n")
    if present == "failing shim":
        house.python("python3.12", answer=FAILING)
    done = house.run("launch/setup.sh")
    assert done.returncode == 1
    assert done.stderr.startswith("error: Python 3.12 was not found")
    for remedy in ("uv python install 3.12", "pyenv install 3.12", "apt-get install python3.12"):
        assert remedy in done.stderr
    assert not (house.project / ".venv").exists()


def test_without_the_venv_module_setup_says_how_to_get_it(house) -> None:
    answer = f'case "$2" in *ensurepip*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    house.python("python3.12", answer=answer)
    done = house.run("launch/setup.sh")
    assert done.returncode == 1
    assert "error: python3.12 is Python 3.12, but its venv module is not installed" in done.stderr
    assert "apt-get install python3.12-venv" in done.stderr


def test_where_packages_are_compiled_setup_asks_for_a_compiler_first(house) -> None:
    house.python("python3.12")
    house.stub("uname", '[ "$1" = -s ] && echo Darwin || echo arm64\n')
    done = house.run("launch/setup.sh")
    assert done.returncode == 1
    assert "there is no C++ compiler" in done.stderr
    assert "apt-get install g++ python3.12-dev" in done.stderr
    assert house.calls() == []
    house.stub("c++", "exit 0\n")
    assert house.run("launch/setup.sh").returncode == 0
    assert house.calls() == made_with(house, "python3.12")


def test_where_packages_are_compiled_setup_asks_for_pythons_headers_too(house) -> None:
    answer = PYTHON.replace("case", 'case "$2" in *Python.h*) exit 1 ;; esac\ncase', 1)
    house.python(
        "python3.12",
        answer=answer.format(real=sys.executable, name="x", log="x", status="x", venv_python="x"),
    )
    house.stub("uname", '[ "$1" = -s ] && echo Darwin || echo arm64\n')
    house.stub("c++", "exit 0\n")
    done = house.run("launch/setup.sh")
    assert done.returncode == 1
    assert "Python.h is missing" in done.stderr


def test_when_pip_fails_setup_fails_and_tries_again_next_time(house) -> None:
    house.python("python3.12")
    house.status.write_text("1")
    done = house.run("launch/setup.sh")
    assert done.returncode == 1
    assert "error: pip could not install the packages" in done.stderr
    assert "check the network" in done.stderr
    assert "install a C++ compiler" in done.stderr
    house.calls()
    house.status.write_text("0")
    assert house.run("launch/setup.sh").returncode == 0
    assert house.calls() == INSTALLS


def test_a_failed_install_leaves_no_environment_that_passes_for_the_one_before(house) -> None:
    house.python("python3.12")
    house.run("launch/setup.sh")
    constraints = house.project / "constraints.txt"
    before = constraints.read_text()
    constraints.write_text(before + "# changed\n")
    house.status.write_text("1")
    assert house.run("launch/setup.sh").returncode == 1
    constraints.write_text(before)
    house.status.write_text("0")
    house.calls()
    assert house.run("launch/setup.sh").returncode == 0
    assert house.calls() == INSTALLS


@pytest.fixture
def furnished(house) -> House:
    """A project whose .venv is there; its programs note down how they are called."""
    house.stub("setup.sh", 'echo setup >>"$LOG"\n', house.project / "launch")
    programs = house.project / ".venv" / "bin"
    for name in ("ruff", "mypy", "shellcheck", "megatron-cp"):
        house.stub(name, f'echo "{name} $*" >>"$LOG"\n', programs)
    house.stub("python", 'echo "python $* with $OMP_NUM_THREADS thread" >>"$LOG"\n', programs)
    return house


CHECKS = [
    "setup",
    "ruff check .",
    "ruff format --check .",
    "mypy ",
    "shellcheck --external-sources "
    + "".join(f"launch/{path.name} " for path in sorted((REPOSITORY / "launch").glob("*.sh")))
    + "launch/slurm.sbatch .ci/run",
]


@pytest.mark.parametrize(
    ("arguments", "pytest_arguments"),
    [
        ([], ""),
        (["quick"], " -m not slow"),
        (["quick", "tests/patching", "-x"], " -m not slow tests/patching -x"),
        (["-k", "quick"], " -k quick"),
    ],
)
def test_test_runs_all_checks_and_then_the_tests(furnished, arguments, pytest_arguments) -> None:
    done = furnished.run("launch/test.sh", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert furnished.calls() == [
        *CHECKS,
        f"python -m pytest{pytest_arguments} with 1 thread",
    ]


@pytest.mark.parametrize("failing", ["setup.sh", "ruff", "mypy", "shellcheck", "python"])
def test_test_fails_when_a_part_of_it_fails(furnished, failing) -> None:
    folder = "launch" if failing == "setup.sh" else ".venv/bin"
    furnished.stub(failing, 'echo failed >>"$LOG"\nexit 3\n', furnished.project / folder)
    assert furnished.run("launch/test.sh").returncode == 3
    assert furnished.calls()[-1] == "failed"


def test_ci_runs_everything(furnished) -> None:
    assert furnished.run(".ci/run").returncode == 0
    assert furnished.calls() == [*CHECKS, "python -m pytest with 1 thread"]
    furnished.stub("python", "exit 1\n", furnished.project / ".venv" / "bin")
    assert furnished.run(".ci/run").returncode == 1


def test_quickstart_sets_up_prepares_data_and_verifies_four_algorithms(furnished) -> None:
    furnished.stub("python", 'echo "python $*" >>"$LOG"\n', furnished.project / ".venv" / "bin")
    assert furnished.run("launch/quickstart.sh", "--steps", "5").returncode == 0
    setup, data, verify = furnished.calls()
    assert setup == "setup"
    assert data.startswith("python launch/prepare_data.py --output-prefix out/data/stdlib ")
    assert verify.startswith(
        "megatron-cp verify --config ring:cp=2 ulysses:cp=2 kvallgather:cp=2 hybrid:cp=4,ulysses=2"
    )
    assert verify.endswith("--data-prefix out/data/stdlib --output out/quickstart --steps 5")


@pytest.mark.parametrize("failing", ["python", "megatron-cp"])
def test_quickstart_fails_when_a_part_of_it_fails(furnished, failing) -> None:
    furnished.stub(failing, "exit 1\n", furnished.project / ".venv" / "bin")
    assert furnished.run("launch/quickstart.sh").returncode == 1


@pytest.mark.parametrize("script", ["launch/setup.sh", "launch/test.sh", "launch/quickstart.sh"])
def test_scripts_can_be_executed(script) -> None:
    assert os.access(REPOSITORY / script, os.X_OK)
