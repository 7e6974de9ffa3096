"""Core attention as Megatron builds and calls it, against the oracle, on ranks of a pool."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.mask import AttentionMask
from megatron_cp_ext.patching import PatchManager, wrap
from megatron_cp_ext.testing import (
    GlooPool,
    assert_close_to_oracle,
    dense_pairs,
    oracle_attention,
)

S, B, HEADS, KV_HEADS, DIM = 48, 2, 4, 2, 8
Pools = Callable[[int], GlooPool]


def tensors(batch: int) -> dict[str, Tensor]:
    """query, key, value and dout of the whole sequence, fp64, the same on every rank."""
    generator = torch.Generator().manual_seed(5)

    def draw(heads: int) -> Tensor:
        return torch.randn(S, batch, heads, DIM, generator=generator, dtype=torch.float64)

    return {
        "query": draw(HEADS),
        "key": draw(KV_HEADS),
        "value": draw(KV_HEADS),
        "dout": draw(HEADS),
    }


def build(algorithm: str = "ring", mask_type: str = "causal", **config: Any) -> Any:
    """A core-attention module over all ranks of the pool."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_cp_ext.megatron.core_attention import ContextParallelAttention
    from megatron_cp_ext.megatron.settings import ContextParallelSettings

    size = dist.get_world_size()
    alone = [dist.new_group([rank]) for rank in range(size)][dist.get_rank()]
    groups = ProcessGroupCollection(tp=alone, cp=dist.group.WORLD)
    arguments = {
        "num_layers": 1,
        "hidden_size": HEADS * DIM,
        "num_attention_heads": HEADS,
        "num_query_groups": KV_HEADS,
        "context_parallel_size": size,
        "attention_dropout": 0.0,
    }
    return ContextParallelAttention(
        TransformerConfig(**(arguments | config)),
        layer_number=1,
        attn_mask_type=AttnMaskType[mask_type],
        attention_type="self",
        pg_collection=groups,
        settings=ContextParallelSettings(
            algorithm=algorithm, ulysses_degree=size if algorithm == "ulysses" else 1
        ),
    )


def attend(
    module: Any, layout: SequenceLayout, *, packed: bool = False, **kwargs: Any
) -> dict[str, Tensor]:
    """Forward and backward of this rank's shard: out, dq, dk, dv."""
    rank = dist.get_rank()
    whole = tensors(1 if packed else B)
    local = {name: layout.shard(tensor, rank) for name, tensor in whole.items()}
    if packed:
        local = {name: tensor.squeeze(1) for name, tensor in local.items()}
    leaves = [local[name].requires_grad_() for name in ("query", "key", "value")]
    out = module(*leaves, kwargs.pop("attention_mask", None), **kwargs)
    out.backward(local["dout"].flatten(-2))
    results = {"out": out.detach().view_as(local["dout"])}
    results |= dict(zip(("dq", "dk", "dv"), (leaf.grad for leaf in leaves), strict=True))
    return {n: t.unsqueeze(1) if packed else t for n, t in results.items()}


def assert_right(
    shards: list[dict[str, Tensor]], layout: SequenceLayout, mask: AttentionMask, batch: int
) -> None:
    """Compare the ranks' shards with the oracle."""
    whole = tensors(batch)
    oracle = oracle_attention(
        whole["query"],
        whole["key"],
        whole["value"],
        dense_pairs(mask, S),
        dout=whole["dout"],
    )
    joined = {name: layout.unshard([shard[name] for shard in shards]) for name in shards[0]}
    assert_close_to_oracle(joined, oracle.tensors(without=("lse",)), 1e-9)


# Packed streams.

PACKED = {
    "documents of any length": ([0, 1, 7, 30, 48], None),
    "documents that balance": ([0, 8, 24, 48], None),
    "padding inside": ([0, 5, 12, 40], [0, 8, 16, 48]),
    "padding at the end": ([0, 5, 41], None),
    "repeated last boundary": ([0, 20, 48, 48, 48], None),
}


def attend_packed(algorithm: str, real: list[int], padded: list[int] | None) -> dict[str, Tensor]:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_cp_ext.megatron.documents import packed_layout

    bounds = torch.tensor(real, dtype=torch.int32)
    starts = bounds if padded is None else torch.tensor(padded, dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds.clone(),
        cu_seqlens_q_padded=None if padded is None else starts,
        cu_seqlens_kv_padded=None if padded is None else starts.clone(),
    )
    layout = packed_layout(starts, S, dist.get_world_size())
    return attend(build(algorithm), layout, packed=True, packed_seq_params=params)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", PACKED)
def test_packed_documents(gloo_pool: Pools, name: str, world: int) -> None:
    from megatron_cp_ext.megatron.documents import packed_layout

    real, padded = PACKED[name]
    lengths = [b - a for a, b in itertools.pairwise(real)]
    starts = padded or real
    layout = packed_layout(torch.tensor(starts), S, world)
    mask = AttentionMask.documents(starts, lengths=lengths)
    for algorithm in ("ring", "ulysses", "kvallgather"):
        shards = gloo_pool(world).run(attend_packed, algorithm, real, padded)
        assert_right(shards, layout, mask, 1)


