"""Keys and values in one flat buffer, so that they travel in one message."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVPack:
    """Keys and values of one shard as views of one contiguous buffer.

    Args:
        buffer: `[key.numel() + value.numel()]`.
        key_shape: shape of the keys; the value's shape differs in its last dimension at most.
        v_dim: size of a value head.
    """

    buffer: Tensor
    key_shape: torch.Size
    v_dim: int

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> KVPack:
        """Copy keys `[s, b, hk, d]` and values `[s, b, hk, dv]` into a new buffer."""
        buffer = torch.cat([key.reshape(-1), value.reshape(-1)])
        return cls(buffer, key.shape, value.size(-1))

    @classmethod
    def over(cls, buffer: Tensor, rows: int, *, key: Tensor, value: Tensor) -> KVPack:
        """A buffer that holds `rows` rows of keys and values shaped like these."""
        return cls(buffer, torch.Size((rows, *key.shape[1:])), value.size(-1))

    @classmethod
    def empty(cls, rows: int, *, key: Tensor, value: Tensor, dtype: torch.dtype) -> KVPack:
        """A new buffer for `rows` rows of keys and values shaped like these."""
        buffer = key.new_empty(packed_numel(rows, key=key, value=value), dtype=dtype)
        return cls.over(buffer, rows, key=key, value=value)

    def holding(self, buffer: Tensor) -> KVPack:
        """The same shapes over another buffer."""
        return KVPack(buffer, self.key_shape, self.v_dim)

    def zeros(self, dtype: torch.dtype) -> KVPack:
        """The same shapes over a buffer of zeros."""
        return self.holding(torch.zeros_like(self.buffer, dtype=dtype))

    @property
    def key(self) -> Tensor:
        """View of the keys."""
        return self.buffer[: self.key_shape.numel()].view(self.key_shape)

    @property
    def value(self) -> Tensor:
        """View of the values."""
        shape = (*self.key_shape[:-1], self.v_dim)
        return self.buffer[self.key_shape.numel() :].view(shape)


def packed_numel(rows: int, *, key: Tensor, value: Tensor) -> int:
    """Elements of a pack of `rows` rows of keys and values shaped like these."""
    return rows * (key[0].numel() + value[0].numel())
