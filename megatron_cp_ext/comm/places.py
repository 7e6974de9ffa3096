"""What a rank is doing, in words, for the error that ends it.

A run of many ranks fails on one and is seen to fail on another, which waits for it in vain. What
helps is which rank was where. Whatever takes time or may fail stands in a block with a name, and
an error that leaves such blocks carries their names in a note, outermost first:

    rank 2: iteration 7, backward pass, layer 4, backward, ring step 1 of 3, waiting for kv from
    rank 1
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch.distributed as dist

_NOTED = "_names_its_place"


class _Places:
    """The named blocks this process is in, outermost first, and where its last error arose.

    One list for all threads: on accelerators autograd runs the backward pass in a thread of its
    own, while the one that called it waits inside its block.
    """

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.failed = ""


_here = _Places()


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Name a block; an error that leaves it says so.

    Args:
        what: what the block does, such as "waiting for kv from rank 1".
    """
    depth = len(_here.entered)
    _here.entered.append(what)
    _here.failed = ""
    try:
        yield
    except Exception as error:
        if not hasattr(error, _NOTED):
            _here.failed = here()
            error.add_note(_here.failed)
            setattr(error, _NOTED, True)
        raise
    finally:
        del _here.entered[depth:]


def steps(name: str, count: int) -> Iterable[int]:
    """`range(count + 1)`, each number the name of what is done until the next: "name 1 of 3".

    A loop over this must be inside a `during` block, which clears up after an error.
    """
    depth = len(_here.entered)
    for step in range(count + 1):
        _here.entered[depth:] = [f"{name} {step} of {count}"]
        yield step
    del _here.entered[depth:]


def here() -> str:
    """Where this rank is now, in words, or where the error arose that is on its way out.

    Empty outside of any named block.
    """
    if _here.failed or not _here.entered:
        return _here.failed
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return f"rank {rank}: {', '.join(_here.entered)}"


def innermost() -> str:
    """The name of the innermost block; empty outside of any."""
    return _here.entered[-1] if _here.entered else ""


def members(ranks: Iterable[int]) -> str:
    """Global ranks in words: "rank 1", "ranks 1 and 3", "ranks 0, 1 and 3"."""
    distinct = [str(rank) for rank in sorted(set(ranks))]
    if len(distinct) == 1:
        return f"rank {distinct[0]}"
    return f"ranks {', '.join(distinct[:-1])} and {distinct[-1]}"
