"""Command lines through Megatron's real parser and validation, without devices or processes."""

from __future__ import annotations

import os
import sys
import time

import pytest

from megatron_cp_ext.features.dry_run import DryRun
from megatron_cp_ext.features.facts import Facts

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128 --attention-dropout 0 --bf16"
).split()
BIG = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--group-query-attention --num-query-groups 8 --seq-length 131072 "
    "--max-position-embeddings 131072 --micro-batch-size 1 --global-batch-size 128 "
    "--train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 "
    "--attention-dropout 0 --bf16 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --position-embedding-type rope "
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
    "--context-parallel-size 8 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2 "
    "--use-distributed-optimizer --cp-kernel reference --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1"
).split()


@pytest.fixture(scope="module")
def cpu() -> DryRun:
    return DryRun(Facts(platform="cpu", here=False))


@pytest.fixture(scope="module")
def cuda() -> DryRun:
    return DryRun(Facts(platform="cuda", here=False))


def test_512_ranks_are_planned_in_one_process(cuda: DryRun) -> None:
    start = time.process_time()
    outcome = cuda.check(BIG, 512, sample_rank=511)
    assert time.process_time() - start < 15
    assert outcome.errors == ()
    plan = outcome.plan
    groups = {group.kind: group for group in plan.groups}
    assert {kind: group.size for kind, group in groups.items()} == {
        "TP": 8,
        "CP": 8,
        "Ulysses": 2,
        "ring": 4,
        "DP": 2,
        "PP": 4,
    }
    assert groups["CP"].count == 64
    assert groups["TP"].sample == tuple(range(504, 512))
    assert all(511 in group.sample for group in plan.groups)
    assert plan.shards[0].tokens == ((0, 8192), (122880, 131072))
    assert plan.kernel == "reference" and plan.algorithm == "hybrid"
    assert plan.layers == 20 and plan.micro_batches == 64
    assert any("DotProductAttention" in patch for patch in plan.patches)
    # 70 billion parameters over 32 model-parallel ranks, and the embedding of the first stage
    assert plan.memory.parameters == pytest.approx(2 * 70.6e9 / 32, rel=0.05)
    assert plan.memory.gradients == pytest.approx(2 * plan.memory.parameters)
    assert plan.memory.optimizer == pytest.approx(6 * plan.memory.parameters / 16, rel=0.01)


def test_nothing_is_left_behind(cpu: DryRun, capsys) -> None:
    import torch
    from megatron.training import arguments

    before = (list(sys.argv), dict(os.environ), arguments.validate_args, torch.empty)
    assert cpu.check([*SMALL, "--context-parallel-size", "2"], 2).errors == ()
    assert cpu.check([*SMALL, "--context-parallel-size", "3"], 2).errors
    assert (list(sys.argv), dict(os.environ), arguments.validate_args, torch.empty) == before
    assert capsys.readouterr().out == ""


def test_the_target_platform_is_told_not_found(cpu: DryRun, cuda: DryRun) -> None:
    """A laptop can plan for a cluster: no CUDA device is missed, no CPU setting distorts."""
    argv = [*SMALL, "--context-parallel-size", "2", "--cp-platform", "cuda"]
    argv += ["--tensor-model-parallel-size", "2"]
    there = cuda.check(argv, 4)
    assert there.errors == ()
    assert there.plan.platform == "cuda"
    assert there.args.transformer_impl == "transformer_engine"
    assert not any("cpu-platform" in patch for patch in there.plan.patches)
    here = cpu.check(argv, 4)
    assert here.args.transformer_impl == "local"
    assert any("cpu-platform" in patch for patch in here.plan.patches)


def test_without_a_world_size_the_degrees_decide(cpu: DryRun) -> None:
    argv = [*SMALL, "--context-parallel-size", "4", "--pipeline-model-parallel-size", "2"]
    assert cpu.check(argv).plan.world == 8


