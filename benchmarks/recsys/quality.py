"""Quality of recommendations: two towers, implicit's ALS and BPR, and popularity, on the same split."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import scipy.sparse
import torch
from torch.nn.functional import cross_entropy

from benchmarks.machine import conditions, name_of, save_section, title_of
from nbdist import Session
from nbdist.recsys.datasets import movielens
from nbdist.recsys.etl import Categorify, Workflow, leave_one_out
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.metrics import ranking_metrics
from nbdist.recsys.models import TwoTower, softmax_logits
from nbdist.recsys.retrieval import top_k
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import fit, warmup_decay

K = 10
METRICS = (f"recall@{K}", f"ndcg@{K}", f"mrr@{K}")
"""With one row a user to be found, recall is the hit rate."""


@dataclass
class Likes:
    """Ratings above 3 in three parts, by codes."""

    source: str
    workflow: Workflow
    train: pl.DataFrame
    valid: pl.DataFrame
    test: pl.DataFrame
    movies: dict[str, Any] = field(repr=False)
    """The columns of all movies, by code: what the item tower takes."""

    @classmethod
    def of(cls, name: str) -> Likes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that they are invented is in `source`
            ratings, movies, source = movielens(name, synthetic=True)
        split = leave_one_out(ratings.filter(pl.col("rating") > 3).join(movies, on="movie"))
        workflow = Workflow(Categorify("user", "movie", "genres")).fit(split.train, progress=False)
        columns = ["user", "movie", "genres"]
        parts = [workflow.transform(part, columns).collect().filter(pl.col("movie") > 1) for part in split]
        codes = workflow.vocabularies["movie"].mapping()
        known = movies.filter(pl.col("movie").is_in(list(codes)))
        table = workflow.transform(known, ["movie", "genres"]).collect().sort("movie")
        (columns_of_movies,) = MemoryLoader(table, len(table))
        return cls(source, workflow, *parts, columns_of_movies)

    def size(self, column: str) -> int:
        return self.workflow.vocabularies[column].size

    def lists(self, rows: pl.DataFrame) -> Ragged:
        """The movies of each user, by code."""
        users = pl.DataFrame({"user": range(self.size("user"))}, schema={"user": pl.Int64})
        joined = users.join(rows.group_by("user").agg("movie"), on="user", how="left", maintain_order="left")
        (batch,) = MemoryLoader(joined.select(pl.col("movie").fill_null([])), len(joined))
        return batch["movie"]

    def judged(self, recommend: Callable[[Ragged], torch.Tensor]) -> list[dict[str, float]]:
        """Metrics on the validation rows, and on the test rows."""
        found = []
        for seen, held in ((self.train, self.valid), (pl.concat([self.train, self.valid]), self.test)):
            found.append(ranking_metrics(recommend(self.lists(seen)), self.lists(held), K))
        return found


def popularity(likes: Likes) -> Callable[[Ragged], torch.Tensor]:
    shares = likes.workflow.vocabularies["movie"].shares()[None]  # (1, movies)
    return lambda seen: top_k(torch.ones(likes.size("user"), 1), shares.T, K, exclude=_and_unknown(seen))[1]


def interactions(rows: pl.DataFrame, shape: tuple[int, int]) -> scipy.sparse.csr_matrix:
    """A one for each row's user and movie, as implicit takes them; shape (users, movies)."""
    return scipy.sparse.csr_matrix((np.ones(len(rows), np.float32), (rows["user"], rows["movie"])), shape=shape)


def implicit_model(kind: str, likes: Likes, **options: Any) -> Callable[[Ragged], torch.Tensor]:
    from implicit.als import AlternatingLeastSquares
    from implicit.bpr import BayesianPersonalizedRanking

    matrix = interactions(likes.train, (likes.size("user"), likes.size("movie")))
    model = {"als": AlternatingLeastSquares, "bpr": BayesianPersonalizedRanking}[kind](random_state=0, **options)
    model.fit(matrix, show_progress=False)
    users, movies = torch.from_numpy(model.user_factors), torch.from_numpy(model.item_factors)
    return lambda seen: top_k(users, movies, K, exclude=_and_unknown(seen))[1]


