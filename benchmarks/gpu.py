"""Everything that was written for GPUs, run on one: tests, then figures, into `results/gpu.md`.

`make gpu`; or on a bare machine, without network, `python -m benchmarks.gpu` from a clone: with a torch that has CUDA,
pytest, and what `make gpu-wheels` puts into `build/wheels` on another machine. What is not installed is left out, which
the results say. `--dry-run` runs on CPUs what can be: it tells whether this command works, and nothing of GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import ROOT
from benchmarks.machine import conditions, save
from nbdist import Session, in_ddp, rank_device

#: Seconds after which no further part is begun.
LIMIT = 540.0
PACKAGES = ("torch", "cloudpickle", "psutil")
#: Without these a part is left out.
OPTIONAL = ("pynvml", "pyarrow", "fastai", "torchrec", "fbgemm_gpu", "cudf_polars")
NO_GPU = 2
"""The exit status where there is no GPU."""


def missing() -> str:
    """Why nothing can be run here; empty where there is a GPU."""
    if torch.version.cuda is None:
        return f"no GPU: this torch ({torch.__version__}) is built for CPUs"
    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} (CUDA {torch.version.cuda}) finds no NVIDIA GPU that it can use"
    return ""


class Tests:
    """What pytest reports, a line for each test."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.failed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.partition("::")[2].removeprefix("test_").replace("_", " ")
        why = ""
        if report.outcome == "skipped":
            why = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.outcome == "failed":
            self.failed += 1
            why = str(report.longrepr).strip().splitlines()[-1]
        self.rows.append(f"| {name} | {report.outcome} | {report.duration:.1f} | {why.replace('|', '/')} |")


def run_tests() -> Tests:
    """Those of `tests/test_gpus.py`, without what the other tests need."""
    import pytest

    tests = Tests()
    arguments = ["-q", "-c", os.devnull, "--rootdir", str(ROOT / "tests"), "--noconftest", "-p", "no:cacheprovider"]
    status = pytest.main([*arguments, str(ROOT / "tests" / "test_gpus.py")], plugins=[tests])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        tests.failed += 1
        tests.rows.append(f"| the tests themselves | {status!r} | – | they could not be run |")
    return tests


# --------------------------------------------------------------------------------------------------------- figures


def median(measure: Callable[[], float], turns: int = 5) -> float:
    measure()
    return statistics.median(measure() for _ in range(turns))


def seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def touch() -> float:
    """In a rank: its GPU is used."""
    return float(torch.ones(1, device=rank_device()).item())


#: A process that has imported torch and nothing else forks, and its child initialises CUDA.
BARE = """
import os, statistics, sys, time
import torch
def turn():
    begin = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        torch.ones(1, device=sys.argv[1]).item()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return time.perf_counter() - begin
turn()
print(statistics.median(turn() for _ in range(5)))
"""


def launch(device: str) -> list[str]:
    """A call whose rank uses its GPU, beside a bare fork that does."""
    import subprocess

    bare = float(subprocess.check_output([sys.executable, "-c", BARE, device], text=True))
    options = in_ddp.options(devices=device)
    ours = median(lambda: seconds(lambda: options(1, touch)))
    lines = [
        f"| a bare fork of a process with torch, CUDA used | {bare * 1000:,.0f} ms | |",
        f"| warm `in_ddp(1)`, CUDA used | {ours * 1000:,.0f} ms | {ours / bare:.2f} × the bare fork (at most 1.5) |",
    ]
    if device == "cuda":
        nccl = in_ddp.options(devices=device, backend="nccl")
        alone = median(lambda: seconds(lambda: nccl(1, touch)))
        lines.append(f"| the same with NCCL alone, without gloo beside it | {alone * 1000:,.0f} ms | |")
    with Session(1, devices=device) as session:
        session.run(touch)
        live = median(lambda: seconds(lambda: session.run(touch)), 20)
    return [*lines, f"| a call in a live session, CUDA used | {live * 1000:,.2f} ms | |"]


ROWS, BATCH = 4_000_000, 65_536


