"""Functions that the ranks run while they are measured, and how the notebook measures them.

This text is run as a cell, so that all of it is the notebook's own; peers that cannot send a cell's functions import
the same text as a module. Ranks report through files, for not every peer returns values: a moment is a reading of the
system-wide monotonic clock, the same in all processes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def join() -> int:
    """Be ready to train: torch and fastai imported, every rank there. Returns the rank."""
    import fastai.collab  # noqa: F401
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    return int(dist.get_rank())


def enter(rank: int, world_size: int, meeting_file: str, fn: Callable[..., Any], *args: Any) -> Any:
    """For peers that start processes but no process group: enter one, then run `fn`."""
    threads = max(1, (os.cpu_count() or 1) // world_size)
    # As the launchers that care set it: accelerate gives each rank all cores where it is not there.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS=str(threads))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    store = dist.FileStore(meeting_file, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        return fn(*args)
    finally:
        dist.destroy_process_group()


def report(folder: str, rank: int, **numbers: float) -> None:
    """Leave a rank's numbers, and the moment of this call, where the notebook finds them."""
    numbers = {"at": time.monotonic(), **numbers}
    Path(folder, f"{rank}.json").write_text(json.dumps(numbers))


def ready(folder: str) -> None:
    report(folder, join())


def noop() -> None:
    return None


def memory(folder: str) -> None:
    """Private and shared bytes of a rank that has imported torch and fastai, all ranks being there."""
    import psutil
    import torch.distributed as dist

    rank = join()
    info = psutil.Process().memory_full_info()
    report(folder, rank, private=info.uss, shared=info.rss - info.uss)
    dist.barrier()


def take(folder: str, frame: Any) -> None:
    rank = join()
    report(folder, rank, last=float(frame.iloc[-1].sum()))


def hold(folder: str, frame: Any, mark: str) -> None:
    """Read all of the frame in every rank, then add up the memory of all processes that have `mark`."""
    import torch.distributed as dist

    rank = join()
    for column in frame:
        frame[column].to_numpy().sum()
    dist.barrier()
    if rank == 0:
        report(folder, rank, **proportional_memory(mark))
    dist.barrier()


def proportional_memory(mark: str) -> dict[str, float]:
    """Bytes and number of the processes with `mark` in their environment; shared pages are counted once."""
    total, count = 0, 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() not in (process / "environ").read_bytes():
                continue
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:  # gone meanwhile, or not ours
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        count += 1
    return {"held": total, "processes": count}


