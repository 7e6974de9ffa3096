"""What our tests and our users' tests need: a gloo worker pool, an fp64 oracle, a comparison."""

from megatron_cp_ext.testing.compare import (
    assert_close_to_oracle,
    bounds,
    relative_error,
    relative_errors,
    tolerance,
)
from megatron_cp_ext.testing.oracle import OracleResult, oracle_attention
from megatron_cp_ext.testing.pool import GlooPool, WorkerError, WorkerTimeout

__all__ = [
    "GlooPool",
    "OracleResult",
    "WorkerError",
    "WorkerTimeout",
    "assert_close_to_oracle",
    "bounds",
    "oracle_attention",
    "relative_error",
    "relative_errors",
    "tolerance",
]
