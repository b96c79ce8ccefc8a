"""Speed of the loaders of `nbdist.recsys`, compared with other loaders of the same rows in the same run."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fastai.collab import CollabDataLoaders, EmbeddingDotBias
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import MSELossFlat
from fastai.tabular.core import TabDataLoader
from fastai.torch_core import set_seed

from benchmarks import plots
from benchmarks.machine import conditions, save
from nbdist.recsys.loader import MemoryLoader, ParquetLoader

BATCH = 2048


#: By which ours has to be faster than those in memory.
REQUIRED = {
    "tensor gather": 0.8,
    "fastai CollabDataLoaders": 10,
    "DataLoader(TensorDataset)": 10,
    "DataLoader with a BatchSampler": 10,
    "datasets (Hugging Face), torch format": 3,
}


class Peak:
    """The growth of this process's memory while a block runs, in bytes: the largest of samples, some ms apart."""

    def __enter__(self) -> Peak:
        self._process, self._stop = psutil.Process(), threading.Event()
        self._before = self._process.memory_info().rss
        self.bytes = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.bytes = max(self.bytes, self._process.memory_info().rss - self._before)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def rows_of(batch: Any) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def speed(loader: Iterable[Any], at_most: int | None = None) -> float:
    """Rows per second of one epoch, or of its first `at_most` rows."""
    began, rows = time.perf_counter(), 0
    for batch in loader:
        rows += rows_of(batch)
        if at_most is not None and rows >= at_most:
            break
    return rows / (time.perf_counter() - began)


def in_turn(contestants: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Rows per second of each, in turn, so that what disturbs one disturbs all. The first round is for warming up."""
    rounds = [{name: run() for name, run in contestants.items()} for _ in range(repeats + 1)][1:]
    return {name: [each[name] for each in rounds] for name in contestants}


def gather(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The plain loop: a permutation, and for each batch its part of it as an index."""
    order = torch.randperm(len(tensors[0]))
    for start in range(0, len(order), BATCH):
        index = order[start : start + BATCH]
        yield tuple(tensor[index] for tensor in tensors)


class Batches(torch.utils.data.Dataset[list[torch.Tensor]]):
    """A batch at a time, by a list of rows: what one who knows DataLoader gives a `BatchSampler` to."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, rows: list[int]) -> list[torch.Tensor]:
        index = torch.tensor(rows)
        return [tensor[index] for tensor in self._tensors]


def by_batches(dataset: Any) -> torch.utils.data.DataLoader[Any]:
    sampler = torch.utils.data.RandomSampler(dataset)
    return torch.utils.data.DataLoader(
        dataset, batch_size=None, sampler=torch.utils.data.BatchSampler(sampler, BATCH, drop_last=False)
    )


def hugging_face(table: pa.Table) -> Iterable[Any]:
    """datasets, its rows as tensors, read by batches of a shuffled index."""
    import datasets

    return by_batches(datasets.Dataset(table).with_format("torch"))


def in_memory(rows: int, repeats: int) -> dict[str, list[float]]:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"user": rng.integers(0, 162_541, rows), "item": rng.integers(0, 59_047, rows)})
    frame["rating"] = rng.random(rows, dtype=np.float32)
    tensors = tuple(torch.tensor(frame[name].to_numpy()) for name in frame)
    ours = MemoryLoader(tensors, BATCH, shuffle=True)
    fastai = CollabDataLoaders.from_df(frame, valid_pct=0.01, bs=BATCH).train
    dataset = torch.utils.data.TensorDataset(*tensors)
    torchs = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True)
    batches = by_batches(Batches(*tensors))
    hugging = hugging_face(pa.Table.from_pandas(frame, preserve_index=False))
    contestants = {
        "MemoryLoader": lambda: speed(ours),
        "tensor gather": lambda: speed(gather(*tensors)),
        "fastai CollabDataLoaders": lambda: speed(fastai),
        "DataLoader(TensorDataset)": lambda: speed(torchs, rows // 5),
        "DataLoader with a BatchSampler": lambda: speed(batches),
        "datasets (Hugging Face), torch format": lambda: speed(hugging, rows // 5),
    }
    return in_turn(contestants, repeats)


class Rows(torch.utils.data.Dataset[tuple[int, int, float]]):
    """A row at a time, from a table in memory: what a loader by items does, with its file already read."""

    def __init__(self, table: pa.Table) -> None:
        self._columns = [column.to_numpy() for column in table.columns]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, row: int) -> tuple[int, int, float]:
        user, item, rating = self._columns
        return user[row], item[row], rating[row]


def mosaicml(folder: Path, table: pa.Table) -> Iterable[Any]:
    """MosaicML's streaming, from files of its own format on this machine, shuffled as it comes."""
    from streaming import MDSWriter, StreamingDataset

    kinds = {"user": "int64", "item": "int64", "rating": "float32"}
    with MDSWriter(out=str(folder), columns=kinds) as writer:
        for user, item, rating in zip(*(column.to_numpy() for column in table.columns), strict=True):
            writer.write({"user": user, "item": item, "rating": rating})
    return torch.utils.data.DataLoader(
        StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH), batch_size=BATCH
    )


