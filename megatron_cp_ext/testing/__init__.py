"""What our tests and our users' tests need: a gloo worker pool, an fp64 oracle, a comparison.

`strategies` (random cases for hypothesis) is not imported here, because hypothesis is an extra.
"""

from megatron_cp_ext.testing.cases import AttentionCase, covered_pairs, dense_pairs
from megatron_cp_ext.testing.compare import (
    assert_close_to_oracle,
    bounds,
    relative_error,
    relative_errors,
    tolerance,
)
from megatron_cp_ext.testing.oracle import OracleResult, oracle_attention
from megatron_cp_ext.testing.pool import GlooPool, WorkerError, WorkerTimeout
from megatron_cp_ext.testing.running import (
    Refusal,
    assert_matches_oracle,
    attend_here,
    disagreement,
    run_case,
    run_cases,
)
from megatron_cp_ext.testing.tiles import attend_by_tiles

__all__ = [
    "AttentionCase",
    "GlooPool",
    "OracleResult",
    "Refusal",
    "WorkerError",
    "WorkerTimeout",
    "assert_close_to_oracle",
    "assert_matches_oracle",
    "attend_by_tiles",
    "attend_here",
    "bounds",
    "covered_pairs",
    "dense_pairs",
    "disagreement",
    "oracle_attention",
    "relative_error",
    "relative_errors",
    "run_case",
    "run_cases",
    "tolerance",
]
