"""Triton's kernel for Adagrad on rows: right by Triton's own interpreter, and compiled for GPUs old and new."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETED = """
import torch
from nbdist.recsys.parallel.device_rows import adagrad_rows
from nbdist.recsys.parallel.fused_rows import FusedAdagrad

draw = torch.Generator().manual_seed(0)
for width in (1, 10, 16, 64):
    tables = [torch.randn(rows, width, generator=draw) for rows in (50, 1, 300)]
    sums = [torch.rand(table.shape, generator=draw) for table in tables]
    mine = [one.clone() for one in (*tables, *sums)]
    fused = FusedAdagrad(mine[:3], mine[3:], 1e-10)
    for counts in ((200, 3, 100), (1, 0, 1), (40, 2, 40)):
        grads = []
        for count, table, kept in zip(counts, tables, sums):
            ids = (torch.rand(count, generator=draw) ** 2 * len(table)).long()
            rows = torch.randn(count, width, generator=draw)
            adagrad_rows(table, kept, ids, rows, torch.tensor(0.1), 1e-10)
            grad = torch.sparse_coo_tensor(ids[None], rows, table.shape, check_invariants=False)
            grads.append(grad if count else None)
        fused.step(grads, torch.tensor(0.1))
    torch.testing.assert_close(mine, [*tables, *sums], rtol=1e-5, atol=1e-6)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nbdist.recsys.parallel.fused_rows import _adagrad

kinds = {"places": "*i64", "firsts": "*i64", "keys": "*i32", "order": "*i64", "grads": "*fp32", "rate": "*fp32"}
sizes = {"TABLES": 2, "SLOTS": 2, "WIDTH": 10, "COLUMNS": 16, "SOME": 32}
signature = kinds | {"count": "i32", "eps": "fp32"} | dict.fromkeys(sizes, "constexpr")
for capability in (75, 80, 90):
    source = ASTSource(fn=_adagrad, signature=signature, constexprs=sizes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1})
    assert made.asm["cubin"]
"""


@pytest.mark.parametrize("code, variables", [(INTERPRETED, {"TRITON_INTERPRET": "1"}), (COMPILED, {})])
def test_the_kernel(code: str, variables: dict[str, str]) -> None:
    usual = {
        name: value for name, value in os.environ.items() if not name.startswith("LD_")
    }  # no GPU, also none imitated
    done = subprocess.run([sys.executable, "-c", code], env=usual | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
