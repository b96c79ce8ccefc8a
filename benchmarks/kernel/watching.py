"""The cost of watching each call for hangs: the same calls with and without the records of the ranks' collectives and
the look at the ranks every two seconds, in turn. The result is a section of the page of `benchmarks.kernel.hangs`. Run
this benchmark after that one, which replaces the page."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from unittest import mock

from benchmarks.machine import conditions, save_section
from benchmarks.recsys.turns import spread
from nbdist import Session, in_ddp
from nbdist.kernel.calls import group
from nbdist.recsys.datasets import synthetic_ratings

CALLS, LAUNCHES, BATCH = 300, 5, 512


def nothing() -> None:
    """A call that does nothing."""


def trained(ratings: object) -> float:
    """In a rank: samples a second of the learner in notebook 01 on all ranks, in its second epoch."""
    import fastai.distributed  # noqa: F401 (gives Learner distrib_ctx)
    from fastai.collab import CollabDataLoaders, collab_learner
    from fastai.torch_core import num_distrib

    loaders = CollabDataLoaders.from_df(ratings, item_name="movie", bs=BATCH // num_distrib(), verbose=False)
    learner = collab_learner(loaders, n_factors=50, y_range=(0, 5.5))
    with learner.no_bar(), learner.no_logging(), learner.distrib_ctx():
        learner.fit(1, 5e-3)
        began = time.perf_counter()
        learner.fit(1, 5e-3)
        return len(loaders.train_ds) / (time.perf_counter() - began)


def unwatched() -> contextlib.AbstractContextManager[object]:
    """Make ranks that begin in the `with` block keep no records, without which no call is watched."""
    return mock.patch.object(group, "Recording", lambda ranks: None)


def launch() -> float:
    """Milliseconds of a call on new ranks from a warm server."""
    found = []
    for _ in range(LAUNCHES):
        began = time.perf_counter()
        in_ddp.options(devices="cpu")(2, nothing)
        found.append(time.perf_counter() - began)
    return 1000 * statistics.median(found)


def call(session: Session) -> float:
    """Milliseconds of a call that does nothing, on ranks that are there."""
    began = time.perf_counter()
    for _ in range(CALLS):
        session.run(nothing)
    return 1000 * (time.perf_counter() - began) / CALLS


def measure(rounds: int) -> dict[str, dict[bool, list[float]]]:
    """Figures of each round, by what is measured and whether calls are watched; the first round is for warming up."""
    ratings = synthetic_ratings(943, 1682, 100_000).ratings.to_pandas()
    found: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in ("launch", "call", "training")}
    with contextlib.ExitStack() as stack:
        sessions = {True: stack.enter_context(Session(2, devices="cpu"))}
        with unwatched():
            sessions[False] = stack.enter_context(Session(2, devices="cpu"))
            sessions[False].run(nothing)
        for number in range(rounds + 1):
            for watched in (True, False) if number % 2 else (False, True):
                with contextlib.nullcontext() if watched else unwatched():
                    one: dict[str, Callable[[], float]] = {
                        "launch": launch,
                        "call": lambda watched=watched: call(sessions[watched]),
                        "training": lambda watched=watched: sessions[watched].run(trained, ratings),
                    }
                    for name, function in one.items():
                        value = function()
                        if number:
                            found[name][watched].append(value)
            print(number, found, flush=True)
    return found


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    names = {
        "launch": "`in_ddp(2, nothing)` from a warm server, ms",
        "call": "a session's call that does nothing, ms",
        "training": "notebook 01's learner on 2 ranks, samples/s",
    }
    lines = [
        f"{options.rounds} rounds in which both take turns; medians, and the ratio within a round with its spread.",
        "",
        "| | watched | not watched | ratio |",
        "|---|--:|--:|--:|",
    ]
    for name, values in measure(options.rounds).items():
        ratios = [one / other for one, other in zip(values[True], values[False], strict=True)]
        medians = " | ".join(f"{statistics.median(values[watched]):,.4g}" for watched in (True, False))
        lines.append(f"| {names[name]} | {medians} | {spread(ratios)} |")
    save_section("hangs", "What watching costs", [*lines, "", *conditions(("torch", "fastai"))], keep=not options.print)


if __name__ == "__main__":
    main()
