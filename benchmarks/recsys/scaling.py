"""Scaling of training over 1, 2 and 4 CPU ranks, and the parts of a step.

fastai's collaborative learner with `fast`, and the click model of `training.py` with `shard`; at a fixed batch over all
ranks and at a fixed batch a rank, compared with the best single process with a thread for each core, and with two
processes that train at the same time and exchange nothing: what the machine has for two. Contestants take turns.
A step is taken apart by torch's profiler, in runs of their own, and its parts are scaled to a step without profiler.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import ROOT
from benchmarks.machine import conditions, name_of, save
from benchmarks.recsys.training import WARM, Sparse, adagrad, predict, rows_for, sharded
from nbdist import Session
from nbdist.recsys.datasets import movielens

RANKS = (1, 2, 4)
WIDTH = 16
PARTS = ("loader", "forward", "backward", "optimizer", "callbacks")
EXCHANGE = "exchange"
_COLLECTIVE = re.compile(r"(gloo|nbdist):")


class Run(NamedTuple):
    """Rows a second of a rank's own batches, and the seconds of a step by part, where it was profiled."""

    speed: float
    parts: dict[str, float]


class Parts:
    """Notes for torch's profiler which part of a step goes on."""

    def __init__(self) -> None:
        self._open: Any = None

    def turn(self, name: str = "") -> None:
        """The part that goes on ends, and `name` begins."""
        import torch

        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = torch.profiler.record_function(name) if name else None
        if self._open is not None:
            self._open.__enter__()


@contextmanager
def _profiled(wanted: bool, found: dict[str, float]) -> Iterator[None]:
    """Puts into `found` the microseconds of each part, without its collectives, and of the collectives."""
    import torch

    if not wanted:
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in profile.events() if e.name in PARTS)
    for start, end, name in spans:
        found[name] = found.get(name, 0.0) + end - start
    found[EXCHANGE] = 0.0
    for event in profile.events():
        if _COLLECTIVE.match(event.name):
            for start, end, name in spans:
                if start <= event.time_range.start < end:
                    inside = min(end, event.time_range.end) - event.time_range.start
                    found[name] -= inside
                    found[EXCHANGE] += inside
                    break


def clicks(batch: int, steps: int, data: str, plain: bool, profiled: bool) -> Run:
    """In a rank: the click model."""
    import torch
    import torch.distributed as dist

    from nbdist.recsys.training.objective import log_loss

    ranks = dist.get_world_size()
    batches = rows_for(WARM + steps, batch * ranks, () if plain else ("user", "movie"))
    torch.manual_seed(0)
    if plain:
        model: Any = Sparse(WIDTH)
        optimizer = adagrad(model.parameters())
    else:
        parallel = sharded(WIDTH, batch)
        model, optimizer = parallel.model, parallel.optimizer
    parts, found = Parts(), dict[str, float]()
    with ExitStack() as stack:
        for step, rows in enumerate(batches):
            if step == WARM:
                dist.barrier()
                stack.enter_context(_profiled(profiled, found))
                begin = time.perf_counter()
            parts.turn("forward")
            loss = log_loss(model(rows), rows["liked"]) if plain else log_loss(*predict(model, rows))
            parts.turn("backward")
            optimizer.zero_grad()
            loss.backward()
            parts.turn("optimizer")
            optimizer.step()
            parts.turn("loader")
        seconds = time.perf_counter() - begin
        parts.turn()
    return Run(batch * steps / seconds, {name: micros / 1e6 / steps for name, micros in found.items()})


