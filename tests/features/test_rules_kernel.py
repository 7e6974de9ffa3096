"""Rules about kernels, masks and platforms."""

from __future__ import annotations

import pytest

from megatron_cp_ext.features.facts import Facts, installed_versions
from megatron_cp_ext.kernels import KERNELS

ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
THERE = Facts(platform="cuda", here=False, environment=ONE_QUEUE)
HERE = Facts(platform="cuda", environment=ONE_QUEUE, device_arch=9)
# What a CUDA machine may be advised of that has nothing to do with the rule in question.
QUIET = {"cp_kernel": "reference", "seq_length": 1 << 20, "max_position_embeddings": 1 << 20}


def test_dropout_takes_the_kernel_that_has_it(hint, mistake) -> None:
    assert "reference" in hint("--attention-dropout", attention_dropout=0.1).reason
    error = mistake("--attention-dropout", attention_dropout=0.1, cp_kernel="aten_cpu")
    assert "--attention-dropout 0" in error.remedy


def test_dropout_by_name_needs_no_advice(found) -> None:
    assert found(attention_dropout=0.1, cp_kernel="reference") == ({}, {})


def test_a_kernel_of_another_platform(found) -> None:
    assert "aten_cpu" in KERNELS
    errors, _ = found(facts=THERE, cp_kernel="aten_cpu")
    assert "CPU tensors only" in errors["--cp-kernel"].reason


@pytest.mark.parametrize("value", [1.0, -0.1])
def test_dropout_is_a_probability(found, value: float) -> None:
    errors, _ = found(attention_dropout=value)
    assert "probability" in errors["--attention-dropout"].reason


def test_transformer_engine_that_is_missing_or_too_old(found) -> None:
    asked = {"transformer_impl": "transformer_engine", **QUIET}
    errors, _ = found(facts=HERE, **asked)
    assert "not importable" in errors["--transformer-impl"].reason
    assert "pip install" in errors["--transformer-impl"].remedy
    old = Facts(**{**vars(HERE), "versions": {"transformer_engine": "1.4.0"}})
    errors, _ = found(facts=old, **asked)
    assert errors["--transformer-impl"].value == "transformer_engine 1.4.0"
    new = Facts(**{**vars(HERE), "versions": {"transformer_engine": "2.3.0", "torch": "2.8"}})
    assert found(facts=new, **asked)[0] == {}


def test_packages_of_a_machine_elsewhere_are_not_judged(found) -> None:
    assert found(facts=THERE, transformer_impl="transformer_engine", **QUIET)[0] == {}


def test_flash_attention_that_is_missing(found) -> None:
    errors, _ = found(facts=HERE, **{**QUIET, "cp_kernel": "flash_attn"})
    assert "flash_attn is not importable" in str(errors["--cp-kernel"].reason)


def test_an_old_torch(mistake) -> None:
    error = mistake("--cp-platform", facts=Facts(versions={"torch": "2.1.0"}))
    assert "2.6" in error.reason


def test_npu_needs_its_package(found) -> None:
    errors, _ = found(facts=Facts(platform="npu"), **QUIET)
    assert "torch_npu" in errors["--cp-platform"].reason


def test_installed_versions_are_found() -> None:
    versions = installed_versions()
    assert versions["torch"].startswith("2.") and versions["megatron"].startswith("0.")


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--attention-backend", {"attention_backend": "flash"}),
        ("--attention-backend", {"attention_backend": "local"}),
        ("--flash-attention-version", {"flash_attention_version": 3}),
    ],
)
def test_megatrons_choice_of_kernel_is_not_ignored(mistake, found, option: str, changes) -> None:
    assert "--cp-kernel" in mistake(option, **changes).remedy
    assert found(**changes, context_parallel_size=1, spec=["local"]) == ({}, {})
    assert found(attention_backend="auto") == ({}, {})


def test_megatrons_local_backend_has_a_spec(mistake) -> None:
    mistake("--attention-backend", attention_backend="local", context_parallel_size=1)


def test_an_old_flag_for_flash_attention(hint) -> None:
    hint("--use-flash-attn", use_flash_attn=True)


def test_a_general_mask_must_be_made(mistake, found) -> None:
    option = "--attention-mask-type"
    general = {"attention_mask_type": "general"}
    mistake(option, create_attention_mask_in_dataloader=False, **general)
    mistake(option, dataloader_inter_document_masking=True, **general)
    assert found(create_attention_mask_in_dataloader=True, **general) == ({}, {})


def test_a_long_general_mask_is_large(hint) -> None:
    long = {"seq_length": 65536, "max_position_embeddings": 65536}
    assert "4 GiB" in hint("--attention-mask-type", attention_mask_type="general", **long).reason


@pytest.mark.parametrize("masks", [{"eod_mask_loss": True}, {"sft": True}, {"fim_data": True}])
def test_uneven_loss_masks_without_the_correction(hint, found, masks) -> None:
    (option,) = ("--" + name.replace("_", "-") for name in masks)
    assert "--calculate-per-token-loss" in hint(option, cp_loss_correction=False, **masks).remedy
    assert found(cp_loss_correction=True, **masks) == ({}, {})
    assert found(cp_loss_correction=False, calculate_per_token_loss=True, **masks) == ({}, {})


def test_one_hardware_queue_before_blackwell(found) -> None:
    bare = {"platform": "cuda", "environment": {}}
    option = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert option in found(facts=Facts(device_arch=9, **bare), **QUIET)[0]
    assert option in found(facts=Facts(here=False, **bare), **QUIET)[1]
    for facts in (Facts(device_arch=10, **bare), HERE):
        errors, advice = found(facts=facts, **QUIET)
        assert option not in errors and option not in advice
    assert option not in found()[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"context_parallel_algo": "ulysses_cp_algo"},
        {"context_parallel_algo": "kvallgather_cp_algo"},
        {"context_parallel_size": 1},
    ],
)
def test_two_directions_need_a_ring(mistake, changes) -> None:
    mistake("--use-cp-send-recv-overlap", use_cp_send_recv_overlap=True, **changes)


def test_rings_overlap(found) -> None:
    assert found(use_cp_send_recv_overlap=True) == ({}, {})
    hybrid = {"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2}
    assert found(use_cp_send_recv_overlap=True, **hybrid) == ({}, {})


def test_chunks_too_short_to_hide_the_ring(found, hint) -> None:
    given = {"cp_kernel": "reference", "bf16": True}
    short = {"seq_length": 4096, "max_position_embeddings": 4096}
    advice = hint("--seq-length", facts=THERE, **short, **given)
    # MHA in bf16 within a node: 2 F / B = 2 x 600e12 / 450e9 tokens on each of 4 ranks
    assert "2667" in advice.reason and f"{4 * 2667} tokens" in advice.remedy
    enough = {"seq_length": 8 * 1334, "max_position_embeddings": 8 * 1334}
    assert found(facts=THERE, **enough, **given) == ({}, {})
    assert found(facts=THERE, context_parallel_algo="ulysses", **short, **given) == ({}, {})


def test_short_chunks_on_cpus_are_for_tests(found) -> None:
    assert found(seq_length=64) == ({}, {})
