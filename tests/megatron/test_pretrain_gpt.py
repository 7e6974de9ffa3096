"""The packaged GPT pre-training: what it refuses, which ranks read data, what it computes."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import mpu

from megatron_cp_ext.megatron import pretrain_gpt


@pytest.mark.parametrize("name", pretrain_gpt.UPSTREAM_ONLY)
def test_other_trainings_are_left_to_megatron_s_own_script(refused: Any, name: str) -> None:
    plain = dict.fromkeys(pretrain_gpt.UPSTREAM_ONLY)
    pretrain_gpt.check_args(argparse.Namespace(**plain))
    with refused("--" + name.replace("_", "-"), remedy="pretrain_gpt.py"):
        pretrain_gpt.check_args(argparse.Namespace(**{**plain, name: "given"}))


def test_the_loss_is_the_sum_over_unmasked_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False)
    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: args)
    losses = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    loss, tokens, report = pretrain_gpt.compute_loss(mask, losses.bfloat16())
    loss.backward()
    assert (loss.item(), tokens.item(), tokens.dtype) == (21.0, 3, torch.int32)
    assert report["lm loss"].tolist() == [21.0, 3.0]
    assert not report["lm loss"].requires_grad
    assert torch.equal(losses.grad, mask)


@pytest.mark.parametrize("check", ["check_for_nan_in_loss_and_grad", "check_for_spiky_loss"])
def test_losses_are_checked_as_the_flags_say(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    checks: list[dict[str, Any]] = []
    machine = SimpleNamespace(
        validate_result=lambda **given: checks.append(given),
        is_unexpectedly_large=lambda loss, threshold, context: loss > threshold,
    )
    monkeypatch.setattr(pretrain_gpt, "get_rerun_state_machine", lambda: machine)
    flags = {"check_for_nan_in_loss_and_grad": False, "check_for_spiky_loss": False, check: True}
    loss = torch.tensor(11.0)
    pretrain_gpt.check_loss(argparse.Namespace(**flags), loss)
    assert all(given["result"] is loss for given in checks)
    if check == "check_for_spiky_loss":
        assert [given["fatal"] for given in checks] == [False]
        assert checks[0]["rejection_func"](loss)
    else:
        assert [given["fatal"] for given in checks] == [True, True]
        bad = [torch.tensor(float("nan")), torch.tensor(float("inf"))]
        found = [[bool(given["rejection_func"](value)) for value in bad] for given in checks]
        assert found == [[True, False], [False, True]]


@pytest.mark.parametrize(
    ("tensor_rank", "at_an_end", "masks", "builds"),
    [
        (0, True, False, True),
        (0, False, False, False),
        (0, False, True, True),
        (1, True, True, False),
    ],
)
def test_data_is_read_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, tensor_rank: int, at_an_end: bool, masks: bool, builds: bool
) -> None:
    args = argparse.Namespace(dataloader_inter_document_masking=masks)
    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: args)
    monkeypatch.setattr(pretrain_gpt, "needs_tokens", lambda args, stage: at_an_end)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    assert pretrain_gpt.builds_dataset() is builds


@pytest.mark.parametrize(
    ("pipeline", "untied", "expected"),
    [([3], False, [3]), ([4, 5, 6], False, [4, 6]), ([4, 5, 6], True, [4])],
)
def test_ranks_with_word_embeddings(
    monkeypatch: pytest.MonkeyPatch, pipeline: list[int], untied: bool, expected: list[int]
) -> None:
    args = argparse.Namespace(untie_embeddings_and_output_weights=untied)
    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: args)
    monkeypatch.setattr(pretrain_gpt, "core_transformer_config_from_args", lambda args: None)
    monkeypatch.setattr(pretrain_gpt, "get_mtp_ranks", lambda ranks, config: [])
    assert pretrain_gpt.embedding_ranks(pipeline) == expected


def test_document_boundaries_reach_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[torch.Tensor] = []
    monkeypatch.setattr(pretrain_gpt, "update_seqlen_stats_from_cu_seqlens", counted.append)
    boundaries = torch.tensor([[0, 3, 8]], dtype=torch.int32)
    batch = {"cu_seqlens": boundaries, "max_seqlen": torch.tensor([5])}
    packed = pretrain_gpt.packed_sequences(batch, 8)
    assert packed is not None
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 3, 8]
    assert (packed.max_seqlen_q, packed.max_seqlen_kv) == (5, 5)
    assert [seen.tolist() for seen in counted] == [[0, 3, 8]]
    assert pretrain_gpt.packed_sequences({"cu_seqlens": None}, 8) is None
