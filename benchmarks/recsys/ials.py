"""Speed and quality of `IALS` on ranks, compared with implicit's ALS of the same width, in turns, in one run."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import scipy.sparse
import torch

from benchmarks.machine import conditions, name_of, save_section
from nbdist import Session
from nbdist.recsys.datasets import movielens, synthetic_ratings
from nbdist.recsys.recommenders import IALS, LeaveOneOut
from nbdist.recsys.recommenders.hidden import Hidden, unseen
from nbdist.recsys.recommenders.interactions import Interactions

RANKS = 2
#: Settings of both, each as many: (regularization, weight of a pair that was not taken). implicit's confidence of a
#: pair that was taken is the inverse of the latter.
OURS = [(0.003, 0.1), (0.01, 0.1), (0.003, 0.3)]
THEIRS = [(1.0, 0.1), (10.0, 0.1), (10.0, 0.3)]


class Took(NamedTuple):
    wall: float
    cpu: float


class Data(NamedTuple):
    """A log without each user's last row, which is to be found."""

    name: str
    log: Interactions
    hidden: Hidden

    @classmethod
    def of(cls, name: str, rows: pl.DataFrame, users: int) -> Data:
        train, valid, test = LeaveOneOut().split(rows, "user", "timestamp")
        known = pl.concat([train, valid])
        found = unseen(test, known, "user", "movie").unique("user", maintain_order=True)
        found = found.sample(min(users, len(found)), seed=0)
        hidden = Hidden.of(known["movie"], found, "user", "movie", 10)
        return cls(name, Interactions.of(known, "user", "movie", None), hidden)


def timed(fn: Callable[[], Any]) -> tuple[Any, Took]:
    cpu, wall = time.process_time(), time.perf_counter()
    value = fn()
    return value, Took(time.perf_counter() - wall, time.process_time() - cpu)


def on_ranks(log: Interactions, options: dict[str, Any]) -> tuple[Any, Took]:
    """In a rank."""
    return timed(lambda: IALS(**options).fit_to(log)._vectors)


def ours(session: Session, data: Data, dim: int, iterations: int, setting: tuple[float, float]) -> tuple[Any, Took]:
    options = {"dim": dim, "iterations": iterations, "regularization": setting[0], "unobserved_weight": setting[1]}
    found = session.run_all(on_ranks, data.log, options)
    model = IALS(**options)  # type: ignore[arg-type]
    model._vectors, model._log = found[0][0], data.log
    return model, Took(max(took.wall for _, took in found), sum(took.cpu for _, took in found))


def theirs(data: Data, dim: int, iterations: int, setting: tuple[float, float]) -> tuple[Any, Took]:
    from implicit.als import AlternatingLeastSquares

    taken = data.log.taken
    shape = (len(data.log.users), len(data.log.items))
    ones = np.ones(len(taken.values), np.float32)
    matrix = scipy.sparse.csr_matrix((ones, taken.values.numpy(), taken.offsets.numpy()), shape=shape)
    model = AlternatingLeastSquares(
        factors=dim,
        iterations=iterations,
        regularization=setting[0],
        alpha=1 / setting[1],
        num_threads=RANKS,
        random_state=0,
    )
    _, took = timed(lambda: model.fit(matrix, show_progress=False))
    same = IALS(dim)  # whose `recommend` is used for both: with the users' vectors of the library
    same._vectors, same._log = torch.from_numpy(np.array(model.item_factors)), data.log
    users = torch.from_numpy(np.array(model.user_factors))
    places = {one: place for place, one in enumerate(data.log.users.to_list())}
    rows = torch.tensor([places[one] for one in data.hidden.users.to_list()])
    at = iter(range(len(rows)))
    same._scores = lambda lists: torch.stack([users[rows[next(at)]] for _ in lists.lengths]) @ same._vectors.T  # type: ignore[method-assign]
    return same, took


def ndcg(data: Data, model: Any) -> float:
    return float(data.hidden.metrics(model.recommend(data.hidden.users, 10)["items"])["ndcg"].mean())


def section(session: Session, data: Data, dim: int, iterations: int, rounds: int, settings: int) -> list[str]:
    runs = {"implicit ALS, 2 threads": theirs, "nbdist IALS, 2 ranks": lambda *some: ours(session, *some)}
    took: dict[str, list[Took]] = {name: [] for name in runs}
    best = {}
    for name, run in runs.items():
        run(data, dim, 1, OURS[0])  # what is loaded at the first run
        tried = [
            run(data, dim, iterations, one)[0] for one in (OURS if name.startswith("nbdist") else THEIRS)[:settings]
        ]
        best[name] = max(ndcg(data, model) for model in tried)
    for _ in range(rounds):
        for name, run in runs.items():
            took[name].append(run(data, dim, iterations, OURS[0])[1])
    wall = {name: float(np.median([one.wall for one in some])) for name, some in took.items()}
    cpu = {name: float(np.median([one.cpu for one in some])) for name, some in took.items()}
    first = next(iter(runs))
    ratios = [(a.wall / b.wall, a.cpu / b.cpu) for a, b in zip(took[first], took["nbdist IALS, 2 ranks"], strict=True)]
    lines = [
        f"{data.name}: {len(data.log.taken.values):,} pairs of {len(data.log.users):,} users and "
        f"{len(data.log.items):,} items. Width {dim}, {iterations} iterations, {rounds} rounds in turns; NDCG@10 of "
        f"the last row of {len(data.hidden.users):,} users, "
        + ("at one setting, not tuned." if settings == 1 else f"the best of {settings} settings each."),
        "",
        "| | seconds | CPU seconds | ndcg@10 |",
        "|---|--:|--:|--:|",
        *(f"| {name} | {wall[name]:.2f} | {cpu[name]:.2f} | {best[name]:.4f} |" for name in runs),
        "",
        f"implicit's time divided by nbdist's, in pairs: {np.median([w for w, _ in ratios]):.2f} "
        f"({min(w for w, _ in ratios):.2f} to {max(w for w, _ in ratios):.2f}); CPU time "
        f"{np.median([c for _, c in ratios]):.2f} "
        f"({min(c for _, c in ratios):.2f} to {max(c for _, c in ratios):.2f}).",
        "",
    ]
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=5_000_000, help="of the synthetic log; 0: without it")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--large-iterations", type=int, default=15)
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as implicit asks for
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are invented is in `source`
        ratings, _, source = movielens("100k", synthetic=True)
    with Session(RANKS) as session:
        likes = ratings.filter(pl.col("rating") > 3)
        lines = section(session, Data.of(name_of(source), likes, 10_000), options.dim, 15, options.rounds, 3)
        if options.rows:
            rows = synthetic_ratings(options.rows // 80, 10_000, options.rows)[0]
            large = Data.of("Synthetic ratings, all of them taken as liked", rows, 2_000)
            lines += section(session, large, options.dim, options.large_iterations, options.rounds, 1)
    save_section(
        "quality",
        "iALS compared with implicit's: speed at equal quality",
        lines + conditions(["torch", "polars", "implicit", "scipy"]),
        keep=not options.print,
    )


if __name__ == "__main__":
    main()
