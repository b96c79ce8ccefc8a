"""The training loop: it learns what a plain loop learns, whatever the ranks and the sharding, and can be resumed."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clicks import USERS, Clicks, build, clicks, loaders, noisy, predict
from conftest import Kernel, Sessions
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.metrics import AUC, RMSE, Throughput
from nbdist.recsys.models import PooledTables
from nbdist.recsys.sharding import replicate
from nbdist.recsys.sharding.sharded import kernels
from nbdist.recsys.training import Snapshots, evaluate, evaluation, fit, warmup_decay
from nbdist.recsys.training.evaluation import Precision
from nbdist.recsys.training.history import History, Record

WARM = "import torchrec.distributed"
HOWS = ("sharded", "replicated")
States = dict[str, torch.Tensor]


def numbers(history: History) -> list[Any]:
    """All but the speed."""
    return [(r.step, r.epoch, r.loss, r.metrics, r.rates) for r in history]


def train(how: str, rows: int, batch: int, **options: Any) -> tuple[History, States]:
    """In a rank: train, and gather; after `breaks_after` steps there is an error."""
    dropout, left = options.pop("dropout", 0.0), options.pop("breaks_after", 10**9)
    tables, keyed, seed = options.pop("tables", None), options.pop("keyed", ()), options.pop("seed", 3)

    def forward(module: nn.Module, features: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal left
        left -= module.training
        return (noisy if dropout else predict)(module, features) if left >= 0 else 1 / 0

    model = build(how, dropout, tables=tables)
    history = fit(model, forward, *loaders(rows, batch, seed, keyed=keyed), **options)
    whole = model.gather()
    return history, {} if whole is None else whole.state_dict()


# --- what is learned ---


@pytest.mark.long("larger trainings")
def test_the_same_on_any_number_of_ranks_and_either_way(sessions: Sessions) -> None:
    aucs = {}
    for nranks, how in itertools.product((1, 2, 4), HOWS):
        history, _ = sessions[nranks].run(train, how, 8192, 512 // nranks, epochs=4, progress=False)
        assert [record.step for record in history] == [16, 32, 48, 64]
        aucs[nranks, how] = history[-1].metrics["auc"]
    assert min(aucs.values()) > 0.85, aucs
    assert max(aucs.values()) - min(aucs.values()) < 0.005, aucs
    for nranks in (1, 2, 4):
        assert aucs[nranks, "sharded"] == pytest.approx(aucs[nranks, "replicated"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_the_schedule_holds_for_tables_and_dense_layers(sessions: Sessions, how: str) -> None:
    """Against a plain loop in this process, over the rows of both ranks; the last batches are uneven."""
    rows, batch, steps = 325, 64, 7
    schedule = warmup_decay(steps, warmup=3, final=0.1)
    history, trained = sessions[2].run(
        train, how, rows, batch, steps=steps, log_every=2, schedule=schedule, progress=False
    )
    torch.manual_seed(1)
    model = Clicks()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-8)
    parts = [MemoryLoader(clicks(rows, 1), batch, shuffle=True, seed=3, rank=r, world_size=2) for r in range(2)]
    assert len(parts[0]) == 3, "the run is in its third epoch at the end"
    losses, sizes = [], []
    both = itertools.chain.from_iterable(zip(*parts, strict=True) for _ in range(3))
    for step, pair in zip(range(steps), both, strict=False):
        joined = {name: torch.cat([part[name] for part in pair]) for name in pair[0]}
        optimizer.param_groups[0]["lr"] = 0.1 * schedule(step)
        optimizer.zero_grad()
        logits, labels = predict(model, joined)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sizes.append(len(labels))
    torch.testing.assert_close(trained, dict(model.state_dict()), rtol=0, atol=1e-5)
    assert [record.step for record in history] == [2, 4, 6, 7]
    assert [record.rates for record in history] == [pytest.approx([0.1 * schedule(s)]) for s in (1, 3, 5, 6)]
    for record, (start, stop) in zip(history, [(0, 2), (2, 4), (4, 6), (6, 7)], strict=True):
        mean = sum(a * b for a, b in zip(losses[start:stop], sizes[start:stop], strict=True)) / sum(sizes[start:stop])
        assert record.loss == pytest.approx(mean, abs=1e-5), "the mean over rows, not over batches"
        assert record.rows_per_second > 0


@pytest.mark.slow
def test_evaluation_is_of_every_row_once(sessions: Sessions) -> None:
    def check() -> tuple[dict[str, float], int, bool]:
        model = replicate(nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1))
        x = torch.arange(103.0)[:, None]
        rows = 0

        def line(module: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal rows
            rows += len(batch[0])
            assert not module.training and not torch.is_grad_enabled()
            return module(batch[0]), batch[1]

        found = evaluate(model, line, MemoryLoader((x, x + 1), 10), {"rmse": RMSE()})
        weight, bias = (p.item() for p in model.model.parameters())
        whole = ((weight * x + bias - x - 1) ** 2).mean().sqrt().item()
        return found, rows, abs(found["rmse"] - whole) < 1e-4 and model.model.training

    answers = sessions[4].run_all(check)
    assert all(same for *_, same in answers) and len({found["rmse"] for found, *_ in answers}) == 1
    assert sum(rows for _, rows, _ in answers) == 103


@pytest.mark.slow
@pytest.mark.parametrize("rows", [103, 9, 5])
def test_evaluation_of_padded_rows_is_that_of_all_rows(sessions: Sessions, rows: int) -> None:
    def check(remainder: str) -> float:
        torch.manual_seed(0)
        model = replicate(nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1))
        x = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0)) * 10
        line = lambda module, batch: (module(batch[0]), batch[1])  # noqa: E731
        return evaluate(model, line, MemoryLoader((x, x**2), 2, remainder=remainder), {"rmse": RMSE()})["rmse"]

    assert sessions[4].run(check, "pad") == pytest.approx(sessions[1].run(check, "keep"), abs=1e-6)


@pytest.mark.long("larger trainings")
def test_fit_takes_a_loss_and_metrics(sessions: Sessions) -> None:
    def regress() -> tuple[History, float]:
        torch.manual_seed(0)
        model = replicate(nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1))
        x = torch.rand(200, 1)
        data = MemoryLoader((x, 3 * x - 1), 20, shuffle=True, seed=0)
        history = fit(
            model,
            lambda module, batch: (module(batch[0]), batch[1]),
            data,
            MemoryLoader((x, 3 * x - 1), 20),
            epochs=120,
            loss=nn.functional.mse_loss,
            metrics={"rmse": RMSE()},
            progress=False,
        )
        return history, float(model.model.module.weight)

    history, weight = sessions[2].run(regress)
    assert history.values("rmse")[-1] < 0.03 and weight == pytest.approx(3, abs=0.05)


@pytest.mark.slow
def test_parts_of_the_ranks_own(sessions: Sessions) -> None:
    """Each rank with rows of its own, as when it reads its own file."""

    def own(rows: tuple[int, int]) -> tuple[History, States]:
        part = {name: column[: rows[dist.get_rank()]] for name, column in clicks(325, dist.get_rank()).items()}
        model = build("replicated")
        history = fit(model, predict, MemoryLoader(part, 32, rank=0, world_size=1), epochs=2, progress=False)
        return history, model.model.module.state_dict()

    (history, first), (_, second) = sessions[2].run_all(own, (320, 320))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert [record.step for record in history] == [10, 20] and history[-1].metrics == {}
    # As many steps, and rows of different numbers: the gradient is the mean over all of them.
    whole = [{name: column[:n] for name, column in clicks(325, r).items()} for r, n in enumerate((320, 289))]
    batches = [MemoryLoader(part, 32, rank=0, world_size=1) for part in whole]
    torch.manual_seed(1)
    model = Clicks()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-8)
    for pair in [*zip(*batches, strict=True), *zip(*batches, strict=True)]:
        logits, labels = predict(model, {name: torch.cat([part[name] for part in pair]) for name in pair[0]})
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, labels.float()).backward()
        optimizer.step()
    _, trained = sessions[2].run(own, (320, 289))
    torch.testing.assert_close(trained, dict(model.state_dict()), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="rank 0 has 10 steps and that of rank 1 has 11"):
        sessions[2].run(own, (320, 321))


@pytest.mark.long("larger trainings")
def test_autocast(sessions: Sessions) -> None:
    def dtypes(precision: str | None) -> tuple[set[torch.dtype], float]:
        model, seen = build("sharded"), set()

        def watch(module: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            logits, labels = predict(module, batch)
            seen.add(logits.dtype)
            return logits, labels

        history = fit(model, watch, *loaders(6000, 128), epochs=3, precision=precision, progress=False)
        assert {p.dtype for p in model.model.parameters()} == {torch.float32}
        return seen, history[-1].metrics["auc"]

    (half, auc), (full, expected) = sessions[2].run(dtypes, "bf16"), sessions[2].run(dtypes, "fp32")
    assert half == {torch.bfloat16} and full == {torch.float32}
    assert auc == pytest.approx(expected, abs=0.01) and auc > 0.7


@pytest.mark.slow
def test_early_stop(sessions: Sessions, tmp_path: Path) -> None:
    """A learning rate of 0 after the first steps: nothing gets better any more."""

    def stopped(resume: bool) -> History:
        schedule = lambda step: float(step < 6)  # noqa: E731
        options = {"steps": 1000, "log_every": 3, "schedule": schedule, "patience": 2, "progress": False}
        return train("sharded", 2000, 64, snapshots=Snapshots(tmp_path, resume=resume), **options)[0]

    history = sessions[2].run(stopped, False)
    values = history.values("auc")
    best = values.index(max(values))
    assert best <= 2 and len(values) == best + 3 and history[-1].step == 3 * len(values)
    again = sessions[2].run(stopped, True)
    assert numbers(again) == numbers(history), "a run that was stopped stays stopped"


# --- gradients that wait for the step ---

LONG: dict[str, Any] = {
    "dropout": 0.2,
    "steps": 23,
    "log_every": 4,
    "schedule": warmup_decay(23, warmup=5),
    "progress": False,
}
WAITING: dict[str, dict[str, Any]] = {"sharded": {"tables": {"fused": False}}, "replicated": {}}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_accumulated_batches_are_one_large_batch(sessions: Sessions, how: str) -> None:
    """325 rows: the last step of an epoch has fewer batches, and fewer rows in them."""
    options = {"steps": 7, "log_every": 2, "progress": False, **WAITING[how]}
    large, expected = sessions[2].run(train, how, 325, 96, **options)
    history, weights = sessions[2].run(train, how, 325, 32, gradient_accumulation_steps=3, **options)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)
    assert [(r.step, r.epoch) for r in history] == [(r.step, r.epoch) for r in large]
    assert [r.loss for r in history] == pytest.approx([r.loss for r in large], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_gradients_are_clipped_by_the_norm_of_all(sessions: Sessions, how: str) -> None:
    """Against a plain loop in this process, over the rows of both ranks."""
    limit, steps = 0.02, 6
    _, trained = sessions[2].run(train, how, 400, 50, steps=steps, max_grad_norm=limit, progress=False, **WAITING[how])
    torch.manual_seed(1)
    model, norms = Clicks(), []
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-8)
    parts = [MemoryLoader(clicks(400, 1), 50, shuffle=True, seed=3, rank=r, world_size=2) for r in range(2)]
    for pair in itertools.islice(itertools.chain(zip(*parts, strict=True), zip(*parts, strict=True)), steps):
        optimizer.zero_grad()
        logits, labels = predict(model, {name: torch.cat([part[name] for part in pair]) for name in pair[0]})
        nn.functional.binary_cross_entropy_with_logits(logits, labels.float()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
    assert min(norms) > limit, "each step was"
    torch.testing.assert_close(trained, dict(model.state_dict()), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"max_grad_norm= must know all gradients .*: use shard\(..., fused=False\)"):
        sessions[2].run(train, "sharded", 400, 50, steps=steps, max_grad_norm=limit, progress=False)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps= must know all gradients"):
        sessions[2].run(train, "sharded", 400, 50, steps=steps, gradient_accumulation_steps=2, progress=False)


def ahead(function: Any, *args: Any, **options: Any) -> tuple[int, Any]:
    """In a rank: how often ids that were sent ahead were taken, and what `function` gives."""
    from nbdist.recsys.sharding.batches_ahead import InputsAhead

    taken = 0
    take = InputsAhead.take

    def count(self: Any, *args: Any) -> Any:
        nonlocal taken
        found = take(self, *args)
        taken += found is not None
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InputsAhead, "take", count)
        result = function(*args, **options)
    return taken, result


@pytest.mark.long("larger trainings")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ids_that_are_sent_ahead_change_nothing(sessions: Sessions, tmp_path: Path, accumulate: int) -> None:
    """Ten full batches and an uneven one an epoch, evaluations and snapshots between; broken off and resumed."""
    options: dict[str, Any] = {
        "keyed": ["user", "movie"],
        "gradient_accumulation_steps": accumulate,
        **LONG,
        **WAITING["sharded"],
    }
    one = sessions[2].run(ahead, train, "sharded", 1300, 64, **options)
    assert one[0] == 0, "on CPUs it has to be asked for"
    history, expected = one[1]
    options["pipelined"] = True
    taken, (found, weights) = sessions[2].run(ahead, train, "sharded", 1300, 64, **options)
    assert taken >= 12 * accumulate
    assert numbers(found) == numbers(history)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    options["snapshots"] = Snapshots(tmp_path, every=3, keep=1, resume=True)
    with pytest.raises(ZeroDivisionError):
        sessions[2].run(train, "sharded", 1300, 64, breaks_after=11 * accumulate, **options)
    _, (found, weights) = sessions[2].run(ahead, train, "sharded", 1300, 64, **options)
    assert numbers(found) == numbers(history)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    # A model that makes its ids itself takes nothing of it; nor does one that has nothing sharded.
    options = {"pipelined": True, "steps": 5, "progress": False, "keyed": ["movie", "user"]}
    taken, (_, weights) = sessions[2].run(ahead, train, "sharded", 400, 50, **options)
    torch.testing.assert_close(weights, sessions[2].run(train, "sharded", 400, 50, steps=5, progress=False)[1])
    assert taken == 0 and sessions[2].run(ahead, train, "replicated", 400, 50, **options)[0] == 0


# --- snapshots ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.long("larger trainings") if how == "sharded" else ()) for how in HOWS]
)
def test_resumed_as_if_never_broken_off(sessions: Sessions, tmp_path: Path, how: str) -> None:
    """In mid-epoch, between two records, with dropout and everybody's random generators in use: bit for bit."""
    history, expected = sessions[2].run(train, how, 1200, 64, **LONG)
    options = {"snapshots": Snapshots(tmp_path, every=3, keep=1, resume=True), **LONG}
    for calls, newest in ((2, []), (8, ["step-6"]), (5, ["step-9"]), (9, ["step-18"])):
        with pytest.raises(ZeroDivisionError):
            sessions[2].run(train, how, 1200, 64, breaks_after=calls, **options)
        assert [path.name for path in Snapshots(tmp_path).all()] == newest
    for _ in range(2):  # the second time there is nothing left to do
        resumed, weights = sessions[2].run(train, how, 1200, 64, **options)
        assert numbers(resumed) == numbers(history)
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.long("larger trainings")
@pytest.mark.parametrize("how", HOWS)
def test_resumed_on_other_ranks_the_loss_follows_the_same_curve(
    sessions: Sessions, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In mid-epoch on fewer ranks and then on more than at first, each time with as many rows in a step."""
    rows, a_step, options = 8192, 512, {"epochs": 4, "log_every": 8, "metrics": None}
    undisturbed, _ = sessions[2].run(train, how, rows, a_step // 2, progress=False, **options)
    other_order, _ = sessions[2].run(train, how, rows, a_step // 2, progress=False, seed=4, **options)
    elastic = {"snapshots": Snapshots(tmp_path, every=5, resume=True), **options}
    with pytest.raises(ZeroDivisionError):
        sessions[2].run(train, how, rows, a_step // 2, breaks_after=22, progress=False, **elastic)
    with pytest.raises(ZeroDivisionError):
        sessions[1].run(train, how, rows, a_step, breaks_after=23, progress=True, **elastic)
    assert "resumed after step 20 of 2 ranks; the rest of the epoch is divided among 1" in capsys.readouterr().out
    history, _ = sessions[4].run(train, how, rows, a_step // 4, progress=False, **elastic)
    assert [(r.step, r.epoch) for r in history] == [(r.step, r.epoch) for r in undisturbed]
    losses, without, noise = (torch.tensor([r.loss for r in h]) for h in (history, undisturbed, other_order))
    torch.testing.assert_close(losses[:2], without[:2], rtol=0, atol=0)
    # What another order of the rows does is the noise.
    assert (losses - without).abs().max() < 3 * (noise - without).abs().max(), (losses, without, noise)
    aucs = [h[-1].metrics["auc"] for h in (history, undisturbed)]
    assert aucs[0] == pytest.approx(aucs[1], abs=0.005)


@pytest.mark.long("larger trainings")
@pytest.mark.slow
def test_a_resumed_run_with_other_batches_has_the_same_epochs(sessions: Sessions, tmp_path: Path) -> None:
    """On half as many ranks with the same batches, an epoch has twice the steps, and the run as many epochs."""
    options = {"epochs": 3, "progress": False, "snapshots": Snapshots(tmp_path, every=4, resume=True)}
    with pytest.raises(ZeroDivisionError):
        sessions[2].run(train, "replicated", 1200, 100, breaks_after=10, **options)
    history, _ = sessions[1].run(train, "replicated", 1200, 100, **options)
    # After 8 steps, 6 an epoch, there are 8 of the second one left, and then 12 of the last.
    assert [record.step for record in history] == [6, 12, 24, 28]
    assert [record.epoch for record in history] == pytest.approx([1.0, 5 / 3, 8 / 3, 3.0])


@pytest.mark.slow
def test_a_run_with_a_loader_for_each_rank_resumes_on_the_same_ranks_only(sessions: Sessions, tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, resume=True)

    def own() -> None:
        rows = MemoryLoader(clicks(128, dist.get_rank()), 32, rank=0, world_size=1)
        fit(build("replicated"), predict, rows, epochs=1, snapshots=snapshots, progress=False)

    sessions[2].run(own)
    with pytest.raises(ValueError, match="taken on 2 ranks with a loader of its own for each, and here are 1"):
        sessions[1].run(own)


@pytest.mark.slow
def test_a_snapshot_is_taken_when_a_node_is_about_to_be_taken_away(sessions: Sessions, tmp_path: Path) -> None:
    def warned() -> None:
        """In a rank: as on a cluster, where one of the ranks is notified in the third step."""
        from nbdist.rank import preemption

        seen = 0

        def forward(module: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal seen
            seen += 1
            if seen == 3 and dist.get_rank() == 1:
                preemption.announce()
            return predict(module, batch)

        os.environ[preemption.NOTICES] = "1"
        try:
            rows = MemoryLoader(clicks(1200, 1), 64)
            fit(build("replicated"), forward, rows, steps=8, snapshots=Snapshots(tmp_path, every=100), progress=False)
        finally:
            del os.environ[preemption.NOTICES]
            preemption.announced = False

    sessions[2].run(warned)
    assert [path.name for path in Snapshots(tmp_path).all()] == ["step-3", "step-8"]


@pytest.mark.long("larger trainings")
def test_adam_clipped_and_accumulated_is_resumed_bit_for_bit(sessions: Sessions, tmp_path: Path) -> None:
    options = LONG | {"tables": {"optimizer": {"user": "adam", "*": "adagrad"}, "lr": 0.01, "fused": False}}
    options |= {"max_grad_norm": 0.05, "gradient_accumulation_steps": 2}
    history, expected = sessions[2].run(train, "sharded", 1200, 32, **options)
    options["snapshots"] = Snapshots(tmp_path, every=3, keep=1, resume=True)
    with pytest.raises(ZeroDivisionError):
        sessions[2].run(train, "sharded", 1200, 32, breaks_after=17, **options)
    assert [path.name for path in Snapshots(tmp_path).all()] == ["step-6"]
    resumed, weights = sessions[2].run(train, "sharded", 1200, 32, **options)
    assert numbers(resumed) == numbers(history)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.long("larger trainings")
@pytest.mark.slow
def test_the_best_snapshot_is_kept(sessions: Sessions, tmp_path: Path) -> None:
    """Training first makes it better, and then, with labels turned round, worse."""

    def turning(left: int, folder: Path) -> tuple[History, float, Path]:
        model, seen = build("sharded"), 0

        def forward(module: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal seen
            seen += module.training
            if seen > left:
                raise InterruptedError
            logits, labels = predict(module, batch)
            return logits, ~labels if module.training and seen > 12 else labels

        snapshots = Snapshots(folder, every=5, keep=1, keep_best="auc", resume=True)
        options = {"steps": 24, "log_every": 2, "eval_every": 4, "snapshots": snapshots, "progress": False}
        history = fit(model, forward, *loaders(1200, 64), **options)
        model.load(snapshots.best())
        auc = evaluate(model, predict, loaders(1200, 64)[1], {"auc": AUC()})["auc"]
        return history, auc, snapshots.best()

    history, auc, best = sessions[2].run(turning, 10**9, tmp_path / "whole")
    assert [record.step for record in history] == list(range(2, 25, 2))
    assert [record.step for record in history if record.metrics] == list(range(4, 25, 4))
    found = {record.step: record.metrics["auc"] for record in history if record.metrics}
    assert max(found, key=lambda step: found[step]) == 12 and auc == max(found.values())
    assert best.name == "step-12" and sorted(one.name for one in (tmp_path / "whole").iterdir()) == [
        "best.json",
        "step-12",
        "step-24",
    ]
    assert len(history.values("auc")) == 6 and "<td></td>" in history._repr_html_()
    history.plot()
    # Broken off after the best one, which later ones are measured by.
    with pytest.raises(InterruptedError):
        sessions[2].run(turning, 17, tmp_path / "broken")
    assert Snapshots(tmp_path / "broken").best().name == "step-12"
    with pytest.raises(FileNotFoundError, match="no best snapshot"):
        Snapshots(tmp_path).best()


@pytest.mark.slow
def test_an_evaluation_that_fails_costs_no_training(sessions: Sessions, tmp_path: Path) -> None:
    def evaluated(fails_at: int | None, folder: Path | None) -> tuple[History, States]:
        model, seen = build("sharded", 0.2), 0

        def forward(module: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal seen
            seen += module.training
            if not module.training and seen == fails_at:
                raise MemoryError("no room for the evaluation")
            return noisy(module, batch)

        snapshots = folder and Snapshots(folder, resume=True)
        history = fit(model, forward, *loaders(1200, 64), steps=12, log_every=4, snapshots=snapshots, progress=False)
        whole = model.gather()
        return history, {} if whole is None else dict(whole.state_dict())

    expected, weights = sessions[2].run(evaluated, None, None)
    for fails_at, newest in ((8, "step-8"), (4, "step-12")):  # the second time at the end: four steps after the eighth
        with pytest.raises(MemoryError):
            sessions[2].run(evaluated, fails_at, tmp_path)
        assert Snapshots(tmp_path).all()[-1].name == newest
    resumed, trained = sessions[2].run(evaluated, None, tmp_path)
    assert numbers(resumed) == numbers(expected)
    torch.testing.assert_close(trained, weights, rtol=0, atol=0)


@pytest.mark.slow
def test_a_metric_that_cannot_be_computed_is_reported(sessions: Sessions) -> None:
    def one_label(alone: bool) -> History:
        model, (train, _) = build("replicated"), loaders(600, 64)
        rows = clicks(100, 2)
        valid = MemoryLoader({**rows, "liked": torch.ones_like(rows["liked"])}, 64)
        if alone:
            evaluate(model, predict, valid, {"auc": AUC()})
        return fit(model, predict, train, valid, steps=4, log_every=2, patience=1)

    before = len(sessions[2].logs(0))
    history, other = sessions[2].run_all(one_label, False)
    assert [record.step for record in history] == [2, 4], "what is no number is never better: it stops after two"
    for one in (history, other):
        assert all(set(record.failed) == {"auc"} and math.isnan(record.metrics["auc"]) for record in one)
        assert all(record.metrics["valid_loss"] > 0 for record in one)
    why = "AUC of 100 rows with 100 labels of 1: it needs both labels"
    assert f"auc after step 4 could not be computed: {why}" in sessions[2].logs(0)[before:]
    assert why in history._repr_html_() and History._from_json(history._to_json())[0].failed == {"auc": why}
    with pytest.raises(ValueError, match=f"auc: {why}"):
        sessions[2].run(one_label, True)


@pytest.mark.slow
def test_snapshots_keep_the_newest(sessions: Sessions, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "by it"
    snapshots = Snapshots(folder, every=2, keep=3)
    run = sessions[2].run(train, "sharded", 1200, 64, steps=11, snapshots=snapshots, progress=False)
    assert len(run[0]) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["step-10", "step-11", "step-8"]

    def weights() -> States:
        model = build("replicated")
        model.load(folder / "step-11", optimizer=False)
        return dict(model.model.module.state_dict())

    # The weights fit a model that is not sharded, on another number of ranks.
    torch.testing.assert_close(sessions[4].run(weights), run[1], rtol=0, atol=0)


@pytest.mark.slow
def test_snapshots_that_do_not_fit(sessions: Sessions, tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, every=2, resume=True)
    sessions[2].run(train, "sharded", 1200, 64, steps=4, snapshots=snapshots, progress=False)
    with pytest.raises(ValueError, match=r"has snapshots of a run, the newest step-4: give resume=True"):
        sessions[2].run(train, "sharded", 1200, 64, steps=8, snapshots=Snapshots(tmp_path), progress=False)
    with pytest.raises(ValueError, match=r"loader with rows=1200, this one has 1300"):
        sessions[2].run(train, "sharded", 1300, 64, steps=8, snapshots=snapshots, progress=False)
    with pytest.raises(ValueError, match="does not fit"):
        sessions[2].run(train, "replicated", 1200, 64, steps=8, snapshots=snapshots, progress=False)


@pytest.mark.slow
def test_a_snapshot_that_fails_leaves_the_one_before(sessions: Sessions, tmp_path: Path) -> None:
    class Broken:
        """Writes something, and then the disk is full on the last rank."""

        def __init__(self, model: Any) -> None:
            self.model = model

        def save(self, folder: Path) -> None:
            self.model.save(folder)
            dist.barrier()
            if dist.get_rank() == dist.get_world_size() - 1:
                raise OSError(28, "No space left on device")

    def save(step: int, broken: bool) -> None:
        model = build("sharded")
        Snapshots(tmp_path)._save(Broken(model) if broken else model, step, {"history": []}, {"rank": dist.get_rank()})

    def load() -> tuple[int, int]:
        common, own = Snapshots(tmp_path, resume=True)._load(build("sharded"))  # type: ignore[misc]
        return common["step"], own["rank"]

    sessions[2].run(save, 5, False)
    with pytest.raises(OSError, match="No space"):
        sessions[2].run(save, 6, True)
    assert (tmp_path / ".step-6.tmp").exists()
    assert sessions[2].run_all(load) == [(5, 0), (5, 1)]
    sessions[2].run(save, 7, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5", "step-7"]


@pytest.mark.slow
def test_the_steps_of_fused_optimizers_are_saved(sessions: Sessions, tmp_path: Path) -> None:
    """FBGEMM's Adam corrects its bias by them. On CPUs it has no optimizer that counts, so here they are made up."""

    def counts(load: bool) -> set[tuple[int, int]]:
        model = build("sharded")
        if load:
            model.load(tmp_path)
        else:
            for lookup in kernels(model.optimizer):
                lookup.iter.fill_(5)
            model.save(tmp_path)
        return {(int(lookup.iter), int(lookup.iter_cpu)) for lookup in kernels(model.optimizer)}

    assert sessions[2].run_all(counts, False) == [{(5, 0)}] * 2
    assert sessions[2].run_all(counts, True) == [{(5, 5)}] * 2


# --- half precision ---


class Pairs(nn.Module):
    """A table with sparse gradients, and a layer over it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(USERS, 8, sparse=True)
        self.over = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.over(self.table(ids)).squeeze(1)  # type: ignore[no-any-return]


def half(
    precision: Precision, copied: bool, fused: bool, overflows: int | None, **options: Any
) -> tuple[History, States, set[torch.dtype], list[float]]:
    """In a rank: train; on rank 1 alone the gradients of a step overflow. And what the table's sum was after steps."""
    seen, sums, step = set(), [], 0

    def watch(module: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal step
        logits = module(batch["user"])
        seen.add(logits.dtype)
        if module.training:
            step += 1
            sums.append(float(replicated.module.table.weight.sum()))
            if step == overflows and dist.get_rank() == 1:
                logits = logits * torch.tensor(1e38).exp()
        return logits, batch["liked"]

    more = {"process_group": dist.new_group()} if copied else {}
    replicated = replicate(
        Pairs(), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8, fused=True if fused else None), **more
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Detected call of")  # a first step may be left out
        history = fit(replicated, watch, *loaders(3000, 64), progress=False, precision=precision, **options)
    return history, {key: value.clone() for key, value in replicated.module.state_dict().items()}, seen, sums


HALF = pytest.mark.long("more in half precision")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("copied", "fused", "norm"),
    [
        *((False, False, 0.1), (False, True, None), (True, False, 0.1)),
        *(pytest.param(*how, marks=HALF) for how in ((False, False, None), (False, True, 0.1), (True, False, None))),
    ],
)
def test_fp16_learns_what_fp32_learns(sessions: Sessions, copied: bool, fused: bool, norm: float | None) -> None:
    options = {"epochs": 2, "max_grad_norm": norm}
    _, expected, full, _ = sessions[2].run(half, "fp32", copied, fused, None, **options)
    history, weights, halves, _ = sessions[2].run(half, "fp16", copied, fused, None, **options)
    assert full == {torch.float32} and halves == {torch.float16}
    torch.testing.assert_close(weights, expected, rtol=0, atol=0.02)
    assert history[-1].metrics["auc"] > 0.7
    for overflows in (1, 3):
        parts = sessions[2].run_all(half, "fp16", copied, fused, overflows, steps=5, max_grad_norm=norm)
        (_, first, _, sums), (_, second, _, others) = parts
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        assert sums == others and all(math.isfinite(one) for one in sums)
        left_out = [step + 1 for step in range(4) if sums[step] == sums[step + 1]]
        assert left_out == [overflows], "no rank has taken that step"


@pytest.mark.slow
def test_the_scale_of_fp16_is_part_of_a_snapshot(sessions: Sessions, tmp_path: Path) -> None:
    def scale(step: int) -> float:
        return float(json.loads((tmp_path / f"step-{step}" / "state.json").read_text())["loss_scale"]["scale"])

    options = {"snapshots": Snapshots(tmp_path, every=2, keep=9, resume=True)}
    sessions[2].run(half, "fp16", False, False, 3, steps=4, **options)
    assert (scale(2), scale(4)) == (2.0**16, 2.0**15)
    history, *_ = sessions[2].run(half, "fp16", False, False, None, steps=6, **options)
    assert scale(6) == 2.0**15 and history[-1].step == 6


@pytest.mark.slow
def test_fp16_is_refused_for_tables_that_are_sharded(sessions: Sessions) -> None:
    with pytest.raises(ValueError, match='must be "bf16" or "fp32" for a model that is sharded, got "fp16"'):
        sessions[2].run(train, "sharded", 100, 10, steps=1, precision="fp16")


@pytest.mark.parametrize("there", [True, False])
def test_bf16_is_refused_where_a_gpu_has_none(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    asked: list[bool] = []

    def supported(including_emulation: bool = True) -> bool:
        asked.append(including_emulation)
        return there

    monkeypatch.setattr(evaluation, "collective_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with contextlib.nullcontext() if there else pytest.raises(ValueError, match=r'"fp16" or "fp32" on rank 0, .* T4'):
        evaluation.check_precision("bf16")
    assert asked == [False]
    evaluation.check_precision("fp16")


# --- what is refused ---


def linear(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch["user"][:, None].float())[:, 0], batch["liked"].float()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({}, "steps= or epochs="),
        ({"steps": 3, "epochs": 2}, "either steps= or epochs="),
        ({"steps": 0}, "`steps` must be an integer, at least 1, got 0"),
        ({"epochs": 1, "log_every": 0}, "`log_every` must be an integer, at least 1, got 0"),
        ({"epochs": 1, "patience": 0}, "`patience` must be an integer, at least 1, got 0"),
        ({"epochs": 1, "patience": 1, "valid": None}, "`patience` needs `valid`"),
        ({"epochs": 1, "loss": nn.functional.mse_loss}, r"metrics=\{"),
        ({"epochs": 1, "train": [1, 2, 3]}, "train is a list: a ParquetLoader or MemoryLoader"),
        ({"epochs": 1, "eval_every": 2, "valid": None}, "`eval_every` needs `valid`"),
        (
            {"epochs": 1, "gradient_accumulation_steps": 0},
            "`gradient_accumulation_steps` must be an integer, at least 1, got 0",
        ),
        ({"epochs": 1, "max_grad_norm": 0.0}, "`max_grad_norm` must be above 0, got 0.0"),
        ({"epochs": 1, "precision": "half"}, '`precision` must be "bf16", "fp16", "fp32" or None, got \'half\''),
        (
            {"epochs": 1, "snapshots": Snapshots("x", keep_best="ndcg")},
            "keep_best must be one of the metrics, .*valid_loss, auc, .*got 'ndcg'",
        ),
        ({"epochs": 1, "remainder": "drop"}, "valid has remainder='drop'"),
        ({"epochs": 1.5}, "`epochs` must be an integer, at least 1, got 1.5"),
        ({"epochs": 1, "metrics": [AUC()]}, "`metrics` must be a dict from name to metric, got list"),
        ({"epochs": 1, "metrics": {"auc": AUC}}, "`metrics` must have metrics such as .* for 'auc'"),
        ({"epochs": 1, "metrics": {"loss": AUC()}}, "`metrics` must have other names than step, .*, got 'loss'"),
        ({"epochs": 1, "schedule": lambda step: math.nan}, "`schedule` must return finite numbers, .* nan for step 0"),
        (
            {"epochs": 1, "predict": linear, "schedule": lambda step: -step},
            "`schedule` must return finite numbers, .* -1 for step 1",
        ),
        ({"epochs": 1, "schedule": lambda step: None}, "`schedule` must return finite numbers, .* None for step 0"),
        (
            {"epochs": 1, "predict": linear, "loss": lambda x, y: x - y, "metrics": {}},
            r"`loss` must return one number, .* got shape \(10,\)",
        ),
        ({"epochs": 1, "predict": lambda model, batch: None}, "`predict` must return tensors: .* got NoneType"),
        ({"epochs": 1, "predict": lambda model, batch: batch["liked"].float()}, "`predict` must return .* got Tensor"),
        ({"epochs": 1, "predict": lambda model, batch: ([1.0], [0])}, "`predict` .* got tuple of list, list"),
        ({"epochs": 1, "schedule": 0.1}, "`schedule` must be a function from step to a factor .*, got 0.1"),
        ({"epochs": 1, "valid": None, "metrics": {"auc": AUC()}}, "`valid` must be given where `metrics` is, got None"),
        ({"epochs": 1, "metrics": {"speed": Throughput()}}, r"got Throughput\(\) for 'speed'"),
        (
            {"epochs": 1, "predict": lambda model, batch: (linear(model, batch)[0], batch["liked"] * 2)},
            "labels must be 0 or 1, or between them, got 2 in row",
        ),
        (
            {"epochs": 1, "model": nn.Linear(1, 1)},
            r"`model` must be the result of shard\(\) or replicate\(\), got Linear",
        ),
    ],
)
def test_invalid_arguments_of_fit_are_refused(sessions: Sessions, options: dict[str, Any], pattern: str) -> None:
    def refused() -> str:
        data, valid = loaders(100, 10)
        valid.remainder = options.pop("remainder", "keep")
        model = replicate(nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1))
        with pytest.raises((ValueError, TypeError)) as caught:
            rest = [options.pop("train", data), options.pop("valid", valid)]
            fit(options.pop("model", model), options.pop("predict", predict), *rest, **options)
        return str(caught.value)

    answers = sessions[2].run_all(refused)
    assert len(set(answers)) == 1 and re.search(pattern, answers[0]), answers


