"""Transfers run beside the kernels: the order of what a device is told, recorded by a stand-in.

The stand-in has the names of torch.cuda that are used, which torch.npu has too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_cp_ext.comm import CommGroup, start_all_gather, start_transfer, transfer
from megatron_cp_ext.comm.streams import SideStream, side_stream
from megatron_cp_ext.comm.wire import Addressed, Waitable


class FakeStream:
    def __init__(self, device_module: FakeDevice, name: str) -> None:
        self.device_module, self.name = device_module, name

    def wait_stream(self, other: FakeStream) -> None:
        self.device_module.log.append(f"{self.name} waits for all of {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.device_module.log.append(f"{self.name} waits for {event.of}")

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


class FakeEvent:
    def __init__(self, device_module: FakeDevice) -> None:
        self.device_module, self.of = device_module, ""

    def record(self, stream: FakeStream) -> None:
        count = self.device_module.marks = self.device_module.marks + 1
        self.of = f"mark {count}"
        self.device_module.log.append(f"{stream.name} makes {self.of}")

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


class FakeDevice:
    """What torch.cuda is to `SideStream`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.marks = 0
        self.current = FakeStream(self, "main")

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream(self, "side")

    def Event(self) -> FakeEvent:  # noqa: N802
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class FakeWork:
    def __init__(self, device: FakeDevice, what: str) -> None:
        self.device, self.what = device, what

    def wait(self) -> None:
        self.device.log.append(f"{self.device.current.name} waits for the {self.what}")


class FakeWire:
    """Queues operations on the current stream, as NCCL does."""

    on_streams = True

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def point_to_point(
        self, sends: list[Addressed], receives: list[Addressed], group: CommGroup
    ) -> list[Waitable]:
        return self._queue("messages")

    def all_gather(self, into: Tensor, buffer: Tensor, group: CommGroup) -> list[Waitable]:
        return self._queue("all-gather")

    def _queue(self, what: str) -> list[Waitable]:
        self.device.log.append(f"{what} on {self.device.current.name}")
        return [FakeWork(self.device, what)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    stream = SideStream(torch.device("cpu"), fake)
    monkeypatch.setattr(transfer, "side_stream", lambda device, purpose: stream)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda t, s: fake.log.append(f"{t.numel()} held for {s.name}")
    )
    return fake


def group_on(device: FakeDevice) -> CommGroup:
    wire: Any = FakeWire(device)
    return CommGroup(ranks=(0, 1), rank=0, wire=wire)


def test_a_transfer_follows_what_was_queued_and_nothing_waits_but_streams(
    device: FakeDevice,
) -> None:
    under_way = start_transfer(
        [(torch.zeros(2), 1)], [(torch.zeros(3), 1)], group_on(device), kind="kv"
    )
    device.log.append("kernel on main")
    under_way.wait()
    assert device.log == [
        "side waits for all of main",
        "messages on side",
        "side waits for the messages",
        "2 held for side",
        "3 held for side",
        "side makes mark 1",
        "kernel on main",
        "main waits for mark 1",
    ]


def test_two_transfers_are_under_way_and_each_is_waited_for_alone(device: FakeDevice) -> None:
    group = group_on(device)
    first = start_transfer([(torch.zeros(2), 1)], [], group, kind="kv")
    second = start_all_gather(torch.zeros(4), group, kind="kv")
    device.log.clear()
    first.wait()
    assert device.log == ["main waits for mark 1"]
    assert second.wait()[0].shape == (2, 4)
    assert device.log[1:] == ["main waits for mark 2"]


def test_what_the_host_waits_for_takes_no_stream(device: FakeDevice) -> None:
    group = group_on(device)
    assert group.wire is not None
    group.wire.on_streams = False
    under_way = start_transfer([(torch.zeros(2), 1)], [], group, kind="kv")
    assert device.log == ["messages on main"]
    under_way.wait()
    assert device.log[1:] == ["main waits for the messages"]


def test_a_cpu_has_no_streams() -> None:
    assert side_stream(torch.device("cpu"), None) is None
