"""Runs that are killed at random moments and resumed end where the run that was never killed ends.

NBDIST_KILLS is the number of runs that are killed, once or twice each.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clicks import build, loaders, noisy
from conftest import poll

from nbdist import RankDied, in_ddp, warm
from nbdist.recsys.training import Snapshots, fit, warmup_decay

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("NBDIST_KILLS", 4))
RANKS, STEPS = 2, 60


def train(folder: Path | None, pids: Path | None = None) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """In a rank: the numbers of the history, and on rank 0 the weights."""
    if pids is not None:
        (pids / f".{dist.get_rank()}").write_text(str(os.getpid()))
        (pids / f".{dist.get_rank()}").rename(pids / f"{dist.get_rank()}")
    model = build("sharded", dropout=0.1)
    history = fit(
        model,
        noisy,
        *loaders(3000, 64),
        steps=STEPS,
        log_every=20,
        schedule=warmup_decay(STEPS, warmup=10),
        snapshots=folder and Snapshots(folder, every=7, resume=True),
        progress=False,
    )
    whole = model.gather()
    return [(r.step, r.loss, r.metrics) for r in history], {} if whole is None else dict(whole.state_dict())


@dataclass
class Killer:
    """Kills one rank or all of them, at a random moment of the run; some of the times while a snapshot is written."""

    folder: Path
    pids: Path
    draw: random.Random
    longest: float
    """Seconds after which to kill at the latest."""

    def __post_init__(self) -> None:
        self.writing = self.draw.random() < 0.5
        self.victims = self.draw.choice([[0], [1], [0, 1]])
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        if not poll(lambda: self.over.is_set() or len(list(self.pids.glob("[0-9]"))) == RANKS):
            return
        self.over.wait(self.draw.uniform(0, self.longest))
        if self.writing:
            while not self.over.is_set() and not any(self.folder.glob(".step-*.tmp")):
                time.sleep(0.001)
            self.over.wait(self.draw.uniform(0, 0.1))
        if self.over.is_set():
            return
        for rank in self.victims:
            os.kill(int((self.pids / str(rank)).read_text()), signal.SIGKILL)

    def __enter__(self) -> Killer:
        for old in self.pids.glob("[0-9]"):
            old.unlink()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


@pytest.mark.long("trainings that are killed again and again")
@pytest.mark.timeout(600 + 60 * KILLS)
def test_killed_and_resumed(tmp_path: Path) -> None:
    warm("import torchrec.distributed")
    pids = tmp_path / "pids"
    pids.mkdir()
    expected, weights = in_ddp(RANKS, train, None, pids)
    found, _ = in_ddp(RANKS, train, tmp_path / "timed", pids)
    assert found == expected, "snapshots change nothing"
    longest = time.time() - max(path.stat().st_mtime for path in pids.iterdir())
    draw = random.Random(42)
    killed, runs, broken, starts = 0, 0, 0, []
    while killed < KILLS:  # a run that ends before its killer strikes does not count
        folder, most, kills = tmp_path / f"run-{runs}", draw.randint(1, 2), 0
        runs += 1
        while True:
            try:
                with Killer(folder, pids, draw, longest) if kills < most else contextlib.nullcontext():
                    found, trained = in_ddp(RANKS, train, folder, pids)
                break
            except RankDied as death:
                assert "SIGKILL" in str(death)
                kills += 1
                there = Snapshots(folder).all()
                starts.append(int(there[-1].name[5:]) if there else 0)
                broken += len(list(folder.glob(".step-*")))
        assert found == expected, f"killed {kills} times, last resumed after step {starts[-1]}"
        torch.testing.assert_close(trained, weights, rtol=0, atol=0)
        assert not list(folder.glob(".step-*")), "what was half written has been removed"
        killed += kills > 0
    print(f"{killed} of {runs} runs killed; resumed after steps {starts}; {broken} snapshots were half written")
    assert any(starts)
