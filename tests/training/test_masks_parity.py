"""Masks and attention variants in training: the numbers of CP = 1, as in `test_parity.py`.

Where Megatron's own attention cannot do it at CP = 1, the baseline is ours on one rank, and one
more comparison ties it to something Megatron can do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from megatron_cp_ext.verification import Metrics, RunSpec, Tolerances, Workload, compare

Train = Callable[..., Metrics]

FP32 = Tolerances.of("fp32")
OURS_ALONE = RunSpec("none", options=("--context-parallel-algo", "ring"))

MLA = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--multi-latent-attention", "--q-lora-rank", "24", "--kv-lora-rank", "16"),
    *("--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "12"),
    *("--rope-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)


def assert_equal(
    trained: Train, workload: Workload, expected: RunSpec | str, *specs: RunSpec | str
) -> None:
    """Compare each run with the expected one at every step."""
    for spec in specs:
        comparison = compare(trained(expected, workload), trained(spec, workload), FP32)
        assert not comparison.failures, f"{spec}: {comparison.failures}"


def with_options(workload: Workload, *options: str) -> Workload:
    return dataclasses.replace(workload, extra=options)


RESET = ("--reset-position-ids", "--reset-attention-mask")


@pytest.mark.slow
def test_reset_position_ids_and_attention_mask(trained: Train, packed_workload: Workload) -> None:
    reset = with_options(packed_workload, *RESET)
    assert_equal(trained, reset, "none", "kvallgather:cp=2", "ring:cp=4", "hybrid:cp=4,ulysses=2")
    one_document = trained("none", packed_workload)
    assert compare(one_document, trained("none", reset), FP32).failures, "the mask matters"


@pytest.mark.slow
def test_a_dense_mask_from_the_data_loader(trained: Train, packed_workload: Workload) -> None:
    reset = with_options(packed_workload, *RESET)
    dense = dataclasses.replace(reset, extra=(*RESET, "--attention-mask-type", "general"))
    expected = trained("none", reset)
    for spec in ("ring:cp=2", "ulysses:cp=4"):
        assert not compare(expected, trained(spec, dense), FP32).failures, spec


@pytest.mark.slow
def test_inter_document_masking(trained: Train, packed_workload: Workload) -> None:
    packed = with_options(packed_workload, "--dataloader-inter-document-masking")
    assert_equal(trained, packed, OURS_ALONE, "ring:cp=2", "ulysses:cp=4", "kvallgather:cp=4")
    # The same documents, as Megatron's own attention sees them.
    reset = trained("none", with_options(packed_workload, *RESET))
    assert not compare(reset, trained("ring:cp=2", packed), FP32).failures


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2,sp", "pp=2"])
def test_reset_attention_mask_with_tp_and_pp(
    trained: Train, packed_workload: Workload, layout: str
) -> None:
    reset = with_options(packed_workload, *RESET)
    spec = RunSpec.parse(f"ring:cp=2,{layout}")
    assert_equal(trained, reset, spec.baseline(), spec)


@pytest.mark.slow
def test_sliding_window_with_a_skip_pattern(trained: Train, workload: Workload) -> None:
    windowed = with_options(workload, "--window-size", "64,0", "--window-attn-skip-freq", "2")
    assert_equal(trained, windowed, "none", "ring:cp=2", "kvallgather:cp=4", "ulysses:cp=4")


@pytest.mark.slow
def test_learnable_sinks(trained: Train, workload: Workload) -> None:
    sinks = with_options(workload, "--softmax-type", "learnable")
    assert_equal(trained, sinks, "none", "ulysses:cp=2", "ring:cp=4", "hybrid:cp=4,ulysses=2")


@pytest.mark.slow
def test_sinks_with_tensor_parallelism(trained: Train, workload: Workload) -> None:
    sinks = with_options(workload, "--softmax-type", "learnable")
    assert_equal(trained, sinks, "none:tp=2", "ulysses:cp=2,tp=2")


@pytest.mark.slow
def test_one_kv_head_for_four_ulysses_ranks(trained: Train, workload: Workload) -> None:
    one_kv_head = with_options(workload, "--num-query-groups", "1")
    assert_equal(trained, one_kv_head, "none", "ulysses:cp=2", "ulysses:cp=4")


@pytest.mark.slow
def test_multi_latent_attention(trained: Train, workload: Workload) -> None:
    mla = dataclasses.replace(workload, model=MLA)
    assert_equal(trained, mla, OURS_ALONE, "ring:cp=2", "ulysses:cp=4")


@pytest.mark.slow
def test_attention_dropout(trained: Train, workload: Workload) -> None:
    dropout = with_options(workload, "--attention-dropout", "0.1", "--cp-kernel", "reference")
    assert_equal(trained, dropout, OURS_ALONE, "ulysses:cp=2", "ring:cp=4", "kvallgather:cp=4")
    without = with_options(workload, "--cp-kernel", "reference")
    assert compare(trained(OURS_ALONE, without), trained(OURS_ALONE, dropout), FP32).failures
