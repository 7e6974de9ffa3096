"""Operations between ranks that are started without waiting, and point-to-point ones among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_cp_ext.comm.places import during, members
from megatron_cp_ext.comm.streams import Waitable, side_stream
from megatron_cp_ext.comm.topology import CommGroup
from megatron_cp_ext.comm.wire import Addressed, Wire, wire_for


class Transfer:
    """Sends and receives under way.

    Args:
        received: buffers that are being filled, in the order they were named.
        sent: what leaves; kept alive until the transfer is over.
        works: the pending operations.
        about: what is waited for, in words.
    """

    def __init__(
        self, received: list[Tensor], sent: list[Tensor], works: list[Waitable], about: str
    ) -> None:
        self._received, self._sent, self._works = received, sent, works
        self._about = about

    def wait(self) -> list[Tensor]:
        """Wait until all of it is done; return what has arrived and let go of what was sent.

        On an accelerator the current stream waits, and the host goes on; on a CPU the host waits.
        """
        with during(self._about):
            for work in self._works:
                work.wait()
        self._works, self._sent = [], []
        return self._received


def start(
    issue: Callable[[Wire], list[Waitable]],
    *,
    sent: list[Tensor],
    received: list[Tensor],
    group: CommGroup,
    about: str,
) -> Transfer:
    """Start an operation beside the kernels that follow.

    Args:
        issue: starts it on a wire.
        sent: buffers that it reads.
        received: buffers that it fills.
        group: who takes part.
        about: what is waited for, in words.
    """
    device = (sent or received)[0].device
    wire = wire_for(group, device)
    stream = side_stream(device, group.group) if wire.on_streams else None
    with during(f"starting, then {about}"):
        if stream is None:
            return Transfer(received, sent, issue(wire), about)
        with stream.after_current():
            for work in issue(wire):
                work.wait()  # the side stream waits, not the host
        stream.hold(sent + received)
        return Transfer(received, sent, [stream.mark()], about)


def start_transfer(
    sends: Sequence[Addressed],
    receives: Sequence[Addressed],
    group: CommGroup,
    *,
    kind: str,
) -> Transfer:
    """Start sending some buffers and receiving others.

    Between two ranks, what is sent first is received first. All ranks of the group must call
    this in the same order for transfers that concern each other.

    Args:
        sends: contiguous buffers, each with the member of the group it goes to.
        receives: contiguous buffers to be filled, each with the member it comes from.
        group: whose members these are.
        kind: what travels, for the count.
    """
    sent = [buffer for buffer, _ in sends]
    received = [buffer for buffer, _ in receives]
    if not sends and not receives:
        return Transfer(received, sent, [], "waiting for nothing")
    for buffer in sent:
        group.traffic.record(kind, buffer.numel() * buffer.element_size())
    return start(
        lambda wire: wire.point_to_point(sends, receives, group),
        sent=sent,
        received=received,
        group=group,
        about=_in_words(
            kind, [group.ranks[s] for _, s in receives], [group.ranks[t] for _, t in sends]
        ),
    )


def _in_words(kind: str, sources: list[int], targets: list[int]) -> str:
    """A transfer in words, with global ranks, for the error that ends it."""
    waiting = [f"for {kind} from {members(sources)}"] if sources else []
    sending = [f"to send {kind} to {members(targets)}"] if targets else []
    return f"waiting {' and '.join(waiting + sending)}"
