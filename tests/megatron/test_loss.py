"""The loss under context parallelism equals that of one rank, however masks fall on the ranks.

Where Megatron's own way gives another loss, the same training with the correction off must fail
the same comparison.
"""

from __future__ import annotations

import functools
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_cp_ext.features.loss import LossFeature
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.megatron import loss, moe, mtp
from megatron_cp_ext.patching import PatchManager
from megatron_cp_ext.testing import GlooPool
from megatron_cp_ext.verification.launch import forked
from megatron_cp_ext.verification.metrics import Metrics
from megatron_cp_ext.verification.spec import RunSpec
from megatron_cp_ext.verification.training import train
from megatron_cp_ext.verification.workload import Workload

EOD = 256
SEQ = 128
STEPS = 10
OFF = "--no-cp-loss-correction"
PER_TOKEN = "--calculate-per-token-loss"
MTP = ("--mtp-num-layers", "1")
MOE = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.1"),
    *("--moe-z-loss-coeff", "0.1", "--moe-ffn-hidden-size", "64"),
    *("--expert-model-parallel-size", "2"),
)

GetPool = Callable[[int], GlooPool]


# ------------------------------------------------------------------------------------ trainings


def write_documents(prefix: Path, documents: Sequence[np.ndarray]) -> Path:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(document.astype(np.uint16), [document.size])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many documents of a few tokens: each rank has another number of ends in its shard."""
    random = np.random.default_rng(7)
    documents = [
        np.append(random.integers(0, EOD, random.integers(1, 20)), EOD) for _ in range(2000)
    ]
    return write_documents(tmp_path_factory.mktemp("short") / "data", documents)


@pytest.fixture(scope="module")
def padded_middles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences whose second and third quarters are ends of documents: all that rank 1 of 2 has.

    As every document is as long as a sequence, shuffling keeps them aligned.
    """
    random = np.random.default_rng(8)
    documents = []
    for _ in range(100):
        document = random.integers(0, EOD, SEQ)
        document[SEQ // 4 : 3 * SEQ // 4] = EOD
        documents.append(document)
    return write_documents(tmp_path_factory.mktemp("padded") / "data", documents)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Metrics, str]]:
    """`run(data, spec, *options)`: what that training logs, trained once in this module."""

    @functools.cache
    def result(data: Path, spec: str, *options: str) -> tuple[Metrics, str]:
        workload = Workload(
            steps=STEPS, seq_length=SEQ, micro_batch_size=2, global_batch_size=4, data_prefix=data
        )
        directory = tmp_path_factory.mktemp("run")
        metrics = train(
            RunSpec.parse(spec),
            workload,
            directory,
            launcher=forked,
            extra_args=["--eod-mask-loss", *options],
            timeout_s=300.0,
        )
        logs = directory.glob("ranks/0/*/stdout.log")
        return metrics, "\n".join(log.read_text() for log in sorted(logs))

    return result


def close(ours: Metrics, expected: Metrics) -> bool:
    """Whether losses and gradient norms agree at every step."""
    assert ours.iterations == expected.iterations == tuple(range(1, STEPS + 1))
    return np.allclose(ours.losses, expected.losses, rtol=1e-5, atol=0) and np.allclose(
        ours.grad_norms, expected.grad_norms, rtol=1e-4, atol=0
    )


def mtp_losses(log: str) -> list[float]:
    return [float(value) for value in re.findall(r"mtp_1 loss: (\S+)", log)]


TRAINING = (pytest.mark.slow, pytest.mark.timeout(900))


def trainings(function: Callable[..., None]) -> Callable[..., None]:
    for mark in TRAINING:
        function = mark(function)
    return function


@trainings
@pytest.mark.parametrize("spec", ["ring:cp=2", "hybrid:cp=4,ulysses=2"])
def test_uneven_masks(run: Any, short_documents: Path, spec: str) -> None:
    expected, _ = run(short_documents, "none")
    ours, log = run(short_documents, spec)
    assert close(ours, expected)
    assert log.count("losses are averaged over the tokens of whole sequences") == 1


@trainings
def test_uneven_masks_need_the_correction(run: Any, short_documents: Path) -> None:
    expected, _ = run(short_documents, "none")
    theirs, log = run(short_documents, "ring:cp=2", OFF)
    assert not close(theirs, expected)
    assert log.count("losses are averaged as Megatron does") == 1


@trainings
def test_uneven_masks_with_loss_per_token(run: Any, short_documents: Path) -> None:
    expected, _ = run(short_documents, "none", PER_TOKEN)
    ours, _ = run(short_documents, "ring:cp=2", PER_TOKEN)
    assert close(ours, expected)


@trainings
@pytest.mark.parametrize("options", [(), (PER_TOKEN,)])
def test_a_rank_without_any_token_in_the_loss(
    run: Any, padded_middles: Path, options: tuple[str, ...]
) -> None:
    expected, _ = run(padded_middles, "none", *options)
    ours, _ = run(padded_middles, "ulysses:cp=2", *options)
    assert close(ours, expected)


@trainings
def test_a_rank_without_any_token_needs_the_correction(run: Any, padded_middles: Path) -> None:
    expected, _ = run(padded_middles, "none")
    theirs, _ = run(padded_middles, "ulysses:cp=2", OFF)
    assert not close(theirs, expected)


@trainings
@pytest.mark.parametrize("options", [(), (PER_TOKEN,)])
def test_multi_token_prediction(run: Any, short_documents: Path, options: tuple[str, ...]) -> None:
    expected, expected_log = run(short_documents, "none", *MTP, *options)
    ours, log = run(short_documents, "kvallgather:cp=2", *MTP, *options)
    assert close(ours, expected)
    # Megatron prints six digits after the point.
    assert mtp_losses(log) == pytest.approx(mtp_losses(expected_log), rel=2e-5)
    assert len(mtp_losses(log)) == STEPS


@trainings
@pytest.mark.parametrize("options", [(), (PER_TOKEN,)])
def test_multi_token_prediction_needs_the_correction(
    run: Any, short_documents: Path, options: tuple[str, ...]
) -> None:
    expected, expected_log = run(short_documents, "none", *MTP, *options)
    theirs, log = run(short_documents, "kvallgather:cp=2", *MTP, *options, OFF)
    assert not close(theirs, expected)
    assert mtp_losses(log) != pytest.approx(mtp_losses(expected_log), rel=2e-5)


@trainings
@pytest.mark.parametrize("options", [(), (PER_TOKEN,)])
def test_auxiliary_losses_of_experts(
    run: Any, short_documents: Path, options: tuple[str, ...]
) -> None:
    # The seed of an expert's weights depends on the rank that holds it, so both have two. With
    # two data-parallel ranks the same pairs of samples make up the micro batches.
    expected, _ = run(short_documents, "none:dp=2", *MOE, *options)
    ours, _ = run(short_documents, "ring:cp=2", *MOE, *options)
    assert close(ours, expected)


@trainings
@pytest.mark.parametrize("name", ["--moe-aux-loss-coeff", "--moe-z-loss-coeff"])
def test_auxiliary_losses_are_large_enough_to_be_seen(
    run: Any, short_documents: Path, name: str
) -> None:
    with_both, _ = run(short_documents, "none:dp=2", *MOE)
    without, _ = run(short_documents, "none:dp=2", *MOE, name, "0")
    assert not close(without, with_both)
