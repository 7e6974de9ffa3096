"""`megatron-cp doctor`: finds what is there, and says what is broken."""

from __future__ import annotations

import pytest

from megatron_cp_ext import capabilities
from megatron_cp_ext.cli import doctor
from megatron_cp_ext.features import diagnosis
from megatron_cp_ext.features.diagnosis import Finding, possible_patches, problems_of
from megatron_cp_ext.features.registry import all_features
from megatron_cp_ext.patching import Feature, wrap


def test_this_installation_works_on_one_screen(capsys) -> None:
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    for part in ("torch", "megatron-core", "transformer-engine", "flash-attn", "torch-npu"):
        assert part in shown
    for kernel in capabilities.KERNELS:
        assert f"kernel {kernel}" in shown
    assert "equal the reference" in shown
    assert shown.rstrip().endswith("everything needed works")
    assert len(shown.splitlines()) <= 40


def test_what_is_broken_fails(monkeypatch, capsys) -> None:
    findings = [Finding("a", "fine"), Finding("b", "gone", "FAIL"), Finding("c", "absent", "-")]
    monkeypatch.setattr(diagnosis, "diagnose", lambda self_test: findings)
    assert doctor.main(["--no-self-test"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("broken: b")


def test_every_feature_that_patches_is_asked() -> None:
    owners = {patch.owner for patch in possible_patches()}
    hooks = ("register_patches", "register_early_patches")
    patching = {
        feature.name
        for feature in all_features()
        if any(getattr(type(feature), hook) is not getattr(Feature, hook) for hook in hooks)
    }
    assert patching - owners == {"plan"}


@pytest.mark.parametrize(
    ("target", "parameters", "problem"),
    [
        ("megatron.core.utils:get_model_config", ("model",), None),
        ("megatron.core.utils:gone_in_this_version", (), "does not exist"),
        ("megatron.core.utils:get_model_config", ("renamed",), "no parameter renamed"),
    ],
)
def test_a_target_is_looked_up_and_its_signature_checked(target, parameters, problem) -> None:
    patch = wrap(target, lambda original: original(), owner="test", parameters=parameters)
    problems = problems_of(patch, "this version")
    assert bool(problems) == bool(problem)
    assert problem is None or problem in problems[0]
