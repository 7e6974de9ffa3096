"""The Triton kernels that merge and sum, run by Triton's interpreter, equal torch and the oracle.

The interpreter is chosen when Triton is imported, so this runs in a process of its own, which is
this file as a script.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="torch comes without Triton here"
)


@needs_triton
def test_triton_merges_and_sums_as_torch_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["all", "equal"]


def test_without_triton_torch_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_cp_ext.kernels import merge

    monkeypatch.setitem(sys.modules, "megatron_cp_ext.kernels.merge_triton", None)
    monkeypatch.setattr(merge, "FUSED_ON", {"cpu"})
    merge._triton_kernels.cache_clear()
    try:
        total = torch.ones(2, 1, 1, 3)
        merge.accumulate(total, torch.ones(2, 1, 1, 3, dtype=torch.bfloat16))
        assert (total == 2).all()
    finally:
        merge._triton_kernels.cache_clear()


def test_a_triton_that_cannot_compile_is_named_and_torch_merges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton without its interpreter finds no GPU here, as it finds no compiler elsewhere."""
    pytest.importorskip("triton")
    from megatron_cp_ext.kernels import merge

    monkeypatch.setattr(merge, "FUSED_ON", {"cpu"})
    merge._triton_kernels.cache_clear()
    try:
        total = torch.ones(2, 1, 1, 3)
        with pytest.warns(UserWarning, match="cannot compile here"):
            merge.accumulate(total, total.clone())
        assert (total == 2).all()
    finally:
        merge._triton_kernels.cache_clear()


# Ampere and Hopper; ptxas comes with Triton, so no GPU is needed.
@needs_triton
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", ["_merge_kernel", "_add_kernel"])
def test_the_kernels_compile_for_gpus_and_read_16_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, architecture: int
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_cp_ext.kernels import merge_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(merge_triton, name)
    constants = {"FIRST": False, "BLOCK_ROWS": 32, "BLOCK_DIM": 128}
    constants |= dict.fromkeys(("out_d", "part_d", "into_d"), 1)  # as Triton itself does for 1
    pointers = {"part": "*bf16"} | dict.fromkeys(("out", "lse", "part_lse", "into"), "*fp32")
    names = kernel.arg_names
    compiled = triton.compile(
        ASTSource(
            fn=kernel,
            signature={n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names},
            constexprs={(i,): constants[n] for i, n in enumerate(names) if n in constants},
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, n in enumerate(names)
                if n not in constants and n != "heads"
            },
        ),
        target=GPUTarget("cuda", architecture, 32),
    )
    assert compiled.asm["cubin"]
    loads = re.findall(r"(?:ld|st)\.global[.\w]*", compiled.asm["ptx"])
    wide = [load for load in loads if ".v4." in load]
    assert len(wide) >= 20  # 32 elements of three tensors for each thread
    assert not any(".b16" in load or ".b8" in load for load in loads)


