"""What works with what: algorithm x kernel x feature x platform, or why not and what does.

The one source for validation, the command line's checks, the README's table and the tests that
walk all cells. It knows names only and imports nothing that computes. A cell that nobody filled
is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_cp_ext.errors import UsageError

ALGORITHMS = ("ring", "ulysses", "hybrid", "kvallgather")
PLATFORMS = ("cpu", "cuda", "npu")
KERNELS = ("aten_cpu", "reference")

# What a call may need, and how it is said to users.
FEATURES = {
    "causal": "causal mask",
    "full": "bidirectional attention",
    "window": "sliding window, to either side",
    "documents": "packed documents of any length",
    "padding": "tail and inner padding",
    "dense": "dense mask [s, s] or [b, 1, s, s]",
    "per_sample": "a mask for each sample",
    "sink": "attention sink",
    "gqa": "fewer KV heads than query heads",
    "few_kv_heads": "fewer KV heads than ranks",
    "uneven_heads": "query heads that the ranks do not divide",
    "few_heads": "fewer query heads than Ulysses ranks",
    "v_dim": "value dim unlike query dim (MLA)",
    "dropout": "attention dropout",
    "deterministic": "bitwise repeatable runs",
    "any_scale": "softmax scale of 0 or below",
    "fp64": "fp64",
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
}


@dataclass(frozen=True)
class Support:
    """Whether something works.

    Args:
        reason: why it does not; empty if it does.
        instead: what does work; empty if it does.
    """

    reason: str = ""
    instead: str = ""

    @property
    def works(self) -> bool:
        """Whether it does."""
        return not self.reason


YES = Support()
_EVERYTHING = dict.fromkeys(FEATURES, YES)
_NOBODY = Support("nobody has tested it", "use another combination of README's table")
_NO_HEAD_LEFT = Support(
    "each rank of a Ulysses group needs a query head of its own",
    "use ring, kvallgather, or hybrid with a smaller Ulysses degree",
)

# Algorithms move tensors and know no masks, so they differ in nothing but heads.
_BY_ALGORITHM: dict[str, dict[str, Support]] = {
    "ring": _EVERYTHING,
    "kvallgather": _EVERYTHING,
    "ulysses": _EVERYTHING | {"few_heads": _NO_HEAD_LEFT},
    "hybrid": _EVERYTHING | {"few_heads": _NO_HEAD_LEFT},
}

_BY_KERNEL: dict[str, dict[str, Support]] = {
    "reference": _EVERYTHING,
    "aten_cpu": _EVERYTHING
    | {
        "dropout": Support("it has no dropout", "use kernel reference"),
        "any_scale": Support(
            "it scales the -inf of what is masked, which needs a positive softmax scale",
            "use kernel reference",
        ),
    },
}

_NO_NPU = Support("nobody has tested it on an NPU", "run on cpu or cuda")
_BY_PLATFORM: dict[str, dict[str, Support]] = {
    "cpu": dict.fromkeys(KERNELS, YES),
    "cuda": {
        "reference": YES,
        "aten_cpu": Support("it runs on CPU tensors only", "use kernel reference"),
    },
    "npu": dict.fromkeys(KERNELS, _NO_NPU),
}


def kernel_support(kernel: str, feature: str) -> Support:
    """Whether a kernel can do something, whatever the algorithm."""
    return _BY_KERNEL.get(kernel, {}).get(feature, _NOBODY)


def platform_support(kernel: str, platform: str) -> Support:
    """Whether a kernel runs on a platform."""
    unknown = Support(f"nothing is known of {platform} tensors", f"use {', '.join(PLATFORMS)}")
    return _BY_PLATFORM.get(platform, {}).get(kernel, unknown)


def support(*, algorithm: str, kernel: str, feature: str, platform: str) -> Support:
    """One cell of the table."""
    cells = (
        platform_support(kernel, platform),
        _BY_ALGORITHM.get(algorithm, {}).get(feature, _NOBODY),
        kernel_support(kernel, feature),
    )
    return next((cell for cell in cells if not cell.works), YES)


def usable_kernels(*, algorithm: str, features: Iterable[str], platform: str) -> list[str]:
    """The kernels that can do all of that, fastest first."""
    features = list(features)
    return [
        kernel
        for kernel in KERNELS
        if all(
            support(algorithm=algorithm, kernel=kernel, feature=feature, platform=platform).works
            for feature in features
        )
    ]


def require(*, algorithm: str, kernel: str, features: Iterable[str], platform: str) -> str:
    """The kernel to use: `kernel`, or the fastest that can where it is `"auto"`.

    Raises:
        UsageError: there is no such algorithm or kernel, or something does not work with it.
    """
    features = list(features)
    for option, value, known in (
        ("algorithm", algorithm, ALGORITHMS),
        ("kernel", kernel, ("auto", *KERNELS)),
    ):
        if value not in known:
            raise UsageError(
                option=option,
                value=value,
                reason=f"there is no such {option}",
                remedy=f"use one of {', '.join(known)}",
            )
    able = usable_kernels(algorithm=algorithm, features=features, platform=platform)
    if kernel == "auto" and able:
        return able[0]
    # Where no kernel can, name what stands in the way of the one that can do most.
    tried = KERNELS[-1] if kernel == "auto" else kernel
    platform_cell = platform_support(tried, platform)
    if not platform_cell.works:
        raise _refusal("kernel", kernel, f"on {platform}", platform_cell)
    for feature in features:
        for option, value, cell in (
            ("algorithm", algorithm, _BY_ALGORITHM[algorithm].get(feature, _NOBODY)),
            ("kernel", kernel, kernel_support(tried, feature)),
        ):
            if not cell.works:
                raise _refusal(option, value, f"with {FEATURES[feature]}", cell)
    return tried


def _refusal(option: str, value: str, circumstance: str, cell: Support) -> UsageError:
    return UsageError(
        option=option, value=f"{value} {circumstance}", reason=cell.reason, remedy=cell.instead
    )


def markdown_table() -> str:
    """The README's table: features down, algorithms and kernels across."""
    columns = [*ALGORITHMS, *KERNELS]
    lines = [
        f"| | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    notes: list[str] = []
    for feature, title in FEATURES.items():
        cells = [_BY_ALGORITHM[a].get(feature, _NOBODY) for a in ALGORITHMS]
        cells += [kernel_support(kernel, feature) for kernel in KERNELS]
        shown = []
        for cell in cells:
            note = f"{cell.reason}; {cell.instead}"
            if not cell.works and note not in notes:
                notes.append(note)
            shown.append("yes" if cell.works else f"refused [{notes.index(note) + 1}]")
        lines.append(f"| {title} | {' | '.join(shown)} |")
    lines += ["", *(f"[{number}] {note}.  " for number, note in enumerate(notes, 1))]
    return "\n".join(lines).rstrip()
