"""Speed of a click model's training on 2 ranks, in one process, with TorchRec as it comes, and DDP; and the memory that
a rank takes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from benchmarks import plots
from benchmarks.machine import conditions, save
from nbdist import RankDied, Session
from nbdist.recsys.loader import MemoryLoader, keyed_jagged
from nbdist.recsys.sharding import replicate, shard
from nbdist.recsys.training import fit
from nbdist.recsys.training.objective import log_loss

TABLES = {"user": 162_541, "movie": 59_047}  # MovieLens 25M
WIDTHS = (16, 64)
DENSE = {16: 2.5, 64: 8.0}
"""Times as fast as plain DDP that is required."""
WARM = 5
"""Steps before the clock starts."""


class Model(nn.Module):
    """HugeCTR's example: embeddings, and a tower of 128-128-1 on them."""

    def __init__(self, width: int, tables: Mapping[str, int] = TABLES) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=width, feature_names=[name])
            for name, rows in tables.items()
        ]
        self.tables = EmbeddingBagCollection(tables=configs)
        sizes = (len(tables) * width, 128, 128)
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


class Sparse(nn.Module):
    """The same model on torch's own tables, with gradients of the rows of a batch alone."""

    def __init__(self, width: int, tables: Mapping[str, int] = TABLES) -> None:
        super().__init__()
        whole = Model(width, tables)
        weights = [table.weight for table in whole.tables.embedding_bags.values()]
        self.tables = nn.ModuleList(nn.Embedding.from_pretrained(w, freeze=False, sparse=True) for w in weights)
        self.tower = whole.tower

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = [table(batch[name]) for table, name in zip(self.tables, TABLES, strict=True)]
        return self.tower(torch.cat(found, dim=1)).squeeze(1)  # (rows,)


