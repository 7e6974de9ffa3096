"""A small model's arguments, for rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_cp_ext.features.facts import Facts
from megatron_cp_ext.features.rules import examine

ACCEPTED = {
    "rank": 0,
    "world_size": 8,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 4,
    "expert_model_parallel_size": 1,
    "context_parallel_algo": None,
    "cp_comm_type": ["p2p"],
    "attention_mask_type": "causal",
    "attention_dropout": 0.0,
    "cp_kernel": "auto",
    "seq_length": 64,
    "max_position_embeddings": 64,
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 1,
    "group_query_attention": False,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "position_embedding_type": "rope",
    "transformer_impl": "local",
}


@pytest.fixture
def found():
    """`found(**changes)`: errors and advice, by option, about a small model with changes."""

    def ask(*, facts: Facts | None = None, **changes):
        errors, advice = examine(SimpleNamespace(**{**ACCEPTED, **changes}), facts or Facts())
        return {e.option: e for e in errors}, {a.option: a for a in advice}

    return ask


@pytest.fixture
def mistake(found):
    """`mistake("--flag", **changes)`: the only error is about this option; returns it."""

    def only(option: str, *, facts: Facts | None = None, **changes):
        errors, _ = found(facts=facts, **changes)
        assert list(errors) == [option], errors
        error = errors[option]
        assert error.reason and error.remedy
        return error

    return only


@pytest.fixture
def hint(found):
    """`hint("--flag", **changes)`: no error, and the only advice is about this option."""

    def only(option: str, *, facts: Facts | None = None, **changes):
        errors, advice = found(facts=facts, **changes)
        assert not errors, errors
        assert list(advice) == [option], advice
        return advice[option]

    return only
