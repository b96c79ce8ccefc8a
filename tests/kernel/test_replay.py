"""A step of a recorded loop runs again in this process, and has the same losses and gradients, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Kernel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist import NbdistError, Recording, Session, in_ddp, replay_step
from nbdist.recsys.loader import MemoryLoader
from nbdist.replay import log

pytestmark = pytest.mark.slow

EPOCHS, STEPS = 12, 96


def train(folder: Path, sink: dict[int, Any], epochs: int = EPOCHS, bad: int = 0, more: float = 0.0) -> dict[int, Any]:
    """A loop with dropout, a scheduler, and random numbers between its epochs; returns loss and gradients by step."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rows = torch.utils.data.DataLoader(torch.randn(128, 2)[dist.get_rank() :: 2], batch_size=8, shuffle=True)
    recording, step = Recording(folder, model, optimizer, scheduler), 0
    for _ in range(epochs):
        for batch in recording.steps(rows):
            optimizer.zero_grad()
            loss = model(batch).square().mean() * (1 + more)
            loss.backward()
            step = recording._step + 1
            sink[step] = (loss.item(), [one.grad.clone() for one in model.parameters() if one.grad is not None])
            if step == bad:
                raise ArithmeticError(f"in step {step}")
            optimizer.step()
        scheduler.step()
        torch.rand(1)
    return sink


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.long("20 steps, each on fresh ranks"))])
def test_steps_are_equal_bit_for_bit(steps: int, session: Session, tmp_path: Path) -> None:
    recorded = session.run_all(train, tmp_path / "run", {})
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    for step in [1, STEPS, *random.Random(5).sample(range(2, STEPS), steps - 2)]:
        rank, sink = step % 2, {}
        found = replay_step(tmp_path / "run", train, tmp_path / "run", sink, step=step, rank=rank)
        assert found.same is True and list(sink) == [step], found
        assert same(sink[step], recorded[rank][step])
    after = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:], "the notebook's own are as before"
    assert not dist.is_initialized()


