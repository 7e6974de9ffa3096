"""How fast the algorithms are here: time, efficiency against the limit, bytes sent."""

from megatron_cp_ext.benchmark.measure import Measurement, Workload, measure

__all__ = ["Measurement", "Workload", "measure"]
