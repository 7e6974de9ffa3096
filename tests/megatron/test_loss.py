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
from megatron_cp_ext.megatron.cpu.startup import import_megatron_uncompiled
from megatron_cp_ext.megatron.documents import packed_layout
from megatron_cp_ext.patching import PatchManager
from megatron_cp_ext.patching.patch import wrap
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


# ------------------------------------------------------------------------------- the functions


def whole_and_boundaries(bounds: Sequence[int] | None, total: int) -> tuple[torch.Tensor, Any]:
    whole = torch.arange(1, 2 * total + 1).view(2, total)
    if bounds is None:
        return whole, None
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return whole, SimpleNamespace(
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
    )


def on_two_ranks(pool: GetPool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function's results on two ranks, which may have to import Megatron first."""
    return pool(2).run(function, *args, timeout=300.0, **kwargs)


def roll_on_ranks(bounds: Sequence[int] | None, total: int, dtype: torch.dtype) -> Any:
    import_megatron_uncompiled()
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    whole, params = whole_and_boundaries(bounds, total)
    size, rank = dist.get_world_size(), dist.get_rank()
    layout = layout_of(params, total, size)
    local = layout.shard(whole.to(dtype), rank, 1)
    return mtp.roll(roll_tensor, local, cp_group=dist.group.WORLD, packed_seq_params=params)


def layout_of(params: Any, total: int, size: int) -> SequenceLayout:
    if params is None:
        return SequenceLayout.zigzag(total, size)
    return packed_layout(params.cu_seqlens_q, total, size)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bounds", [None, (0, 12, 36), (0, 5, 6, 30)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_rolling_is_that_of_one_rank(
    gloo_pool: GetPool, bounds: Sequence[int] | None, dtype: torch.dtype
) -> None:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    total = 36
    whole, params = whole_and_boundaries(bounds, total)
    expected, count = roll_tensor(whole.to(dtype), packed_seq_params=params)
    layout = layout_of(params, total, 2)
    results = on_two_ranks(gloo_pool, roll_on_ranks, bounds, total, dtype)
    for rank, (rolled, summed) in enumerate(results):
        assert torch.equal(rolled, layout.shard(expected, rank, 1))
        assert torch.equal(summed, count)


def mtp_gradients(**case: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the MTP loss on this rank, and the part of one rank's it should be."""
    import_megatron_uncompiled()
    size, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([member]) for member in range(size)][rank]
    ours = mtp_gradient(dist.group.WORLD, **case)
    expected = mtp_gradient(alone, **case)
    layout = SequenceLayout.zigzag(expected.size(1), size)
    return ours, layout.shard(expected, rank, 1)


def mtp_gradient(group: Any, *, per_token: bool, with_labels: bool, masked_from: int) -> Any:
    """Gradient of the MTP loss by this rank's hidden states, `[3, s_local, 2, 4]`."""
    from megatron.core.transformer import multi_token_prediction as upstream

    size, rank, s = dist.get_world_size(group), dist.get_rank(group), 16
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, s, 2, 4, generator=random)
    weight = torch.randn(4, 7, generator=random)
    tokens = torch.randint(0, 7, (2, s), generator=random)
    mask = (torch.arange(s) < masked_from).float().expand(2, s)
    layout = SequenceLayout.zigzag(s, size)
    local = layout.shard(hidden, rank, 1).requires_grad_()
    config = SimpleNamespace(
        mtp_num_layers=2,
        mtp_loss_scaling_factor=0.3,
        mtp_detach_heads=False,
        calculate_per_token_loss=per_token,
    )

    def losses(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            logits.permute(1, 2, 0), labels.long(), reduction="none"
        )

    manager = PatchManager()
    manager.register(wrap(f"{upstream.__name__}:roll_tensor", mtp.roll, owner="test"))
    manager.apply()
    try:
        upstream.MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
        cut = layout.shard(tokens, rank, 1)
        out = mtp.process_loss(
            upstream.process_mtp_loss,
            hidden_states=local.flatten(0, 1),
            labels=cut if with_labels else None,
            loss_mask=layout.shard(mask, rank, 1),
            output_layer=lambda h, **_: (h @ weight, None),
            output_weight=None,
            runtime_gather_output=None,
            is_training=False,
            compute_language_model_loss=losses,
            config=config,
            cp_group=group,
            input_ids=cut,
        )
        (out * 0.0).sum().backward()
    finally:
        manager.undo()
    assert config.calculate_per_token_loss is per_token
    assert local.grad is not None
    return local.grad


