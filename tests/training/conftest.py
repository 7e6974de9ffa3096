"""Trainings shared by the parity tests: text on disk, and every run made once."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_cp_ext.verification import Metrics, RunSpec, Workload, train
from megatron_cp_ext.verification.launch import forked

PREPARE = Path(__file__).parents[2] / "launch" / "prepare_data.py"


def prepare(*arguments: str) -> None:
    """Run the data preparation as a user does."""
    subprocess.run(
        [sys.executable, str(PREPARE), *arguments], check=True, capture_output=True, timeout=300
    )


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text: the standard library's sources, one document for each file."""
    prefix = tmp_path_factory.mktemp("text") / "text"
    prepare("--output-prefix", str(prefix), "--max-bytes", "400000")
    return prefix


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text in documents of 1 to 200 bytes, so that every sequence holds several."""
    folder = tmp_path_factory.mktemp("short")
    source = Path(json.__file__).read_bytes() + Path(random.__file__).read_bytes()
    draw = random.Random(0)
    start = number = 0
    while start < len(source):
        stop = start + draw.choice([1, 2, 5, 9, 17, 33, 70, 200])
        (folder / f"{number:05d}.txt").write_bytes(source[start:stop])
        start, number = stop, number + 1
    prefix = folder / "documents"
    prepare("--input", str(folder), "--glob", "*.txt", "--output-prefix", str(prefix))
    return prefix


Train = Callable[..., Metrics]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`trained(spec, workload, *extra)`: the metrics of a run, made at its first mention."""
    done: dict[tuple[RunSpec, Workload, tuple[str, ...]], Metrics] = {}

    def get(spec: RunSpec | str, workload: Workload, *extra: str) -> Metrics:
        spec = RunSpec.parse(spec) if isinstance(spec, str) else spec
        key = (spec, workload, extra)
        if key not in done:
            folder = tmp_path_factory.mktemp("run")
            done[key] = train(
                spec, workload, folder, extra_args=extra, launcher=forked, timeout_s=300
            )
        return done[key]

    return get


@pytest.fixture(scope="session")
def workload(text: Path) -> Workload:
    """Twenty steps of a tiny GPT on real text, fp32."""
    return Workload(steps=20, data_prefix=text)


@pytest.fixture(scope="session")
def packed_workload(short_documents: Path) -> Workload:
    """The same on short documents, two sequences at a time."""
    return dataclasses.replace(Workload(steps=20, micro_batch_size=2), data_prefix=short_documents)
