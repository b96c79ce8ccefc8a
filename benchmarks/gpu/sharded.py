"""TorchRec's part: one step, two NCCL ranks, and rows per second of sharded tables."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from benchmarks import ROOT
from nbdist import in_ddp

from .notes import attempt, note, seconds
from .pair import session_of

LIMIT = 120.0
NEEDS = ("torchrec", "fbgemm_gpu", "pyarrow", "torchmetrics")


def of_tests(name: str, *args: Any) -> Any:
    """In a rank: call a function of `tests/test_gpus.py`."""
    spec = importlib.util.spec_from_file_location("test_gpus", ROOT / "tests" / "test_gpus.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)(*args)


def speed(way: str, width: int, batch: int, steps: int) -> float:
    """In a rank: rows per second of sharded tables, by `fit` or by a plain loop."""
    from benchmarks.recsys import training

    measure: Callable[[], Any] = {
        "`fit`": lambda: training.helped(width, batch, steps),
        "a plain loop": lambda: training.loop(training.sharded, width, batch, steps),
    }[way]
    measure()
    return steps * batch / measure().seconds


def run(device: str) -> None:
    with attempt("import"):
        logging.disable(logging.WARNING)
        took = seconds(lambda: __import__("torchrec"))
        note("importing TorchRec and FBGEMM", f"{took:.1f} s")
    with attempt("one step of sharded tables"):
        right = in_ddp.options(devices=device)(1, of_tests, "train_sharded")
        note("one step of sharded tables changes the rows of the batch", right, met=right)
    for pipelined in (False, True):
        what = f"`shard` and `fit(pipelined={pipelined})` on two NCCL ranks of one GPU"
        with attempt(what), session_of(device) as session:
            losses, gathered = session.run(of_tests, "fit_sharded", pipelined)
            right = losses[-1] < losses[0] and abs(gathered - losses[-1]) < 1e-3 * abs(losses[-1])
            note(what, f"losses {losses}, of the gathered model {gathered:.4f}", met=right)
    for width, batch in ((16, 65_536), (64, 65_536), (16, 2048)):
        for way in ("`fit`", "a plain loop"):
            what = f"sharded tables, width {width}, batch {batch:,}, {way}"
            with attempt(what):
                found = in_ddp.options(devices=device)(1, speed, way, width, batch, 3 if device == "cpu" else 100)
                note(what, f"{found / 1e6:.2f} M rows/s")
