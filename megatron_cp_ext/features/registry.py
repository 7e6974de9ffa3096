"""The list of features, in the order their hooks run."""

from __future__ import annotations

from megatron_cp_ext.features.bidirectional import BidirectionalFeature
from megatron_cp_ext.features.context_parallel import ContextParallelFeature
from megatron_cp_ext.features.cpu_platform import CpuPlatformFeature
from megatron_cp_ext.features.documents import DocumentsFeature
from megatron_cp_ext.features.failure import FailureFeature
from megatron_cp_ext.features.help_texts import HelpTextsFeature
from megatron_cp_ext.features.hybrid import HybridFeature
from megatron_cp_ext.features.loss import LossFeature
from megatron_cp_ext.features.metrics import MetricsFeature
from megatron_cp_ext.features.mindspeed_flags import MindSpeedFlagsFeature
from megatron_cp_ext.features.plan import PlanFeature
from megatron_cp_ext.features.ring import RingFeature
from megatron_cp_ext.features.rules import RulesFeature
from megatron_cp_ext.features.wheel_install import WheelInstallFeature
from megatron_cp_ext.patching import Feature


def all_features() -> list[Feature]:
    """A fresh instance of every feature."""
    return [
        CpuPlatformFeature(),
        WheelInstallFeature(),
        HelpTextsFeature(),
        ContextParallelFeature(),
        RingFeature(),
        HybridFeature(),
        MindSpeedFlagsFeature(),
        RulesFeature(),
        DocumentsFeature(),
        BidirectionalFeature(),
        LossFeature(),
        FailureFeature(),
        MetricsFeature(),
        PlanFeature(),
    ]
