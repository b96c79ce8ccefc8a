"""SASRec, gSASRec, eSASRec and HSTU on real data, trained and judged as published results were, in one table.

Games: reviews of video games at Amazon, as the authors of SASRec keep them (``data/Video.txt`` in their repository,
github.com/kang205/SASRec), in the folder that NBDIST_DATA names; times are not in it. 100k, 1m, 20m: MovieLens, as
`movielens` finds it. Rows of a user with the same time keep the order of the file. A sort that does not keep it has
another last item for a quarter of the users of 1m; results on such data (0.2853 and 0.1603 for SASRec, github.com/
meta-recsys/generative-recommenders, README) are not comparable.
`--prepare FILE` writes the rows as tensors, and `--prepared FILE` trains on them where polars is not installed.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.machine import conditions, save_section
from nbdist import Session, rank_device
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.metrics import ranking_metrics
from nbdist.recsys.models import HSTU, SASRec, calibrated_bce, draw_rows
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import fit

if TYPE_CHECKING:
    import polars as pl

K = 10
TEMPERATURE = 0.05
METRICS = (f"hit_rate@{K}", f"ndcg@{K}")


@dataclass(frozen=True)
class Published:
    """Published results on the same data, and how they came about."""

    what: str
    results: dict[str, tuple[float, float]]
    """Model → `METRICS`."""
    where: str
    judged: str
    rows: Callable[[], pl.DataFrame]
    candidates: int | None
    """Items that were drawn for each user, to be ranked with the one to be found. None: all, but those taken before."""
    length: int
    dropout: float
    epochs: int
    choose: bool
    """True: the best epoch by the rows before the last one, which are not trained on. False: the last epoch."""
    batch: int = 128
    negatives: int = 1024
    """Items that are drawn for a batch."""


def games() -> pl.DataFrame:
    import polars as pl

    path = Path(os.environ["NBDIST_DATA"], "Video.txt")
    rows = pl.read_csv(path, separator=" ", has_header=False, new_columns=["user", "movie"])
    return rows.with_row_index("timestamp")


def movies(name: str) -> pl.DataFrame:
    from nbdist.recsys.datasets import movielens

    return movielens(name).frame


def movies_of(name: str, results: dict[str, tuple[float, float]], length: int, **more: Any) -> Published:
    return Published(
        f"MovieLens {name}",
        results,
        "github.com/MTSWebServices/RecTools (SASRec, eSASRec); Zhai et al., ICML 2024 (HSTU)",
        "all movies are ranked, but those that the user has rated before",
        functools.partial(movies, name),
        candidates=None,
        length=length,
        dropout=0.2,
        **{"epochs": 100, "choose": False, **more},
    )


ALL = {
    "100k": movies_of("100k", {}, 100, choose=True, epochs=80, batch=32, negatives=256),
    "1m": movies_of(
        "1m",
        {
            "SASRec": (0.3058, 0.1779),
            "eSASRec": (0.3133, 0.1772),
            "HSTU": (0.3226, 0.1880),
            "HSTU-large": (0.3642, 0.2164),
        },
        200,
    ),
    "20m": movies_of(
        "20m", {"SASRec": (0.2990, 0.1818), "eSASRec": (0.3289, 0.1966), "HSTU-large": (0.3556, 0.2098)}, 200
    ),
    "games": Published(
        "Amazon video games",
        {"SASRec": (0.7410, 0.5360)},
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


@dataclass(frozen=True)
class Judged:
    """Users, with the one item that is to be found for each."""

    batch: dict[str, Any]
    """`history`: codes of the items before it; `times` of these, and `now`, its own, in seconds since 1970."""
    wanted: torch.Tensor
    """Its code, shape (users,)."""
    drawn: torch.Tensor | None
    """Codes that are ranked, the wanted one first, shape (users, 1 + candidates); None: all items are."""


@dataclass(frozen=True)
class Data:
    """The rows that a published result was trained on and judged by, as tensors."""

    size: int
    """Codes of items: 0 and 1 are no item."""
    batch: dict[str, Ragged]
    """`history` and `times`, as in `Judged`."""
    valid: Judged | None
    test: Judged

    @property
    def items(self) -> torch.Tensor:
        return torch.arange(2, self.size)


def prepare(published: Published) -> Data:
    """Divide the rows of users in three parts, and code the items."""
    import polars as pl

    from nbdist.recsys.etl import Categorify, Workflow, leave_one_out, sequences

    train, valid, test = split = leave_one_out(published.rows())
    before = pl.concat([train, valid])
    # Candidates are all items, those too that occur in the last rows alone.
    every = pl.concat(split).with_columns(pl.col("timestamp").cast(pl.Int64))
    items = every.select("movie", history=pl.concat_list("movie"), times=pl.concat_list("timestamp"), now="timestamp")
    workflow = Workflow(Categorify(("movie", "history"))).fit(items, progress=False)
    size = workflow.vocabularies["movie"].size

    def lists(rows: pl.DataFrame) -> pl.DataFrame:
        return sequences(rows, "movie", "timestamp").rename({"movie": "history", "timestamp": "times"})

    def columns(frame: pl.DataFrame, *names: str) -> dict[str, Any]:
        coded = workflow.transform(frame, list(names)).collect()
        (batch,) = MemoryLoader(coded, len(coded), rank=0, world_size=1, device="cpu")
        return dict(batch)

    def judged(held: pl.DataFrame, known: pl.DataFrame) -> Judged:
        if published.candidates is not None:
            held = held.sample(min(len(held), 10_000), seed=0)
        asked = held.select("user", "movie", now="timestamp")
        asked = asked.join(lists(known), on="user", maintain_order="left")
        found = columns(asked, "history", "times", "now", "movie")
        wanted = found.pop("movie")
        return Judged(found, wanted, _drawn(found["history"], wanted, size, published.candidates))

    batch = columns(lists(train if published.choose else before), "history", "times")
    return Data(size, batch, judged(valid, train) if published.choose else None, judged(test, before))


def _drawn(seen: Ragged, wanted: torch.Tensor, size: int, count: int | None) -> torch.Tensor | None:
    """Draw `count` items that a user has not taken, any as likely as any other, behind the one to be found."""
    if count is None:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = []
    for one, history in zip(wanted.tolist(), seen.values.split(seen.lengths.tolist()), strict=True):
        left = torch.ones(size)
        left[:2], left[history.long()], left[one] = 0, 0, 0
        rows.append(torch.cat([torch.tensor([one]), left.multinomial(count, generator=generator)]))
    return torch.stack(rows).int()


def _and_no_items(seen: Ragged) -> Ragged:
    """Lists with the codes of null and of unknown items at the front of each."""
    lists = [torch.cat([torch.tensor([0, 1]), one]) for one in seen.values.split(seen.lengths.tolist())]
    return Ragged(torch.cat(lists), torch.tensor([0, *map(len, lists)]).cumsum(0))


@torch.no_grad()
def judge(model: SASRec | HSTU, data: Data, judged: Judged) -> list[float]:
    """`METRICS` of what a model names to each user."""
    vectors = model.item(data.items.to(rank_device())).cpu()
    items = torch.cat([torch.zeros(2, vectors.shape[1]), vectors])
    blocks = MemoryLoader(judged.batch, 1000, rank=0, world_size=1)
    queries = torch.cat([model.query(block).cpu() for block in blocks])
    if judged.drawn is None:
        from nbdist.recsys.retrieval import top_k

        _, named = top_k(queries, items, K, exclude=_and_no_items(judged.batch["history"]))
    else:
        scores = (items[judged.drawn.long()] @ queries[:, :, None]).squeeze(2)  # (users, 1 + candidates)
        named = judged.drawn.gather(1, scores.topk(K).indices)
    found = ranking_metrics(named, Ragged(judged.wanted, torch.arange(len(judged.wanted) + 1)), K)
    return [found[name] for name in METRICS]


@dataclass(frozen=True)
class Kind:
    """A model, and the loss that it is trained with."""

    make: Callable[..., SASRec | HSTU]
    how: str
    loss: Callable[..., torch.Tensor] | None = None
    """None: a softmax."""


SOFTMAX = f"a softmax of cosines at a temperature of {TEMPERATURE}"
MODELS = {
    "SASRec": Kind(functools.partial(SASRec, temperature=TEMPERATURE), SOFTMAX),
    "gSASRec": Kind(SASRec, "calibrated binary cross entropy of products", calibrated_bce),
    "eSASRec": Kind(functools.partial(SASRec, layers="ligr", temperature=TEMPERATURE), f"gated layers, {SOFTMAX}"),
    "HSTU": Kind(functools.partial(HSTU, temperature=TEMPERATURE), SOFTMAX),
}


def make(published: Published, name: str, size: int) -> SASRec | HSTU:
    """Make a model for a set; HSTU reads times where the set has them."""
    times = {"times": "times"} if name == "HSTU" and not published.candidates else {}
    return MODELS[name].make(size, length=published.length, embedding_dim=50, dropout=published.dropout, **times)


def train(
    published: Published, name: str, data: Data, epochs: int, every: int
) -> list[tuple[int, list[float], list[float]]]:
    """In a rank: epoch, and `METRICS` of the validation and of the test rows, again and again."""
    torch.manual_seed(0)
    parallel = replicate(
        make(published, name, data.size), lambda parameters: torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.98))
    )
    rows = MemoryLoader(data.batch, published.batch // dist.get_world_size(), shuffle=True, seed=0)
    items = {"movie": data.items.to(rank_device())}
    of, records, begin = MODELS[name].loss, [], time.perf_counter()
    loss = functools.partial(of, items=len(data.items)) if of else cross_entropy

    def predict(module: Any, batch: Any) -> Any:
        return module(batch, draw_rows(items, published.negatives)["movie"])

    for epoch in range(every, epochs + 1, every):
        fit(parallel, predict, rows, epochs=every, loss=loss, progress=False)
        if dist.get_rank() == 0:  # the others wait in their next step
            plain: Any = parallel.module.eval()
            valid = judge(plain, data, data.valid) if data.valid else []
            records.append((epoch, valid, judge(plain, data, data.test)))
            print(name, *records[-1], f"{time.perf_counter() - begin:.0f} s", flush=True)
            plain.train()
    return records


def measure(
    published: Published, names: Sequence[str], data: Data, session: Session, epochs: int | None, every: int
) -> list[str]:
    epochs = epochs or published.epochs
    rows, curves = [], []
    for name in names:
        records = session.run(train, published, name, data, epochs, every)
        epoch, _, result = max(records, key=lambda one: one[1][1]) if published.choose else records[-1]
        rows.append(_row(f"{name}, nbdist, epoch {epoch} of {epochs}: {MODELS[name].how}", result))
        curves.append(f"{name} {', '.join(f'{at}: {test[0]:.4f}, {test[1]:.4f}' for at, _, test in records)}")
    rows += [_row(f"{one}, published", values) for one, values in published.results.items()]
    chosen = "the best by NDCG of the rows before the last" if published.choose else "the last one"
    histories, users = data.batch["history"], len(data.test.wanted)
    return [
        f"{len(histories.values):,} rows of {len(histories.lengths):,} users to train on, {data.size - 2:,} "
        f"items; the last row of each is to be found: {published.judged}. Length {published.length}, 2 blocks, 1 head, "
        f"width 50, dropout {published.dropout}, Adam with 0.001 and betas 0.9 and 0.98, batches of {published.batch}, "
        f"{published.negatives} negatives that are drawn for a batch. The epoch is {chosen}.",
        "",
        f"| | {' | '.join(METRICS).replace('_', ' ')} |",
        "|---|" + "--:|" * len(METRICS),
        *rows,
        "",
        f"The standard error of a hit rate of 0.2 of {users:,} users is {(0.2 * 0.8 / users) ** 0.5:.4f}.",
        "",
        f"Published: {published.where}." if published.results else "No result is published for this split.",
        "",
        f"By epoch: {'; '.join(curves)}.",
        "",
    ]


def _row(what: str, values: Iterable[float]) -> str:
    return f"| {what} | {' | '.join(f'{value:.4f}' for value in values)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=list(ALL))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="instead of as many as were published, or, for games, of 200")
    parser.add_argument("--every", type=int, default=10, help="epochs from one look at the result to the next")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="write the rows as tensors, and train nothing")
    parser.add_argument("--prepared", type=Path, metavar="FILE", help="rows that `--prepare` wrote")
    options = parser.parse_args()
    published = ALL[options.set]
    data = torch.load(options.prepared, weights_only=False) if options.prepared else prepare(published)
    if options.prepare:
        torch.save(data, options.prepare)
        return
    with Session(options.ranks) as session:
        lines = measure(published, options.models, data, session, options.epochs, options.every)
    lines += conditions(("torch", "torchmetrics"))
    save_section("next_item", published.what, lines, keep=not options.print)


if __name__ == "__main__":
    main()