def test_replicate_and_fit_are_refused_outside_a_rank() -> None:
    data = MemoryLoader((torch.arange(10),), 2)
    with pytest.raises(RuntimeError, match="in_ddp"):
        replicate(nn.Linear(1, 1), torch.optim.SGD)
    with pytest.raises(RuntimeError, match="in_ddp"):
        fit(None, predict, data, steps=1)  # type: ignore[arg-type]
    for options in ({"every": 0}, {"keep": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            Snapshots("somewhere", **options)


@pytest.mark.slow
def test_a_model_on_meta_is_not_replicated(sessions: Sessions) -> None:
    with pytest.raises(ValueError, match="weight is on the meta device"):
        sessions[2].run(lambda: replicate(nn.Linear(2, 2, device="meta"), torch.optim.SGD) and None)


def test_a_model_that_cannot_be_trained_is_refused(sessions: Sessions) -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="`model` must have a parameter to train, got Linear without any"):
        sessions[2].run(lambda: replicate(frozen, torch.optim.SGD) and None)
    made = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(TypeError, match="got a SGD that is made already: give lambda parameters: SGD"):
        sessions[2].run(lambda: replicate(nn.Linear(2, 2), made) and None)


def test_an_id_without_a_row_is_named(sessions: Sessions) -> None:
    def run() -> None:
        model = replicate(PooledTables({"user": 50}, embedding_dim=1), torch.optim.SGD)
        rows = MemoryLoader({"user": torch.arange(0, 100), "y": torch.zeros(100)}, 50)
        fit(model, lambda m, batch: (m(batch)[:, 0], batch["y"]), rows, epochs=1, progress=False)

    with pytest.raises(ValueError, match=r"'user' must have ids 0 to 49, .* got 50 in row 0 of the batch of rank 1"):
        sessions[2].run(run)


# --- schedules ---


@given(
    steps=st.integers(1, 200),
    parts=st.tuples(st.integers(0, 199), st.integers(0, 199)).map(sorted),
    final=st.floats(0, 1),
    shape=st.sampled_from(["cosine", "linear", 2, 0.5]),
)
def test_warmup_decay_rises_and_falls(steps: int, parts: list[int], final: float, shape: str | float) -> None:
    warmup, start = parts
    if start >= steps:
        with pytest.raises(ValueError, match="warmup <= decay_start < steps"):
            warmup_decay(steps, warmup=warmup, decay_start=start)
        return
    factors = [
        warmup_decay(steps, warmup=warmup, decay_start=start, final=final, shape=shape)(i) for i in range(steps + 2)
    ]
    up, level, down = factors[:warmup], factors[warmup : start + 1], factors[start:]
    assert up == [(i + 1) / warmup for i in range(warmup)]
    assert level == pytest.approx([1.0] * len(level))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(down))
    assert factors[-2:] == pytest.approx([final, final])
    assert warmup_decay(steps, warmup=warmup)(warmup) == 1.0