def give(folder: str, megabytes: int) -> Any:
    """Rank 0 returns a tensor; its moment is the one before it returns."""
    import torch

    rank = join()
    tensor = torch.full((megabytes * 1_000_000 // 4,), 1.5) if rank == 0 else None
    report(folder, rank)
    return tensor


def train(folder: str, users: int, items: int, ratings: int, epochs: int) -> None:
    """fastai's collaborative filtering with `distrib_ctx`, batches of 64 a rank; samples per second of all ranks."""
    os.environ["ACCELERATE_USE_CPU"] = "true"  # or accelerate takes CPU ranks for single processes
    rank = join()
    import fastai.distributed  # noqa: F401 (gives Learner distrib_ctx)
    import torch
    import torch.distributed as dist
    from fastai.callback.schedule import fit_one_cycle  # noqa: F401 (gives Learner that method)
    from fastai.collab import CollabDataLoaders, collab_learner

    from nbdist.fastai.patches import patched
    from nbdist.recsys.datasets import synthetic_ratings

    # fastai and accelerate look for torchrun's variables, which not every launcher sets.
    for name, number in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size()}.items():
        os.environ.setdefault(name, str(number))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with patched():  # without it fastai's distrib_ctx wants CUDA
        for size in ((50, 50, 1000), (users, items, ratings)):  # a small one first: what is imported late is there
            torch.manual_seed(42)
            loaders = CollabDataLoaders.from_df(synthetic_ratings(*size).frame.to_pandas(), bs=64, seed=42)
            learner = collab_learner(loaders, n_factors=50, y_range=(0, 5.5))
            with learner.distrib_ctx():
                assert hasattr(learner, "distributed_trainer"), "fastai trains each rank alone"
                dist.barrier()
                begin = time.monotonic()
                learner.fit_one_cycle(epochs, 5e-3, wd=0.1)
                dist.barrier()
                seconds = time.monotonic() - begin
    report(folder, rank, rate=epochs * len(loaders.train_ds) / seconds, loss=float(learner.recorder.values[-1][1]))


# ------------------------------------------------------------------------------------------- how they are measured

Launch = Callable[..., Any]


def measure(launch: Launch, ranks: int, task: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Launch once: seconds until all ranks are inside (`inside`), until it returned (`returned`), and their reports."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        value = launch(ranks, task, folder, *args)
        end = time.monotonic()
        reports = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    assert reports, "no rank has reported"
    inside = max(r["at"] for r in reports) - begin
    return {"inside": inside, "returned": end - begin, "end": end, "reports": reports, "value": value}


def measure_launch(launch: Launch, ranks: int) -> dict[str, float]:
    found = measure(launch, ranks, ready)
    assert len(found["reports"]) == ranks, f"{len(found['reports'])} of {ranks} ranks have reported"
    return {"inside": found["inside"], "returned": found["returned"]}


def measure_loop(launch: Launch, ranks: int, count: int) -> dict[str, list[float]]:
    """Launch after a pause of a second, then `count` times back to back, as a sweep in a loop does."""
    time.sleep(1.0)
    found = [measure_launch(launch, ranks)["returned"] for _ in range(1 + count)]
    return {"paused": found[:1], "loop": found[1:]}


def measure_memory(launch: Launch, ranks: int) -> dict[str, float]:
    reports = measure(launch, ranks, memory)["reports"]
    return {key: sum(r[key] for r in reports) / len(reports) for key in ("private", "shared")}


def make_frame(megabytes: float) -> Any:
    """A DataFrame of 8 numeric columns, half of them integers."""
    import numpy as np
    import pandas as pd

    rng, rows = np.random.default_rng(), int(megabytes * 1_000_000 / 64)
    integers = pd.DataFrame(rng.integers(0, 1 << 40, (rows, 4)), columns=list("abcd"))
    return pd.concat([integers, pd.DataFrame(rng.random((rows, 4)), columns=list("efgh"))], axis=1)


def measure_frame(launch: Launch, ranks: int, frame: Any) -> dict[str, float]:
    found, last = measure(launch, ranks, take, frame), float(frame.iloc[-1].sum())
    assert [r["last"] for r in found["reports"]] == [last] * ranks, "a rank has another frame"
    return {"inside": found["inside"], "returned": found["returned"]}


def measure_held(launch: Launch, ranks: int, frame: Any, mark: str) -> dict[str, float]:
    report = measure(launch, ranks, hold, frame, mark)["reports"][0]
    assert report["processes"] > ranks, f"only {report['processes']} processes found"
    return {"held": report["held"]}


def measure_tensor(launch: Launch, megabytes: int) -> dict[str, float]:
    found = measure(launch, 2, give, megabytes)
    value, returning = found["value"], found["reports"][0]["at"]
    if value is None:
        raise TypeError("the launcher returns None")
    assert len(value) == megabytes * 1_000_000 // 4 and float(value[-1]) == 1.5
    return {"returned": found["end"] - returning}


def measure_training(launch: Launch, *size: int) -> dict[str, float]:
    report = measure(launch, 2, train, *size)["reports"][0]
    return {"rate": report["rate"], "loss": report["loss"]}


def measure_fresh(original: Any, copy: Callable[[Any], Any]) -> dict[str, float]:
    """The notebook's own way to have it twice."""
    begin = time.monotonic()
    made = copy(original)
    seconds = time.monotonic() - begin
    assert len(made) == len(original)
    return {"inside": seconds, "returned": seconds}


def element(frame: Any, row: int, column: int) -> float:
    return float(frame.iat[row, column])


def frame_size(frame: Any) -> int:
    return len(frame)


def measure_again(call: Callable[..., Any], megabytes: int) -> dict[str, float]:
    """The same frame twice to ranks that stay, then with elements changed. `call` runs a function on them."""
    frame, seconds = make_frame(megabytes), []
    call(frame_size, make_frame(0.001))  # pandas is imported
    for _ in range(2):
        begin = time.monotonic()
        size = call(frame_size, frame)
        seconds.append(time.monotonic() - begin)
        assert size == len(frame)
    changed, seen = [(0, 0), (len(frame) // 2, 3), (len(frame) - 1, 7)], 0
    for row, column in changed:
        frame.iat[row, column] = frame.iat[row, column] + 1
        seen += call(element, frame, row, column) == float(frame.iat[row, column])
    return {"first": seconds[0], "again": seconds[1], "seen": seen / len(changed)}


def measure_latency(call: Callable[..., Any], calls: int) -> list[float]:
    """Seconds of each of `calls` calls of a function that does nothing."""
    seconds = []
    for _ in range(calls):
        begin = time.monotonic()
        call(noop)
        seconds.append(time.monotonic() - begin)
    return seconds
