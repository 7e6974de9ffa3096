"""`megatron-cp run [script.py] ARGS`: the same as `python -m megatron_cp_ext.run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run the script named first in `argv`, or the packaged pre-training, in this process."""
    from megatron_cp_ext import run

    sys.argv = [run.__file__, *argv]
    run.main()
    return 0
