"""How fast a click model trains with sharded tables and a fused optimizer, beside plain DDP with dense gradients."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from benchmarks.machine import conditions, save
from nbdist import Session
from nbdist.recsys.loader import MemoryLoader, keyed_jagged
from nbdist.recsys.sharding import shard
from nbdist.recsys.training import fit, replicate
from nbdist.recsys.training.loop import log_loss

TABLES = {"user": 162_541, "movie": 59_047}  # MovieLens 25M
REQUIRED = {16: 2.5, 64: 8.0}
WARM = 5
"""Steps before the clock starts."""


class Model(nn.Module):
    """HugeCTR's example: embeddings, and a tower of 128-128-1 on them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=width, feature_names=[name])
            for name, rows in TABLES.items()
        ]
        self.tables = EmbeddingBagCollection(tables=configs)
        sizes = (len(TABLES) * width, 128, 128)
        hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.tower = nn.Sequential(*hidden, nn.Linear(128, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.tower(self.tables(features).values()).squeeze(1)  # (rows,)


def predict(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(keyed_jagged(batch, list(TABLES))), batch["liked"]


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01, eps=1e-8)


def sharded(width: int, batch_size: int) -> Any:
    torch.manual_seed(0)
    return shard(Model(width), batch_size=batch_size, optimizer="adagrad", dense_optimizer=adagrad)


def plain(width: int, batch_size: int) -> Any:
    torch.manual_seed(0)
    return replicate(Model(width), adagrad)


def rows_for(steps: int, batch_size: int) -> MemoryLoader:
    """Rows for so many steps, in the same order for everybody; few users and movies have most of them."""
    draw = torch.Generator().manual_seed(0)
    rows = steps * batch_size * dist.get_world_size()
    ids = {name: (torch.rand(rows, generator=draw) ** 2 * size).long() for name, size in TABLES.items()}
    liked = (sum(ids.values()) + torch.randint(100_000, (rows,), generator=draw)) % 2
    return MemoryLoader({**ids, "liked": liked}, batch_size)


def loop(build: Callable[[int, int], Any], width: int, batch_size: int, steps: int) -> tuple[float, float]:
    """In a rank: seconds for `steps` steps of a plain loop after the first ones, and the loss of the last."""
    model = build(width, batch_size)
    for step, batch in enumerate(rows_for(WARM + steps, batch_size)):
        if step == WARM:
            dist.barrier()
            began = time.perf_counter()
        model.optimizer.zero_grad()
        loss = log_loss(*predict(model.model, batch))
        loss.backward()
        model.optimizer.step()
    return time.perf_counter() - began, loss.item()


def helped(width: int, batch_size: int, steps: int) -> tuple[float, float]:
    """In a rank: the same by `fit`, as it counts its own time; sharded."""
    model, rows = sharded(width, batch_size), rows_for(WARM + steps, batch_size)
    fit(model, predict, rows, steps=WARM, show=False)
    last = fit(model, predict, rows, steps=steps, show=False)[-1]
    return steps * batch_size * dist.get_world_size() / last.rows_per_second, last.loss


def measure(session: Session, width: int, batch_size: int, steps: int, repeats: int) -> dict[str, list[float]]:
    """Rows per second of each, in turn, so that what disturbs one disturbs all. The first round is for warming up."""
    few = max(5, steps // 5)
    contestants: dict[str, tuple[int, tuple[Any, ...]]] = {
        "sharded tables, fused Adagrad": (steps, (loop, sharded, width, batch_size, steps)),
        "the same, by `fit`": (steps, (helped, width, batch_size, steps)),
        "plain DDP, dense gradients, Adagrad": (few, (loop, plain, width, batch_size, few)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(repeats + 1):
        for name, (count, (fn, *arguments)) in contestants.items():
            seconds = max(took for took, _ in session.run_all(fn, *arguments))
            if number:
                speeds[name].append(count * batch_size * session.nranks / seconds)
    return speeds


def same_loss(session: Session, width: int, batch_size: int) -> tuple[float, float]:
    """The mean over the ranks of the last loss, sharded and under plain DDP, after the same steps."""
    losses = []
    for build in (sharded, plain):
        answers = session.run_all(loop, build, width, batch_size, 10)
        losses.append(sum(loss for _, loss in answers) / len(answers))
    return losses[0], losses[1]


def table(speeds: dict[str, list[float]], required: float) -> list[str]:
    """Rows for one width; ratios are of figures of one round, then their median."""
    (ours, first), (by_fit, second), (theirs, third) = speeds.items()
    overhead = statistics.median(b / a for a, b in zip(first, second, strict=True))
    ratio = statistics.median(a / b for a, b in zip(first, third, strict=True))
    verdict = "reached" if ratio >= required else "**missed**"
    return [
        "| | rows/s | ours is faster by | required |",
        "|---|---:|---:|---:|",
        f"| {ours} | {statistics.median(first):,.0f} | | |",
        f"| {by_fit} | {statistics.median(second):,.0f} | ({overhead:.2f} of the plain loop) | |",
        f"| {theirs} | {statistics.median(third):,.0f} | {ratio:.1f} × | {required:g} ×: {verdict} |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after one for warming up")
    parser.add_argument("--steps", type=int, default=50, help="a round, after the first ones; a fifth with plain DDP")
    parser.add_argument("--batch-size", type=int, default=2048, help="rows per step and rank")
    parser.add_argument("--quick", action="store_true", help="one round of few steps, to see that everything works")
    parser.add_argument("--print", action="store_true", help="show the table without keeping it in results/")
    options = parser.parse_args()
    repeats, steps = (1, 10) if options.quick else (options.repeats, options.steps)

    lines = [
        "# Training a click model",
        "",
        f"Tables of {' and '.join(f'{rows:,} {name}s' for name, rows in TABLES.items())}, a tower of 128-128-1, "
        f"2 CPU ranks, batch {options.batch_size:,} a rank. Median of {repeats} rounds in which all take turns; ratios "
        "within a round.",
    ]
    with Session(2, devices="cpu") as session:
        for width, required in REQUIRED.items():
            ours, theirs = same_loss(session, width, options.batch_size)
            if abs(ours - theirs) > 1e-4:
                sys.exit(f"not the same training: the loss is {ours:.5f} sharded, {theirs:.5f} with plain DDP")
            speeds = measure(session, width, options.batch_size, steps, repeats)
            title = (
                f"Embeddings of {width}; after 15 steps the loss is {ours:.5f} sharded, {theirs:.5f} with plain DDP."
            )
            lines += ["", title, "", *table(speeds, required)]
    lines += ["", "Not run on a GPU: none was at hand.", "", *conditions(("torch", "torchrec", "fbgemm-gpu-cpu"))]
    save("training", lines, keep=not options.print)


if __name__ == "__main__":
    main()
