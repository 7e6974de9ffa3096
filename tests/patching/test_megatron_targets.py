"""The same promises on Megatron's own functions and classes."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys

import pytest
import torch

from megatron_cp_ext.patching import PatchError, PatchManager, replace, wrap

BATCH = "megatron.core.utils:get_batch_on_this_cp_rank"
ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention.forward"


@pytest.fixture
def megatron_manager():
    manager = PatchManager(f"megatron-core {importlib.metadata.version('megatron-core')}")
    yield manager
    manager.undo()


def module_contents() -> dict[tuple[str, str], object]:
    """Every name of every imported module of Megatron and torch."""
    return {
        (module_name, name): value
        for module_name, module in list(sys.modules.items())
        if module_name.split(".")[0] in ("megatron", "torch") and hasattr(module, "__dict__")
        for name, value in list(vars(module).items())
    }


def test_a_batch_function_bound_by_name_in_a_script_is_patched(
    make_module, megatron_manager
) -> None:
    script = make_module(
        "script_bound", "from megatron.core.utils import get_batch_on_this_cp_rank as cut"
    )
    original = script.cut
    megatron_manager.register(
        wrap(
            BATCH,
            lambda original, batch, *args, **kwargs: {"wrapped": batch},
            owner="batch",
            parameters=("batch",),
        )
    )
    megatron_manager.apply()
    assert script.cut({"tokens": 1}) == {"wrapped": {"tokens": 1}}
    assert inspect.signature(script.cut) == inspect.signature(original)
    megatron_manager.undo()
    assert script.cut is importlib.import_module("megatron.core.utils").get_batch_on_this_cp_rank
    assert script.cut is original


def test_core_attention_is_patched_in_place_for_every_spec_that_refers_to_it(
    megatron_manager,
) -> None:
    module = importlib.import_module("megatron.core.transformer.dot_product_attention")
    backends = importlib.import_module("megatron.core.models.backends")
    original = module.DotProductAttention.__dict__["forward"]
    megatron_manager.register(
        wrap(
            ATTENTION,
            lambda original, self, query, *args, **kwargs: query + 1,
            owner="attention",
            parameters=("query", "key", "value", "attention_mask", "packed_seq_params"),
        )
    )
    megatron_manager.apply()
    attention = object.__new__(backends.LocalSpecProvider().core_attention())
    torch.nn.Module.__init__(attention)
    ones = torch.ones(1)
    assert attention(ones, key=ones, value=ones, attention_mask=None).item() == 2
    megatron_manager.undo()
    assert module.DotProductAttention.__dict__["forward"] is original


def test_a_function_that_arguments_bind_by_name_is_patched_there(megatron_manager) -> None:
    arguments = importlib.import_module("megatron.training.arguments")
    original = arguments.get_device_arch_version
    megatron_manager.register(
        replace(
            "megatron.training.utils.common_utils:get_device_arch_version",
            lambda: 90,
            owner="platform",
        )
    )
    megatron_manager.apply()
    assert arguments.get_device_arch_version() == 90
    assert "megatron.training.arguments:get_device_arch_version" in (
        megatron_manager.applied()[0].rebound
    )
    megatron_manager.undo()
    assert arguments.get_device_arch_version is original


def test_undo_leaves_no_trace_in_megatron_and_torch(megatron_manager) -> None:
    for name in (BATCH, ATTENTION, "megatron.training.arguments:parse_args"):
        importlib.import_module(name.split(":")[0])
    before = module_contents()
    for patch in (
        wrap(BATCH, lambda original, *args: None, owner="a"),
        wrap(ATTENTION, lambda original, *args: None, owner="a"),
        wrap("megatron.training.arguments:parse_args", lambda original: None, owner="a"),
        replace("torch.cuda:Stream", object, owner="a"),
        replace("torch.cuda.memory:memory_allocated", lambda: 0, owner="a"),
        replace("torch.cuda.memory:memory_reserved", lambda: 0, owner="a"),
        wrap("torch:Tensor.to", lambda original, *args: None, owner="a"),
        wrap("torch:randperm", lambda original, *args: None, owner="a"),
    ):
        megatron_manager.register(patch)
    megatron_manager.apply()
    changed = module_contents()
    assert "to" in vars(torch.Tensor)
    assert sum(changed[name] is not value for name, value in before.items()) >= 8
    megatron_manager.undo()
    after = module_contents()
    assert [name for name, value in before.items() if after[name] is not value] == []
    assert "to" not in vars(torch.Tensor)


@pytest.mark.parametrize(
    ("target", "parameters", "reason"),
    [
        ("megatron.core.utils:cut_batch_for_cp", (), "does not exist"),
        (BATCH, ("batch", "no_such_parameter"), "has no parameter no_such_parameter"),
        (ATTENTION, ("query", "keys"), "has no parameter keys"),
    ],
)
def test_a_target_of_another_version_is_refused_with_the_version(
    megatron_manager, target, parameters, reason
) -> None:
    megatron_manager.register(wrap(target, print, owner="a", parameters=parameters))
    with pytest.raises(PatchError) as caught:
        megatron_manager.apply()
    assert reason in str(caught.value)
    assert f"megatron-core {importlib.metadata.version('megatron-core')}" in str(caught.value)
