"""Quality of recommendations, by `nbdist.recsys.benchmark`: its models, two towers, and implicit's ALS and BPR.

Games: Amazon's video games, as `benchmarks.recsys.next_item` describes them. Nothing is known of a game but its id,
and that is all that two towers learn from there. `--keep FOLDER` writes each model's comparison as soon as it is made,
and a later call with the same options takes it from there.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import scipy.sparse
import torch
from torch.nn.functional import cross_entropy

from benchmarks.machine import conditions, name_of, save_section, title_of
from benchmarks.recsys.next_item import ALL, games
from nbdist import Session
from nbdist.recsys.datasets import movielens
from nbdist.recsys.etl import Categorify, Split, Workflow
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.models import TwoTower, hard_negatives, softmax_logits
from nbdist.recsys.recommenders import EASE, IALS, Candidate, Comparison, ItemKNN, LeaveOneOut, Popularity, benchmark
from nbdist.recsys.recommenders.intervals import table_of
from nbdist.recsys.recommenders.protocols import SplitProtocol
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
    """Two towers, trained on the ranks of a session: users' ids, and items by each column of `movies`."""

    def __init__(self, session: Session, movies: pl.DataFrame, **options: Any) -> None:
        self._session, self._movies, self._options = session, movies, options

    def fit(self, log: pl.DataFrame, *, user: str, item: str, time: str | None) -> None:
        self._coded = Coded(log, user, item)
        known = log.join(self._movies, on=item, maintain_order="left")
        columns = self._movies.columns
        workflow = Workflow(Categorify(user, *columns)).fit(known, progress=False)
        rows = workflow.transform(known, [user, *columns]).collect()
        rows = rows.join(rows.group_by(user).agg(taken=item), on=user, maintain_order="left")
        sizes = {name: workflow.vocabularies[name].size for name in (user, *columns)}
        shares = workflow.vocabularies[item].shares()
        model = self._session.run(train, rows, sizes, shares, user, item, **self._options)
        one_each = workflow.transform(known.unique(item).sort(item), columns).collect()
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
    exclude: bool = False,
    hardest: int | None = None,
    seed: int = 0,
) -> Any:
    """In a rank."""
    torch.manual_seed(seed)
    users, items = {user: sizes[user]}, {name: size for name, size in sizes.items() if name != user}
    model = TwoTower(users, items, embedding_dim=dim)
    parallel = replicate(model, lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=decay))

    def predict(module: Any, batch: Any) -> Any:
        taken = batch["taken"] if exclude else None
        logits = softmax_logits(*module(batch), batch[item], shares, exclude=taken, temperature=temperature)
        return logits if hardest is None else hard_negatives(*logits, hardest)

    loader = MemoryLoader(rows, 512, shuffle=True, seed=seed)
    schedule = warmup_decay(epochs * len(loader), warmup=20)
    fit(parallel, predict, loader, epochs=epochs, loss=cross_entropy, schedule=schedule, progress=False)
    return parallel.gather()


def candidates(session: Session, movies: pl.DataFrame, alpha: Range) -> dict[str, Any]:
    return {
        "popularity": Popularity,
        "item neighbors (nbdist)": ItemKNN,
        "EASE (nbdist)": EASE,
        "iALS (nbdist)": IALS,
        "two towers (nbdist)": Candidate(
            lambda **options: Towers(session, movies, **options),
            {"dim": (16, 64), "epochs": (10, 20), "decay": Range(0.05, 1.0, log=True), "temperature": (0.5, 1.0)},
        ),
        **of_implicit(alpha),
    }


def of_implicit(alpha: Range) -> dict[str, Candidate]:
    return {
        "implicit ALS": Candidate(
            functools.partial(Implicit, "als"),
            {"factors": (16, 32, 64, 128), "regularization": Range(0.1, 100.0, log=True), "alpha": alpha},
        ),
        "implicit BPR": Candidate(
            functools.partial(Implicit, "bpr", iterations=100),
            {
                "factors": (8, 16, 32),
                "learning_rate": Range(0.002, 0.05, log=True),
                "regularization": Range(0.003, 0.3, log=True),
            },
        ),
    }


@dataclass(frozen=True)
class LeaveOneOutOf:
    """`LeaveOneOut` of some users, who are drawn. All rows of the others are training rows."""

    users: int

    def split(self, log: pl.DataFrame, user: str, time: str) -> Split[pl.DataFrame]:
        some = log[user].unique().sort().sample(self.users, seed=0)
        rows = log.with_columns(some=pl.col(user).is_in(some.implode()))
        measured, others = (rows.filter(one).drop("some") for one in (pl.col("some"), ~pl.col("some")))
        train, valid, test = LeaveOneOut().split(measured, user, time)
        return Split(pl.concat([others, train]), valid, test)


@dataclass(frozen=True)
class Compared:
    """A set, with the models that are compared on it."""

    title: str
    said: str
    log: pl.DataFrame
    models: dict[str, Any]
    protocol: SplitProtocol = field(default_factory=LeaveOneOut)


