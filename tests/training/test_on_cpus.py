"""Megatron's own training on CPU ranks: the numbers do not depend on how it is spread over them.

All runs of a model start from one checkpoint of a single rank, because Megatron's initial weights
depend on the tensor- and pipeline-parallel rank that draws them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_cp_ext.verification import Metrics, RunSpec, Tolerances, Workload, compare, train
from megatron_cp_ext.verification.launch import forked

pytestmark = pytest.mark.slow

FP32, BF16 = Tolerances.of("fp32"), Tolerances.of("bf16")

# Megatron pads the vocabulary to a multiple of this and TP: 272 tokens in either case.
PADDED = {1: "272", 2: "136"}

LEARNED_POSITIONS = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)
ROTARY = Workload().model
EXPERTS = (
    *ROTARY,
    *("--num-experts", "4", "--moe-router-topk", "2"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
)
MULTI_TOKEN = (*ROTARY, "--mtp-num-layers", "1")

Start = Callable[..., Metrics]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """`run("none:tp=2", workload, ...)`: train from the workload's common initial weights."""
    weights: dict[tuple[str, ...], Path] = {}
    done: dict[tuple[str, Workload, tuple[str, ...]], Metrics] = {}

    def start(spec: str, workload: Workload, *extra: str) -> Metrics:
        parsed = RunSpec.parse(spec)
        padded = ("--make-vocab-size-divisible-by", PADDED[parsed.tp])
        return train(
            parsed,
            workload,
            tmp_path_factory.mktemp("run"),
            extra_args=(*padded, *extra),
            launcher=forked,
            timeout_s=550,
        )

    def get(spec: str, workload: Workload, *extra: str) -> Metrics:
        key = (spec, workload, extra)
        if key in done:
            return done[key]
        if workload.model not in weights:
            folder = weights[workload.model] = tmp_path_factory.mktemp("weights")
            one = dataclasses.replace(workload, steps=1, dtype="fp32")
            still = ("--lr", "0", "--min-lr", "0", "--no-save-optim", "--no-save-rng")
            start("none", one, *still, "--save", str(folder), "--save-interval", "1")
        load = ("--load", str(weights[workload.model]), "--finetune")
        done[key] = start(spec, workload, *load, "--exit-on-missing-checkpoint", *extra)
        return done[key]

    return get


def assert_same(run: Start, spec: str, workload: Workload, tolerances: Tolerances = FP32) -> None:
    comparison = compare(run("none", workload), run(spec, workload), tolerances)
    assert not comparison.failures, comparison.failures


@pytest.mark.parametrize(
    "spec",
    [
        "none:dp=2",
        "none:dp=2,use-distributed-optimizer,overlap-grad-reduce,overlap-param-gather",
        "none:tp=2",
        "none:tp=2,sp",
        "none:pp=2",
        "none:tp=2,sp,recompute-granularity=selective",
        "none:pp=2,recompute-granularity=full,recompute-method=uniform,recompute-num-layers=1",
        "none:tp=2,sp,dp=2,use-distributed-optimizer",
    ],
)
def test_rms_norm_swiglu_gqa_and_rotary_positions(run: Start, spec: str) -> None:
    assert_same(run, spec, Workload(steps=8))


@pytest.mark.parametrize("spec", ["none:tp=2,sp", "none:pp=2"])
def test_layer_norm_and_learned_positions(run: Start, spec: str) -> None:
    assert_same(run, spec, Workload(steps=8, model=LEARNED_POSITIONS))


@pytest.mark.parametrize("spec", ["none:dp=2,use-distributed-optimizer", "none:tp=2,sp"])
def test_bf16(run: Start, spec: str) -> None:
    assert_same(run, spec, Workload(steps=8, dtype="bf16"), BF16)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_experts(run: Start, dispatcher: str) -> None:
    workload = Workload(steps=8, model=EXPERTS)
    spec = f"none:dp=2,expert-model-parallel-size=2,moe-token-dispatcher-type={dispatcher}"
    assert_same(run, spec, workload)