def test_every_document_is_balanced_whatever_its_length() -> None:
    from megatron_cp_ext.megatron.documents import packed_layout

    for bounds in ([0, 8, 24, S], [0, 7, S]):
        layout = packed_layout(torch.tensor(bounds), S, 2)
        assert layout == SequenceLayout.zigzag_documents(bounds, 2)


def cut_and_rotate(bounds: list[int]) -> tuple[Tensor, Tensor]:
    """This rank's tokens of a packed batch, and what rotating ones of them by position gives."""
    from megatron.core.models.common.embeddings import rope_utils

    from megatron_cp_ext.megatron.batch import cut_per_document
    from megatron_cp_ext.megatron.rope import rotate_packed

    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    batch = {"tokens": torch.arange(S)[None], "cu_seqlens": cu_seqlens[None]}
    tokens = cut_per_document(lambda: {}, batch, dist.group.WORLD)["tokens"][0]
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    angles = (0.1 * torch.arange(longest)).repeat_interleave(DIM).view(longest, 1, 1, DIM)
    rotated = rotate_packed(
        rope_utils._apply_rotary_pos_emb_thd,
        torch.ones(len(tokens), 1, DIM),
        cu_seqlens,
        angles,
        cp_group=dist.group.WORLD,
    )
    return tokens, rotated


@pytest.mark.parametrize("bounds", [[0, 1, 7, 30, 48], [0, 8, 24, 48]])
def test_every_token_gets_its_position_within_its_document(
    gloo_pool: Pools, bounds: list[int]
) -> None:
    by_rank = gloo_pool(2).run(cut_and_rotate, bounds)
    tokens = torch.cat([tokens for tokens, _ in by_rank])
    assert sorted(tokens.tolist()) == list(range(S))
    document = torch.searchsorted(torch.tensor(bounds), tokens, right=True) - 1
    angle = 0.1 * (tokens - torch.tensor(bounds)[document])
    # cos - sin for the first half of the dim, cos + sin for the second.
    expected = torch.stack([angle.cos() - angle.sin(), angle.cos() + angle.sin()], -1)
    rotated = torch.cat([rotated for _, rotated in by_rank])[:, 0, [0, -1]]
    torch.testing.assert_close(rotated, expected, atol=1e-5, rtol=0)


# Mask tensors.

PADDING = torch.arange(S)[None] < torch.tensor([[S], [S - 9]])  # [b, s], True = a real token
BERT_MASK = PADDING[:, None, :, None] & PADDING[:, None, None, :]  # [b, 1, s, s]


def attend_masked(algorithm: str, mask_type: str, masked: Tensor) -> dict[str, Tensor]:
    layout = SequenceLayout.zigzag(S, dist.get_world_size())
    return attend(build(algorithm, mask_type), layout, attention_mask=masked)


@pytest.mark.parametrize("algorithm", ["ring", "ulysses", "kvallgather"])
def test_a_bidirectional_model_with_padding(gloo_pool: Pools, algorithm: str) -> None:
    shards = gloo_pool(2).run(attend_masked, algorithm, "padding", ~BERT_MASK)
    assert_right(shards, SequenceLayout.zigzag(S, 2), AttentionMask.dense(BERT_MASK), B)
    padding_rows = SequenceLayout.zigzag(S, 2).unshard([s["out"] for s in shards])[S - 9 :, 1]
    assert torch.equal(padding_rows, torch.zeros_like(padding_rows))


def test_a_tensor_given_to_a_causal_model_is_honoured_too(gloo_pool: Pools) -> None:
    allowed = torch.rand(1, 1, S, S, generator=torch.Generator().manual_seed(1)) > 0.3
    shards = gloo_pool(2).run(attend_masked, "ring", "causal", ~allowed)
    mask = AttentionMask.dense(allowed, causal=True)
    assert_right(shards, SequenceLayout.zigzag(S, 2), mask, B)


def refusals() -> list[str]:
    """The options that errors name, for calls that cannot be honoured."""
    layout = SequenceLayout.zigzag(S, dist.get_world_size())
    local = layout.local_length(dist.get_rank())
    bias = torch.zeros(1, HEADS, S, S)
    named = []
    for mask_type, kwargs in (
        ("causal", {"attention_bias": bias}),
        ("causal", {"attention_mask": torch.zeros(1, 1, local, S, dtype=torch.bool)}),
        ("causal", {"attention_mask": torch.zeros(1, 1, S, S)}),
        ("arbitrary", {}),
    ):
        with pytest.raises(UsageError) as caught:
            attend(build(mask_type=mask_type), layout, **kwargs)
        named.append(caught.value.option)
    return named


def test_what_cannot_be_honoured_is_refused(gloo_pool: Pools) -> None:
    named = ["attention_bias", "attention_mask", "attention_mask", "attn_mask_type"]
    assert gloo_pool(2).run(refusals) == [named, named]


# BERT.