def parquet(folder: Path, rows: int, memory: int, repeats: int) -> tuple[dict[str, list[float]], float, int]:
    """Rows per second, and the peak of memory and the size of all rows in bytes."""
    rng = np.random.default_rng(0)
    for number in range(4):
        part = {"user": rng.integers(0, 162_541, rows // 4), "item": rng.integers(0, 59_047, rows // 4)}
        part["rating"] = rng.random(rows // 4, dtype=np.float32)
        pq.write_table(pa.table(part), folder / f"{number}.parquet", row_group_size=100_000)
    del part
    # What a process takes once, for the thread and the libraries, is no part of a budget for rows.
    speed(ParquetLoader(folder / "0.parquet", BATCH, shuffle=True, memory_bytes=30 << 20), rows // 8)
    with Peak() as peak:
        speed(ParquetLoader(folder, BATCH, shuffle=True, memory_bytes=memory))
    by_row = torch.utils.data.DataLoader(Rows(pq.read_table(folder / "0.parquet")), BATCH, shuffle=True)
    ours = ParquetLoader(folder, BATCH, shuffle=True, memory_bytes=memory)
    streamed = mosaicml(folder / "mds", pq.read_table(folder / "0.parquet").slice(0, rows // 200))
    contestants = {
        "ParquetLoader": lambda: speed(ours),
        "DataLoader over rows": lambda: speed(by_row, rows // 40),
        "streaming (MosaicML)": lambda: speed(streamed),
    }
    return in_turn(contestants, repeats), peak.bytes, 20 * rows


def training(rows: int, repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Rows per second of an epoch of fastai's training, and the validation loss at its end, for each round.

    All train with the same rows in as many steps and validate with the same others; a round has its own weights to
    start with, the same for all. As of 2.8.12, fastai's loader draws the rows of an epoch with replacement
    (`TabWeightedDL`, with equal weights): a good third of them does not come, others come again. `TabDataLoader` is
    fastai's, too, and gives each row once, as ours does.
    """
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"user": rng.integers(1, 6041, rows), "item": rng.integers(1, 3707, rows)})
    taste = rng.normal(size=6041)[frame["user"]] + rng.normal(size=3707)[frame["item"]]
    frame["rating"] = (3 + taste / 2).clip(0.5, 5).astype(np.float32)
    options = {"valid_pct": 0.01, "seed": 0, "bs": 4096, "device": "cpu"}
    fastai = CollabDataLoaders.from_df(frame, **options)
    once = CollabDataLoaders.from_df(frame, **options, dl_type=TabDataLoader)
    pairs = []
    for part in (fastai.train_ds, fastai.valid_ds):  # with fastai's codes
        x, y = part.items[["user", "item"]].to_numpy(), part.items["rating"].to_numpy()
        pairs.append((torch.tensor(x).long(), torch.tensor(y)[:, None]))
    train = MemoryLoader(pairs[0], 4096, shuffle=True, seed=0, remainder="drop")
    ours = DataLoaders(train, MemoryLoader(pairs[1], 4096), device="cpu")
    contestants = {"MemoryLoader": ours, "fastai": fastai, "fastai, each row once": once}
    steps = {name: len(dls.train) for name, dls in contestants.items()}
    assert len(set(steps.values())) == 1, f"not the same number of steps: {steps}"
    losses: dict[str, list[float]] = {name: [] for name in contestants}

    def run(name: str) -> float:
        set_seed(len(losses[name]))  # the round
        learn = Learner(contestants[name], EmbeddingDotBias(50, 6041, 3707, y_range=(0, 5.5)), loss_func=MSELossFlat())
        with learn.no_bar(), learn.no_logging():
            began = time.perf_counter()
            learn.fit(1, 5e-3, wd=0.1)
            seconds = time.perf_counter() - began
        losses[name].append(float(learn.recorder.values[-1][1]))
        return rows / seconds

    return in_turn({name: (lambda name=name: run(name)) for name in contestants}, repeats), losses


def table(speeds: dict[str, list[float]], required: dict[str, float]) -> list[str]:
    """Return rows for one group, ours first; ratios are of figures of one round, then their median."""
    (ours, first), *others = speeds.items()
    lines = [f"| {ours} | {statistics.median(first) / 1e6:.2f} M | | |"]
    for name, values in others:
        ratio = statistics.median(a / b for a, b in zip(first, values, strict=True))
        verdict = "reached" if ratio >= required[name] else "**missed**"
        lines.append(
            f"| {name} | {statistics.median(values) / 1e6:.2f} M | {ratio:.1f} × | {required[name]:g} ×: {verdict} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after one for warming up")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, to see that everything works")
    parser.add_argument("--print", action="store_true", help="show the table without keeping it in results/")
    options = parser.parse_args()
    scale = 10 if options.quick else 1

    torch.set_num_threads(1)
    memory_speeds = in_memory(2_000_000 // scale, options.repeats)
    torch.set_num_threads(2)
    budget = (128 << 20) // scale if not options.quick else 48 << 20
    with tempfile.TemporaryDirectory() as folder:
        file_speeds, peak, size = parquet(
            Path(folder), 25_000_000 // (4 if options.quick else 1), budget, options.repeats
        )
    torch.set_num_threads(1)  # two, on cores that others use too, wait for each other: ratios of 0.3 and of 10
    trained, losses = training(1_000_000 // scale, options.repeats)

    same = "; ".join(
        f"{name} {statistics.mean(each):.5f} ± {statistics.stdev(each):.5f}" for name, each in losses.items()
    )
    head = ["| | rows/s | ours is faster by | required |", "|---|---:|---:|---:|"]
    absolute = statistics.median(file_speeds["ParquetLoader"])
    lines = [
        "# Loaders",
        "",
        f"Median of {options.repeats} rounds in which all take turns; ratios within a round.",
        "",
        "In memory: user, item and rating, shuffled, batch 2048, one thread.",
        "",
        *head,
        *table(memory_speeds, REQUIRED),
        "",
        f"From Parquet: the same columns, {size / 1e6:.0f} MB, shuffled, budget {budget / 1e6:.0f} MB; "
        f"DataLoader has a file's rows in memory, streaming a 200th of all on disk. {absolute / 1e6:.1f} M rows/s of "
        f"5 M required; memory grew by up to "
        f"{peak / 1e6:.0f} MB: {'within' if peak <= budget else '**above**'} the budget.",
        "",
        *head,
        *table(file_speeds, {"DataLoader over rows": 20, "streaming (MosaicML)": 3}),
        "",
        "An epoch of fastai's training, 6,040 users × 3,706 items, 50 factors, batch 4096, one thread. fastai's own "
        "loader draws rows with replacement, so that an epoch lacks a good third of them; compared with it, fastai's "
        "`TabDataLoader`, which gives each row once, as ours does.",
        "",
        *head,
        *table(trained, {"fastai": 1.5, "fastai, each row once": 1.5}),
        "",
        f"Validation loss after the epoch, mean of {options.repeats + 1} rounds from different weights: {same}.",
        "",
        *conditions(("torch", "fastai", "datasets", "mosaicml-streaming")),
    ]
    if not options.print:
        shown = {"in memory": memory_speeds, "from Parquet": file_speeds, "an epoch of training": trained}
        panels = {f"rows/s, {what}": speeds for what, speeds in shown.items()}
        lines += plots.bars("loader", panels, ours=["MemoryLoader", "ParquetLoader"], log=True)
    save("loader", lines, keep=not options.print)


if __name__ == "__main__":
    main()
