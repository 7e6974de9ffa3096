"""Every configuration would start on the cluster it names, and is the model it names."""

from __future__ import annotations

import re
from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest

from megatron_cp_ext.features.checking import check_command
from megatron_cp_ext.features.dry_run import Outcome
from megatron_cp_ext.verification.launch import environment, forked
from megatron_cp_ext.verification.metrics import read_metrics
from megatron_cp_ext.verification.processes import run_command

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.args"))
TINY = [name for name in NAMES if name.startswith("tiny-")]
REAL = [name for name in NAMES if name not in TINY]
GB = 1e9
# Parameters of the published models, in 1e9.
PUBLISHED = {
    "llama2-7b-32k": 6.74,
    "llama3-8b-128k": 8.03,
    "llama3-8b-256k": 8.03,
    "llama3-70b-128k": 70.55,
    "qwen3-30b-a3b-128k": 30.53,
    "gpt-oss-20b-256k": 20.91,
    "deepseek-v2-lite-64k": 15.71,
}


def text(name: str) -> str:
    return (CONFIGS / f"{name}.args").read_text()


def arguments(name: str) -> list[str]:
    return [
        word
        for line in text(name).splitlines()
        if not line.lstrip().startswith("#")
        for word in line.split()
    ]


def cluster(name: str) -> tuple[int, int, str]:
    """Nodes, ranks of a node, and what the ranks are."""
    match = re.search(r"^# cluster: (\d+) nodes? x (\d+) (.*)$", text(name), re.MULTILINE)
    assert match, f"{name} names no cluster"
    return int(match[1]), int(match[2]), match[3]


def check(name: str, *extra: str) -> Outcome:
    """What `megatron-cp check` says for the cluster that the configuration names."""
    nodes, ranks, kind = cluster(name)
    return check_command(
        [*arguments(name), "--mock-data", *extra],
        world_size=nodes * ranks,
        platform="cuda" if kind.startswith("GPUs") else "cpu",
        devices_per_node=ranks,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )


@cache
def checked(name: str) -> Outcome:
    outcome = check(name)
    assert outcome.errors == (), [str(error) for error in outcome.errors]
    return outcome


def parameters(args: Namespace) -> float:
    """Number of weights, norms and biases left out, from the validated arguments alone."""
    h, heads = args.hidden_size, args.num_attention_heads
    if args.multi_latent_attention:
        key, rope = args.qk_head_dim, args.qk_pos_emb_head_dim
        attention = h * heads * (key + rope) + h * (args.kv_lora_rank + rope)
        attention += args.kv_lora_rank * heads * (key + args.v_head_dim)
        attention += heads * args.v_head_dim * h
    else:
        groups = args.num_query_groups if args.group_query_attention else heads
        attention = 2 * h * args.kv_channels * (heads + groups)
    matrices = 3 if args.swiglu or args.quick_geglu else 2
    dense = matrices * h * args.ffn_hidden_size
    total = args.num_layers * attention + 2 * args.vocab_size * h
    if args.num_experts is None:
        return total + args.num_layers * dense
    pattern = args.moe_layer_freq
    layers = sum(pattern) if isinstance(pattern, list) else args.num_layers
    experts = args.num_experts * args.moe_ffn_hidden_size
    experts += args.moe_shared_expert_intermediate_size or 0
    sparse = matrices * h * experts + h * args.num_experts
    return total + layers * sparse + (args.num_layers - layers) * dense


def test_all_models_of_the_readme_are_there() -> None:
    assert sorted(PUBLISHED) == REAL
    assert TINY == ["tiny-gqa", "tiny-mla", "tiny-moe", "tiny-window-sink"]


@pytest.mark.parametrize("name", NAMES)
def test_it_would_start_on_the_cluster_it_names(name) -> None:
    outcome = checked(name)
    nodes, ranks, _ = cluster(name)
    args = outcome.args
    degrees = args.tensor_model_parallel_size * args.context_parallel_size
    degrees *= args.pipeline_model_parallel_size * args.data_parallel_size
    assert degrees == nodes * ranks == args.world_size
    assert outcome.plan is not None
    assert args.context_parallel_size > 1


@pytest.mark.parametrize("name", NAMES)
def test_it_would_not_start_with_degrees_that_do_not_fit(name) -> None:
    errors = check(name, "--context-parallel-size", "3").errors
    assert errors


@pytest.mark.parametrize("name", REAL)
def test_it_is_the_published_model(name) -> None:
    assert parameters(checked(name).args) / GB == pytest.approx(PUBLISHED[name], rel=2e-3)


@pytest.mark.parametrize("name", REAL)
def test_its_name_is_its_length(name) -> None:
    length = int(name.rsplit("-", 1)[1].removesuffix("k")) * 1024
    args = checked(name).args
    assert args.seq_length == args.max_position_embeddings == length


@pytest.mark.parametrize("name", REAL)
def test_it_fits_the_memory_it_names(name) -> None:
    match = re.search(r"\((\d+) GB", cluster(name)[2])
    assert match
    total = checked(name).to_dict()["plan"]["memory"]["total"]
    assert 0 < total < int(match[1]) * GB


@pytest.mark.parametrize("name", NAMES)
def test_heads_stay_in_a_node_and_no_kv_head_is_sent_twice(name) -> None:
    args = checked(name).args
    ulysses = {
        "ulysses_cp_algo": args.context_parallel_size,
        "hybrid_cp_algo": args.ulysses_degree_in_cp,
    }.get(args.context_parallel_algo, 1)
    tp = args.tensor_model_parallel_size
    assert cluster(name)[1] % (tp * ulysses) == 0
    mha = args.multi_latent_attention or not args.group_query_attention
    groups = args.num_attention_heads if mha else args.num_query_groups
    assert groups % (tp * ulysses) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_note_says_why(name) -> None:
    note = "\n".join(line for line in text(name).splitlines() if line.startswith("#"))
    assert re.search(r"^#.*CP \d+", note, re.MULTILINE)
    if name in REAL:
        for reason in ("Bytes|ring +\\(P-1\\)", "c >= \\(K/H\\) e F / B", "Memory:"):
            assert re.search(reason, note), reason


@pytest.mark.parametrize("name", ["nccl-cp", "hccl-cp"])
def test_variables_are_assigned_once_and_explained(name) -> None:
    lines = (CONFIGS / f"{name}.env").read_text().splitlines()
    assigned = [n for n, line in enumerate(lines) if line and not line.startswith("#")]
    names = [lines[n].split("=")[0] for n in assigned]
    assert len(set(names)) == len(names) > 4
    assert all(re.fullmatch(r"[A-Z0-9_]+=\S+", lines[n]) for n in assigned)
    assert all(lines[n - 1].startswith("#") for n in assigned)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_it_trains(name, tmp_path) -> None:
    """Three real steps on as many ranks as it names."""
    nodes, ranks, _ = cluster(name)
    metrics = tmp_path / "metrics.jsonl"
    command = forked(
        nodes * ranks,
        [
            *(*arguments(name), "--mock-data", "--train-iters", "3"),
            *("--cp-metrics-file", str(metrics)),
        ],
        logs=tmp_path / "ranks",
        script=None,
    )
    log = tmp_path / "log"
    finished = run_command(command, log=log, env=environment(), timeout_s=400)
    assert finished.returncode == 0, errors_of(tmp_path)
    steps = read_metrics(metrics).steps
    assert len(steps) == 3
    assert 0 < steps[2].loss < steps[0].loss < 6


def errors_of(folder: Path) -> str:
    """The ends of all logs of a run."""
    return "\n".join(path.read_text()[-2000:] for path in folder.rglob("*.log"))
