"""Quality of recommendations, by `nbdist.recsys.benchmark`: its models, two towers, and implicit's ALS and BPR."""

from __future__ import annotations

import argparse
import warnings
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
from nbdist.recsys.etl import Categorify, Workflow
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.models import TwoTower, softmax_logits
from nbdist.recsys.recommenders import EASE, IALS, Candidate, ItemKNN, Popularity, benchmark
from nbdist.recsys.recommenders.spaces import Range, Space
from nbdist.recsys.retrieval import top_k
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import fit, warmup_decay

OWN = "(nbdist)"
"""The end of the names of nbdist's own models."""


def interactions(rows: pl.DataFrame, shape: tuple[int, int]) -> scipy.sparse.csr_matrix:
    """A one for each row's user and movie, as implicit takes them; shape (users, movies)."""
    return scipy.sparse.csr_matrix((np.ones(len(rows), np.float32), (rows["user"], rows["movie"])), shape=shape)


@dataclass
class Coded:
    """A log by the codes of its users and items, with the items that each user has taken."""

    log: pl.DataFrame
    user: str
    item: str
    workflow: Workflow = field(init=False)
    rows: pl.DataFrame = field(init=False)

    def __post_init__(self) -> None:
        self.workflow = Workflow(Categorify(self.user, self.item)).fit(self.log, progress=False)
        self.rows = self.workflow.transform(self.log, [self.user, self.item]).collect()

    def size(self, column: str) -> int:
        return self.workflow.vocabularies[column].size

    def best(self, users: pl.Series, user_vectors: Any, item_vectors: Any, k: int) -> pl.DataFrame:
        """The items with the largest products that a user has not taken."""
        asked = self.workflow.transform(pl.DataFrame({self.user: users}), [self.user]).collect()
        taken = self.rows.group_by(self.user).agg(self.item)
        lists = asked.join(taken, on=self.user, how="left", maintain_order="left")[self.item]
        # The codes of null and of unknown items are no items.
        lists = pl.DataFrame({"i": lists}).select(i=pl.concat_list(pl.lit(0), pl.lit(1), "i"))["i"]
        lengths = torch.from_numpy(lists.list.len().cast(pl.Int64).to_numpy(writable=True))
        values = torch.from_numpy(lists.explode().cast(pl.Int64).to_numpy(writable=True))
        exclude = Ragged(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        codes = torch.from_numpy(asked[self.user].cast(pl.Int64).to_numpy(writable=True))
        _, places = top_k(torch.as_tensor(user_vectors)[codes], torch.as_tensor(item_vectors), k, exclude=exclude)
        ids = self.workflow.vocabularies[self.item].mapping()
        by_code = {code: id for id, code in ids.items()}
        return pl.DataFrame({"items": [[by_code[code] for code in row if code >= 0] for row in places.tolist()]})


class Implicit:
    """A model of the library implicit."""

    def __init__(self, kind: str, **options: Any) -> None:
        from implicit.als import AlternatingLeastSquares
        from implicit.bpr import BayesianPersonalizedRanking

        make = {"als": AlternatingLeastSquares, "bpr": BayesianPersonalizedRanking}[kind]
        self._model = make(random_state=0, **options)

    def fit(self, log: pl.DataFrame, *, user: str, item: str, time: str | None) -> None:
        self._coded = Coded(log, user, item)
        matrix = interactions(
            self._coded.rows.rename({user: "user", item: "movie"}), (self._coded.size(user), self._coded.size(item))
        )
        self._model.fit(matrix, show_progress=False)

    def recommend(self, users: pl.Series, k: int) -> pl.DataFrame:
        return self._coded.best(users, self._model.user_factors, self._model.item_factors, k)


class Towers:
    """Two towers, trained on the ranks of a session."""

    def __init__(self, session: Session, movies: pl.DataFrame, **options: Any) -> None:
        self._session, self._movies, self._options = session, movies, options

    def fit(self, log: pl.DataFrame, *, user: str, item: str, time: str | None) -> None:
        self._coded = Coded(log, user, item)
        known = log.join(self._movies, on=item, maintain_order="left")
        workflow = Workflow(Categorify(user, item, "genres")).fit(known, progress=False)
        rows = workflow.transform(known, [user, item, "genres"]).collect()
        sizes = {name: workflow.vocabularies[name].size for name in (user, item, "genres")}
        shares = workflow.vocabularies[item].shares()
        model = self._session.run(train, rows, sizes, shares, user, item, **self._options)
        one_each = workflow.transform(known.unique(item).sort(item), [item, "genres"]).collect()
        (batch,) = MemoryLoader(one_each, len(one_each))
        with torch.no_grad():
            self._users = model.query({user: torch.arange(sizes[user])})
            vectors = model.item(batch)
        self._items = torch.zeros(sizes[item], vectors.shape[1])
        self._items[batch[item]] = vectors

    def recommend(self, users: pl.Series, k: int) -> pl.DataFrame:
        return self._coded.best(users, self._users, self._items, k)


def train(
    rows: pl.DataFrame,
    sizes: dict[str, int],
    shares: Any,
    user: str,
    item: str,
    dim: int,
    epochs: int,
    decay: float,
    temperature: float,
) -> Any:
    """In a rank."""
    torch.manual_seed(0)
    model = TwoTower({user: sizes[user]}, {name: sizes[name] for name in (item, "genres")}, embedding_dim=dim)
    parallel = replicate(model, lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=decay))

    def predict(module: Any, batch: Any) -> Any:
        return softmax_logits(*module(batch), batch[item], shares, temperature=temperature)

    loader = MemoryLoader(rows, 512, shuffle=True, seed=0)
    schedule = warmup_decay(epochs * len(loader), warmup=20)
    fit(parallel, predict, loader, epochs=epochs, loss=cross_entropy, schedule=schedule, progress=False)
    return parallel.gather()


