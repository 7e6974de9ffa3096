"""What a rule finds: a mistake (`UsageError`), or advice about something that does work."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.features.facts import Facts


@dataclass(frozen=True)
class Advice:
    """Something that works, but hardly as the user means it; the parts are `UsageError`'s.

    Args:
        option: the flag, as the user writes it.
        value: what was given.
        reason: what will happen.
        remedy: what to do instead.
    """

    option: str
    value: object
    reason: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"\n  option: {self.option}\n  value:  {self.value}\n  reason: {self.reason}"
            f"\n  remedy: {self.remedy}"
        )


Finding = UsageError | Advice

# Where a YAML file keeps options until Megatron merges its groups, and under what other name.
YAML_GROUPS = ("model_parallel", "language_model")
YAML_NAMES = {"num_experts": "num_moe_experts"}


class Arguments(argparse.Namespace):
    """Megatron's arguments for reading, parsed or validated, flat or grouped as in a YAML file.

    An attribute that is missing reads as None, so that rules can be asked about arguments of any
    origin: a YAML file need not have every option, and validation deletes some.
    """

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    def __getattr__(self, name: str) -> Any:
        found = find_holder(self._namespace, name)
        if found is None:
            return None
        holder, attribute = found
        return getattr(holder, attribute)

    def size(self, name: str, default: int = 1) -> int:
        """A degree; the default where it is missing or None."""
        value = getattr(self, name)
        return default if value is None else int(value)

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.size("tensor_model_parallel_size")

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return self.size("pipeline_model_parallel_size")

    @property
    def cp(self) -> int:
        """Context-parallel size."""
        return self.size("context_parallel_size")

    @property
    def kv_heads(self) -> int | None:
        """KV heads of the whole model: as many as query heads without grouping."""
        if self.group_query_attention or (
            self.group_query_attention is None and self.num_query_groups is not None
        ):
            return self.num_query_groups
        return self.num_attention_heads

    @property
    def is_active(self) -> bool:
        """Whether attention is ours."""
        return self.cp > 1 or self.context_parallel_algo is not None


def find_holder(namespace: Any, name: str) -> tuple[Any, str] | None:
    """Who holds an option, and under what name; None if nobody does."""
    for attribute in (name, YAML_NAMES.get(name, name)):
        for holder in (namespace, *(getattr(namespace, group, None) for group in YAML_GROUPS)):
            if holder is not None and hasattr(holder, attribute):
                return holder, attribute
    return None


def settle(namespace: argparse.Namespace, name: str, value: Any) -> None:
    """Set an option where it is held, in the namespace or in a group of a YAML file."""
    holder, attribute = find_holder(namespace, name) or (namespace, name)
    setattr(holder, attribute, value)


Rule = Callable[[Arguments, Facts], Iterator[Finding]]