def copies() -> dict[str, float]:
    """In a rank: bytes per second of the loader, and of one pinned copy of as many bytes."""
    from nbdist.recsys.loader import MemoryLoader, Ragged

    device = rank_device()
    columns = {f"id{number}": torch.randint(1 << 40, (ROWS,)) for number in range(8)}
    size = sum(column.nbytes for column in columns.values())
    resident, shuffled = MemoryLoader(columns, BATCH), MemoryLoader(columns, BATCH, shuffle=True)
    # With a column of lists, none of them large, batches are gathered on the CPU.
    lists = Ragged(torch.zeros(ROWS, dtype=torch.uint8), torch.arange(ROWS + 1))
    through = MemoryLoader({**columns, "lists": lists}, BATCH, shuffle=True)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def epoch(loader: MemoryLoader) -> None:
        for _ in loader:
            pass
        wait()

    block = torch.empty(size // 16, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(block, device=device)

    def copy() -> None:
        for _ in range(16):
            there.copy_(block, non_blocking=True)
        wait()

    begin = seconds(lambda: epoch(resident))
    return {
        "first": size / begin,
        "resident": size / median(lambda: seconds(lambda: epoch(resident)), 3),
        "shuffled": size / median(lambda: seconds(lambda: epoch(shuffled)), 3),
        "through": size / median(lambda: seconds(lambda: epoch(through)), 3),
        "bus": size / median(lambda: seconds(copy), 3),
    }


def loader(device: str) -> list[str]:
    """Batches on the GPU, beside the bus."""
    found = in_ddp.options(devices=device)(1, copies)
    bus = found["bus"]

    def line(what: str, key: str, more: str = "") -> str:
        return f"| {what} | {found[key] / 1e9:.1f} GB/s | {found[key] / bus:.0%} of it{more} |"

    return [
        f"| a pinned copy to the GPU | {bus / 1e9:.1f} GB/s | |",
        line(f"the loader, {BATCH:,} rows of 8 columns a batch", "resident", " (at least 80 %)"),
        line("its first epoch, in which the columns are copied", "first"),
        line("shuffled", "shuffled"),
        line("shuffled, and a column has lists, so that batches are gathered on the CPU", "through"),
    ]


RATINGS = 100_000
FASTAI = "from fastai.collab import *; from fastai.distributed import *"


def collab_epoch(batch: int, quickly: bool) -> float:
    """In a rank, or in a process of its own: seconds of an epoch of notebook 01's model, the median of some."""
    from fastai.collab import CollabDataLoaders, collab_learner

    from nbdist.fastai import fast
    from nbdist.recsys.datasets import synthetic_ratings

    ratings = synthetic_ratings(943, 1682, RATINGS).with_titles().to_pandas()
    learn = collab_learner(CollabDataLoaders.from_df(ratings, bs=batch), n_factors=50, y_range=(0, 5.5))
    if quickly:
        fast(learn)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx() if dist.is_initialized() else contextlib.nullcontext():
        return median(lambda: seconds(lambda: learn.fit_one_cycle(1, 5e-3, wd=0.1)), 3)


def notebook(device: str) -> list[str]:
    """Epochs of notebook 01's dot product, in a process without ranks, on a GPU rank, and on a CPU rank."""
    lines = []
    for batch, ways in ((512, (False,)), (4096, (False, True))):
        for quickly in ways:
            alone = in_ddp(0, collab_epoch, batch, quickly, imports=FASTAI)
            how = "`fast`" if quickly else "plain fastai"
            lines.append(
                f"| an epoch of notebook 01's model, batch {batch:,}, {how}, without ranks | {alone:.3f} s | |"
            )
            for where in dict.fromkeys((device, "cpu")):
                took = in_ddp.options(devices=where, imports=FASTAI)(1, collab_epoch, batch, quickly)
                beside = f"{took / alone:.2f} × that without ranks" if where == device else ""
                lines.append(f"| the same on one rank, {where} | {took:.3f} s | {beside} |")
    return lines


STEPS, CLICKS = 60, 65_536


def click_models() -> dict[str, float]:
    """In a rank: seconds of the click model of `recsys/training.py`, trained in several ways."""
    from benchmarks.recsys import training

    ways = {
        "sharded tables, a plain loop": lambda: training.loop(training.sharded, 64, CLICKS, STEPS),
        "sharded tables, `fit`": lambda: training.helped(64, CLICKS, STEPS),
        "`replicate`, `nn.Embedding(sparse=True)`": lambda: training.loop(training.common, 64, CLICKS, STEPS),
        "DDP, dense gradients": lambda: training.loop(training.plain, 64, CLICKS, STEPS),
    }
    for way in ways.values():
        way()
    return {name: statistics.median(way().seconds for _ in range(3)) for name, way in ways.items()}


def clicks(device: str) -> list[str]:
    """The click model."""
    found = {way: STEPS * CLICKS / took for way, took in in_ddp.options(devices=device)(1, click_models).items()}
    lines = []
    for i, (way, speed) in enumerate(found.items()):
        what = f"the click model, embeddings of 64, batch {CLICKS:,}: {way}"
        lines.append(f"| {what} | {speed / 1e6:.2f} M rows/s | {'at least 10 M on an H200' if i == 0 else ''} |")
    return lines


#: Title → what has to be installed, and what measures it.
PARTS: dict[str, tuple[tuple[str, ...], Callable[[str], list[str]]]] = {
    "launch": ((), launch),
    "loader": (("pyarrow",), loader),
    "notebook": (("fastai",), notebook),
    "clicks": (("torchrec", "fbgemm_gpu", "pyarrow", "torchmetrics"), clicks),
}


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def figures(only: Sequence[str], device: str, begin: float) -> list[str]:
    lines = ["| figure | measured | beside |", "|---|---|---|"]
    for title, (needed, measure) in PARTS.items():
        if title not in only:
            continue
        print(f"{time.monotonic() - begin:5.0f} s  {title}", file=sys.stderr, flush=True)
        lacking = [module for module in needed if not installed(module)]
        if lacking:
            lines.append(f"| {title} | left out | {', '.join(lacking)} not installed |")
        elif time.monotonic() - begin > LIMIT:
            lines.append(f"| {title} | left out | ten minutes are over |")
        else:
            before = len(lines)
            try:
                lines += measure(device)
            except Exception as error:  # the others are worth having all the same; it is told, and the command fails
                lines.append(f"| {title} | failed | {type(error).__name__}: {str(error).splitlines()[0]} |")
            print(*lines[before:], sep="\n", file=sys.stderr, flush=True)
    return lines


def describe() -> list[str]:
    """The GPUs, and what of the optional packages is here."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    here = [name for name in OPTIONAL if installed(name)]
    without = [name for name in OPTIONAL if name not in here]
    return [
        f"- GPUs: {', '.join(names) or 'none: a dry run on CPUs, which tells nothing of GPUs'}; "
        f"CUDA {torch.version.cuda}",
        f"- installed: {', '.join(here) or 'none of the optional packages'}; left out without: {', '.join(without)}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on CPUs, to see whether this command works")
    everything = ["tests", *PARTS]
    parser.add_argument("--only", nargs="+", choices=everything, default=everything, help="some of it")
    parser.add_argument("--print", action="store_true", help="leave results/ as they are")
    arguments = parser.parse_args()
    if arguments.dry_run:
        os.environ["NBDIST_GPU_DRY_RUN"] = "1"
    elif why := missing():
        print(f"{why}. Nothing was run; results/gpu.md is as it was.", file=sys.stderr)
        return NO_GPU
    begin, device = time.monotonic(), "cpu" if arguments.dry_run else "cuda"
    if arguments.dry_run:
        globals().update(ROWS=200_000, RATINGS=6_000, STEPS=3, CLICKS=2048)
    tests = run_tests() if "tests" in arguments.only else Tests()
    found = figures(arguments.only, device, begin)
    failed = tests.failed + sum("| failed |" in line for line in found)
    lines = ["| test | outcome | seconds | |", "|---|---|---:|---|", *tests.rows, "", *found, ""]
    lines += [*describe(), *conditions(PACKAGES), f"- took {time.monotonic() - begin:.0f} s; {failed} failed"]
    save("gpu", lines, keep=not (arguments.print or arguments.dry_run or arguments.only != everything))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