def test_mistakes_of_every_kind_have_four_parts(cpu: DryRun) -> None:
    for extra, option in (
        ("--context-parallel-size 3", "--seq-length"),
        ("--lr three", "command line"),
        ("--no-such-flag", "command line"),
        ("--min-lr 7", "Megatron's own check"),
        ("--yaml-cfg /nowhere.yaml", "Megatron's own check"),
    ):
        outcome = cpu.check([*SMALL, *extra.split()])
        assert outcome.plan is None
        assert any(option in error.option for error in outcome.errors), extra
        for error in outcome.errors:
            assert error.option and str(error.value) and error.reason and error.remedy


def test_arguments_of_a_checkpoint_go_through_the_same_rules(cpu: DryRun) -> None:
    """`--use-checkpoint-args` changes what was parsed, before validation."""
    args = cpu.parse([*SMALL, "--context-parallel-size", "4"], 4)
    args.num_attention_heads, args.seq_length = 5, 66
    outcome = cpu.check_parsed(args)
    assert {error.option for error in outcome.errors} >= {"--seq-length", "--num-attention-heads"}


def test_a_yaml_file_goes_through_the_same_rules(cpu: DryRun, tmp_path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "disable_msc_deprecated: false\nenable_msc: false\nseq_length: 66\n"
        "max_position_embeddings: 66\nmicro_batch_size: 1\nhybrid_context_parallel: true\n"
        "data_path: null\nglobal_batch_size: 8\ncontext_parallel_algo: ulysses_cp_algo\n"
        "model_parallel:\n  context_parallel_size: 4\n  tensor_model_parallel_size: 1\n"
        "  pipeline_model_parallel_size: 1\n"
        "language_model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 3\n"
    )
    outcome = cpu.check(["--yaml-cfg", str(config)], 8)
    assert {error.option for error in outcome.errors} == {
        "--seq-length",
        "--context-parallel-size",
        "--num-attention-heads",
        "--hybrid-context-parallel",
    }


def test_an_earlier_runs_metrics_are_not_emptied(cpu: DryRun, tmp_path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("precious\n")
    argv = [*SMALL, "--context-parallel-size", "2", "--cp-metrics-file", str(metrics)]
    assert cpu.check(argv, 2).errors == ()
    assert metrics.read_text() == "precious\n"


def test_a_dry_run_flag_stops_nothing_here(cpu: DryRun) -> None:
    argv = [*SMALL, "--context-parallel-size", "2", "--cp-dry-run"]
    assert cpu.check(argv, 2).plan is not None


@pytest.mark.parametrize(
    ("extra", "mask"),
    [
        ("--window-size (8,0)", "causal window 8"),
        ("--reset-attention-mask", "causal documents"),
        ("--attention-mask-type general", "general"),
    ],
)
def test_masks_are_named(cpu: DryRun, extra: str, mask: str) -> None:
    outcome = cpu.check([*SMALL, "--context-parallel-size", "2", *extra.split()], 2)
    assert outcome.plan.mask == mask


def test_a_window_sends_less(cpu: DryRun) -> None:
    argv = [*SMALL, "--context-parallel-size", "4"]
    whole, windowed = (
        cpu.check([*argv, *extra], 4).plan for extra in ([], ["--window-size", "(4,0)"])
    )
    assert 0 < windowed.bytes_per_step < whole.bytes_per_step


def test_latent_attention_sends_heads_of_its_own_sizes(cpu: DryRun) -> None:
    latent = "--multi-latent-attention --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
    latent += "--position-embedding-type rope --no-rope-fusion --kv-lora-rank 16"
    plan = cpu.check([*SMALL, "--context-parallel-size", "2", *latent.split()], 2).plan
    # chunk 0 (16 tokens) goes to rank 1: 8 heads of 24 + 16 elements in bf16
    assert plan.shards[0].forward == 16 * 8 * (24 + 16) * 2


def test_without_context_parallelism_attention_is_megatrons(cpu: DryRun) -> None:
    plan = cpu.check(SMALL, 2).plan
    assert plan.algorithm is None and plan.kernel is None and plan.bytes_per_step == 0