@pytest.mark.parametrize("spec", ["none:pp=2", "none:tp=2,sp"])
def test_multi_token_prediction(run: Start, spec: str) -> None:
    assert_same(run, spec, Workload(steps=8, model=MULTI_TOKEN))


def with_dropout(workload: Workload, attention: str, hidden: str) -> Workload:
    dropout = ("--attention-dropout", attention, "--hidden-dropout", hidden)
    return dataclasses.replace(workload, extra=dropout)


def test_tensor_parallel_ranks_drop_the_same_hidden_values(run: Start) -> None:
    """Without sequence parallelism, hidden values are whole on every rank, and so are the masks.

    Only the first rank reads data; had that moved its generator, the ranks would disagree.
    """
    workload = with_dropout(Workload(steps=8), attention="0", hidden="0.2")
    assert run("none", workload).losses != run("none", Workload(steps=8)).losses
    assert_same(run, "none:tp=2", workload)


def test_recomputation_drops_the_same_values_again(run: Start) -> None:
    workload = with_dropout(Workload(steps=4), attention="0.2", hidden="0.2")
    plain = run("none:tp=2,sp", workload)
    full = "recompute-granularity=full,recompute-method=uniform,recompute-num-layers=1"
    assert run(f"none:tp=2,sp,{full}", workload).grad_norms == plain.grad_norms
    selective = run("none:tp=2,sp,recompute-granularity=selective", workload)
    assert selective.grad_norms == plain.grad_norms


@pytest.mark.parametrize(
    ("spec", "dtype", "extra"),
    [
        ("none", "fp32", ()),
        ("none:pp=2", "fp32", ()),
        ("none:tp=2,sp,use-distributed-optimizer", "bf16", ()),
        ("none:dp=2,use-distributed-optimizer", "fp32", ()),
        ("none:dp=2,use-distributed-optimizer", "fp32", ("--ckpt-format", "torch")),
        ("none:dp=2,use-distributed-optimizer", "fp32", ("--dist-ckpt-optim-fully-reshardable",)),
    ],
)
def test_a_resumed_training_goes_on_to_the_last_digit(
    tmp_path_factory: pytest.TempPathFactory, spec: str, dtype: str, extra: tuple[str, ...]
) -> None:
    """With dropout, so that random states count: tracker's, default, and the optimizer's state."""
    whole = with_dropout(Workload(steps=4), attention="0.1", hidden="0.1")
    whole = dataclasses.replace(whole, dtype="bf16" if dtype == "bf16" else "fp32")
    saved = tmp_path_factory.mktemp("saved")

    def start(workload: Workload, *more: str) -> Metrics:
        folder = tmp_path_factory.mktemp("run")
        return train(
            RunSpec.parse(spec),
            workload,
            folder,
            extra_args=(*extra, *more),
            launcher=forked,
            timeout_s=550,
        )

    straight = start(whole)
    start(dataclasses.replace(whole, steps=2), "--save", str(saved), "--save-interval", "2")
    resumed = start(whole, "--load", str(saved), "--exit-on-missing-checkpoint")
    assert resumed.iterations == (3, 4)
    assert resumed.losses == straight.between(3, 4).losses
    assert resumed.grad_norms == straight.between(3, 4).grad_norms


def test_evaluation_leaves_the_training_as_it_was(run: Start, text: Path) -> None:
    """On real data, with a validation loss every other step."""
    workload = dataclasses.replace(Workload(steps=6), data_prefix=text)
    plain = run("none", workload, "--split", "80,20,0")
    evaluated = ("--split", "80,20,0", "--eval-iters", "1", "--eval-interval", "2")
    assert run("none", workload, *evaluated).losses == plain.losses
    assert plain.losses[-1] < plain.losses[0]


def test_workers_that_read_ahead_change_nothing(run: Start, text: Path) -> None:
    workload = dataclasses.replace(Workload(steps=4), data_prefix=text)
    assert run("none", workload, "--num-workers", "2").losses == run("none", workload).losses