def test_shapes_of_warmup_decay() -> None:
    assert [warmup_decay(4, shape="linear")(i) for i in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    assert [warmup_decay(4, shape=2)(i) for i in range(5)] == [1, 0.5625, 0.25, 0.0625, 0]
    assert warmup_decay(4)(2) == pytest.approx(0.5) and warmup_decay(4)(1) > 0.75
    for shape in ("steep", 0, -1):
        with pytest.raises(ValueError, match="power above 0"):
            warmup_decay(4, shape=shape)


# --- what is shown ---


def test_a_history_to_look_at() -> None:
    history = History(
        Record(10 * i, i / 2, 0.7 / i, {"valid_loss": 0.7, "auc": 0.5 + i / 1000}, [0.1, 0.001], 12_345.6)
        for i in range(1, 26)
    )
    assert len(history) == 25 and history[-1].step == 250 and history.values("auc")[0] == 0.501
    page = history._repr_html_()
    assert page.count("<tr>") == 1 + 20 and "<td>250</td>" in page and "<td>10</td>" not in page
    assert "5 earlier ones" in page and "<th>valid_loss</th>" in page and "0.1, 0.001" in page
    assert repr(history).count("\n") == 25 and "12,346" in repr(history)
    assert list(history.frame.columns) == [
        "step",
        "epoch",
        "loss",
        "valid_loss",
        "auc",
        "lr",
        "lr_2",
        "rows_per_second",
    ]
    figure = history.plot()
    assert [axes.get_title() for axes in figure.axes] == ["loss", "auc", "learning rate", "rows/s"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 1, 2, 1]
    assert History._from_json(history._to_json()).records == history.records
    assert History()._repr_html_() == "" and "no records" in repr(History()) and History().plot().axes


@pytest.mark.slow
def test_progress_is_printed_as_lines_without_a_notebook(sessions: Sessions, tmp_path: Path) -> None:
    session = sessions[2]
    before = len(session.logs(0))
    for steps in (4, 8):
        session.run(train, "replicated", 1200, 64, steps=steps, log_every=2, snapshots=Snapshots(tmp_path, resume=True))
    lines = session.logs(0)[before:].splitlines()
    assert "rank 1" not in session.logs(1)
    # The snapshot of step 4 was taken before its evaluation, which is made up for.
    assert [line.split()[0] for line in lines if line.startswith(" ")] == ["step", "2", "4", "step", "4", "6", "8"]
    assert "resumed after step 4" in lines and lines[-1] == "8 steps"


CELL = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from clicks import build, loaders, predict
from nbdist import in_ddp
from nbdist.recsys.training import fit

steps = []

def slowly(model, batch):
    steps.extend([batch] if model.training else [])
    while len(steps) in (11, 21) and not os.path.exists(f"seen {{len(steps) - 1}}"):
        time.sleep(0.01)  # what the next table overtakes is not shown
    return predict(model, batch)

def train():
    return fit(build("replicated"), slowly, *loaders(2400, 64), steps=30, log_every=10)

history = in_ddp(2, train)
"""


@pytest.mark.long("notebooks")
@pytest.mark.slow
def test_progress_is_shown_in_the_cell(kernel: Kernel) -> None:
    cell, outputs = kernel.start(CELL), []
    for step in (10, 20):
        outputs += kernel.finish(cell, until=lambda result: f"<td>{step}</td>" in str(result.outputs)).outputs  # noqa: B023
        (kernel.cwd / f"seen {step}").touch()
    outputs += kernel.finish(cell).outputs
    shown = [out for out in outputs if out["kind"] == "display_data"]
    updates = [out for out in outputs if out["kind"] == "update_display_data"]
    assert [sorted(out["data"]) for out in shown] == [["text/html", "text/plain"], ["image/png", "text/plain"]]
    table, plot = (out["transient"]["display_id"] for out in shown)
    tables = [out["data"]["text/html"] for out in updates if out["transient"]["display_id"] == table]
    rows = [page.count("<tr>") for page in tables]
    assert rows == sorted(rows) and {2, 3, 4} <= set(rows), "it grew row by row"
    assert "30 steps" in tables[-1] and "<td>30</td>" in tables[-1]
    assert any("image/png" in out["data"] for out in updates if out["transient"]["display_id"] == plot)
    assert "<td>30</td>" in kernel.ok("history").outputs[0]["data"]["text/html"]


def test_evaluations_of_a_part_of_the_rows(sessions: Sessions) -> None:
    """Always of the same first batches; and a profiler shows the parts of a step."""
    y = torch.arange(40.0)

    def run() -> Any:
        model = replicate(nn.Linear(1, 1), "sgd", lr=1e-6)

        def forward(module: nn.Module, batch: Any) -> Any:
            return module(batch["x"]).squeeze(1), batch["y"]

        valid = MemoryLoader({"x": torch.zeros(40, 1), "y": y}, 4)
        train = MemoryLoader({"x": torch.zeros(8, 1), "y": torch.zeros(8)}, 4)
        options: dict[str, Any] = {"loss": nn.functional.mse_loss, "metrics": {"rmse": RMSE()}, "progress": False}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            history = fit(model, forward, train, valid, epochs=3, eval_batches=2, **options)
        assert torch.equal(torch.cat([batch["y"] for batch in valid]), y), (
            "the next iteration begins with the first row"
        )
        with pytest.raises(ValueError, match="`eval_batches` needs `valid` and a metric"):
            fit(model, forward, train, epochs=1, eval_batches=2, loss=nn.functional.mse_loss, progress=False)
        bias = float(model.module.bias)
        return history.values("rmse"), bias, {one.key for one in profile.key_averages()}

    found, bias, names = sessions[1].run(run)
    assert found == pytest.approx([float(((y[:8] - bias) ** 2).mean().sqrt())] * 3, rel=1e-3)
    assert {f"nbdist:{one}" for one in ("forward", "backward", "optimizer", "evaluate")} <= names
