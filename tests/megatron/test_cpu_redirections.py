"""What each redirection of the CPU platform does, tried on torch and Megatron themselves."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cp_ext.megatron import cpu
from megatron_cp_ext.megatron.cpu import device, optimizer, rng
from megatron_cp_ext.patching import PatchManager

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[PatchManager]:
    """All redirections in force; made once, as Megatron's many modules are searched for names."""
    manager = PatchManager()
    for patch in cpu.patches():
        manager.register(patch)
    manager.apply()
    yield manager
    manager.undo()


# ------------------------------------------------------------------------------------- device

FACTORY_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "arange": (3,),
    "as_tensor": ([1.0],),
    "empty_strided": ((2, 2), (2, 1)),
    "eye": (2,),
    "full": ((2,), 1.0),
    "linspace": (0.0, 1.0, 3),
    "randint": (0, 5, (2,)),
    "randperm": (4,),
    "tensor": ([1.0],),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", device.FACTORIES)
@pytest.mark.parametrize("where", ["cuda", "cuda:3", torch.device("cuda"), "current"])
def test_tensors_asked_for_on_cuda_are_made_on_the_cpu(name: str, where: Any) -> None:
    default = (torch.zeros(2),) if name.endswith("_like") else (2,)
    given = FACTORY_ARGUMENTS.get(name, default + ((1.0,) if name == "full_like" else ()))
    chosen = torch.cuda.current_device() if where == "current" else where
    assert getattr(torch, name)(*given, device=chosen).device == CPU


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", device.TENSOR_FACTORIES)
def test_tensors_made_from_others_on_cuda_are_made_on_the_cpu(name: str) -> None:
    given = {"new_full": ((2,), 1.0), "new_tensor": ([1.0],)}.get(name, ((2,),))
    assert getattr(torch.zeros(1), name)(*given, device="cuda").device == CPU


@pytest.mark.usefixtures("on_cpu")
def test_moving_to_cuda_stays_where_it_is() -> None:
    x = torch.zeros(2, requires_grad=True)
    assert x.cuda() is x
    assert x.cuda(0, non_blocking=True) is x
    assert x.to("cuda") is x
    assert x.to(device=torch.device("cuda", 1), non_blocking=True) is x
    assert x.pin_memory() is x
    half = x.to("cuda:0", torch.bfloat16)
    assert (half.device, half.dtype) == (CPU, torch.bfloat16)
    assert x.to(torch.empty(0, dtype=torch.float64)).dtype == torch.float64
    assert torch.zeros(2, pin_memory=True).device == CPU

    model = torch.nn.Linear(2, 2)
    assert model.cuda() is model
    assert model.to("cuda", torch.float64).weight.dtype == torch.float64
    made = torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda")
    assert made.weight.device == CPU


@pytest.mark.usefixtures("on_cpu")
def test_other_devices_are_untouched() -> None:
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.zeros(2).to("meta").device.type == "meta"


@pytest.mark.usefixtures("on_cpu")
def test_types_are_named_as_on_cuda() -> None:
    for dtype, name in (
        (torch.float32, "torch.cuda.FloatTensor"),
        (torch.bfloat16, "torch.cuda.BFloat16Tensor"),
    ):
        assert torch.zeros(1, dtype=dtype).type() == name
    converted = torch.zeros(1).type("torch.cuda.HalfTensor")
    assert (converted.dtype, converted.device) == (torch.float16, CPU)
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64


# -------------------------------------------------------------------- streams, events, memory


@pytest.mark.usefixtures("on_cpu")
def test_streams_and_events_do_nothing_but_tell_the_time() -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        start = stream.record_event()
    end = torch.cuda.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(end)
    end.record(stream)
    end.wait()
    torch.cuda.synchronize()
    assert 0.0 <= start.elapsed_time(end) < 60_000.0
    assert stream.query()
    assert end.query()


@pytest.mark.usefixtures("on_cpu")
def test_memory_is_that_of_the_process() -> None:
    before = torch.cuda.memory_allocated()
    ballast = torch.ones(32 * 2**20)  # 128 MiB
    after = torch.cuda.memory_allocated()
    assert after - before > 100 * 2**20, ballast.numel()
    assert torch.cuda.max_memory_allocated() >= after - 2**20
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] - 2**20
    for key in ("reserved_bytes.all.current", "allocation.all.current"):
        assert key in stats, "Megatron logs it"


# ------------------------------------------------------------------------------ random numbers


@pytest.fixture
def tracker(on_cpu: PatchManager) -> Any:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    made = CudaRNGStatesTracker()
    torch.manual_seed(1)
    made.add("model-parallel-rng", 7)
    made.add("other", 8)
    return made


def draws(seed: int, count: int) -> list[float]:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_fork_draws_from_its_own_state_and_comes_back(tracker: Any, caplog: Any) -> None:
    expected_outside, expected_inside = draws(1, 3), draws(7, 4)
    with caplog.at_level(logging.WARNING):
        seen_outside = [torch.rand(1).item()]
        with tracker.fork():
            seen_inside = torch.rand(2).tolist()
        seen_outside += torch.rand(1).tolist()
        with tracker.fork():
            seen_inside += torch.rand(2).tolist()
        seen_outside += torch.rand(1).tolist()
    assert seen_inside == expected_inside
    assert seen_outside == expected_outside
    assert not caplog.records, "drawing inside a fork is what it is for"