def bert_losses(size: int) -> Tensor:
    """Losses `[b, s_local]` of a small BERT on padded samples, cut over `size` ranks."""
    from megatron.core import parallel_state
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_cp_ext.megatron import bidirectional, context_parallel_layer_spec, cpu

    manager = PatchManager()
    for patch in cpu.patches():
        manager.register(patch)
    target = "megatron.core.models.bert.bert_model:BertModel.bert_position_ids"
    manager.register(wrap(target, bidirectional.zigzag_position_ids, owner="test"))
    manager.apply()
    try:
        parallel_state.initialize_model_parallel(context_parallel_size=size)
        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            context_parallel_size=size,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
        )
        spec = context_parallel_layer_spec(bert_layer_local_spec) if size > 1 else None
        model = BertModel(
            config=config,
            num_tokentypes=0,
            transformer_layer_spec=spec or bert_layer_local_spec,
            vocab_size=64,
            max_sequence_length=S,
            add_binary_head=False,
        )
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(64, (B, S), generator=generator)
        layout = SequenceLayout.zigzag(S, size)
        local = layout.shard(tokens, parallel_state.get_context_parallel_rank(), 1)
        losses, _ = model(local, PADDING.long(), lm_labels=local)
        return losses.detach()
    finally:
        parallel_state.destroy_model_parallel()
        manager.undo()


def test_bert_with_padding_masks(gloo_pool: Pools) -> None:
    whole = gloo_pool(2).run(bert_losses, 1)[0]
    shards = gloo_pool(2).run(bert_losses, 2)
    joined = SequenceLayout.zigzag(S, 2).unshard(shards, 1)
    real = PADDING
    torch.testing.assert_close(joined[real], whole[real], rtol=1e-5, atol=1e-6)


# How a model comes to have it.


def test_a_spec_gets_it_without_patches() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megatron_cp_ext.megatron import context_parallel_layer_spec
    from megatron_cp_ext.megatron.core_attention import ContextParallelAttention

    spec = get_gpt_layer_local_spec()
    ours = context_parallel_layer_spec(spec, algorithm="ulysses_cp_algo", ulysses_degree=2)
    attention = ours.submodules.self_attention.submodules.core_attention
    assert attention.func is ContextParallelAttention
    assert attention.keywords["settings"].algorithm == "ulysses"
    assert spec.submodules.self_attention.submodules.core_attention is DotProductAttention

    block = TransformerBlockSubmodules(layer_specs=[spec, spec, spec])
    layers = context_parallel_layer_spec(block).layer_specs
    assert len(layers) == 3
    assert all(
        layer.submodules.self_attention.submodules.core_attention.func is ContextParallelAttention
        for layer in layers
    )
    with pytest.raises(UsageError, match="names neither"):
        context_parallel_layer_spec(copy.copy(ours))


class StandInTEAttention(torch.nn.Module):
    """What Transformer Engine's class looks like to those who build one."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        raise AssertionError("Transformer Engine's own attention was built")


class Specialised(StandInTEAttention):
    """A subclass that attends in a way of its own."""

    def __init__(self, config: Any) -> None:
        torch.nn.Module.__init__(self)


def build_as_te(target: str) -> tuple[str, str, float]:
    """Build Transformer Engine's attention by its reference after the patch, as specs do."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_cp_ext.megatron.core_attention import constructor_wrapper
    from megatron_cp_ext.megatron.settings import ContextParallelSettings

    manager = PatchManager()
    wrapper = constructor_wrapper(StandInTEAttention, ContextParallelSettings())
    manager.register(wrap(target, wrapper, owner="test", parameters=("k_channels",)))
    manager.apply()
    try:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        module = StandInTEAttention(
            config=TransformerConfig(
                num_layers=1,
                hidden_size=32,
                num_attention_heads=4,
                context_parallel_size=dist.get_world_size(),
            ),
            layer_number=1,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            k_channels=16,
            v_channels=12,
            cp_comm_type="a2a",
            pg_collection=ProcessGroupCollection(tp=alone[dist.get_rank()], cp=dist.group.WORLD),
        )
        return type(module).__name__, type(Specialised(None)).__name__, module.softmax_scale
    finally:
        manager.undo()


def test_transformer_engines_class_becomes_ours_where_it_is_built(gloo_pool: Pools) -> None:
    target = f"{__name__}:StandInTEAttention.__init__"
    built = gloo_pool(2).run(build_as_te, target)
    assert built == [("ContextParallelAttention", "Specialised", 16**-0.5)] * 2


def softmax_scale(**config: Any) -> float:
    return build(**config).softmax_scale


def test_query_key_layer_scaling_changes_no_result(gloo_pool: Pools) -> None:
    scaled = gloo_pool(2).run(softmax_scale, apply_query_key_layer_scaling=True)
    assert scaled == gloo_pool(2).run(softmax_scale) == [DIM**-0.5] * 2


def test_settings_are_plain_data() -> None:
    from megatron_cp_ext.megatron.settings import ContextParallelSettings

    settings = ContextParallelSettings()
    assert settings == ContextParallelSettings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.kernel = "reference"  # type: ignore[misc]
