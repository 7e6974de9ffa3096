"""Counts what a rank sends."""

from __future__ import annotations

from collections import Counter


class Traffic:
    """Bytes this rank has sent to other ranks, and the number of operations, by kind.

    Kinds are named after what travels: `"kv"`, `"dkv"`, `"heads"` and so on. What a rank keeps
    for itself in a collective is not sent and not counted.
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def record(self, kind: str, sent: int) -> None:
        """Add one operation that sends `sent` bytes."""
        self.bytes[kind] += sent
        self.operations[kind] += 1

    @property
    def total_bytes(self) -> int:
        """All bytes sent, of every kind."""
        return self.bytes.total()

    def reset(self) -> None:
        """Start counting from zero."""
        self.bytes.clear()
        self.operations.clear()
