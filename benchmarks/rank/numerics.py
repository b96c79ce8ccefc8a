"""Costs of `check="nan"` and `check="ranks"`: steps of a click model of notebook 05's size, each check in turn."""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from benchmarks.machine import conditions, save
from nbdist import Session
from nbdist.numerics import nan
from nbdist.numerics.call import checked
from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import fit, log_loss
from nbdist.recsys.training.run import Run

#: Rows of a batch on each of two ranks, of the tables, and ids of a list in a row, as notebook 05 has them of ML-100k.
BATCH, TABLES = 1024, {"user": 944, "rated": 1683, "movie": 1683, "raters": 944, "genres": 19}
LISTS = {"rated": 50, "raters": 50, "genres": 2}
#: The part of a step that a check may cost.
TARGET = 0.02
#: The kind and the milliseconds of steps, in order.
Steps = list[tuple[str, float]]


class Click(nn.Module):
    """The model of notebook 05, its tables in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.EmbeddingBag(size, 64) for name, size in TABLES.items()})
        self.above = nn.Parameter(torch.tensor([2.0, 1.0, 0.0, -1.0]))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = {name: bags(batch[name]) for name, bags in self.tables.items()}
        user, movie = vectors["user"] + vectors["rated"], vectors["movie"] + vectors["raters"] + vectors["genres"]
        score = (user[:, 1:] * movie[:, 1:]).sum(1) + user[:, 0] + movie[:, 0]
        squares = sum(vector.square().sum(1) for vector in vectors.values())
        return score[:, None] + self.above, squares  # type: ignore[return-value]


def table(rows: int) -> dict[str, torch.Tensor]:
    """Rows to train on."""
    ids = {name: torch.randint(size, (rows, LISTS.get(name, 1))) for name, size in TABLES.items()}
    return {**ids, "label": torch.rand(rows, 4) > 0.5}


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """The loss of a batch."""
    logits, squares = model(batch)
    return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"].float()) + 0.02 * squares.mean()


def by_fit(steps: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of CPU time of a step of `fit`, on rank 0, by the check."""
    model = replicate(Click(), lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    rows = MemoryLoader(table(90_000), BATCH, shuffle=True, seed=1)

    def block(check: str) -> float:
        with checked([check] if check else []):
            begin = time.process_time()
            fit(model, predict, rows, steps=steps, loss=LOSSES, progress=False)
            return time.process_time() - begin

    return in_turn(block, steps, rounds)


def predict(model: Any, batch: Any) -> Any:
    logits, squares = model(batch)
    return {"stars": (logits, batch["label"]), "squares": (squares, batch["label"])}


LOSSES = {"stars": log_loss, "squares": lambda squares, _: 0.02 * squares.mean()}


def by_hand(steps: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of CPU time of a step of a plain loop under DistributedDataParallel, on rank 0, by the check."""
    model = nn.parallel.DistributedDataParallel(Click())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = table(BATCH)

    def some(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    def block(check: str) -> float:
        with checked([check] if check else []):
            some(5)  # in which a check comes to know the models
            begin = time.process_time()
            some(steps)
            return time.process_time() - begin

    return in_turn(block, steps, rounds)


def in_turn(block: Callable[[str], float], steps: int, rounds: int) -> dict[str, list[float]]:
    """Run blocks of steps with each check in turn, in one process, since two of them may differ by more than a check
    costs."""
    found: dict[str, list[float]] = {check: [] for check in CHECKS}
    for number in range(rounds + 1):
        first = number % len(CHECKS)
        for check in [*CHECKS[first:], *CHECKS[:first]]:
            took = block(check)
            if number:  # the first is slower
                found[check].append(1000 * took / steps)
    return found


class Switch:
    """The check `nan`, switched on and off from step to step, and the CPU time of each kind of step. Steps without the
    check are of two kinds, which differ by chance alone."""

    def __init__(self, seed: int) -> None:
        self.check: nan.NanCheck | None = None
        self.steps: Steps = []
        self._random = random.Random(seed)
        self._kind, self._began, self._first = "", 0.0, WARM_UP
        self._off = contextlib.ExitStack()

    def next(self) -> bool:
        """Begin the next step; return whether it is checked."""
        took = time.process_time() - self._began
        if self._first:  # in which a check comes to know the models
            self._first -= 1
            return True
        if self._kind:
            self.steps.append((self._kind, 1000 * took))
        self._off.close()
        self._kind = self._random.choice(KINDS)
        if self._kind != "nan":
            self._switch_off()
        self._began = time.process_time()
        return self._kind == "nan"

    def _switch_off(self) -> None:
        assert self.check is not None and self.check.forwards is not None
        forwards, checking = self.check.forwards, torch.autograd.backward
        self._off.callback(forwards.only_of, list(self.check._models.all) if forwards._handles else ())
        forwards._remove()
        for hooks in (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks):
            self._off.callback(hooks.update, dict(hooks))
            hooks.clear()
        torch.autograd.backward = checking.__wrapped__  # type: ignore[attr-defined]
        self._off.callback(setattr, torch.autograd, "backward", checking)


def fit_by_step(steps: int, seed: int) -> Steps:
    """Milliseconds of CPU time of single steps of `fit`, on rank 0."""
    model = replicate(Click(), lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    rows = MemoryLoader(table(90_000), BATCH, shuffle=True, seed=1)
    switch, train_on = Switch(seed), Run.train_on

    def train(run: Run, *batches: Any) -> None:
        switch.check = check = run._check
        run.checks = switch.next()
        run._check = check if run.checks else None
        train_on(run, *batches)
        run._check = check

    with mock.patch.object(Run, "train_on", train):
        fit(model, predict, rows, steps=steps + WARM_UP + 1, loss=LOSSES, progress=False, check="nan", log_every=steps)
    return switch.steps


def hand_by_step(steps: int, seed: int) -> Steps:
    """Milliseconds of CPU time of single steps of a plain loop under DistributedDataParallel, on rank 0."""
    model = nn.parallel.DistributedDataParallel(Click())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch, switch = table(BATCH), Switch(seed)
    with nan.nan_check() as switch.check:
        for _ in range(steps + WARM_UP + 1):
            switch.next()
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return switch.steps


def interval(costs: Callable[[random.Random], float], seed: int) -> tuple[float, float]:
    """Return the bounds of the 95 % interval of a figure that is computed from samples drawn again."""
    draw = random.Random(seed)
    drawn = sorted(costs(draw) for _ in range(1000))
    return drawn[25], drawn[-26]


def pairs(steps: Steps, kind: str) -> list[float]:
    """Return the cost of a kind of step in each pair of neighbors: a step of this kind, and one of the kinds that it is
    compared with. A step is in one pair at most."""
    others = {"nan": ("none", "none again"), "none again": ("none",)}[kind]
    found, number = [], 0
    while number + 1 < len(steps):
        (first, a), (second, b) = steps[number], steps[number + 1]
        if first == kind and second in others:
            found.append(a / b - 1)
        elif second == kind and first in others:
            found.append(b / a - 1)
        else:
            number -= 1
        number += 2
    return found


def step_rows(loop: str, steps: Steps) -> Iterator[str]:
    """Yield the rows of the table for single steps."""
    for kind in KINDS:
        own, about = [took for one, took in steps if one == kind], " | | "
        if kind != "none":
            costs = pairs(steps, kind)
            low, high = interval(lambda draw, of=costs: statistics.median(draw.choices(of, k=len(of))), 1)  # type: ignore[misc]
            about = f"{len(costs):,} | {statistics.median(costs):+.1%} | {low:+.1%} to {high:+.1%}"
        yield f"| {loop} | {kind} | {len(own):,} | {statistics.median(own):.3f} | {about} |"


LOOPS: dict[str, Callable[[int, int], dict[str, list[float]]]] = {"`fit`": by_fit, "a plain loop under DDP": by_hand}
STEPS: dict[str, Callable[[int, int], Steps]] = {
    "`fit`": fit_by_step,
    "a plain loop under DDP": hand_by_step,
}
CHECKS = ("", "ranks:10")
KINDS = ("none", "none again", "nan")
#: Steps before the first that is measured.
WARM_UP = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6000, help="of each loop, with and without the check `nan`")
    parser.add_argument("--rounds", type=int, default=60, help="blocks of 50 steps of the check `ranks`, in turn")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    with Session(options.ranks, devices="cpu", output="none") as session:
        steps = {loop: session.run(fn, options.steps, 1) for loop, fn in STEPS.items()}
        blocks = {loop: session.run(fn, 50, options.rounds) for loop, fn in LOOPS.items()} if options.rounds else {}
    lines = [
        "# What the checks of numbers cost",
        "",
        f"CPU time of a step on rank 0, over all threads: a click model of notebook 05's size, {BATCH:,} rows in a "
        f"batch of each rank; CPU ranks: {options.ranks}. The check `nan` is switched on and off from step to step, in "
        f"random order in one process; the cost is the median of the ratios of neighbors, minus 1, with its 95% "
        f"interval (drawn again 1,000 times). `none again` is a second kind of steps without the check: it differs by "
        f"chance alone; `nan` is compared with both. "
        f"The check may cost {TARGET:.0%}.",
        "",
        "| loop | check | steps | CPU ms a step | pairs | cost | 95% interval |",
        "|---|---|--:|--:|--:|--:|--:|",
        *(row for loop, took in steps.items() for row in step_rows(loop, took)),
    ]
    if blocks:
        lines += [
            "",
            f"The check `ranks`: {options.rounds} blocks of 50 steps, in turn; the cost is the median of the ratios to "
            "the block without a check in the same round, minus 1, with its quartiles.",
            "",
            "| loop | check | CPU ms a step | cost | quartiles |",
            "|---|---|--:|--:|--:|",
        ]
    for loop, by_check in blocks.items():
        for check, took in by_check.items():
            costs = [a / b - 1 for a, b in zip(took, by_check[""], strict=True)]
            low, middle, high = statistics.quantiles(costs, n=4)
            cost = f"{middle:+.1%} | {low:+.1%} to {high:+.1%}" if check else " | "
            lines.append(f"| {loop} | {check or 'none'} | {statistics.median(took):.3f} | {cost} |")
    save("numerics", [*lines, "", *conditions(("torch",))], keep=not options.print)


if __name__ == "__main__":
    main()