def test_forks_inside_forks_keep_all_states_apart(tracker: Any) -> None:
    with tracker.fork():
        first = torch.rand(1).tolist()
        with tracker.fork("other"):
            other = torch.rand(1).tolist()
            with tracker.fork():
                first += torch.rand(1).tolist()
            other += torch.rand(1).tolist()
        first += torch.rand(1).tolist()
    assert first == draws(7, 3)
    assert other == draws(8, 2)
    assert torch.rand(1).tolist() == draws(1, 1)


def test_a_fork_that_fails_comes_back_too(tracker: Any) -> None:
    def fail() -> None:
        with tracker.fork():
            torch.rand(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.rand(1).tolist() == draws(1, 1)
    with pytest.raises(KeyError, match="nobody"), tracker.fork("nobody"):
        raise AssertionError("never reached")


@pytest.mark.usefixtures("on_cpu")
def test_the_cuda_generator_is_the_cpu_s() -> None:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(2).tolist()
    assert first == draws(5, 2)
    torch.cuda.set_rng_state(state)
    assert torch.rand(2).tolist() == first


@pytest.mark.usefixtures("on_cpu")
def test_reading_data_draws_nothing_from_the_model_s_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def state_changes() -> bool:
        before = torch.get_rng_state()
        loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2, pin_memory=True)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        return not torch.equal(before, torch.get_rng_state())

    assert not state_changes()
    plain = inspect.unwrap(torch.utils.data.DataLoader.__init__)
    monkeypatch.setattr(torch.utils.data.DataLoader, "__init__", plain)
    assert state_changes(), "without the patch it does, or this test shows nothing"


def test_a_loader_keeps_the_generator_it_is_given() -> None:
    own, kept = torch.Generator(), {}
    rng.load_with_own_generator(lambda loader, **given: kept.update(given), None, generator=own)
    assert kept == {"generator": own, "pin_memory": False}


# ----------------------------------------------------------------------- parts of the training


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_norms_tell_megatron_to_sum_their_gradients(
    normalization: str, sequence_parallel: bool
) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = SimpleNamespace(
        normalization=normalization,
        sequence_parallel=sequence_parallel,
        layernorm_zero_centered_gamma=False,
        persist_layer_norm=False,
        memory_efficient_layer_norm=False,
    )
    norm = WrappedTorchNorm(config, 8, eps=1e-3)
    assert type(norm).__name__ == normalization
    assert norm.eps == 1e-3
    assert config.sequence_parallel is sequence_parallel, "the model's configuration is shared"
    marks = [getattr(parameter, "sequence_parallel", False) for parameter in norm.parameters()]
    assert marks == [sequence_parallel] * (2 if normalization == "LayerNorm" else 1)


@pytest.mark.usefixtures("on_cpu")
def test_token_counts_for_the_all_to_all_are_numpy() -> None:
    from megatron.core.transformer.moe.moe_utils import maybe_move_tensor_to_cpu

    counts = torch.tensor([3, 1])
    assert maybe_move_tensor_to_cpu(counts, as_numpy=True).tolist() == [3, 1]
    assert type(maybe_move_tensor_to_cpu(counts, as_numpy=True)).__module__ == "numpy"
    assert maybe_move_tensor_to_cpu(counts, record_stream=True) is counts
    assert maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def adam(parameters: int = 2) -> Any:
    inner = torch.optim.Adam([torch.nn.Parameter(torch.ones(2)) for _ in range(parameters)])
    return SimpleNamespace(optimizer=inner)


def test_a_new_distributed_optimizer_has_one_step_count() -> None:
    outer = adam()
    optimizer.state_dict_before_first_step(lambda given: {}, outer)
    states = list(outer.optimizer.state.values())
    assert [state["step"].item() for state in states] == [0.0, 0.0]
    for state in states:
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (2,)
        assert not state["exp_avg"].requires_grad

    for parameter in outer.optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(2)
    outer.optimizer.step()
    optimizer.state_dict_before_first_step(lambda given: {}, outer)
    assert [state["step"].item() for state in states] == [1.0, 1.0], "an old one is kept"


def test_loaded_step_counts_advance_once_a_step() -> None:
    outer = adam()

    def load(given: Any, state_dict: dict[str, float]) -> None:
        shared = torch.tensor(state_dict["step"])
        for parameter in given.optimizer.param_groups[0]["params"]:
            given.optimizer.state[parameter] = {
                "step": shared,
                "exp_avg": torch.zeros(2),
                "exp_avg_sq": torch.zeros(2),
            }
            parameter.grad = torch.ones(2)

    optimizer.load_with_own_step_counts(load, outer, {"step": 4.0})
    outer.optimizer.step()
    assert [state["step"].item() for state in outer.optimizer.state.values()] == [5.0, 5.0]


@pytest.mark.usefixtures("on_cpu")
def test_the_optimizer_s_step_turns_gradients_off() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.AdamW([parameter], lr=0.5)
    parameter.grad = torch.ones(2)
    inner.step()
    inner.zero_grad()
    assert parameter.requires_grad
    assert parameter.grad is None
    assert torch.all(parameter < 1.0)
