"""What may attend to what, in global positions, and how that becomes work for a kernel.

A mask is cut into tiles: rectangles of one shard's queries against one shard's keys, each full
or limited by a diagonal band. A causal mask over a zigzag of two ranks, queries of rank 0
(chunks 0 and 3) against keys of rank 1 (chunks 1 and 2), has a single tile, because chunk 0
sees neither chunk and chunk 3 sees both in full:

                keys 1   keys 2
    queries 0     .        .
    queries 3     #        #

Bands have one meaning everywhere: query position q sees key position k if
`lo <= k - q <= hi`; None means unlimited. Causal is hi = 0.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.layout import (
    Run,
    document_bounds,
    integers,
    merge_runs,
    overlapping,
    shorten,
    with_offsets,
)

Window = tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class Tile:
    """A rectangle of query-key pairs, of which those inside the band attend.

    Args:
        q_rows: rows of the query shard.
        k_rows: rows of the key shard.
        q_pos: global position of the first query row; positions ascend by one from there.
        k_pos: global position of the first key row.
        lo: smallest `k - q` that attends, None where the tile's edge is the limit.
        hi: largest `k - q` that attends, None where the tile's edge is the limit.
        dense: bool `[q, k]` or `[b, 1, q, k]`, True = may attend; None for a pure band.
        batch: samples the tile applies to; None for all.
    """

    q_rows: Run
    k_rows: Run
    q_pos: int
    k_pos: int
    lo: int | None = None
    hi: int | None = None
    dense: Tensor | None = None
    batch: Run | None = None

    @property
    def is_full(self) -> bool:
        """Whether every pair of the rectangle attends."""
        return self.lo is None and self.hi is None and self.dense is None

    def allowed(self, device: torch.device | None = None) -> Tensor:
        """Which pairs attend: bool `[q, k]`, or `[b, 1, q, k]` for a dense mask with a batch."""
        q = torch.arange(self.q_pos, self.q_pos + self.q_rows.length, device=device)
        k = torch.arange(self.k_pos, self.k_pos + self.k_rows.length, device=device)
        return band_allows(q, k, self.lo, self.hi, dense=self.dense)

    def part(self, q: Run, k: Run) -> Tile:
        """The sub-rectangle of rows `q` and columns `k`, counted from the tile's own corner.

        Sides of the band that no longer cut anything are dropped.
        """
        q_pos, k_pos = self.q_pos + q.start, self.k_pos + k.start
        return Tile(
            q_rows=Run(self.q_rows.start + q.start, self.q_rows.start + q.stop),
            k_rows=Run(self.k_rows.start + k.start, self.k_rows.start + k.stop),
            q_pos=q_pos,
            k_pos=k_pos,
            lo=None if self.lo is None or k_pos - (q_pos + q.length - 1) >= self.lo else self.lo,
            hi=None if self.hi is None or k_pos + k.length - 1 - q_pos <= self.hi else self.hi,
            dense=None if self.dense is None else self.dense[..., q.slice, k.slice],
            batch=self.batch,
        )


def band_allows(
    q_positions: Tensor,
    k_positions: Tensor,
    lo: int | None,
    hi: int | None,
    *,
    dense: Tensor | None = None,
) -> Tensor:
    """Which pairs lie inside a band: bool `[q, k]`, combined with `dense` where given."""
    difference = k_positions[None, :] - q_positions[:, None]
    allowed = torch.ones_like(difference, dtype=torch.bool)
    if lo is not None:
        allowed &= difference >= lo
    if hi is not None:
        allowed &= difference <= hi
    return allowed if dense is None else allowed & dense.to(allowed.device)


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which query positions may attend to which key positions of one sequence.

    Use the constructors `causal`, `full`, `documents` and `dense`.

    Args:
        lo: smallest `k - q` that attends; None for unlimited.
        hi: largest `k - q` that attends; None for unlimited, 0 for causal.
        spans: documents as ascending, disjoint runs of positions; a query sees keys of its own
            document only, and positions in no document see nothing. None for one document.
        pairs: bool tensor `[s, s]` or `[b, 1, s, s]`, True = may attend; None for none.
        samples: one mask for each sample of the batch, in place of all of the above.

    What is derived from a mask at every layer, such as tiles, is kept with it by `remember`.
    """

    lo: int | None = None
    hi: int | None = None
    spans: tuple[Run, ...] | None = None
    pairs: Tensor | None = None
    samples: tuple[AttentionMask, ...] | None = None
    _memory: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def causal(cls, window: Window | None = None) -> AttentionMask:
        """A query sees itself and what came before, at most `window[0]` positions back."""
        return _simple_mask(*_band(window, causal=True))

    @classmethod
    def full(cls, window: Window | None = None) -> AttentionMask:
        """A query sees everything, or what lies within `window = (left, right)` of it."""
        return _simple_mask(*_band(window, causal=False))

    @classmethod
    def documents(
        cls,
        cu_seqlens: Sequence[int] | Tensor,
        causal: bool = True,
        window: Window | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
    ) -> AttentionMask:
        """Block diagonal over packed documents.

        Args:
            cu_seqlens: document boundaries, `[documents + 1]`, ascending from 0. Positions
                from the last boundary on are padding: they see nothing and nothing sees them.
            causal: whether a query sees only what came before it in its document.
            window: `(left, right)` limits within the document, None for unlimited.
            lengths: real tokens of each document, where the rest up to the next boundary is
                padding; None if there is none.

        Raises:
            UsageError: the boundaries do not ascend from 0, or a length exceeds its document.
        """
        bounds = document_bounds(cu_seqlens)
        sizes = (
            [b - a for a, b in itertools.pairwise(bounds)] if lengths is None else integers(lengths)
        )
        if len(sizes) != len(bounds) - 1 or any(
            not 0 <= size <= b - a
            for size, (a, b) in zip(sizes, itertools.pairwise(bounds), strict=False)
        ):
            raise UsageError(
                option="lengths",
                value=shorten(sizes),
                reason="each document has one length, at most its padded size",
                remedy=f"pass {len(bounds) - 1} lengths that fit {shorten(bounds)}",
            )
        spans = tuple(
            Run(start, start + size) for start, size in zip(bounds, sizes, strict=False) if size > 0
        )
        return cls(*_band(window, causal=causal), spans=spans)

    @classmethod
    def dense(
        cls, pairs: Tensor, *, causal: bool = False, window: Window | None = None
    ) -> AttentionMask:
        """An arbitrary mask.

        Args:
            pairs: bool `[s, s]` or `[b, 1, s, s]`, True = may attend.
            causal: whether a query sees only what came before it, whatever `pairs` says.
            window: `(left, right)` limits, likewise.

        Raises:
            UsageError: another dtype or shape.
        """
        square = pairs.dim() in (2, 4) and pairs.size(-1) == pairs.size(-2)
        if pairs.dtype != torch.bool or not square or (pairs.dim() == 4 and pairs.size(1) != 1):
            raise UsageError(
                option="dense mask",
                value=f"{pairs.dtype} {list(pairs.shape)}",
                reason="it must be bool and [s, s] or [b, 1, s, s], True = may attend",
                remedy="convert it, for example `additive_mask == 0`",
            )
        return cls(*_band(window, causal=causal), pairs=pairs)

    @classmethod
    def per_sample(cls, masks: Sequence[AttentionMask]) -> AttentionMask:
        """A mask of its own for each sample of the batch; equal ones are joined.

        Raises:
            UsageError: there is no mask, or one of them already speaks for several samples.
        """
        several = any(
            mask.samples is not None
            or (mask.pairs is not None and mask.pairs.dim() == 4 and mask.pairs.size(0) > 1)
            for mask in masks
        )
        if not masks or several:
            raise UsageError(
                option="masks",
                value=f"{len(masks)} masks",
                reason="each sample has one mask, which speaks for that sample only",
                remedy="pass one mask for each sample, dense ones as [s, s]",
            )
        if all(mask == masks[0] for mask in masks):
            return masks[0]
        return cls(samples=tuple(masks))

    def tiles(self, q_runs: Sequence[Run], k_runs: Sequence[Run]) -> tuple[Tile, ...]:
        """Cut the mask into tiles for one shard's queries against one shard's keys.

        Args:
            q_runs: global positions of the query rows, in local order.
            k_runs: global positions of the key rows, in local order.

        Returns:
            Tiles that together hold exactly the attending pairs, each of them once.
        """
        if self.samples is not None:
            return tuple(
                replace(tile, batch=Run(index, index + 1))
                for index, mask in enumerate(self.samples)
                for tile in mask.tiles(q_runs, k_runs)
            )
        found: list[Tile] = []
        held = sorted(with_offsets(merge_runs(k_runs)))
        for q_run, q_offset in with_offsets(merge_runs(q_runs)):
            for k_run, k_offset in overlapping(held, self.sight(q_run)):
                for q, k in self._blocks(q_run, k_run):
                    tile = self._clip(q, k, q_offset - q_run.start, k_offset - k_run.start)
                    if tile is not None:
                        found.append(tile)
        return tuple(found)

    def features(self) -> list[str]:
        """What a kernel and an algorithm must be able to do, as `capabilities` names it."""
        if self.samples is not None:
            found = {"per_sample": True}
            for sample in self.samples:
                found |= dict.fromkeys(sample.features(), True)
            return list(found)
        used = {
            "causal": self.hi == 0,
            "full": self.hi != 0,
            "window": self.lo is not None or self.hi not in (None, 0),
            "documents": self.spans is not None,
            "dense": self.pairs is not None,
        }
        return [feature for feature, is_used in used.items() if is_used]

    def touches(self, q_run: Run, k_run: Run) -> bool:
        """Whether some query position of `q_run` may see some key position of `k_run`.

        A dense mask counts as seeing everything inside its band and documents.
        """
        if self.samples is not None:
            return any(sample.touches(q_run, k_run) for sample in self.samples)
        return any(self._clip(q, k, 0, 0) for q, k in self._blocks(q_run, k_run))

    def sight(self, q_run: Run) -> Run:
        """Positions outside of which no query of `q_run` sees a key."""
        return self._hull(q_run, self.lo, self.hi, AttentionMask.sight)

    def reach(self, k_run: Run) -> Run:
        """Positions outside of which no query sees a key of `k_run`."""
        lo = None if self.hi is None else -self.hi
        hi = None if self.lo is None else -self.lo
        return self._hull(k_run, lo, hi, AttentionMask.reach)

    def remember(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """`compute()`, computed once for each key and kept as long as this mask."""
        if key not in self._memory:
            self._memory[key] = compute()
        return self._memory[key]

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: not what is remembered, which any copy can compute."""
        return {**self.__dict__, "_memory": {}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionMask) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        """What makes two masks equal; dense tensors are compared by identity."""
        pairs = None if self.pairs is None else id(self.pairs)
        return self.lo, self.hi, self.spans, pairs, self.samples

    def _hull(
        self,
        run: Run,
        lo: int | None,
        hi: int | None,
        of_sample: Callable[[AttentionMask, Run], Run],
    ) -> Run:
        """From the first to the last position that the band and the documents connect to `run`."""
        if self.samples is not None:
            hulls = [of_sample(sample, run) for sample in self.samples]
            return Run(min(hull.start for hull in hulls), max(hull.stop for hull in hulls))
        start, stop = 0, sys.maxsize
        if self.spans is not None:
            first = bisect.bisect_right(self.spans, run.start, key=lambda span: span.stop)
            last = bisect.bisect_left(self.spans, run.stop, key=lambda span: span.start)
            if first >= last:
                return Run(run.start, run.start)
            start, stop = self.spans[first].start, self.spans[last - 1].stop
        if lo is not None:
            start = max(start, run.start + lo)
        if hi is not None:
            stop = min(stop, run.stop + hi)
        return Run(start, stop)

    def _blocks(self, q_run: Run, k_run: Run) -> Iterator[tuple[Run, Run]]:
        """Pairs of sub-runs that lie in the same document."""
        if self.spans is None:
            yield q_run, k_run
            return
        first = bisect.bisect_right(self.spans, q_run.start, key=lambda span: span.stop)
        for span in itertools.islice(self.spans, first, None):
            if span.start >= q_run.stop:
                return
            q, k = _intersect(span, q_run), _intersect(span, k_run)
            if q.length > 0 and k.length > 0:
                yield q, k

    def _clip(self, q: Run, k: Run, q_shift: int, k_shift: int) -> Tile | None:
        """The tile of positions `q` x `k`, without rows and columns outside the band."""
        if self.hi is not None:
            q = Run(max(q.start, k.start - self.hi), q.stop)
            k = Run(k.start, min(k.stop, q.stop + self.hi))
        if self.lo is not None:
            q = Run(q.start, min(q.stop, k.stop - self.lo))
            k = Run(max(k.start, q.start + self.lo), k.stop)
        if q.length <= 0 or k.length <= 0:
            return None
        whole = Tile(
            q_rows=Run(q.start + q_shift, q.stop + q_shift),
            k_rows=Run(k.start + k_shift, k.stop + k_shift),
            q_pos=q.start,
            k_pos=k.start,
            lo=self.lo,
            hi=self.hi,
            dense=None if self.pairs is None else self.pairs[..., q.slice, k.slice],
        )
        return whole.part(Run(0, q.length), Run(0, k.length))


@functools.lru_cache(maxsize=256)
def _simple_mask(lo: int | None, hi: int | None) -> AttentionMask:
    """The same object for the same band, so that what it remembers is not computed anew."""
    return AttentionMask(lo, hi)


def _intersect(a: Run, b: Run) -> Run:
    return Run(max(a.start, b.start), min(a.stop, b.stop))


def _band(window: Window | None, *, causal: bool) -> Window:
    if window is not None and (not isinstance(window, tuple | list) or len(window) != 2):
        raise UsageError(
            option="window",
            value=window,
            reason="a window has a left and a right limit",
            remedy="pass (left, right), each None for unlimited",
        )
    left, right = window if window is not None else (None, None)
    for side, value in (("left", left), ("right", right)):
        if value is not None and value < 0:
            raise UsageError(
                option="window",
                value=window,
                reason=f"the {side} limit counts positions and cannot be negative",
                remedy="use 0 or more, or None for unlimited",
            )
    lo = None if left is None else -left
    hi = 0 if causal else right
    return lo, hi