def accumulated(folder: Path, sink: dict[int, Any], counted: bool) -> None:
    """A loop that updates the parameters after every fourth batch, with a moving average of them."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1)))
    average = torch.optim.swa_utils.AveragedModel(model.module, torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    rows = torch.utils.data.DataLoader(torch.randn(240, 2), batch_size=8, shuffle=True)
    recording = Recording(folder, model, optimizer, average)
    for _ in range(2):
        for count, batch in enumerate(recording.steps(rows)):
            number = count if counted else recording.number
            loss = (model(batch) + average(batch).detach()).square().mean() * random.random()
            loss.backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model.module)


def test_gradients_that_are_accumulated_over_steps(session: Session, tmp_path: Path) -> None:
    session.run(accumulated, tmp_path / "run", {}, False)
    for step in (28, 47):
        assert replay_step(tmp_path / "run", accumulated, tmp_path / "run", {}, False, step=step, rank=1).same is True


def test_a_count_that_starts_again_is_told_of(session: Session, tmp_path: Path) -> None:
    session.run(accumulated, tmp_path / "run", {}, True)
    with pytest.warns(UserWarning, match=r"use `recording.number` in its place"):
        replay_step(tmp_path / "run", accumulated, tmp_path / "run", {}, True, step=28, rank=1)


def own_order(folder: Path, sink: dict[int, Any], kind: str) -> dict[int, Any]:
    """A loop of two steps an epoch, whose order depends on the loader alone; one kind leaves each epoch early."""
    rows, generator = torch.arange(64.0).view(32, 2), torch.Generator().manual_seed(1)
    loader: Any = (
        torch.utils.data.DataLoader([*rows], batch_size=4, shuffle=True, generator=generator)
        if kind == "generator"
        else MemoryLoader({"x": rows[:8]}, 4, shuffle=True, seed=1, transform=lambda batch: batch["x"])
    )
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    recording, step = Recording(folder, model, optimizer), 0
    for _ in range(14):
        for number, batch in enumerate(recording.steps(loader)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            step = recording._step + 1
            sink[step] = batch
            if number == 1 and kind == "generator":
                break
    return sink


@pytest.mark.parametrize("kind", ["generator", "memory"])
def test_loaders_with_an_order_of_their_own_and_epochs_that_end_in_break(kind: str, tmp_path: Path) -> None:
    recorded = in_ddp.options(devices="cpu")(1, own_order, tmp_path / "run", {}, kind)
    assert list(recorded) == list(range(1, 29))
    sink: dict[int, Any] = {}
    assert replay_step(tmp_path / "run", own_order, tmp_path / "run", sink, kind, step=26).same
    assert list(sink) == [26] and torch.equal(sink[26], recorded[26])


def test_another_code_is_told_of(session: Session, tmp_path: Path) -> None:
    session.run(train, tmp_path / "run", {}, 1)
    with pytest.warns(UserWarning, match="the result of step 3 of rank 1 is not the recorded one"):
        found = replay_step(tmp_path / "run", train, tmp_path / "run", {}, 1, step=3, rank=1, more=0.1)
    assert found.same is False


def test_the_step_that_raised_raises_again(session: Session, tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        session.run(train, tmp_path / "run", {}, bad=6)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="in step 6"):
            replay_step(tmp_path / "run", train, tmp_path / "run", {}, step=6, rank=1, bad=6)
        assert not dist.is_initialized()


def test_a_loop_that_ends_early_is_told_of(session: Session, tmp_path: Path) -> None:
    session.run(train, tmp_path / "run", {}, 2)
    with pytest.raises(NbdistError, match="train ended before step 12 of the recording"):
        replay_step(tmp_path / "run", train, tmp_path / "run", {}, 1, step=12)


def on_gpu(folder: Path) -> None:
    vars(log)["rank_device"] = lambda: torch.device("cuda", 0)
    Recording(folder, nn.Linear(1, 1))


def test_what_cannot_be_replayed_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="has no recording: record a training"):
        replay_step(folder, train, folder, {}, step=1)
    in_ddp.options(devices="cpu")(1, train, folder, {}, 1)
    for wrong, text in (
        ({"step": 0}, "step must be at least 1, got 0"),
        ({"step": 10}, "step must be 1 to 9, got 10: rank 0 has recorded 8 steps"),
        ({"step": "1"}, "step must be an integer"),
        ({"step": 1, "rank": 1}, "rank must be 0 to 0, got 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            replay_step(folder, train, folder, {}, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the folder of a recording must not hold one already"):
        in_ddp.options(devices="cpu")(1, train, folder, {}, 1)
    with pytest.raises(ValueError, match="must be made by CPU ranks, got a rank on cuda:0"):
        in_ddp.options(devices="cpu")(1, on_gpu, tmp_path / "other")
    with pytest.raises(TypeError, match="objects with state_dict"):
        Recording(folder, nn.Linear(1, 1), 3)
    with pytest.raises(RuntimeError, match="a recording is made by ranks"):
        Recording(folder, nn.Linear(1, 1))


def test_a_long_training_keeps_few_snapshots(tmp_path: Path) -> None:
    def long(folder: Path) -> None:
        log.EVERY, log.MOST = 1, 4
        train(folder, {})

    in_ddp.options(devices="cpu")(1, long, tmp_path / "run")
    kept = log.snapshots_of(tmp_path / "run", [0])
    assert kept[0] == 0 and len(kept) <= 4 and kept[-1] >= STEPS / 2
    sink: dict[int, Any] = {}
    assert replay_step(tmp_path / "run", train, tmp_path / "run", sink, step=90).same


CELL = """
import torch
import torch.distributed as dist
from nbdist import Recording, in_ddp, replay_step

def loop(say=False):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = Recording("recorded", model, optimizer)
    for batch in recording.steps(torch.randn(40, 4, 2)):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        if say:
            print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.6f}")
        if say == "stop":
            breakpoint()
        if say == "fail" and recording._step == 6:
            raise ValueError(f"{batch.shape}")
in_ddp.options(devices="cpu")(2, loop)
"""


def test_in_a_notebook_with_prints_and_the_debugger(kernel: Kernel) -> None:
    assert not kernel.run(CELL).error
    found = kernel.run('replay_step("recorded", loop, True, step=31, rank=1)')
    assert found.text.count("rank 1 of 2: loss") == 1 and "rank 0" not in found.text, found.text
    assert "step 31 of rank 1: the result is the recorded one, bit for bit" in found.text, found
    stopped = kernel.run("""
import os
os.environ["PYTHONBREAKPOINT"] = "__main__.stop"
def stop():
    print("stopped at rank", dist.get_rank())
replay_step("recorded", loop, "stop", step=31, rank=1)
""")
    assert stopped.text.count("stopped at") == 1 and "stopped at rank 1" in stopped.text, stopped
    failed = kernel.run('replay_step("recorded", loop, "fail", step=7)')
    assert failed.error == "ValueError" and "(torch.Size" not in failed.message and "[4, 2]" in failed.message, failed
    looked = kernel.run(
        "import sys; frame = sys.last_traceback\nwhile frame.tb_next: frame = frame.tb_next\n"
        "print(frame.tb_frame.f_locals['batch'].shape, frame.tb_frame.f_locals['loss'].item() > 0)"
    )
    assert looked.text == "torch.Size([4, 2]) True\n", looked