def rows_for(steps: int, rows: int, keyed: tuple[str, ...] = ()) -> MemoryLoader:
    """Return `steps` steps of `rows` rows over all ranks, alike for all contestants; most are of few users and
    movies."""
    draw = torch.Generator().manual_seed(0)
    ids = {name: (torch.rand(steps * rows, generator=draw) ** 2 * size).long() for name, size in TABLES.items()}
    liked = (sum(ids.values()) + torch.randint(100_000, (steps * rows,), generator=draw)) % 2
    return MemoryLoader({**ids, "liked": liked}, rows // dist.get_world_size(), keyed=keyed)


class Clock:
    """Seconds of a contestant, from its first step that counts to its last."""

    def start(self) -> None:
        dist.barrier()
        self.began = time.perf_counter()

    def stop(self, loss: torch.Tensor | float) -> Turn:
        last = float(loss)  # for which one waits, on a GPU
        return Turn(time.perf_counter() - self.began, last)


@dataclass(frozen=True)
class Turn:
    """A rank's report of a turn: seconds, and the last loss."""

    seconds: float
    loss: float


def common(width: int, batch_size: int) -> Any:
    torch.manual_seed(0)
    return replicate(Sparse(width), adagrad)


def copied(width: int, batch_size: int) -> Any:
    torch.manual_seed(0)
    model = Sparse(width)
    return SimpleNamespace(model=DistributedDataParallel(model), optimizer=adagrad(model.parameters()))


def predict_sparse(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch), batch["liked"]


def training(build: Callable[[int, int], Any], width: int, rows: int, steps: int) -> Iterator[torch.Tensor]:
    """In a rank: a plain loop; the loss of each step."""
    keyed, predicted = ((), predict_sparse) if build in (common, copied) else (tuple(TABLES), predict)
    batches = rows_for(steps, rows, keyed)
    model = build(width, batches.batch_size)
    for batch in batches:
        model.optimizer.zero_grad()
        loss = log_loss(*predicted(model.model, batch))
        loss.backward()
        model.optimizer.step()
        yield loss.detach()


def loop(build: Callable[[int, int], Any], width: int, rows: int, steps: int) -> Turn:
    """In a rank: `steps` steps of a plain loop after the first ones."""
    clock, run = Clock(), training(build, width, rows, WARM + steps)
    for _ in itertools.islice(run, WARM):
        pass
    clock.start()
    *_, loss = run
    return clock.stop(loss)


def grown(build: Callable[[int, int], Any], width: int, rows: int) -> int:
    """In a rank: the bytes that training takes; of what ranks share, each one's part."""

    def held() -> int:
        gc.collect()
        return int(psutil.Process().memory_full_info().pss)

    list(training(build, 4, rows, 1))  # imports what it needs
    before, steps = held(), training(build, width, rows, WARM)
    for _ in itertools.islice(steps, WARM):
        dist.barrier()
    return held() - before


def helped(width: int, rows: int, steps: int) -> Turn:
    """In a rank: the same by `fit`; sharded."""
    clock, batches = Clock(), rows_for(WARM + steps, rows, tuple(TABLES))
    model = sharded(width, batches.batch_size)
    fit(model, predict, batches, steps=WARM, progress=False)
    clock.start()
    return clock.stop(fit(model, predict, batches, steps=steps, progress=False)[-1].loss)


def one_process(width: int, rows: int, steps: int) -> Turn:
    """The same in a single process without anything of ours but the rows."""
    clock, batches = Clock(), rows_for(WARM + steps, rows)
    torch.manual_seed(0)
    model = Sparse(width)
    optimizer = adagrad(model.parameters())
    for step, batch in enumerate(batches):
        if step == WARM:
            clock.start()
        optimizer.zero_grad()
        loss = log_loss(model(batch), batch["liked"])
        loss.backward()
        optimizer.step()
    return clock.stop(loss.detach())


@dataclass
class Batch(Pipelineable):
    """A batch as TorchRec's pipelines take it."""

    features: KeyedJaggedTensor
    liked: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self

    def record_stream(self, stream: Any) -> None:
        pass

    def pin_memory(self) -> Batch:
        return self


class WithLoss(nn.Module):
    """A model as TorchRec's pipelines take it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = log_loss(self.model(batch.features), batch.liked)
        return loss, loss.detach()


def torchrec_alone(width: int, rows: int, steps: int) -> Turn:
    """In a rank: TorchRec as it comes, by its own planner, wrapper and pipeline."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    device = torch.device("cpu")
    clock, batches = Clock(), rows_for(WARM + steps, rows, tuple(TABLES))
    torch.manual_seed(0)
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.01, "eps": 1e-8}
    model = WithLoss(Model(width))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    parallel = DistributedModelParallel(model, device=device, sharders=[EmbeddingBagCollectionSharder(fused)])
    for key, held in parallel.state_dict().items():  # the weights that everybody begins with
        for part in held.local_shards() if hasattr(held, "local_shards") else ():
            (row, column), (height, columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
            part.tensor.copy_(weights[key][row : row + height, column : column + columns])
    dense = {key: p for key, p in parallel.named_parameters() if not hasattr(p, "_in_backward_optimizers")}
    optimizer = CombinedOptimizer([parallel.fused_optimizer, KeyedOptimizerWrapper(dense, adagrad)])
    pipeline: Any = TrainPipelineSparseDist(parallel, optimizer, device)
    steady = iter([Batch(keyed_jagged(batch, list(TABLES)), batch["liked"]) for batch in batches])
    for step in range(WARM + steps):
        if step == WARM:
            clock.start()
        loss = pipeline.progress(steady)
    return clock.stop(loss.detach())


@dataclass(frozen=True)
class Contestant:
    """A way to train."""

    name: str
    ranks: int
    threads: int
    function: Callable[..., Turn]
    arguments: tuple[Any, ...] = ()
    part: float = 1.0
    """The share of the steps that a slow contestant makes."""
    tries: int = 1
    """A turn, where ranks die of what is not ours."""


ONE, RAW, DDP = (
    "one process, `nn.Embedding(sparse=True)`",
    "TorchRec, `TrainPipelineSparseDist`",
    "DDP, dense gradients",
)
SHARDED, OURS = "`shard`, plain loop", "`replicate`, `nn.Embedding(sparse=True)`"
CONTESTANTS = (
    Contestant(ONE, 1, 2, one_process),
    Contestant(RAW, 2, 1, torchrec_alone),
    Contestant(DDP, 2, 1, loop, (plain,), 0.2),
    # As of torch 2.13, gloo's sums of sparse tensors corrupt a rank's memory once in thousands of steps, nbdist or not.
    Contestant("DDP, sparse gradients", 2, 1, loop, (copied,), tries=4),
    Contestant("`shard`, one rank", 1, 2, loop, (sharded,)),
    Contestant(SHARDED, 2, 1, loop, (sharded,)),
    Contestant(OURS, 2, 1, loop, (common,)),
    Contestant("`shard` and `fit`", 2, 1, helped),
)


class Ranks:
    """The sessions on which contestants take their turns, and how often a turn was taken again because ranks died."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        def opened(ranks: int, threads: int) -> Session:
            return stack.enter_context(Session(ranks, devices="cpu", threads=threads))

        self.one, self.two = opened(1, 2), opened(2, 1)
        self.apart = opened(2, 1)  # a crash by torch ends no other contestant's turn
        self.deaths: Counter[str] = Counter()

    def turn(self, one: Contestant, width: int, rows: int, steps: int) -> list[Turn]:
        """Return the reports of its ranks."""
        session = self.apart if one.tries > 1 else self.one if one.ranks == 1 else self.two
        for _ in range(one.tries - 1):
            with contextlib.suppress(RankDied):
                return session.run_all(one.function, *one.arguments, width, rows, steps)
            self.deaths[one.name] += 1
            session.restart()
        return session.run_all(one.function, *one.arguments, width, rows, steps)


def measure(ranks: Ranks, width: int, rows: int, steps: int, repeats: int) -> dict[str, list[float]]:
    """Return each contestant's turns, each of all its ranks. They take turns, so that what disturbs one disturbs all;
    the first round is for warming up."""
    turns: dict[str, list[float]] = {one.name: [] for one in CONTESTANTS}
    for number in range(repeats + 1):
        for one in CONTESTANTS:
            some = max(5, int(steps * one.part))
            speed = some * rows / max(turn.seconds for turn in ranks.turn(one, width, rows, some))
            if number:
                turns[one.name].append(speed)
    return turns


def same_loss(ranks: Ranks, width: int, rows: int) -> float:
    """The mean over two ranks of the last loss after the same steps; ends the program where contestants with as many
    ranks, whose batches are the same, differ."""
    losses: dict[int, dict[str, float]] = {1: {}, 2: {}}
    for one in CONTESTANTS[:-1]:  # `fit` reports a mean over all steps
        losses[one.ranks][one.name] = statistics.mean(turn.loss for turn in ranks.turn(one, width, rows, 10))
    if any(max(some.values()) - min(some.values()) > 1e-4 for some in losses.values()):
        sys.exit(f"not the same training: {losses}")
    return losses[2][OURS]


def table(turns: dict[str, list[float]], width: int) -> list[str]:
    """Rows for one width; ratios are of figures of one round, then their median and spread."""

    def ratio(name: str, other: str) -> str:
        found = sorted(a / b for a, b in zip(turns[name], turns[other], strict=True))
        return f"{statistics.median(found):.2f} ({found[0]:.2f}–{found[-1]:.2f})"

    lines = [f"| | ranks × threads | rows/s | of {ONE} | of {RAW} |", "|---|---:|---:|---:|---:|"]
    for one in CONTESTANTS:
        speed, ratios = statistics.median(turns[one.name]), f"{ratio(one.name, ONE)} | {ratio(one.name, RAW)}"
        lines.append(f"| {one.name} | {one.ranks} × {one.threads} | {speed:,.0f} | {ratios} |")
    lines += ["", "Required of two ranks:", ""]
    for ours, other, wanted in (
        (OURS, ONE, 1.0),
        (SHARDED, ONE, 1.0),
        (SHARDED, RAW, 1.0),
        (SHARDED, DDP, DENSE[width]),
    ):
        found = statistics.median(a / b for a, b in zip(turns[ours], turns[other], strict=True))
        verdict = "reached" if found >= wanted else "**missed**"
        lines.append(f"- {ours}: {wanted:g} × {other}: {found:.2f}, {verdict}.")
    return lines


def memory(width: int, rows: int) -> list[str]:
    """Rows for one width: megabytes a rank, each number of ranks in a session of its own."""
    tables = 2 * sum(TABLES.values()) * width * 4 / 1e6  # and what Adagrad keeps of each number
    lines = ["| ranks | tables and their state / ranks | `shard` | `replicate` |", "|---:|---:|---:|---:|"]
    for ranks in (1, 2, 4):
        row = f"| {ranks} | {tables / ranks:.0f} MB |"
        for build in (sharded, common):
            with Session(ranks, devices="cpu", threads=1) as session:
                taken = [size / 1e6 for size in session.run_all(grown, build, width, rows * ranks)]
            row += f" {statistics.mean(taken):.0f} MB ({max(taken):.0f} MB) |"
        lines.append(row)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after one for warming up")
    parser.add_argument("--steps", type=int, default=50, help="a round, after the first ones; a fifth with plain DDP")
    parser.add_argument("--rows", type=int, default=4096, help="rows per step over all ranks")
    parser.add_argument("--quick", action="store_true", help="one round of few steps, to see that everything works")
    parser.add_argument("--print", action="store_true", help="show the table without keeping it in results/")
    options = parser.parse_args()
    repeats, steps = (1, 10) if options.quick else (options.repeats, options.steps)

    lines = [
        "# Training a click model",
        "",
        f"Tables of {' and '.join(f'{rows:,} {name}s' for name, rows in TABLES.items())}, a tower of 128-128-1, "
        f"Adagrad, {options.rows:,} rows a step over all ranks. Medians of {repeats} rounds in which all take turns; "
        "ratios within a round, and their spread. All begin with the same weights, and those with "
        "as many ranks end with the same loss.",
    ]
    shown: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        ranks = Ranks(stack)
        for width in WIDTHS:
            loss = same_loss(ranks, width, options.rows)
            turns = measure(ranks, width, options.rows, steps, repeats)
            lines += ["", f"Embeddings of {width} (after 15 steps the loss on two ranks is {loss:.4f}):", ""]
            lines += table(turns, width)
            shown[f"rows/s, embeddings of {width}"] = turns
    for name, count in ranks.deaths.items():
        lines += ["", f"Turns of {name} that a crash in torch ended, and that were taken again: {count}."]
    width, rows = WIDTHS[-1], options.rows // 2
    lines += [
        "",
        f"Memory that training takes a rank, at embeddings of {width} and {rows:,} rows a rank: the mean, and the most "
        "of all ranks. The planner has each table whole on one of two ranks, and its columns on all of four.",
        "",
    ]
    lines += memory(width, rows)
    lines += ["", "Not run on a GPU: none was at hand.", "", *conditions(("torch", "torchrec", "fbgemm-gpu-cpu"))]
    if not options.print:
        ours = [one.name for one in CONTESTANTS if one.name.startswith(("`shard`", "`replicate`"))]
        lines += plots.bars("training", shown, ours)
    save("training", lines, keep=not options.print)


if __name__ == "__main__":
    main()
