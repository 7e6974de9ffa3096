"""Recutting of tiles for backends that know full and causal blocks, but no general bands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_cp_ext.layout import Run
from megatron_cp_ext.mask import Tile


def is_top_left_causal(tile: Tile) -> bool:
    """Whether row i of the tile sees exactly its columns 0 to i."""
    return (
        tile.dense is None
        and tile.lo is None
        and tile.hi is not None
        and tile.k_pos - tile.q_pos == tile.hi
    )


def join_full_tiles(tiles: Sequence[Tile]) -> list[Tile]:
    """Join full tiles of neighbouring query rows over the same keys into one tile.

    A joined tile keeps the position of its first row only, which is all a full tile needs.
    """
    joined: list[Tile] = []
    for tile in sorted(tiles, key=lambda t: (t.k_rows, not t.is_full, t.q_rows)):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.is_full
            and tile.is_full
            and last.k_rows == tile.k_rows
            and last.batch == tile.batch
            and last.q_rows.stop == tile.q_rows.start
        ):
            joined[-1] = replace(last, q_rows=Run(last.q_rows.start, tile.q_rows.stop))
        else:
            joined.append(tile)
    return joined


def cut_bands(tiles: Sequence[Tile], *, block: int) -> Iterator[Tile]:
    """Cut every tile into full ones, top-left causal ones, and small ones with any band.

    A causal band becomes the full columns left of the diagonal and one causal tile. A window
    is cut into `block` rows at a time, whose columns are full in the middle, so that only its
    two edges need an explicit mask.

    Args:
        tiles: what to cut.
        block: rows of a tile that needs an explicit mask, and the width of the full middle
            from which it pays to separate it.
    """
    for tile in tiles:
        if tile.is_full:
            yield tile
        elif tile.dense is not None:
            yield from _cut_rows(tile, block)
        elif tile.lo is None:
            yield from _cut_causal(tile)
        else:
            for rows in _cut_rows(tile, block):
                yield from _cut_window(rows, block)


def _cut_causal(tile: Tile) -> Iterator[Tile]:
    """Full columns that the first row sees, then the staircase."""
    assert tile.hi is not None
    rows, columns = tile.q_rows.length, tile.k_rows.length
    # Column of the diagonal in row 0: k_pos + column - q_pos = hi.
    diagonal = tile.hi - (tile.k_pos - tile.q_pos)
    assert 0 <= diagonal < columns, "masks clip rows and columns that the band leaves empty"
    if diagonal:
        yield tile.part(Run(0, rows), Run(0, diagonal))
    yield tile.part(Run(0, rows), Run(diagonal, columns))


def _cut_rows(tile: Tile, block: int) -> Iterator[Tile]:
    for start in range(0, tile.q_rows.length, block):
        stop = min(start + block, tile.q_rows.length)
        yield tile.part(Run(start, stop), Run(0, tile.k_rows.length))


def _cut_window(tile: Tile, block: int) -> Iterator[Tile]:
    """Left edge, full middle and right edge of a few rows of a window."""
    rows = Run(0, tile.q_rows.length)
    shift = tile.k_pos - tile.q_pos
    first, last = 0, tile.k_rows.length
    middle_first, middle_last = first, last
    if tile.lo is not None:
        first = max(first, tile.lo - shift)
        middle_first = max(first, tile.lo - shift + rows.length - 1)
    if tile.hi is not None:
        last = min(last, tile.hi - shift + rows.length)
        middle_last = min(last, tile.hi - shift + 1)
    if middle_last - middle_first < block:
        pieces = [Run(first, last)]
    else:
        pieces = [
            Run(first, middle_first),
            Run(middle_first, middle_last),
            Run(middle_last, last),
        ]
    for columns in pieces:
        if columns.length > 0:
            yield tile.part(rows, columns)