@pytest.mark.timeout(600)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize("masked_from", [5, 9, 16])
def test_mtp_gradients_are_those_of_one_rank(
    gloo_pool: GetPool, per_token: bool, with_labels: bool, masked_from: int
) -> None:
    case = {"per_token": per_token, "with_labels": with_labels, "masked_from": masked_from}
    for gradient, expected in on_two_ranks(gloo_pool, mtp_gradients, **case):
        # Megatron averages gradients over ranks, unless it divides them by the count of tokens.
        mean = gradient if per_token else gradient / 2
        assert torch.allclose(mean, expected, rtol=1e-5, atol=1e-7)
        assert masked_from < 16 or expected.abs().sum() > 0


def outputs_on_ranks(*, train: bool) -> tuple[Any, ...]:
    tokens = torch.tensor([3, 0][dist.get_rank()], dtype=torch.int)
    total = tokens * 2.0
    report = {"lm loss": torch.stack([total, tokens.float()]), "other": torch.ones(1)}
    with torch.set_grad_enabled(train):
        loss_, count, reported = loss.over_whole_sequence((total, tokens, report), dist.group.WORLD)
    return loss_.item(), count.item(), {name: v.tolist() for name, v in reported.items()}


@pytest.mark.parametrize("train", [True, False])
def test_counts_are_summed_and_sums_are_not(gloo_pool: GetPool, train: bool) -> None:
    first, second = gloo_pool(2).run(outputs_on_ranks, train=train)
    assert first[:2] == (12.0, 3)
    assert second[:2] == (0.0, 3)
    # Evaluation may average the ranks' ratios, and one of them would be 0 / 0.
    assert first[2]["lm loss"] == [6.0, 3.0]
    assert second[2]["lm loss"] == ([0.0, 0.0] if train else [6.0, 3.0])
    assert first[2]["other"] == [1.0]


def test_means_of_older_loss_functions_are_left_alone() -> None:
    outputs = (torch.tensor(2.0), {"lm loss": torch.tensor(2.0)})
    assert loss.over_whole_sequence(outputs, None) is outputs  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("z", "aux", "per_token", "option"),
    [
        (0.1, False, False, "--moe-z-loss-coeff"),
        (None, True, True, "--moe-aux-loss-coeff"),
        (0.1, False, True, None),
        (None, True, False, None),
    ],
)
def test_padding_of_the_router_is_refused_where_it_is_not_weighed(
    refused: Any, z: float | None, aux: bool, per_token: bool, option: str | None
) -> None:
    router = SimpleNamespace(
        training=True,
        config=SimpleNamespace(moe_z_loss_coeff=z, calculate_per_token_loss=per_token),
        is_aux_loss_enabled=lambda: aux,
    )
    tokens, padding = torch.ones(4), torch.zeros(4, dtype=torch.bool)

    def forward(router: Any, *given: Any) -> Any:
        return given

    assert moe.refuse_uneven_padding(forward, router, tokens) == (tokens, None)
    if option is None:
        assert moe.refuse_uneven_padding(forward, router, tokens, padding) == (tokens, padding)
        return
    with refused("padding_mask", reason=option, remedy="without padding_mask"):
        moe.refuse_uneven_padding(forward, router, tokens, padding)


ARGS = {
    "context_parallel_size": 2,
    "cp_loss_correction": True,
    "mtp_num_layers": 1,
    "num_experts": 4,
    "rank": 0,
}


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({}, 5),
        ({"mtp_num_layers": None}, 2),
        ({"num_experts": None}, 4),
        ({"cp_loss_correction": False}, 0),
        ({"context_parallel_size": 1}, 0),
    ],
)
def test_what_is_patched(changed: dict[str, Any], count: int) -> None:
    manager = PatchManager()
    LossFeature().register_patches(manager, Namespace(**{**ARGS, **changed}))
    try:
        manager.apply()
        assert len(manager.applied()) == count
    finally:
        manager.undo()


def test_one_line_on_one_rank_says_which_loss_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for changed, said in (
        ({}, "whole sequences"),
        ({"cp_loss_correction": False}, "as Megatron does"),
        ({"rank": 1}, ""),
        ({"context_parallel_size": 1}, ""),
    ):
        LossFeature().post_validate_args(Namespace(**{**ARGS, **changed}))
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == bool(said)
        assert all(said in line for line in lines)
