"""Runs the same training in several configurations and decides whether they agree.

    report = verify(VerifyPlan(Workload(), (RunSpec.parse("ring:cp=2"),), Tolerances.of("fp32"),
                               output=Path("out")))
    assert report.passed

`train` runs one configuration, `compare` holds one run against another. Nothing here imports
torch: the training happens in processes of its own.
"""

from megatron_cp_ext.verification.compare import Comparison, Tolerances, compare, faults
from megatron_cp_ext.verification.launch import Launcher, torchrun
from megatron_cp_ext.verification.metrics import Metrics, MetricsError, Step, read_metrics
from megatron_cp_ext.verification.processes import Cancelled
from megatron_cp_ext.verification.spec import RunSpec
from megatron_cp_ext.verification.training import TrainingFailed, train
from megatron_cp_ext.verification.verify import (
    Progress,
    RunReport,
    VerifyPlan,
    VerifyReport,
    verify,
)
from megatron_cp_ext.verification.workload import Workload

__all__ = [
    "Cancelled",
    "Comparison",
    "Launcher",
    "Metrics",
    "MetricsError",
    "Progress",
    "RunReport",
    "RunSpec",
    "Step",
    "Tolerances",
    "TrainingFailed",
    "VerifyPlan",
    "VerifyReport",
    "Workload",
    "compare",
    "faults",
    "read_metrics",
    "torchrun",
    "train",
    "verify",
]
