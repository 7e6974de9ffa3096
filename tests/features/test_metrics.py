"""The metrics file: exact values, one line an iteration, from one rank."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import mpu

from megatron_cp_ext.features import metrics
from megatron_cp_ext.features.metrics import TRAINING, MetricsFeature, MetricsRecorder
from megatron_cp_ext.patching import PatchManager


def training_log(
    loss_dict: dict[str, torch.Tensor],
    total_loss_dict: dict[str, torch.Tensor],
    learning_rate: float | None,
    iteration: int,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: float | torch.Tensor | None,
    params_norm: float | None,
    num_zeros_in_grad: float | None,
    max_attention_logit: float | None,
    pg_collection: Any = None,
) -> bool:
    """Megatron's signature; it answers whether to report memory again."""
    loss_dict.clear()  # nothing of it may be needed afterwards
    return not report_memory_flag


def log(recorder: MetricsRecorder, iteration: int = 1, **given: Any) -> bool:
    values = {
        "loss_dict": {"lm loss": torch.tensor(1 / 3)},
        "skipped_iter": 0,
        "grad_norm": 0.1,
        "num_zeros_in_grad": None,
        **given,
    }
    return recorder.log(
        training_log,
        values["loss_dict"],
        {},
        1e-3,
        iteration,
        1.0,
        True,
        values["skipped_iter"],
        values["grad_norm"],
        None,
        values["num_zeros_in_grad"],
        max_attention_logit=None,
    )


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MetricsRecorder:
    monkeypatch.setattr(metrics, "holds_the_loss", lambda: True)
    args = argparse.Namespace(consumed_train_samples=8)
    return MetricsRecorder(tmp_path / "new" / "folder" / "metrics.jsonl", args)


def lines(recorder: MetricsRecorder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in recorder.path.read_text().splitlines()]


def test_a_line_holds_the_exact_values(recorder: MetricsRecorder) -> None:
    third = torch.tensor(1 / 3)
    assert log(recorder, loss_dict={"lm loss": third, "mtp loss": torch.tensor([2.5])}) is False
    (line,) = lines(recorder)
    assert line["lm loss"] == third.item() != 1 / 3, "float32, and all of its digits"
    elapsed = line.pop("elapsed_ms")
    assert isinstance(elapsed, float)
    assert elapsed > 0
    assert line == {
        "iteration": 1,
        "lm loss": third.item(),
        "mtp loss": 2.5,
        "grad_norm": 0.1,
        "learning_rate": 1e-3,
        "skipped": False,
        "consumed_samples": 8,
    }


def test_every_line_can_be_read_as_soon_as_it_is_written(recorder: MetricsRecorder) -> None:
    for iteration in (1, 2, 3):
        log(recorder, iteration)
        assert [line["iteration"] for line in lines(recorder)] == list(range(1, iteration + 1))


def test_a_skipped_iteration_and_what_is_not_a_number_are_told(recorder: MetricsRecorder) -> None:
    log(recorder, skipped_iter=1, grad_norm=None, loss_dict={"lm loss": torch.tensor(math.nan)})
    (line,) = lines(recorder)
    assert line["skipped"] is True
    assert line["grad_norm"] is None
    assert math.isnan(line["lm loss"])


def test_zeros_in_the_gradient_are_counted_when_megatron_counts_them(
    recorder: MetricsRecorder,
) -> None:
    log(recorder, num_zeros_in_grad=torch.tensor(12.0), grad_norm=torch.tensor(0.5))
    (line,) = lines(recorder)
    assert (line["num_zeros"], line["grad_norm"]) == (12.0, 0.5)


def test_the_time_is_that_of_the_step(
    recorder: MetricsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(100.0)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    assert recorder.time_step(lambda x, y: x + y, 1, y=2) == 3
    log(recorder)
    assert lines(recorder)[0]["elapsed_ms"] == 1000.0


@pytest.mark.parametrize(
    ("last_stage", "data", "tensor", "writes"),
    [(True, 0, 0, True), (False, 0, 0, False), (True, 1, 0, False), (True, 0, 1, False)],
)
def test_one_rank_writes_and_all_ranks_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last_stage: bool,
    data: int,
    tensor: int,
    writes: bool,
) -> None:
    asked = {}

    def data_rank(**given: bool) -> int:
        asked.update(given)
        return data

    monkeypatch.setattr(mpu, "is_pipeline_last_stage", lambda **given: last_stage)
    monkeypatch.setattr(mpu, "get_data_parallel_rank", data_rank)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda: tensor)
    args = argparse.Namespace(consumed_train_samples=8)
    recorder = MetricsRecorder(tmp_path / "metrics.jsonl", args)
    assert log(recorder) is False
    assert recorder.path.exists() == writes
    assert asked in ({}, {"with_context_parallel": True})


def parse(*given: str, rank: int = 0) -> tuple[MetricsFeature, argparse.Namespace]:
    feature, parser = MetricsFeature(), argparse.ArgumentParser()
    feature.register_args(parser)
    return feature, parser.parse_args(given, argparse.Namespace(rank=rank))


@pytest.mark.parametrize(("rank", "left"), [(0, ""), (1, "yesterday's")])
def test_rank_0_empties_the_file_before_the_training(tmp_path: Path, rank: int, left: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("yesterday's")
    feature, args = parse("--cp-metrics-file", str(path), rank=rank)
    feature.validate_args(args)
    feature.post_validate_args(args)
    assert path.read_text() == left


def test_a_folder_is_refused(tmp_path: Path, refused: Any) -> None:
    feature, args = parse("--cp-metrics-file", str(tmp_path))
    with refused("--cp-metrics-file", reason="folder", remedy="file"):
        feature.validate_args(args)


def test_without_the_flag_nothing_is_patched() -> None:
    feature, args = parse()
    manager = PatchManager()
    feature.validate_args(args)
    feature.post_validate_args(args)
    feature.register_patches(manager, args)
    manager.apply()
    assert not manager.applied()


def test_with_the_flag_megatron_s_log_and_step_are_wrapped(tmp_path: Path) -> None:
    feature, args = parse("--cp-metrics-file", str(tmp_path / "metrics.jsonl"))
    manager = PatchManager()
    feature.register_patches(manager, args)
    manager.apply()
    try:
        assert [(applied.target, applied.kind) for applied in manager.applied()] == [
            (f"{TRAINING}:train_step", "wrap"),
            (f"{TRAINING}:training_log", "wrap"),
        ]
    finally:
        manager.undo()