def strided(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values with another order in memory, and a gap after each row."""
    permuted = tensor.permute(order)
    padded = permuted.new_empty(*permuted.shape[:-1], permuted.size(-1) + 3)
    padded[..., : permuted.size(-1)] = permuted
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return padded[..., : permuted.size(-1)].permute(inverse)


def check_merge(dtype: torch.dtype, dim: int, order: tuple[int, int, int, int]) -> None:
    """Parts of a few rows and samples, one after the other, by Triton and by torch."""
    from megatron_cp_ext.kernels import merge
    from megatron_cp_ext.kernels.merge import OutputAccumulator
    from megatron_cp_ext.layout import Run

    s, b, h = 70, 2, 3
    generator = torch.Generator().manual_seed(dim)
    query = torch.zeros(s, b, h, dim)
    accumulators = []
    for fused_on in (set(), {"cpu"}):
        generator.manual_seed(dim)
        merge.FUSED_ON = fused_on
        held = OutputAccumulator.empty(query, dim, torch.float32)
        for rows, samples in (
            (Run(0, 40), None),
            (Run(40, s), None),
            (Run(3, 69), None),
            (Run(5, 50), Run(1, 2)),
            (Run(0, s), None),
        ):
            count = b if samples is None else samples.length
            out = torch.randn(rows.length, count, h, dim, generator=generator).to(dtype)
            lse = torch.randn(count, h, rows.length, generator=generator) * 4
            nothing = torch.rand(lse.shape, generator=generator) < 0.4
            lse[nothing] = -math.inf
            out[nothing.permute(2, 0, 1)] = 0
            held.merge(strided(out, order), strided(lse, (2, 0, 1)), rows=rows, batch=samples)
        accumulators.append(held)
    by_torch, by_triton = accumulators
    assert by_triton.lse.isneginf().any() and by_triton.lse.isfinite().any()
    torch.testing.assert_close(by_triton.lse, by_torch.lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(by_triton.out, by_torch.out, rtol=1e-6, atol=5e-6)


def check_add(dtype: torch.dtype, dim: int, order: tuple[int, int, int, int]) -> None:
    """Some rows of one sample get a sum, the others stay."""
    from megatron_cp_ext.kernels import merge

    generator = torch.Generator().manual_seed(dim)
    part = torch.randn(33, 1, 3, dim, generator=generator).to(dtype)
    total = torch.randn(70, 2, 3, dim, generator=generator)
    expected = total.clone()
    expected[5:38, 1:2] += part
    merge.FUSED_ON = {"cpu"}
    merge.accumulate(total[5:38, 1:2], strided(part, order))
    assert torch.equal(total, expected)


def check_the_first_is_taken_as_it_is_and_a_nan_stays() -> None:
    from megatron_cp_ext.kernels import merge
    from megatron_cp_ext.kernels.merge import OutputAccumulator
    from megatron_cp_ext.layout import Run

    merge.FUSED_ON = {"cpu"}
    out, lse = torch.randn(4, 1, 2, 8), torch.randn(1, 2, 4)
    held = OutputAccumulator.empty(out, 8, torch.float32)
    held.merge(out, lse, rows=Run(0, 4))
    assert torch.equal(held.out, out) and torch.equal(held.lse, lse)
    lse[0, 1, 2] = math.nan
    held.merge(out, lse, rows=Run(0, 4))
    assert held.lse.isnan().nonzero().tolist() == [[0, 1, 2]]
    assert held.out[2, 0, 1].isnan().all() and held.out.isnan().sum() == 8
    empty = OutputAccumulator.empty(out[:0], 8, torch.float32)
    empty.merge(out[:0], lse[:, :, :0], rows=Run(0, 0))


def check_against_the_oracle() -> None:
    """The whole way: forward and backward of kernel reference, merged and summed by Triton."""
    from megatron_cp_ext import AttentionMask, SequenceLayout
    from megatron_cp_ext.kernels import merge
    from megatron_cp_ext.layout import Run
    from megatron_cp_ext.testing import AttentionCase, assert_matches_oracle

    calls = []
    merge.FUSED_ON = {"cpu"}
    kernels = merge._triton_kernels(torch.device("cpu"))
    assert kernels is not None
    real = kernels.merge
    kernels.merge = lambda *args, **options: (calls.append(options), real(*args, **options))
    assert_matches_oracle(
        None,
        *(
            AttentionCase(
                # Halves in the wrong order: runs of keys that make tiles of their own.
                SequenceLayout(24, ((Run(12, 24), Run(0, 12)),)),
                mask,
                batch=2,
                kv_heads=2,
                qk_dim=12,
                v_dim=20,
                dtype=dtype,
                kernel="reference",
                with_sink=True,
            )
            for dtype in (torch.float32, torch.bfloat16)
            for mask in (
                AttentionMask.documents([0, 5, 17, 21], window=(4, 0)),
                AttentionMask.dense(torch.rand(24, 24) < 0.3),
            )
        ),
    )
    assert {"first": True} in calls and {"first": False} in calls


if __name__ == "__main__":
    for dtype, dim, order in (
        (torch.float32, 8, (0, 1, 2, 3)),
        (torch.bfloat16, 20, (1, 2, 0, 3)),
        (torch.float16, 65, (1, 0, 2, 3)),
        (torch.float64, 3, (3, 1, 0, 2)),
    ):
        check_merge(dtype, dim, order)
        check_add(dtype, dim, order)
    check_the_first_is_taken_as_it_is_and_a_nan_stays()
    check_against_the_oracle()
    print("all equal")