def of_movies(name: str, session: Session) -> tuple[Compared, pl.DataFrame]:
    """A set of MovieLens, and its movies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are invented is in `source`
        ratings, movies, source = movielens(name, synthetic=True)
    said = f"{name_of(source)}. Liked are ratings above 3."
    liked = ratings.filter(pl.col("rating") > 3)
    movies = movies.select("movie", "genres")
    models = candidates(session, movies, alpha=Range(0.5, 20.0, log=True))
    return Compared(title_of(name, source), said, liked, models), movies


def of_games(session: Session) -> Compared:
    log = games()
    said = (
        f"All {len(log):,} reviews of {log['user'].n_unique():,} users are taken as liked; their times are not known, "
        "but their order is. Nothing is known of a game but its id."
    )
    alpha = Range(1.0, 300.0, log=True)  # as wide as iALS's: the inverse of `unobserved_weight`
    models = candidates(session, log.select("movie").unique(), alpha)
    return Compared(ALL["games"].what, said, log, models, LeaveOneOutOf(10_000))


def compared(given: Compared, models: Mapping[str, Any], trials: int, keep: Path | None) -> Comparison:
    """Compare models one after the other, so that `keep` has those that are done if the run is broken off."""
    parts = []
    for name, model in models.items():
        kept = keep / f"{given.title}, {name}, {trials}.pickle" if keep else None
        if kept and kept.exists():
            parts.append(pickle.loads(kept.read_bytes()))
            continue
        parts.append(benchmark({name: model}, given.log, item="movie", protocol=given.protocol, trials=trials))
        if kept:
            kept.write_bytes(pickle.dumps(parts[-1]))
    return joined(parts)


def joined(parts: list[Comparison]) -> Comparison:
    """Join comparisons of the same log and protocol, with the test against the best of all."""
    about = parts[0].about
    rows = [row for one in parts for row in one.table.select("model", "trials", "parameters", "fit_seconds").to_dicts()]
    per_user = {name: frame for one in parts for name, frame in one.per_user.items()}
    found = {name: {one.name: one.to_torch() for one in frame} for name, frame in per_user.items()}
    parameters = {name: chosen for one in parts for name, chosen in one.parameters.items()}
    return Comparison(table_of(found, rows, "ndcg", about["k"], about["seed"]), about, parameters, per_user)


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


NEGATIVES: dict[str, dict[str, Any]] = {
    "all items of the batch but its own": {},
    "without other items that the user has taken": {"exclude": True},
    "the 100 hardest of these": {"exclude": True, "hardest": 100},
}


def hard(session: Session, given: Compared, movies: pl.DataFrame, seeds: int = 3) -> list[str]:
    """Two towers at the setting that the search has chosen, by the negatives of a row; each with several seeds."""
    setting = {"dim": 16, "epochs": 20, "decay": 0.156, "temperature": 0.5}
    models = {
        f"{name}, seed {seed}": Towers(session, movies, **setting, **options, seed=seed)
        for name, options in NEGATIVES.items()
        for seed in range(seeds)
    }
    table = benchmark(models, given.log, item="movie").table
    lines = ["| negatives of a row | ndcg@10 |", "|---|--:|"]
    for name in NEGATIVES:
        runs = table.filter(pl.col("model").str.starts_with(f"{name}, seed"))["ndcg@10"]
        lines.append(f"| {name} | {runs.mean():.4f} ({runs.min():.4f} to {runs.max():.4f}) |")
    at = ", ".join(f"{name} {value}" for name, value in setting.items())
    said = (
        f"{given.said} Two towers, {at}, batches of 512 on each of 2 ranks: the mean of {seeds} seeds, and the range."
    )
    return [said, "", *lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["100k", "1m"], choices=["100k", "1m", "games"])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--without", nargs="+", default=[], help="beginnings of names of models to leave out")
    parser.add_argument(
        "--hard", action="store_true", help="two towers with hard negatives on MovieLens 100k, and no more"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the comparisons of models are kept")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    packages = ["torch", "torchmetrics", "polars", "optuna", "scipy"]
    with Session(2) as session:
        if options.hard:
            lines = hard(session, *of_movies("100k", session)) + conditions(packages)
            save_section("quality", "Two towers with hard negatives", lines, keep=not options.print)
            return
        for name in options.sets:
            given = of_games(session) if name == "games" else of_movies(name, session)[0]
            models = given.models
            for beginning in options.without:
                models = {model: one for model, one in models.items() if not model.startswith(beginning)}
            found = compared(given, models, options.trials, options.keep)
            seed = found.about["seed"]
            lines = [given.said, "", found.to_markdown(), "", verdict(found.table), "", searched(models, seed), ""]
            lines += conditions(
                [*packages, *(["implicit"] if any(one.startswith("implicit") for one in models) else [])]
            )
            save_section("quality", given.title, lines, keep=not options.print)


if __name__ == "__main__":
    main()
