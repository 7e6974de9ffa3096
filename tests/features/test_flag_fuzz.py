"""Thousands of random command lines: each ends in a plan, or in mistakes that name a remedy."""

from __future__ import annotations

import argparse
import copy
import importlib
import random

import pytest

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.features.dry_run import DryRun, Outcome
from megatron_cp_ext.features.facts import Facts

LINES = 2000
SEED = 20260101

# For each dimension the ways to say something about it, an empty one for saying nothing.
WAYS: tuple[tuple[str, ...], ...] = (
    ("", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"),
    ("", "--sequence-parallel"),
    ("", "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 3"),
    ("", "--num-layers-per-virtual-pipeline-stage 1", "--num-virtual-stages-per-pipeline-rank 2"),
    *((*(f"--context-parallel-size {n}" for n in (1, 2, 3, 4, 8)),),),
    (
        "",
        "",
        *(
            f"--context-parallel-algo {name}"
            for name in (
                *("megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo"),
                *("ring", "ulysses", "hybrid", "kvallgather", "adaptive_cp_algo"),
            )
        ),
    ),
    ("", "", "--ulysses-degree-in-cp 2", "--ulysses-degree-in-cp 3", "--ulysses-degree-in-cp 0"),
    (
        "",
        "",
        "--hierarchical-context-parallel-sizes 2 2",
        "--hierarchical-context-parallel-sizes 4",
    ),
    ("", "", *(f"--cp-comm-type {k}" for k in ("p2p", "a2a", "a2a+p2p", "allgather", "p2p a2a"))),
    ("--seq-length 64", "--seq-length 96", "--seq-length 60", "--seq-length 1"),
    ("--max-position-embeddings 128", "--max-position-embeddings 64"),
    ("--num-attention-heads 8", "--num-attention-heads 4", "--num-attention-heads 6"),
    ("", "--group-query-attention --num-query-groups 2", "--group-query-attention"),
    ("--attention-dropout 0", "", "--attention-dropout 1"),
    ("", "", "--attention-mask-type general", "--cp-attention-mask-type general"),
    ("", "--reset-attention-mask", "--dataloader-inter-document-masking"),
    ("", "--no-create-attention-mask-in-dataloader"),
    ("", "", "--window-size (8,0)", "--softmax-type learnable"),
    ("", "--position-embedding-type rope", "--position-embedding-type relative"),
    ("", "", "", "--num-experts 4", "--num-experts 4 --expert-model-parallel-size 2"),
    ("", "", "--expert-tensor-parallel-size 1", "--expert-model-parallel-size 4"),
    ("", "", "--mtp-num-layers 1", "--multi-latent-attention --no-rope-fusion"),
    ("", "", "--recompute-granularity selective", "--recompute-granularity full"),
    ("", "", "--recompute-method uniform --recompute-num-layers 1"),
    ("", "--bf16", "--fp16", "--bf16 --fp16"),
    ("", "", "", "--cuda-graph-impl local", "--enable-cuda-graph"),
    ("", "", "", "--hybrid-context-parallel", "--flash-decode", "--qk-clip"),
    ("", "", "", "--attention-backend flash", "--attention-backend local", "--use-flash-attn"),
    ("", "", "--cp-window-size 1", "--cp-window-size 2", "--use-cp-send-recv-overlap"),
    ("", "", "", "--context-parallel-kv-cache-policy half", "--use-ulysses-allgather-kv"),
    ("", "", "--megatron-cp-in-bnsd", "--adaptive-cp-only-reschedule"),
    ("", "--global-batch-size 8", "--global-batch-size 6"),
    ("", "--use-distributed-optimizer", "--overlap-param-gather"),
    ("", "--calculate-per-token-loss", "--eod-mask-loss --no-cp-loss-correction"),
    ("", "", "--cp-kernel aten_cpu", "--cp-kernel reference", "--deterministic-mode"),
    ("", "--tp-comm-overlap", "", ""),
)
BASE = (
    "--num-layers 4 --hidden-size 48 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128"
)


def random_line(rng: random.Random) -> tuple[str, int]:
    """A command line and a world size. Most dimensions are left alone, so that some lines pass."""
    boldness = rng.choice((0.1, 0.3, 0.9))
    words = [rng.choice(ways) if rng.random() < boldness else ways[0] for ways in WAYS]
    return f"{BASE} {' '.join(words)}", rng.choice((1, 2, 4, 8, 12, 16, 24))


class Lines:
    """Parses and checks many lines; Megatron's parser is built once."""

    def __init__(self, platform: str) -> None:
        self.dry_run = DryRun(Facts(platform=platform, here=False))
        arguments = importlib.import_module("megatron.training.arguments")
        self.parser = argparse.ArgumentParser(allow_abbrev=False)
        arguments.add_megatron_arguments(self.parser)
        for feature in self.dry_run.features:
            feature.register_args(self.parser)

    def check(self, line: str, world_size: int) -> Outcome:
        args = copy.deepcopy(self.parser.parse_args(line.split()))
        args.rank, args.world_size = 0, world_size
        args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
        return self.dry_run.examine(args)


def complaint(outcome: Outcome) -> str | None:
    """What is wrong with an outcome; None for a plan or mistakes of ours."""
    if not outcome.errors:
        return None if outcome.plan is not None else "neither plan nor mistakes"
    for error in outcome.errors:
        if "Megatron's own check" in error.option:
            return f"a rule is missing: {error}"
    for finding in (*outcome.errors, *outcome.advice):
        if not (finding.option.startswith(("--", "CUDA_")) and finding.reason and finding.remedy):
            return f"incomplete: {finding}"
        if isinstance(finding, UsageError) and finding.remedy == finding.reason:
            return f"no remedy: {finding}"
    return None


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_every_line_ends_in_a_plan_or_in_mistakes_of_ours(platform: str) -> None:
    lines, rng = Lines(platform), random.Random(SEED)
    complaints: dict[str, str] = {}
    plans = 0
    with lines.dry_run.pretending():
        for _ in range(LINES):
            line, world = random_line(rng)
            outcome = lines.check(line, world)
            plans += outcome.plan is not None
            found = complaint(outcome)
            if found is not None:
                complaints.setdefault(found.splitlines()[0] + found[-200:], f"{world}: {line}")
    assert not complaints, "\n\n".join(f"{k}\n{v}" for k, v in complaints.items())
    assert plans > LINES // 20, "hardly a line is accepted: the fuzz tests one side only"
