"""SASRec on real data, trained and judged as published results were, beside those.

Games: reviews of video games at Amazon, as the authors of SASRec keep them (``data/Video.txt`` in their repository,
github.com/kang205/SASRec), in the folder that NBDIST_DATA names. 1m: MovieLens, as `movielens` finds it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.machine import conditions, save_section
from nbdist import Session
from nbdist.recsys.datasets import movielens
from nbdist.recsys.etl import Categorify, Workflow, leave_one_out, sequences
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.metrics import ranking_metrics
from nbdist.recsys.models import SASRec, draw_rows
from nbdist.recsys.retrieval import top_k
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import fit

K = 10
BATCH, NEGATIVES, TEMPERATURE = 128, 1024, 0.05
METRICS = (f"hit_rate@{K}", f"ndcg@{K}")


@dataclass(frozen=True)
class Published:
    """A published result, and how it came about."""

    what: str
    result: tuple[float, float]
    """`METRICS`."""
    where: str
    judged: str
    rows: Callable[[], pl.DataFrame]
    candidates: int | None
    """Items that were drawn for each user, to be ranked with the one to be found. None: all, but those taken before."""
    length: int
    dropout: float
    epochs: int
    choose: bool
    """Whether the epoch is the best by the rows before the last, which are not trained on then; else it is the last."""


def games() -> pl.DataFrame:
    path = Path(os.environ["NBDIST_DATA"], "Video.txt")
    rows = pl.read_csv(path, separator=" ", has_header=False, new_columns=["user", "movie"])
    return rows.with_row_index("timestamp")


ALL = {
    "1m": Published(
        "MovieLens 1m",
        (0.2853, 0.1603),
        "github.com/meta-recsys/generative-recommenders, README",
        "all movies are ranked, but those that the user has rated before",
        lambda: movielens("1m").frame,
        candidates=None,
        length=200,
        dropout=0.2,
        epochs=100,
        choose=False,
    ),
    "games": Published(
        "Amazon video games",
        (0.7410, 0.5360),
        "Kang and McAuley, Self-attentive sequential recommendation, ICDM 2018",
        "what is to be found is ranked with 100 items that were drawn, of 10,000 users that were drawn",
        games,
        candidates=100,
        length=50,
        dropout=0.5,
        epochs=200,
        choose=True,
    ),
}


class Data:
    """The rows of users in three parts, by codes."""

    def __init__(self, published: Published) -> None:
        self.train, self.valid, self.test = split = leave_one_out(published.rows())
        if not published.choose:
            self.train = pl.concat([self.train, self.valid])
        # Candidates are all items, those too that occur in the last rows alone.
        items = pl.concat(split).select("movie", history=pl.concat_list("movie"))
        self.workflow = Workflow(Categorify(("movie", "history"))).fit(items, progress=False)
        self.size = self.workflow.vocabularies["movie"].size
        self.items = {"movie": torch.arange(2, self.size)}
        self.histories = self.workflow.transform(self._lists(self.train), ["history"]).collect()

    @staticmethod
    def _lists(rows: pl.DataFrame) -> pl.DataFrame:
        return sequences(rows, "movie").rename({"movie": "history"})

    def judged(self, model: SASRec, held: pl.DataFrame, before: pl.DataFrame, candidates: int | None) -> list[float]:
        """`METRICS` of what a model names to the user of each of some rows, from what they took before."""
        if candidates is not None:
            held = held.sample(min(len(held), 10_000), seed=0)
        asked = held.select("user", "movie").join(self._lists(before), on="user", maintain_order="left")
        frame = self.workflow.transform(asked, ["history", "movie"]).collect()
        (batch,) = MemoryLoader(frame, len(frame))
        wanted = batch["movie"]
        with torch.no_grad():
            vectors = model.item(self.items["movie"])
            items = torch.cat([torch.zeros(2, vectors.shape[1]), vectors])
            queries = torch.cat([model.query(block) for block in MemoryLoader(frame.select("history"), 1000)])
        if candidates is None:
            _, named = top_k(queries, items, K, exclude=_and_no_items(batch["history"]))
        else:
            drawn = self._drawn(batch["history"], wanted, candidates)
            scores = (items[drawn] @ queries[:, :, None]).squeeze(2)  # (users, 1 + candidates)
            named = drawn.gather(1, scores.topk(K).indices)
        found = ranking_metrics(named, Ragged(wanted, torch.arange(len(wanted) + 1)), K)
        return [found[name] for name in METRICS]

    def _drawn(self, seen: Ragged, wanted: torch.Tensor, count: int) -> torch.Tensor:
        """What is to be found, and items that its user has not taken, any as likely as any other."""
        generator = torch.Generator().manual_seed(0)
        rows = []
        for one, history in zip(wanted.tolist(), seen.values.split(seen.lengths.tolist()), strict=True):
            left = torch.ones(self.size)
            left[:2], left[history], left[one] = 0, 0, 0
            rows.append(torch.cat([torch.tensor([one]), left.multinomial(count, generator=generator)]))
        return torch.stack(rows)


def _and_no_items(seen: Ragged) -> Ragged:
    """Lists with the codes of null and of unknown items at the front of each."""
    lists = [torch.cat([torch.tensor([0, 1]), one]) for one in seen.values.split(seen.lengths.tolist())]
    return Ragged(torch.cat(lists), torch.tensor([0, *map(len, lists)]).cumsum(0))


def train(published: Published, data: Data, epochs: int, every: int) -> list[tuple[int, list[float], list[float]]]:
    """In a rank: epoch, and `METRICS` of the validation and of the test rows, again and again."""
    torch.manual_seed(0)
    model = SASRec(
        data.size, length=published.length, embedding_dim=50, dropout=published.dropout, temperature=TEMPERATURE
    )
    parallel = replicate(model, lambda parameters: torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.98)))
    rows = MemoryLoader(data.histories, BATCH // dist.get_world_size(), shuffle=True, seed=0)
    records, begin = [], time.perf_counter()

    def predict(module: Any, batch: Any) -> Any:
        return module(batch, draw_rows(data.items, NEGATIVES)["movie"])

    for epoch in range(every, epochs + 1, every):
        fit(parallel, predict, rows, epochs=every, loss=cross_entropy, progress=False)
        plain: Any = parallel.gather()
        if plain is None:
            continue  # another rank judges, and this one waits in its next step
        before = pl.concat([data.train, data.valid]) if published.choose else data.train
        valid = data.judged(plain.eval(), data.valid, data.train, published.candidates) if published.choose else []
        records.append((epoch, valid, data.judged(plain.eval(), data.test, before, published.candidates)))
        print(*records[-1], f"{time.perf_counter() - begin:.0f} s", flush=True)
    return records


def measure(name: str, session: Session, epochs: int | None, every: int) -> list[str]:
    published = ALL[name]
    data = Data(published)
    epochs = epochs or published.epochs
    records = session.run(train, published, data, epochs, every)
    if published.choose:
        (epoch, _, result), how = max(records, key=lambda one: one[1][1]), "best by NDCG of the rows before the last"
    else:
        (epoch, _, result), how = records[-1], "the last one"
    curve = ", ".join(f"{epoch}: {test[0]:.4f} and {test[1]:.4f}" for epoch, _, test in records)
    figures = [" | ".join(f"{one:.4f}" for one in each) for each in (result, published.result)]
    return [
        f"{len(data.train):,} rows of {len(data.histories):,} users to train on, {data.size - 2:,} items; the last row "
        f"of each is to be found: {published.judged}. Length {published.length}, 2 blocks, 1 head, width 50, dropout "
        f"{published.dropout}, Adam with 0.001 and betas 0.9 and 0.98, batches of {BATCH}, softmax of cosines at a "
        f"temperature of {TEMPERATURE} over {NEGATIVES} negatives that are drawn for a batch.",
        "",
        f"| | {' | '.join(METRICS).replace('_', ' ')} |",
        "|---|" + "--:|" * len(METRICS),
        f"| nbdist, epoch {epoch} of {epochs} ({how}) | {figures[0]} |",
        f"| published: {published.where} | {figures[1]} |",
        "",
        f"By epoch: {curve}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=list(ALL))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="instead of as many as were published, or, for games, of 200")
    parser.add_argument("--every", type=int, default=10, help="epochs from one look at the result to the next")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    with Session(options.ranks) as session:
        lines = measure(options.set, session, options.epochs, options.every)
    lines += conditions(("torch", "torchmetrics", "polars"))
    title = f"SASRec on {ALL[options.set].what}, beside a published result"
    save_section("quality", title, lines, keep=not options.print)


if __name__ == "__main__":
    main()