def candidates(session: Session, movies: pl.DataFrame) -> dict[str, Any]:
    return {
        "popularity": Popularity,
        "item neighbors (nbdist)": ItemKNN,
        "EASE (nbdist)": EASE,
        "iALS (nbdist)": IALS,
        "two towers (nbdist)": Candidate(
            lambda **options: Towers(session, movies, **options),
            {"dim": (16, 64), "epochs": (10, 20), "decay": Range(0.05, 1.0, log=True), "temperature": (0.5, 1.0)},
        ),
        "implicit ALS": Candidate(
            lambda **options: Implicit("als", **options),
            {
                "factors": (16, 32, 64, 128),
                "regularization": Range(0.1, 100.0, log=True),
                "alpha": Range(0.5, 20.0, log=True),
            },
        ),
        "implicit BPR": Candidate(
            lambda **options: Implicit("bpr", iterations=100, **options),
            {
                "factors": (8, 16, 32),
                "learning_rate": Range(0.002, 0.05, log=True),
                "regularization": Range(0.003, 0.3, log=True),
            },
        ),
    }


def searched(models: dict[str, Any], seed: int) -> str:
    """List the values that the search draws from, for each model."""

    def shown(space: Space) -> str:
        if isinstance(space, Range):
            return f"{space.low:g} to {space.high:g}{' (log)' if space.log else ''}"
        return ", ".join(map(str, space))

    lines = [f"Searched by optuna's TPE, seed {seed}; models that begin at random do so with seed 0:", ""]
    for name, model in models.items():
        space = Candidate.of(model, name).space
        if space:
            lines.append(f"- {name}: {'; '.join(f'{one} {shown(values)}' for one, values in space.items())}")
    return "\n".join(lines)


def verdict(table: pl.DataFrame) -> str:
    """Say who is first by NDCG, who is level with it by the paired test, and where nbdist's best stands."""
    best, *others = table["model"]
    level = table.filter(pl.col("verdict") == "level")["model"]
    own, how = table.filter(pl.col("model").str.ends_with(OWN)).select("model", "verdict").row(0)
    where = {
        "best": "",
        "level": f" nbdist's best, {own}, is level with it.",
        "behind": f" nbdist's best, {own}, is behind.",
    }
    return f"First by NDCG: {best}. Level with it: {', '.join(level) or 'none'} (of {len(others)} others).{where[how]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", default=["100k", "1m"], choices=["100k", "1m"])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--without", nargs="+", default=[], help="beginnings of names of models to leave out")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    with Session(2) as session:
        for name in options.sets:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that they are invented is in `source`
                ratings, movies, source = movielens(name, synthetic=True)
            models = candidates(session, movies)
            for beginning in options.without:
                models = {model: one for model, one in models.items() if not model.startswith(beginning)}
            likes = ratings.filter(pl.col("rating") > 3)
            found = benchmark(models, likes, item="movie", trials=options.trials)
            lines = [
                f"{name_of(source)}. Liked are ratings above 3.",
                "",
                found.to_markdown(),
                "",
                verdict(found.table),
                "",
                searched(models, found.about["seed"]),
                "",
            ]
            packages = ["torch", "torchmetrics", "polars", "optuna", "scipy"]
            packages += ["implicit"] if any(model.startswith("implicit") for model in models) else []
            save_section("quality", title_of(name, source), lines + conditions(packages), keep=not options.print)


if __name__ == "__main__":
    main()
