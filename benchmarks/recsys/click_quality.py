"""The click model of `training.py` on ratings: how long until the AUC at which a plain loop ends.

The plain loop is the tutorials': rows from a `DataLoader`, dense gradients, Adam. Contestants take turns, and evaluate
as often; that is not in the time. implicit's ALS knows no rows that are not liked. LightGBM knows a user and a movie by
the share of liked rows, of other training rows than the row itself (`TargetEncoding`).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import plots
from benchmarks.machine import conditions, save_section, title_of
from benchmarks.recsys.quality import interactions
from benchmarks.recsys.training import Model, Sparse, predict, predict_sparse
from benchmarks.recsys.turns import parsed, spread
from nbdist import Session
from nbdist.recsys.datasets import movielens
from nbdist.recsys.etl import TargetEncoding, Workflow
from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.metrics import AUC
from nbdist.recsys.sharding import replicate, shard
from nbdist.recsys.training import evaluate
from nbdist.recsys.training.objective import log_loss

WIDTH, EPOCHS = 16, 3
MORE = EPOCHS + 1
"""Epochs of those that are to reach what the plain loop has after its own."""
#: Evaluations an epoch.
LOOKS = 5
KEYS = ("user", "movie")

Curve = list[tuple[float, float]]
"""Seconds of training, and the AUC then."""


class Rows(NamedTuple):
    """In a rank: what is trained on, what is judged, and how many users and movies there are."""

    train: pl.DataFrame
    test: pl.DataFrame
    sizes: dict[str, int]

    @classmethod
    def of(cls, folder: str) -> Rows:
        both = [pl.read_parquet(f"{folder}/{name}.parquet") for name in ("train", "test")]
        whole = pl.concat(both)
        return cls(*both, {key: int(whole[key].max()) + 1 for key in KEYS})  # type: ignore[arg-type]


class Watch:
    """Counts the seconds of training, and looks at the AUC every `steps` steps."""

    def __init__(self, steps: int, auc: Callable[[], float]) -> None:
        self.curve: Curve = []
        self._every, self._auc, self._step, self._spent = max(1, steps // LOOKS), auc, 0, 0.0
        self._resume()

    def _resume(self) -> None:
        dist.barrier()
        self._since = time.perf_counter()

    def step(self) -> None:
        self._step += 1
        if self._step % self._every == 0:
            self._spent += time.perf_counter() - self._since
            self.curve.append((self._spent, self._auc()))
            self._resume()


def _auc(scores: Tensor, liked: Tensor) -> float:
    metric = AUC()
    metric.update(scores, liked)
    return float(metric.compute())


def _columns(rows: pl.DataFrame) -> dict[str, Tensor]:
    return {name: torch.from_numpy(rows[name].to_numpy(writable=True)) for name in (*KEYS, "liked")}


def plain(folder: str, batch: int, rate: float, sparse: bool) -> Curve:
    """In a single process: torch alone. With `sparse` an expert's: batches by slices, gradients of their rows."""
    rows = Rows.of(folder)
    torch.manual_seed(0)
    model = Sparse(WIDTH, rows.sizes)
    for table in model.tables:
        table.sparse = sparse  # type: ignore[union-attr, assignment]
    made = torch.optim.Adagrad if sparse else torch.optim.Adam
    optimizer = made(model.parameters(), lr=rate)
    test, train = _columns(rows.test), _columns(rows.train)

    def judged() -> float:
        with torch.no_grad():
            return _auc(model(test), test["liked"])

    def batches() -> Any:
        if not sparse:
            yield from DataLoader(TensorDataset(*train.values()), batch, shuffle=True)
            return
        for places in torch.randperm(len(rows.train)).split(batch):
            yield [column[places] for column in train.values()]

    watch = Watch(-(-len(rows.train) // batch), judged)
    for _ in range(MORE if sparse else EPOCHS):
        for user, movie, liked in batches():
            optimizer.zero_grad()
            log_loss(model({"user": user, "movie": movie}), liked).backward()
            optimizer.step()
            watch.step()
    return watch.curve


def on_ranks(folder: str, batch: int, rate: float, common: bool = False) -> Curve:
    """In a rank: our loader, and tables that are sharded; or that ranks have in common."""
    rows = Rows.of(folder)
    torch.manual_seed(0)
    size = batch // dist.get_world_size()
    dense = partial(torch.optim.Adagrad, lr=rate)
    model: Any
    if common:
        model, predicted, keyed = replicate(Sparse(WIDTH, rows.sizes), dense), predict_sparse, ()
    else:
        model = shard(Model(WIDTH, rows.sizes), batch_size=size, optimizer="adagrad", lr=rate, dense_optimizer=dense)
        predicted, keyed = predict, KEYS
    train = MemoryLoader(rows.train, size, shuffle=True, seed=0, keyed=keyed)
    test = MemoryLoader(rows.test, 4096, remainder="pad", keyed=keyed)
    watch = Watch(len(train), lambda: evaluate(model, predicted, test, {"auc": AUC()})["auc"])
    for _ in range(MORE):
        for some in train:
            model.optimizer.zero_grad()
            log_loss(*predicted(model.model, some)).backward()
            model.optimizer.step()
            watch.step()
    return watch.curve


def als(folder: str, factors: int, regularization: float, alpha: float) -> Curve:
    """In a single process: implicit's alternating least squares on the liked rows; its scores rank all others."""
    from implicit.als import AlternatingLeastSquares

    rows = Rows.of(folder)
    matrix = interactions(rows.train.filter(pl.col("liked") > 0), (rows.sizes["user"], rows.sizes["movie"]))
    model = AlternatingLeastSquares(factors, regularization, alpha, iterations=MORE * LOOKS, random_state=0)
    test = _columns(rows.test)

    def judged() -> float:
        of_users, of_movies = torch.from_numpy(model.user_factors), torch.from_numpy(model.item_factors)
        return _auc((of_users[test["user"]] * of_movies[test["movie"]]).sum(1), test["liked"])

    watch = Watch(LOOKS, judged)
    model.fit(matrix, show_progress=False, callback=lambda *_: watch.step())
    return watch.curve


def boosted(folder: str, trees: int) -> Curve:
    """In a single process: LightGBM on target encodings of user and movie; these are in the time."""
    import lightgbm

    rows = Rows.of(folder)
    holder: list[Any] = []
    names = [f"TE_{key}_liked" for key in KEYS]

    def judged() -> float:
        scores = holder[-1].predict(test.select(names).to_numpy(), raw_score=True)
        return _auc(torch.from_numpy(scores), torch.from_numpy(test["liked"].to_numpy(writable=True)))

    def after(state: Any) -> None:
        holder[:] = [state.model]
        watch.step()

    watch = Watch(trees, judged)
    workflow = Workflow(TargetEncoding(*KEYS, target="liked")).fit(rows.train, progress=False)
    with tempfile.TemporaryDirectory() as encoded:
        workflow.write(rows.train, encoded, training=True, overwrite=True, progress=False)
        train = pl.read_parquet(encoded)
    test = workflow.transform(rows.test, [*names, "liked"]).collect()
    data = lightgbm.Dataset(train.select(names).to_numpy(), train["liked"].to_numpy())
    options = {"objective": "binary", "learning_rate": 0.05, "num_leaves": 15, "verbose": -1, "num_threads": 2}
    lightgbm.train(options, data, trees, callbacks=[after])
    return watch.curve


class Contestant(NamedTuple):
    """A way to train; `ranks` with their number of threads."""

    name: str
    ranks: int
    threads: int
    function: Callable[[str], Curve]


LOOP = "plain loop: `DataLoader`, dense Adam, 256 rows"
CONTESTANTS = (
    Contestant(LOOP, 1, 2, partial(plain, batch=256, rate=1e-3, sparse=False)),
    Contestant("`nn.Embedding(sparse=True)`, 1,024 rows", 1, 2, partial(plain, batch=1024, rate=0.05, sparse=True)),
    Contestant("`shard`, 1 rank × 1,024", 1, 2, partial(on_ranks, batch=1024, rate=0.05)),
    Contestant("`shard`, 2 ranks × 512", 2, 1, partial(on_ranks, batch=1024, rate=0.05)),
    Contestant(
        "`replicate`, tables in common, 2 ranks × 512", 2, 1, partial(on_ranks, batch=1024, rate=0.05, common=True)
    ),
    Contestant("implicit's ALS", 1, 2, partial(als, factors=16, regularization=0.1, alpha=1.0)),
    Contestant("LightGBM, target encodings", 1, 2, partial(boosted, trees=100)),
)


def write(name: str, folder: str, part: float) -> str:
    """The rows of a set in two files, nine tenths to train on; returns where they come from."""
    ratings = movielens(name, synthetic=True)
    rows = ratings.frame.sample(fraction=part, shuffle=True, seed=0).select(
        pl.col(*KEYS).cast(pl.Int64), liked=(pl.col("rating") > 3).cast(pl.Int64)
    )
    cut = len(rows) * 9 // 10
    rows[:cut].write_parquet(Path(folder, "train.parquet"))
    rows[cut:].write_parquet(Path(folder, "test.parquet"))
    return ratings.source


def table(curves: dict[str, list[Curve]]) -> list[str]:
    """Seconds until the AUC that the plain loop has at its end: all are seeded, and the same in each turn."""
    target = curves[LOOP][0][-1][1]
    seconds = {
        name: [next((spent for spent, auc in curve if auc >= target), None) for curve in turns]
        for name, turns in curves.items()
    }
    lines = [
        f"The AUC to be reached: {target:.4f}, the plain loop's after {EPOCHS} epochs; the others have {MORE}.",
        "",
        "| | ranks × threads | best AUC | seconds to the plain loop's | of the plain loop |",
        "|---|---:|---:|---:|---:|",
    ]
    for one in CONTESTANTS:
        best = max(auc for _, auc in curves[one.name][0])
        found = [spent for spent in seconds[one.name] if spent is not None]
        cells = "not reached | "
        if len(found) == len(curves[one.name]):
            ratio = statistics.median(found) / statistics.median(filter(None, seconds[LOOP]))
            cells = f"{spread(found)} | {ratio:.3f}"
        lines.append(f"| {one.name} | {one.ranks} × {one.threads} | {best:.4f} | {cells} |")
    return [*lines, ""]


def main() -> None:
    options = parsed(__doc__)
    with (
        tempfile.TemporaryDirectory() as folder,
        Session(1, devices="cpu", threads=2) as one,
        Session(2, devices="cpu", threads=1) as two,
    ):
        for size in options.sets:
            source = write(size, folder, 0.1 if options.quick else 1.0)
            curves: dict[str, list[Curve]] = {contestant.name: [] for contestant in CONTESTANTS}
            for _ in range(options.turns):
                for contestant in CONTESTANTS:
                    curve = (one if contestant.ranks == 1 else two).run(contestant.function, folder)
                    curves[contestant.name].append(curve)
                    print(contestant.name, [(round(spent, 2), round(auc, 4)) for spent, auc in curve], flush=True)
            packages = ("torch", "torchrec", "fbgemm-gpu-cpu", "implicit", "lightgbm")
            lines, title = table(curves) + conditions(packages), title_of(size, source)
            if not options.print:
                first = {name: turns[0] for name, turns in curves.items()}
                lines += plots.curves(f"click_quality_{size}", title, "AUC", first, first[LOOP][-1][1])
            save_section("click_quality", title, lines, keep=not options.print)


if __name__ == "__main__":
    main()
