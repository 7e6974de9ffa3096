"""The list of features, in the order their hooks run."""

from __future__ import annotations

from megatron_cp_ext.features.cpu_platform import CpuPlatformFeature
from megatron_cp_ext.features.dataset_helpers import DatasetHelpersFeature
from megatron_cp_ext.features.metrics import MetricsFeature
from megatron_cp_ext.patching import Feature


def all_features() -> list[Feature]:
    """A fresh instance of every feature."""
    return [CpuPlatformFeature(), DatasetHelpersFeature(), MetricsFeature()]
