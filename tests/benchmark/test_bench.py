"""The benchmark measures what it says: all are timed, efficiency by definition, bytes counted."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest

from megatron_cp_ext.benchmark import Workload, measure
from megatron_cp_ext.benchmark.measure import LIMIT
from megatron_cp_ext.cli.bench import document_boundaries
from megatron_cp_ext.cli.main import main
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.mask import AttentionMask
from megatron_cp_ext.planner.traffic import AttentionShape, attention_traffic

ALGORITHMS = ("ring", "ulysses", "kvallgather", "hybrid")


def test_every_algorithm_is_timed_beside_one_rank() -> None:
    workload = Workload(seq_len=256, mask=AttentionMask.full())
    measured = measure(workload, ALGORITHMS, ranks=2, repeats=2)
    assert [each.algorithm for each in measured] == [LIMIT, *ALGORITHMS]
    alone = measured[0]
    assert (alone.ranks, alone.bytes_sent, alone.efficiency) == (1, 0, 1.0)
    for each in measured:
        assert 0 < each.forward_s < each.total_s
        assert 0 < each.backward_s < each.total_s
    for each in measured[1:]:
        assert each.efficiency == pytest.approx(alone.total_s / 2 / each.total_s)
    tokens, kv, bf16, fp32 = 128, 2 * 2 * 64, 2, 4
    forward_kv = backward_kv = tokens * kv * bf16
    assert measured[1].bytes_sent == forward_kv + backward_kv + tokens * kv * fp32


def test_packed_documents_lie_as_in_a_training() -> None:
    bounds = [0, 37, 40, 131, 256]
    mask = AttentionMask.documents(bounds)
    _, measured = measure(Workload(seq_len=256, mask=mask), ["ring"], ranks=2, repeats=1)
    sent = attention_traffic(
        AttentionShape(heads=8, kv_heads=2, qk_dim=64, v_dim=64),
        SequenceLayout.zigzag_documents(bounds, 2),
        mask,
        algorithm="ring",
    )
    assert measured.bytes_sent == statistics.mean(each.forward + each.backward for each in sent)


def test_the_command_prints_a_table_and_writes_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    command = ["bench", "--algorithms", "ring", "--seq-length", "128", "--repeats", "1"]
    assert main([*command, "--mask", "window:40", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "ring" in shown
    assert LIMIT in shown
    written = json.loads(file.read_text())
    assert written["arguments"]["mask"] == "window:40"
    assert [row["algorithm"] for row in written["measured"]] == [LIMIT, "ring"]
    assert all(row["total_s"] > 0 for row in written["measured"])


@pytest.mark.parametrize("mask", ["diagonal", "window:", "window:-3", "documents:0", "full:3"])
def test_a_mask_it_does_not_know_is_refused(capsys: pytest.CaptureFixture[str], mask: str) -> None:
    assert main(["bench", "--mask", mask]) == 2
    assert "--mask" in capsys.readouterr().err


def test_documents_have_the_mean_length_and_fill_the_sequence() -> None:
    bounds = document_boundaries(100_000, 1000)
    assert (bounds[0], bounds[-1]) == (0, 100_000)
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    assert min(lengths) >= 1
    assert 700 < sum(lengths) / len(lengths) < 1400
    assert bounds == document_boundaries(100_000, 1000)