def collab(batch: int, steps: int, data: str, plain: bool, profiled: bool) -> Run:
    """In a rank: fastai's collaborative learner; the second of two epochs."""
    import fastai.distributed  # noqa: F401 (gives Learner distrib_ctx)
    import pandas as pd
    import torch.distributed as dist
    from fastai.callback.core import Callback
    from fastai.collab import CollabDataLoaders, collab_learner
    from fastai.torch_core import set_seed

    from nbdist.fastai import fast

    ranks = dist.get_world_size()
    frame = pd.read_parquet(data)
    set_seed(42)
    rows = frame.sample(min(len(frame), batch * steps * ranks), random_state=0)
    dls = CollabDataLoaders.from_df(rows, item_name="title", valid_pct=0.001, bs=batch, seed=42)
    learn = fast(collab_learner(dls, n_factors=50, y_range=(0, 5.5)))
    parts, found, stack, taken = Parts(), dict[str, float](), ExitStack(), []

    class First(Callback):
        order = -1000

        def before_batch(self) -> None:
            self.turned("callbacks")

        after_loss = after_backward = after_step = before_batch  # of both, the last as well

        def turned(self, name: str) -> None:
            if self.training:
                parts.turn(name)

    class Last(First):
        order = 1000

        def before_train(self) -> None:
            if self.epoch == 1:
                stack.enter_context(_profiled(profiled, found))
            self.begin = time.perf_counter()

        def after_train(self) -> None:
            taken.append(time.perf_counter() - self.begin)
            parts.turn()
            stack.close()

        def before_batch(self) -> None:
            self.turned("forward")

        def before_backward(self) -> None:
            self.turned("backward")

        def before_step(self) -> None:
            self.turned("optimizer")

        def after_batch(self) -> None:
            self.turned("loader")

    with learn.no_bar(), learn.no_logging(), learn.added_cbs([First(), Last()]):
        if ranks > 1:
            with learn.distrib_ctx():
                learn.fit(2, 5e-3)
        else:
            learn.fit(2, 5e-3)
    steps = len(learn.recorder.losses) // 2
    return Run(batch * steps / taken[1], {name: micros / 1e6 / steps for name, micros in found.items()})


class Training(NamedTuple):
    """A model that is trained, and how large its batches are."""

    title: str
    function: Callable[[int, int, str, bool, bool], Run]
    whole: int
    """Rows a step over all ranks; a rank's are half of them where these are fixed."""
    steps: int


TRAININGS = (
    Training("fastai's collaborative learner, `fast`", collab, 1024, 70),
    Training("Click model, `shard`", clicks, 4096, 50),
)
ALONE = "one process, a thread a core"
CORES = len(os.sched_getaffinity(0))


class Contestant(NamedTuple):
    """Ranks, the batch and threads of each. `apart`: each is by itself, and the click model's tables are torch's."""

    ranks: int
    batch: int
    threads: int = 1
    apart: bool = False

    def open(self, stack: ExitStack) -> list[Session]:
        """The sessions that it trains in."""
        sizes = [1] * self.ranks if self.apart else [self.ranks]
        return [stack.enter_context(Session(size, devices="cpu", threads=self.threads)) for size in sizes]


