"""Runtime patches of importable objects: declared, checked, listed and undone.

This floor knows Python only. What is patched, and why, is decided by the features.
"""

from megatron_cp_ext.patching.feature import Feature
from megatron_cp_ext.patching.manager import AppliedPatch, PatchManager
from megatron_cp_ext.patching.patch import Patch, PatchError, replace, wrap

__all__ = ["AppliedPatch", "Feature", "Patch", "PatchError", "PatchManager", "replace", "wrap"]
