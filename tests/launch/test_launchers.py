"""The launchers: the command each would run, with stand-ins for the clusters' own programs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
LAUNCH = REPOSITORY / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
NODE, MULTI, ASCEND = "torchrun_node.sh", "torchrun_multi.sh", "ascend.sh"
SLURM, KUBERNETES = "slurm.sbatch", "kubernetes.sh"
LAUNCHERS = [NODE, MULTI, ASCEND, SLURM, KUBERNETES]
# What a launcher needs besides the configuration.
NEEDED = {
    MULTI: ["--master", "first:1234", "--node-rank", "0"],
    KUBERNETES: ["--image", "registry/image"],
}


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """A small environment, with a folder of stand-ins first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.fixture
def run(tmp_path, environment):
    """`run(launcher, *arguments)` calls it from an empty folder."""

    def run(launcher: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(LAUNCH / launcher), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def dry(run):
    """`dry(launcher, *arguments)`: the words of the command that --dry-run prints."""

    def dry(launcher: str, *arguments: str) -> list[str]:
        done = run(launcher, "--dry-run", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return shlex.split(done.stdout)

    return dry


@pytest.fixture
def stub(tmp_path):
    """`stub(name, body)` puts a shell script on the PATH."""

    def stub(name: str, body: str) -> Path:
        path = tmp_path / "bin" / name
        path.write_text(f"#!{shutil.which('bash')}\n{body}")
        path.chmod(0o755)
        return path

    return stub


@pytest.fixture
def recorder(stub, tmp_path):
    """A Python that writes down its arguments and environment instead of running."""
    stub(
        "recorder",
        f"printf '%s\\n' \"$@\" >{tmp_path}/words\nenv >{tmp_path}/variables\n",
    )

    def read() -> tuple[list[str], dict[str, str]]:
        lines = (tmp_path / "variables").read_text().splitlines()
        return (tmp_path / "words").read_text().splitlines(), dict(
            line.split("=", 1) for line in lines if "=" in line
        )

    return read


def configuration(name: str) -> list[str]:
    lines = (REPOSITORY / "configs" / f"{name}.args").read_text().splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


def assignments(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables in front of a command, and the command."""
    count = next(n for n, word in enumerate(words) if not re.match(r"[A-Z0-9_]+=", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script) -> None:
    done = subprocess.run(
        ["bash", "-n", str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    runs = script.read_text().startswith("#!/usr/bin/env bash\n")
    assert os.access(script, os.X_OK) or not runs


def test_scripts_pass_shellcheck() -> None:
    shellcheck = Path(REPOSITORY, ".venv", "bin", "shellcheck")
    tool = str(shellcheck) if shellcheck.exists() else shutil.which("shellcheck")
    assert tool, "shellcheck comes with ./launch/setup.sh"
    done = subprocess.run(
        [tool, "--external-sources", *map(str, SCRIPTS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "" and done.returncode == 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_help_tells_the_common_options(run, launcher) -> None:
    done = run(launcher, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("--config", "--data", "--output", "--dry-run", "-- FLAG"):
        assert name in done.stdout
    assert "shellcheck" not in done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no configuration is given"),
        (["--config", "nope"], "there is no configuration nope"),
        (["--config", "tiny-gqa", "--frobnicate", "1"], "unknown option: --frobnicate"),
        (["--config", "tiny-gqa", "--lr"], "--lr is not an option, or lacks its value"),
        (["--config", "tiny-gqa", "--nproc-per-node", "two"], "--nproc-per-node two: not a whole"),
        (["--config", "tiny-gqa", "--save-interval", "0"], "--save-interval 0: not a whole"),
    ],
)
def test_wrong_options_say_what_is_right(run, launcher, arguments, message) -> None:
    done = run(launcher, "--dry-run", *NEEDED.get(launcher, []), *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) > 1
    assert done.stdout == ""


def test_one_node_runs_the_configuration_and_the_extra_flags_last(dry) -> None:
    variables, command = assignments(
        dry(NODE, "--config", "tiny-gqa", "--", "--train-iters", "3", "--note", "a b$'")
    )
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert option(command, "--nproc-per-node") == "2"
    assert option(command, "--rdzv-endpoint") == "localhost:0"
    start = command.index("megatron_cp_ext.run")
    assert command[start - 1] == "-m"
    assert command[start + 1 :] == [
        *configuration("tiny-gqa"),
        *("--mock-data", "--train-iters", "3", "--note", "a b$'"),
    ]


def test_options_become_megatrons_flags(dry) -> None:
    _, command = assignments(
        dry(
            NODE,
            *("--config", "llama3-8b-128k", "--nproc-per-node", "4"),
            *("--script", "mlm/pretrain_gpt.py", "--data", "my data", "--data-cache", "cache"),
            *("--tokenizer", "hf", "--output", "runs/1", "--save-interval", "50"),
            *("--python", "python9"),
        )
    )
    assert command[0] == "python9"
    assert option(command, "--nproc-per-node") == "4"
    assert option(command, "megatron_cp_ext.run") == "mlm/pretrain_gpt.py"
    tail = command[command.index("--data-path") :]
    assert tail == [
        *("--data-path", "my data", "--split", "100,0,0", "--data-cache-path", "cache"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "hf"),
        *("--save", "runs/1/checkpoints", "--load", "runs/1/checkpoints"),
        *("--save-interval", "50", "--tensorboard-dir", "runs/1/tensorboard"),
    ]
    assert "--mock-data" not in command


def test_a_configuration_may_be_any_file(dry, tmp_path) -> None:
    file = tmp_path / "mine.args"
    file.write_text("# mine\n\n  --num-layers 2\n--window-size 3,*\n# --no\n--list a b\n--last 'x")
    _, command = assignments(dry(NODE, "--config", str(file)))
    assert option(command, "--nproc-per-node") == "1"
    words = ["--num-layers", "2", "--window-size", "3,*", "--list", "a", "b", "--last", "'x"]
    start = command.index("megatron_cp_ext.run") + 1
    assert command[start:] == [*words, "--mock-data"]


def test_a_line_that_is_no_flag_is_refused(run, tmp_path) -> None:
    (tmp_path / "mine.args").write_text("--num-layers 2\nhidden-size 3\n")
    done = run(NODE, "--config", "mine.args", "--dry-run")
    assert done.returncode == 1
    assert "the line: hidden-size 3" in done.stderr


def test_variables_that_are_set_win_over_the_file(run, environment, recorder, tmp_path) -> None:
    (tmp_path / "my.env").write_text("# mine\nFIRST_ONE=1\n\nSECOND_ONE=a b=c\n")
    environment["FIRST_ONE"] = "set"
    done = run(NODE, "--config", "tiny-gqa", "--env", "my.env", "--python", "recorder")
    assert (done.returncode, done.stderr) == (0, "")
    words, variables = recorder()
    assert words[:2] == ["-m", "torch.distributed.run"]
    assert (variables["FIRST_ONE"], variables["SECOND_ONE"]) == ("set", "a b=c")
    assert variables["PYTHONPATH"] == str(REPOSITORY)
    (tmp_path / "my.env").write_text("export A=1\n")
    done = run(NODE, "--config", "tiny-gqa", "--env", "my.env", "--dry-run")
    assert done.returncode == 1 and "the line: export A=1" in done.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("--script", "no.py"), ("--data", "no"), ("--tokenizer", "no")]
)
def test_files_that_do_not_exist_are_refused_before_anything_starts(
    run, recorder, tmp_path, name, value
) -> None:
    done = run(NODE, "--config", "tiny-gqa", "--python", "recorder", name, value)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {name} {value}: there is no ")
    assert not (tmp_path / "words").exists()


def test_several_nodes_meet_at_the_first(dry) -> None:
    _, command = assignments(
        dry(MULTI, "--config", "llama3-8b-256k", "--master", "first:77", "--node-rank", "3")
    )
    for name, value in (
        ("--nproc-per-node", "8"),
        ("--nnodes", "4"),
        ("--node-rank", "3"),
        ("--master-addr", "first"),
        ("--master-port", "77"),
    ):
        assert option(command, name) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--node-rank", "0"], "the first node is not given"),
        (["--master", "first"], "this node's rank is not given"),
        (["--master", "first", "--node-rank", "4"], "--node-rank 4 of --nodes 4"),
        (["--master", "first", "--node-rank", "x"], "--node-rank x: not a whole number"),
        (["--nodes", "0"], "--nodes 0: not a whole number"),
    ],
)
def test_several_nodes_need_to_know_one_another(run, arguments, message) -> None:
    done = run(MULTI, "--config", "llama3-8b-256k", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {message}")


def test_ascend_takes_hccl_settings_and_the_npu_platform(dry) -> None:
    variables, command = assignments(dry(ASCEND, "--config", "llama2-7b-32k", "--", "--lr", "1"))
    assert variables["HCCL_CONNECT_TIMEOUT"] == "1800"
    assert not any(name.startswith("NCCL") for name in variables)
    assert command[-5:] == ["--cp-platform", "npu", "--mock-data", "--lr", "1"]
    assert "--nnodes" not in command
    _, command = assignments(
        dry(ASCEND, "--config", "llama3-8b-256k", "--master", "a", "--node-rank", "1")
    )
    assert option(command, "--nnodes") == "4"
    assert option(command, "--master-port") == "29500"


def test_ascend_reads_canns_settings_first(run, environment, recorder, tmp_path) -> None:
    (tmp_path / "set_env.sh").write_text("export FROM_CANN=$UNSET_BEFORE'yes'\n")
    environment["ASCEND_TOOLKIT_HOME"] = str(tmp_path)
    done = run(ASCEND, "--config", "llama2-7b-32k", "--python", "recorder")
    assert (done.returncode, done.stderr) == (0, "")
    assert recorder()[1]["FROM_CANN"] == "yes"
    done = run(ASCEND, "--config", "llama2-7b-32k", "--cann", "nowhere")
    assert done.returncode == 1 and "--cann nowhere: there is no such file" in done.stderr


def test_ascend_does_not_start_one_node_of_several_by_mistake(run, dry) -> None:
    done = run(ASCEND, "--config", "llama3-8b-256k", "--dry-run")
    assert done.returncode == 1 and "llama3-8b-256k is for 4 nodes" in done.stderr
    dry(ASCEND, "--config", "llama3-8b-256k", "--nodes", "1")


def test_slurm_is_asked_for_the_nodes_of_the_configuration(run, dry, stub, tmp_path) -> None:
    arguments = ["--config", "llama3-8b-256k", "--data", "d", "--", "--lr", "1 2"]
    words = dry(SLURM, *arguments)
    assert words[:5] == ["sbatch", "--nodes", "4", "--gpus-per-node", "8"]
    assert words[-2:] == ["--lr", "1 2"]
    stub("sbatch", f"printf '%s\\n' \"$@\" >{tmp_path}/submitted\n")
    assert run(SLURM, *arguments).returncode == 0
    submitted = (tmp_path / "submitted").read_text().splitlines()
    assert option(submitted, "--chdir") == str(REPOSITORY)
    assert submitted[-len(arguments) :] == arguments
    assert submitted[-len(arguments) - 1] == str(LAUNCH / SLURM)


def test_inside_slurm_each_task_starts_one_node(environment, stub, tmp_path) -> None:
    """srun's stand-in runs the task as Slurm would on the third of three nodes."""
    stub("scontrol", '[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n')
    stub("srun", 'while [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=2 exec "$@"\n')
    copy = tmp_path / "spooled"  # Slurm runs a copy from a folder of its own
    shutil.copy(LAUNCH / SLURM, copy)
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "40007"}
    done = subprocess.run(
        [str(copy), "--config", "llama3-8b-256k", "--dry-run", "--", "--lr", "1 2"],
        cwd=REPOSITORY,
        env=environment | job,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    _, command = assignments(shlex.split(done.stdout))
    assert option(command, "--nnodes") == "3"
    assert option(command, "--node-rank") == "2"
    assert option(command, "--master-addr") == "n1"
    assert option(command, "--master-port") == "20007"
    assert command[-2:] == ["--lr", "1 2"]


def test_slurm_from_a_wrong_folder_says_so(environment, tmp_path) -> None:
    copy = tmp_path / "spooled"
    shutil.copy(LAUNCH / SLURM, copy)
    done = subprocess.run(
        [str(copy), "--config", "tiny-gqa"],
        cwd=tmp_path,
        env=environment | {"SLURM_JOB_NODELIST": "n1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "call sbatch in the folder of the project" in done.stderr


def manifest(run, *arguments: str) -> dict:
    done = run(KUBERNETES, "--dry-run", "--image", "registry/image:1", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return yaml.safe_load(done.stdout)


def test_kubernetes_gets_a_pod_for_each_node(run) -> None:
    job = manifest(run, "--config", "llama3-8b-256k", "--rdma", "rdma/hca")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"]["name"] == "llama3-8b-256k"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: spec["replicas"] for name, spec in replicas.items()} == {
        "Master": 1,
        "Worker": 3,
    }
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 1}
    assert {"name": "NCCL_NVLS_ENABLE", "value": "0"} in container["env"]
    assert (
        "Worker" not in manifest(run, "--config", "llama3-8b-128k")["spec"]["pytorchReplicaSpecs"]
    )


def test_the_command_of_a_pod_runs(run) -> None:
    """What the pod is told, with the operator's variables filled in, is a right launch."""
    job = manifest(
        run,
        *("--config", "llama3-8b-256k", "--claim", "books", "--data", "/data/b"),
        *("--output", "/data/o", "--save-interval", "9", "--", "--note", 'a "b" \\c'),
    )
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "books"}} in pod["volumes"]
    given = {"PET_NNODES": "4", "PET_NODE_RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "5"}
    arguments = [
        re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], text) for text in container["args"]
    ]
    assert container["command"] == [f"./launch/{MULTI}"]
    done = run(MULTI, "--dry-run", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    words = shlex.split(done.stdout)
    for name, value in (
        ("--node-rank", "1"),
        ("--master-addr", "m"),
        ("--master-port", "5"),
        ("--data-path", "/data/b"),
        ("--save-interval", "9"),
        ("--note", 'a "b" \\c'),
    ):
        assert option(words, name) == value


def test_the_manifest_in_the_repository_is_what_its_command_prints(run) -> None:
    text = (LAUNCH / "kubernetes.yaml").read_text()
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
    (command,) = [line for line in comments if line.startswith("./launch/kubernetes.sh")]
    done = run(KUBERNETES, *shlex.split(command)[1:])
    assert done.returncode == 0
    assert yaml.safe_load(text) == yaml.safe_load(done.stdout)


def test_kubernetes_applies_the_manifest(run, stub, tmp_path) -> None:
    stub("kubectl", f'echo "$*" >{tmp_path}/called\ncat >{tmp_path}/applied\n')
    arguments = ["--config", "tiny-moe", "--image", "i"]
    assert run(KUBERNETES, *arguments).returncode == 0
    assert (tmp_path / "called").read_text() == "apply -f -\n"
    expected = run(KUBERNETES, *arguments, "--dry-run").stdout
    assert (tmp_path / "applied").read_text() == expected


@pytest.mark.parametrize("name", ["Books", "a_b", "-a", "a.args"])
def test_names_that_kubernetes_refuses_are_refused_here(run, name) -> None:
    done = run(KUBERNETES, "--config", "tiny-moe", "--image", "i", "--name", name, "--dry-run")
    assert done.returncode == 1 and f"--name {name}: not a name" in done.stderr


def test_a_configuration_as_a_shell_array_is_the_configuration() -> None:
    code = f"source <({LAUNCH}/config.sh qwen3-30b-a3b-128k); printf '%s\\n' \"${{ARGS[@]}}\""
    done = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == configuration("qwen3-30b-a3b-128k")


@pytest.mark.slow
def test_one_node_trains(run, tmp_path) -> None:
    """Two real ranks, by the configuration for them, stopped early by an extra flag."""
    metrics = tmp_path / "metrics.jsonl"
    arguments = ["--config", "tiny-gqa", "--output", "run", "--save-interval", "2"]
    flags = ["--train-iters", "3", "--cp-metrics-file", str(metrics)]
    done = run_long(tmp_path, NODE, *arguments, "--", *flags)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert lines[2]["lm loss"] < lines[0]["lm loss"]
    assert (tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").exists()

    # With the same --output the training goes on where it ended.
    flags[1] = "4"
    done = run_long(tmp_path, NODE, *arguments, "--", *flags, "--override-opt-param-scheduler")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [4]


def run_long(folder: Path, launcher: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A real run; it is over when it ends or, with all its processes, after five minutes."""
    process = subprocess.Popen(
        [str(LAUNCH / launcher), *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)