def contestants(whole: int) -> dict[str, Contestant]:
    """By name; `whole` rows a step over all ranks, or half of them a rank."""
    return {
        ALONE: Contestant(1, whole, threads=CORES, apart=True),
        **{f"{n} × {whole // n:,}": Contestant(n, whole // n) for n in RANKS},
        **{f"{n} × {whole // 2:,}": Contestant(n, whole // 2) for n in RANKS},
        f"2 × {whole // 2:,}, exchanging nothing": Contestant(2, whole // 2, apart=True),
    }


Sessions = dict[Contestant, list[Session]]
"""By contestant, whatever its batch: 0 there."""


def measure(training: Training, sessions: Sessions, data: str, turns: int) -> tuple[list[str], Any]:
    """A table; and for the picture speeds and parts by contestant."""

    def run(one: Contestant, profiled: bool) -> list[Run]:
        arguments = training.function, one.batch, training.steps, data, one.apart, profiled
        own = sessions[one._replace(batch=0)]
        if one.apart:
            return [future.result() for future in [session.submit(*arguments) for session in own]]
        return own[0].run_all(*arguments)

    chosen = contestants(training.whole)
    speeds: dict[str, list[float]] = {name: [] for name in chosen}
    for turn in range(turns + 1):
        for name, contestant in chosen.items():
            speed = sum(one.speed for one in run(contestant, False))
            if turn:  # the first is for warming up
                speeds[name].append(speed)
    parts: dict[str, dict[str, float]] = {}
    for name, contestant in chosen.items():
        found = run(contestant, True)[0].parts
        step = contestant.batch * contestant.ranks / statistics.median(speeds[name])
        parts[name] = {part: seconds * step / sum(found.values()) for part, seconds in found.items()}
    shown = [part for part in (*PARTS, EXCHANGE) if any(part in one for one in parts.values())]
    lines = [
        f"| | rows/s | of the process alone | a step, ms | {' | '.join(shown)} |",
        "|---|---:|---:|---:|" + "---:|" * len(shown),
    ]
    alone = statistics.median(speeds[ALONE])
    for name, found in speeds.items():
        speed, own = statistics.median(found), parts[name]
        cells = " | ".join(f"{own.get(part, 0) * 1e3:.2f}" for part in shown)
        spread = f"{min(found):,.0f}–{max(found):,.0f}"
        lines.append(
            f"| {name} | {speed:,.0f} ({spread}) | {speed / alone:.2f} | {sum(own.values()) * 1e3:.2f} | {cells} |"
        )
    return lines, (speeds, parts)


def draw(found: dict[str, Any], path: str) -> None:
    """Rows a second by ranks, and steps taken apart."""
    figure, axes = plt.subplots(len(found), 2, figsize=(11, 4 * len(found)), layout="constrained", squeeze=False)
    for (left, right), training in zip(axes, TRAININGS, strict=True):
        speeds, parts = found[training.title]
        chosen = contestants(training.whole)
        for label, batches in (
            (f"{training.whole:,} rows a step", [training.whole // n for n in RANKS]),
            (f"{training.whole // 2:,} rows a step and rank", [training.whole // 2] * len(RANKS)),
        ):
            names = [f"{n} × {batch:,}" for n, batch in zip(RANKS, batches, strict=True)]
            left.plot(RANKS, [statistics.median(speeds[name]) / 1e3 for name in names], "o-", label=label)
        left.axhline(statistics.median(speeds[ALONE]) / 1e3, color="gray", linestyle="--", label=ALONE)
        left.set(title=training.title.replace("`", ""), xlabel="ranks", ylabel="1,000 rows/s", xticks=RANKS, ylim=0)
        left.legend()
        bottom = [0.0] * len(chosen)
        for part in (*PARTS, EXCHANGE):
            heights = [parts[name].get(part, 0.0) * 1e3 for name in chosen]
            right.barh([*chosen], heights, left=bottom, label=part)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        right.set(title="A step of rank 0", xlabel="ms")
        right.invert_yaxis()
    axes[0][1].legend()  # of both
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    ratings = movielens("100k", synthetic=True)
    lines = [
        "# Scaling",
        "",
        f"Ranks of one thread each on {CORES} cores, compared with one process with {CORES}: the click model's on "
        f"`nn.Embedding(sparse=True)`, the learner's with `fast`. Those `exchanging nothing` are "
        f"two such processes at the same time. Medians of {options.turns} turns. The parts of a step of rank 0 in ms, "
        "from profiled steps scaled to those without a profiler; `exchange` is what it spent in "
        "collectives, waiting included, and is in no other part.",
    ]
    found = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        kinds = dict.fromkeys(one._replace(batch=0) for one in contestants(0).values())
        sessions = {kind: kind.open(stack) for kind in kinds}
        data = f"{folder}/ratings.parquet"
        ratings.with_titles().write_parquet(data)
        for training in TRAININGS:
            table, found[training.title] = measure(training, sessions, data, options.turns)
            lines += ["", f"## {training.title}", "", *table]
            if training.function is collab:
                lines += ["", f"Data: {name_of(ratings.source)}."]
    if not options.print:
        draw(found, str(ROOT / "benchmarks" / "results" / "scaling.png"))
    lines += ["", *conditions(("torch", "fastai", "torchrec", "fbgemm-gpu-cpu"))]
    lines += ["", "![Rows a second by ranks, and steps taken apart](scaling.png)"]
    save("scaling", lines, keep=not options.print)


if __name__ == "__main__":
    main()
