"""The list of features, in the order their hooks run."""

from __future__ import annotations

from megatron_cp_ext.patching import Feature


def all_features() -> list[Feature]:
    """A fresh instance of every feature."""
    return []
