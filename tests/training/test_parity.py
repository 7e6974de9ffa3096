"""Training under context parallelism gives the numbers of training without it.

Every configuration trains 20 steps on real text in Megatron's own loop, and is held against the
same training at CP = 1 with Megatron's own attention: loss within 1e-5, grad norm within 1e-4,
at every step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_cp_ext.verification import Metrics, RunSpec, Tolerances, Workload, compare

Train = Callable[..., Metrics]

FP32, BF16 = Tolerances.of("fp32"), Tolerances.of("bf16")
ALGORITHMS = ("ring", "ulysses", "kvallgather")
LAYOUTS = ("tp=2", "tp=2,sp", "pp=2", "dp=2")


def assert_same_training(
    trained: Train, workload: Workload, spec: str, *, tolerances: Tolerances = FP32
) -> None:
    """Compare a run with the one at CP = 1 and the same TP and PP."""
    parsed = RunSpec.parse(spec)
    comparison = compare(
        trained(parsed.baseline(), workload), trained(parsed, workload), tolerances
    )
    assert not comparison.failures, f"{spec}: {comparison.failures}"


def test_ring_at_cp_2(trained: Train, workload: Workload) -> None:
    assert_same_training(trained, workload, "ring:cp=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "ulysses:cp=2",
        "kvallgather:cp=2",
        "ring:cp=4",
        "ulysses:cp=4",
        "kvallgather:cp=4",
        "hybrid:cp=4,ulysses=2",
    ],
)
def test_algorithms_at_cp_2_and_4(trained: Train, workload: Workload, spec: str) -> None:
    assert_same_training(trained, workload, spec)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "layout"), list(itertools.product(ALGORITHMS, LAYOUTS)))
def test_together_with_tp_pp_and_dp(
    trained: Train, workload: Workload, algorithm: str, layout: str
) -> None:
    assert_same_training(trained, workload, f"{algorithm}:cp=2,{layout}")


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["ring:cp=2", "ulysses:cp=2", "hybrid:cp=4,ulysses=2"])
def test_bf16(trained: Train, workload: Workload, spec: str) -> None:
    in_bf16 = dataclasses.replace(workload, dtype="bf16")
    assert_same_training(trained, in_bf16, spec, tolerances=BF16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "recompute-granularity=selective",
        "recompute-granularity=full,recompute-method=uniform,recompute-num-layers=1",
        "use-cp-send-recv-overlap",
        "use-distributed-optimizer",
    ],
)
def test_options_that_change_no_number(trained: Train, workload: Workload, options: str) -> None:
    assert_same_training(trained, workload, f"ring:cp=2,{options}")


@pytest.mark.slow
def test_learned_positions_layer_norm_and_plain_heads(trained: Train, workload: Workload) -> None:
    older_model = (
        *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
        *("--position-embedding-type", "learned_absolute"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
    )
    gpt2 = dataclasses.replace(workload, model=older_model)
    assert_same_training(trained, gpt2, "kvallgather:cp=2")


@pytest.mark.slow
@pytest.mark.parametrize("resumed", ["none", "ring:cp=2", "ulysses:cp=4"])
def test_a_checkpoint_of_cp_2_resumes_at_other_sizes(
    trained: Train, workload: Workload, tmp_path_factory: pytest.TempPathFactory, resumed: str
) -> None:
    whole = trained("ring:cp=2", workload)
    saved = tmp_path_factory.getbasetemp() / "checkpoint-of-cp-2"
    first = dataclasses.replace(workload, steps=5)
    trained("ring:cp=2", first, "--save", str(saved), "--save-interval", "5")
    second = dataclasses.replace(workload, steps=10)
    continued = trained(resumed, second, "--load", str(saved))
    comparison = compare(whole.between(6, 10), continued, FP32, must_learn=False)
    assert not comparison.failures, comparison.failures
    assert [step.iteration for step in continued.steps] == [6, 7, 8, 9, 10]


# Training scripts that break one thing and then train as usual.
MUTATIONS = {
    "wrong RoPE slice": """
from megatron.core.models.common.embeddings import rotary_pos_embedding as rope

def wrong(pos_emb, seq_dim, cp_group):
    return pos_emb.chunk(cp_group.size(), seq_dim)[cp_group.rank()]

rope.get_pos_emb_on_this_cp_rank = wrong
""",
    "one KV block dropped": """
from megatron_cp_ext.algorithms.interface import AttentionCall

tiles = AttentionCall.tiles

def blind_to_visitors(self, group, k_runs):
    return () if len(k_runs) == 1 else tiles(self, group, k_runs)

AttentionCall.tiles = blind_to_visitors
""",
    "two chunks swapped": """
import dataclasses
from megatron_cp_ext.layout import SequenceLayout

zigzag = SequenceLayout.zigzag

def swapped(seq_len, cp_size):
    layout = zigzag(seq_len, cp_size)
    return dataclasses.replace(layout, shards=layout.shards[::-1])

SequenceLayout.zigzag = swapped
""",
    "unscaled dKV": """
import megatron_cp_ext.algorithms.ring as ring

backward = ring.RingExchange.backward

def unscaled(self, *args, **kwargs):
    dq, dk, dv = backward(self, *args, **kwargs)
    return dq, dk / kwargs["call"].options.softmax_scale, dv

ring.RingExchange.backward = unscaled
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_fault_is_noticed(
    trained: Train, workload: Workload, tmp_path: Path, mutation: str
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        f"{MUTATIONS[mutation]}\nfrom megatron_cp_ext.megatron.pretrain_gpt import main\nmain()\n"
    )
    broken = dataclasses.replace(workload, script=script)
    comparison = compare(trained("none", workload), trained("ring:cp=2", broken), FP32)
    assert any("loss" in failure or "grad" in failure for failure in comparison.failures)