def two_tower(likes: Likes, session: Session, **options: Any) -> Callable[[Ragged], torch.Tensor]:
    model = session.run(train, likes, **options)
    with torch.no_grad():
        users = model.query({"user": torch.arange(likes.size("user"))})
        vectors = model.item(likes.movies)
    movies = torch.zeros(likes.size("movie"), vectors.shape[1])
    movies[likes.movies["movie"]] = vectors
    return lambda seen: top_k(users, movies, K, exclude=_and_unknown(seen))[1]


def train(
    likes: Likes, dim: int, epochs: int, lr: float, decay: float, batch_size: int, temperature: float = 1.0
) -> Any:
    """In a rank."""
    torch.manual_seed(0)
    item = {name: likes.size(name) for name in ("movie", "genres")}
    model = TwoTower({"user": likes.size("user")}, item, embedding_dim=dim)
    parallel = replicate(model, lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=decay))
    shares = likes.workflow.vocabularies["movie"].shares()

    def predict(module: Any, batch: Any) -> Any:
        return softmax_logits(*module(batch), batch["movie"], shares, temperature=temperature)

    rows = MemoryLoader(likes.train, batch_size, shuffle=True, seed=0)
    schedule = warmup_decay(epochs * len(rows), warmup=20)
    fit(parallel, predict, rows, epochs=epochs, loss=cross_entropy, schedule=schedule, progress=False)
    return parallel.gather()


def _and_unknown(seen: Ragged) -> Ragged:
    """Lists with the codes of null and of unknown movies at the front of each: they are no movies."""
    rows = len(seen.lengths)
    lists = [torch.cat([torch.tensor([0, 1]), one]) for one in seen.values.split(seen.lengths.tolist())]
    return Ragged(torch.cat(lists), torch.cat([torch.zeros(1).long(), (seen.lengths + 2).cumsum(0)])) if rows else seen


def grid(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """All combinations."""
    found: list[dict[str, Any]] = [{}]
    for name, some in values.items():
        found = [{**one, name: value} for one in found for value in some]
    return found


def measure(likes: Likes, session: Session) -> list[str]:
    contestants: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
        "popularity": (lambda: popularity(likes), [{}]),
        "implicit ALS": (
            lambda **options: implicit_model("als", likes, **options),
            grid(factors=[4, 8, 16, 32, 64, 128], regularization=[1.0, 10.0, 30.0], alpha=[1.0]),
        ),
        "implicit BPR": (
            lambda **options: implicit_model("bpr", likes, **options),
            grid(factors=[8, 16], learning_rate=[0.005, 0.01], regularization=[0.01, 0.1], iterations=[100]),
        ),
        "two towers (nbdist)": (
            lambda **options: two_tower(likes, session, **options),
            grid(dim=[8, 16, 64], epochs=[10, 20], lr=[0.01], decay=[0.1, 0.3, 1.0], batch_size=[512]),
        ),
    }
    lines = []
    for name, (make, settings) in contestants.items():
        judged = []
        for options in settings:
            valid, test = likes.judged(make(**options))
            print(name, options, valid, flush=True)
            judged.append((valid[f"ndcg@{K}"], test, options))
        _, test, options = max(judged, key=lambda one: one[0])
        said = ", ".join(f"{key} {value}" for key, value in options.items()) or "–"
        lines.append(
            f"| {name} | {' | '.join(f'{test[metric]:.4f}' for metric in METRICS)} | {len(settings)} | {said} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", default=["100k", "1m"], choices=["100k", "1m"])
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    packages = ("torch", "implicit", "torchmetrics", "polars")
    with Session(2) as session:
        for name in options.sets:
            likes = Likes.of(name)
            lines = [
                f"{name_of(likes.source)}. Liked are ratings above 3: "
                f"{len(likes.train):,} to train on; of each user the last one is to be found "
                f"among {likes.size('movie') - 2:,} movies, without those that the user has liked before "
                f"({len(likes.test):,} users); the one before it chose among settings, by NDCG@{K}. The standard error "
                f"of a recall of 0.06 of these users is {(0.06 * 0.94 / len(likes.test)) ** 0.5:.4f}.",
                "",
                f"| model | {' | '.join(METRICS)} | settings tried | chosen |",
                "|---|" + "--:|" * (len(METRICS) + 1) + "---|",
                *measure(likes, session),
                "",
            ]
            save_section("quality", title_of(name, likes.source), lines + conditions(packages), keep=not options.print)


if __name__ == "__main__":
    main()
