"""What `megatron-cp doctor` finds out about an installation."""

from __future__ import annotations

import platform as host
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_cp_ext import __version__, capabilities
from megatron_cp_ext.errors import UsageError
from megatron_cp_ext.features.cpu_platform import resolve_platform
from megatron_cp_ext.features.dry_run import DryRun
from megatron_cp_ext.features.facts import Facts, installed_versions
from megatron_cp_ext.layout import SequenceLayout
from megatron_cp_ext.megatron.releases import describe_version, installed_version
from megatron_cp_ext.patching import Patch, PatchError
from megatron_cp_ext.patching.patch import Target
from megatron_cp_ext.testing import AttentionCase, GlooPool, assert_matches_oracle

OK, MISSING, BROKEN = "ok", "-", "FAIL"

# Small models that between them make every feature declare its patches.
_MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128 --attention-dropout 0 "
    "--position-embedding-type rope --context-parallel-size 2 "
)
_PROBES = (
    "--reset-attention-mask --mtp-num-layers 1",
    "--num-experts 2 --expert-model-parallel-size 2 --cp-metrics-file metrics.jsonl",
    "--dataloader-inter-document-masking --context-parallel-algo ulysses_cp_algo",
    "--attention-mask-type general --context-parallel-algo kvallgather_cp_algo",
)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        what: that was looked at.
        found: in words.
        mark: "ok", "-" for something that is not there and need not be, "FAIL".
    """

    what: str
    found: str
    mark: str = OK

    @property
    def broken(self) -> bool:
        """Whether something that is needed does not work."""
        return self.mark == BROKEN


def diagnose(*, self_test: bool = True) -> list[Finding]:
    """Examine this installation.

    Args:
        self_test: whether to start two gloo ranks too.
    """
    return [
        *_software(),
        *_kernels(),
        *_patches(),
        *(_two_ranks() if self_test else ()),
    ]


def _software() -> Iterator[Finding]:
    versions = installed_versions()
    yield Finding("megatron-cp-ext", f"{__version__}, Python {host.python_version()}")
    yield Finding("torch", torch.__version__)
    megatron = installed_version()
    present = megatron != "(not installed)"
    yield Finding("megatron-core", describe_version(megatron), OK if present else BROKEN)
    for package in ("transformer_engine", "flash_attn", "torch_npu"):
        there = package in versions
        yield Finding(
            package.replace("_", "-"), versions.get(package, "not installed"), OK if there else "-"
        )
    yield _devices()


def _devices() -> Finding:
    found = resolve_platform("auto")
    if found == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return Finding(
            "devices",
            f"{torch.cuda.device_count()} x {', '.join(sorted(names))}; CUDA "
            f"{torch.version.cuda}, driver for CUDA {_driver()}, NCCL {nccl}",
        )
    if found == "npu":
        npu = getattr(torch, "npu")  # noqa: B009  torch_npu puts it there
        return Finding("devices", f"{npu.device_count()} NPUs")
    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU torch"
    return Finding("devices", f"no accelerator: CPU ranks over gloo ({built})", MISSING)


def _driver() -> str:
    """The newest CUDA version that the driver serves."""
    version = getattr(torch._C, "_cuda_getDriverVersion")()  # noqa: B009  CUDA builds only
    return f"{version // 1000}.{version % 1000 // 10}"


def _kernels() -> Iterator[Finding]:
    """Kernels on this platform: what they cannot do, or why they cannot be used at all."""
    here = resolve_platform("auto")
    usable = 0
    for kernel in capabilities.KERNELS:
        support = capabilities.platform_support(kernel, here)
        if not support.works:
            yield Finding(f"kernel {kernel}", f"not on {here}: {support.reason}", MISSING)
            continue
        usable += 1
        cannot = [
            title
            for feature, title in capabilities.FEATURES.items()
            if not capabilities.kernel_support(kernel, feature).works
        ]
        yield Finding(f"kernel {kernel}", f"without {', '.join(cannot)}" if cannot else "does all")
    if not usable:
        yield Finding("kernels", f"none runs on {here}", BROKEN)


def _patches() -> Iterator[Finding]:
    """Every target that a feature may patch: there, and with the signature it expects."""
    version = describe_version(installed_version())
    try:
        patches = possible_patches()
    except UsageError as error:
        yield Finding("patches", f"{error.option}: {error.reason}", BROKEN)
        return
    problems = [problem for patch in patches for problem in problems_of(patch, version)]
    for problem in problems:
        yield Finding("patch", problem, BROKEN)
    if not problems:
        owners = sorted({patch.owner for patch in patches})
        yield Finding("patches", f"all {len(patches)} targets fit ({', '.join(owners)})")


def possible_patches() -> list[Patch]:
    """What the features declare for models that use each of them, one for each target.

    Raises:
        UsageError: such a model is refused.
    """
    found: dict[tuple[str, str], Patch] = {}
    dry_run = DryRun(Facts(platform="cpu", here=False))
    for probe in _PROBES:
        patches = dry_run.patches_for((_MODEL + probe).split(), 2)
        found |= {(patch.target, patch.owner): patch for patch in patches}
    return list(found.values())


def problems_of(patch: Patch, version: str) -> list[str]:
    """Why a patch does not fit the installed Megatron; empty if it does."""
    try:
        Target.resolve(patch.target, version=version).check(patch, version=version)
    except PatchError as error:
        return [str(error)]
    return []


def _two_ranks() -> Iterator[Finding]:
    """Every algorithm that two ranks can run, forward and backward, against the oracle."""
    algorithms = {"ring": 1, "ulysses": 2, "kvallgather": 1}
    cases = [
        AttentionCase(
            SequenceLayout.zigzag(32, 2), algorithm=algorithm, ulysses_degree=degree, kv_heads=2
        )
        for algorithm, degree in algorithms.items()
    ]
    try:
        with GlooPool(2) as pool:
            assert_matches_oracle(pool, *cases)
    except (AssertionError, RuntimeError) as error:
        yield Finding("two gloo ranks", str(error).strip().splitlines()[0], BROKEN)
        return
    yield Finding("two gloo ranks", f"{', '.join(algorithms)} equal the reference")
