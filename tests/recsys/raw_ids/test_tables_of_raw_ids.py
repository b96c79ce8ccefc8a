"""Tables of raw ids on ranks: against a dict, against a plain table, on other numbers of ranks, saved and loaded."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Sessions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.models import DLRM, PooledTables, SequenceTables
from nbdist.recsys.parallel import raw_files
from nbdist.recsys.raw_ids import RawIds, RawTable
from nbdist.recsys.raw_ids.row_store import RowStore
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import Snapshots, fit

pytestmark = pytest.mark.slow
WARM = "import nbdist.recsys.training, nbdist.recsys.models, nbdist.recsys.parallel.replicated"
OPTIMIZERS: dict[str, Any] = {
    "adagrad": lambda some: torch.optim.Adagrad(some, lr=0.1, initial_accumulator_value=0.5),
    "adam": lambda some: torch.optim.Adam(some, lr=0.1, amsgrad=True),
    "momentum": lambda some: torch.optim.SGD(some, lr=0.1, momentum=0.9, nesterov=True),
}


def step(replicated: Any, ids: torch.Tensor) -> None:
    """In a rank: make a step on this rank's part of a batch; the loss is the mean over the batch."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = ids.tensor_split(size)[rank]
    replicated.optimizer.zero_grad()
    vectors = replicated.model(mine)
    targets = (mine % 5)[:, None]
    ((vectors - targets).square().sum() * (size / 64)).backward()
    replicated.optimizer.step()


def train(options: RawIds, batches: list[torch.Tensor], make: Any, folder: Path | None = None) -> Any:
    """In a rank: train a table; with a folder, go on from the checkpoint there, if there is one, and write one."""
    replicated = replicate(RawTable(3, options), make)
    if folder is not None and folder.exists():
        replicated.load(folder)
    for ids in batches:
        step(replicated, ids)
    if folder is not None:
        replicated.save(folder)
    whole = replicated.gather()
    return None if whole is None else content(whole)


def content(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all that a model has learned, by names."""
    found: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        found |= (
            value
            if name == "_extra_state"
            else {name: value}
            if isinstance(value, torch.Tensor)
            else {f"{name}.{part}": one for part, one in value.items()}
        )
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class Expected:
    """The ids that have rows after some batches, by the words of `RawIds`."""

    def __init__(self, options: RawIds) -> None:
        self.options, self.batches = options, 0
        self.rows: dict[int, list[int]] = {}  # id → how often it occurred, and in which batch last
        self.waiting: dict[int, list[int]] = {}

    def step(self, batch: list[int]) -> None:
        self.batches += 1
        for one, count in Counter(batch).items():
            seen = self.rows.get(one) or self.waiting.pop(one, [0, 0])
            where = self.rows if one in self.rows or seen[0] + count >= self.options.admit_after else self.waiting
            where[one] = [seen[0] + count, self.batches]
        time = self.options.time_to_live
        if time is not None and self.batches % max(1, time // 8) == 0:
            for some in (self.rows, self.waiting):
                for one in [one for one, (_, last) in some.items() if last < self.batches - time]:
                    del some[one]
        limit = self.options.capacity
        for some, evict in ((self.rows, self.options.evict), (self.waiting, "lru")):
            if limit is not None and len(some) > limit:
                order = sorted(some, key=lambda one: (some[one][0] * (evict == "lfu"), some[one][1], one))
                for one in order[: len(some) - limit + limit // 32]:
                    del some[one]


CHOICES = st.builds(
    RawIds,
    capacity=st.none() | st.integers(1, 80),
    admit_after=st.integers(1, 3),
    evict=st.sampled_from(["lru", "lfu"]),
    time_to_live=st.none() | st.integers(1, 20),
)
SOME = st.integers(-4, 30) | st.integers(-(2**63), 2**63 - 1)
BATCHES = st.lists(st.lists(SOME, min_size=4, max_size=30), max_size=12)


@settings(max_examples=25, deadline=None)
@given(CHOICES, BATCHES, st.sampled_from([1, 2]))
def test_ids_come_and_go_as_in_a_dict(sessions: Sessions, options: RawIds, batches: list, ranks: int) -> None:
    expected = Expected(options)
    for batch in batches:
        expected.step(batch)
    found = sessions[ranks].run(train, options, [torch.tensor(one) for one in batches], OPTIMIZERS["adagrad"])
    for part, some in (("", expected.rows), ("waiting_", expected.waiting)):
        counts = found[f"{part}counts"].tolist(), found[f"{part}last"].tolist()
        assert dict(zip(found[f"{part}ids"].tolist(), zip(*counts, strict=True), strict=True)) == {
            one: tuple(both) for one, both in some.items()
        }


def batches(count: int, size: int = 64) -> list[torch.Tensor]:
    """Return batches of new ids and popular ones, which differ in the upper half of their bits alone."""
    draw = torch.Generator().manual_seed(3)
    return [(torch.rand(size, generator=draw) ** 4 * (100 + 20 * i)).long() << 33 for i in range(count)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [
        RawIds(capacity=90, evict="lfu"),
        RawIds(admit_probability=0.3, capacity_bytes=9_000, evict=lambda counts, ages: -ages.double() / counts),
        RawIds(admit_after=2, time_to_live=16, unknown="learned"),
    ],
    ids=["lfu", "score", "time to live"],
)
def test_it_is_the_same_on_any_number_of_ranks(sessions: Sessions, options: RawIds, optimizer: str) -> None:
    alone = sessions[1].run(train, options, batches(30), OPTIMIZERS[optimizer])
    assert 20 < len(alone["ids"]) < len(torch.cat(batches(30)).unique())  # some were evicted, or never admitted
    for ranks in (2, 4):
        found = sessions[ranks].run(train, options, batches(30), OPTIMIZERS[optimizer])
        learned = found.pop("default_row", None), alone.get("default_row")
        assert same(found, {key: value for key, value in alone.items() if key != "default_row"}), (ranks, optimizer)
        if learned[0] is not None:
            assert learned[0].any()
            torch.testing.assert_close(*learned)


def as_plain(options: RawIds, make: Any, plain_make: Any) -> None:
    """In a rank: train a table of raw ids, and a plain one of as many codes that begins with the same rows."""
    ids = torch.cat(batches(10)).unique()
    plain = nn.Embedding(len(ids), 3, sparse=True)
    raw = replicate(RawTable(3, options), make)
    other = replicate(plain, plain_make)
    for batch in batches(10):
        codes = torch.searchsorted(ids, batch)
        if (batch == batches(10)[0]).all():
            from nbdist.recsys.raw_ids.mixing import initial_rows

            plain.weight.data.copy_(initial_rows(ids, 3, options.bound))
        for one, looked_up in ((raw, batch), (other, codes)):
            one.optimizer.zero_grad()
            (one.model(looked_up) - (batch % 7)[:, None]).square().mean().backward()
            one.optimizer.step()
        torch.testing.assert_close(raw.model(batch), other.model(codes))


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda some: torch.optim.Adagrad(some, lr=0.1),) * 2,
        (lambda some: torch.optim.SGD(some, lr=0.1),) * 2,
        (
            lambda some: torch.optim.Adam(some, lr=0.1, eps=1e-15),  # which the two add in different places
            lambda some: torch.optim.SparseAdam(list(some), lr=0.1, eps=1e-15),
        ),
    ],
    ids=["adagrad", "sgd", "adam"],
)
def test_it_learns_as_a_plain_table_does(sessions: Sessions, make: Any, plain: Any) -> None:
    sessions[1].run(as_plain, RawIds(), make, plain)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_a_checkpoint_is_loaded_on_any_number_of_ranks(
    sessions: Sessions, tmp_path: Path, before: int, after: int
) -> None:
    options, make, some = RawIds(capacity=90, admit_after=2), OPTIMIZERS["adam"], batches(30)
    whole = sessions[1].run(train, options, some, make)
    sessions[before].run(train, options, some[:15], make, tmp_path / "checkpoint")
    assert same(whole, sessions[after].run(train, options, some[15:], make, tmp_path / "checkpoint"))


def train_in_blocks(*args: Any) -> Any:
    with mock.patch.object(raw_files, "_BLOCK", 7):
        return train(*args)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_rows_in_files_are_those_in_memory(sessions: Sessions, tmp_path: Path, optimizer: str) -> None:
    options, make, some = RawIds(capacity=90, admit_after=2), OPTIMIZERS[optimizer], batches(30)
    whole = sessions[1].run(train, options, some, make)
    (tmp_path / "rows").mkdir()
    options = dataclasses.replace(options, folder=tmp_path / "rows")
    sessions[2].run(train, options, some[:15], make, tmp_path / "checkpoint")
    found = sessions[1].run(train_in_blocks, options, some[15:], make, tmp_path / "checkpoint")
    assert same(whole, found)
    assert not list((tmp_path / "rows").iterdir()), "files have no names"


def test_a_row_store_is_a_file(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    rows = store.grown("weight", torch.arange(6.0).view(2, 3), 4, value=0.5)
    rows[3] = 7
    longer = store.grown("weight", rows, 2_000)
    rows[0, 0] = -1  # both are the file
    assert longer[:4].tolist() == [[-1, 1, 2], [3, 4, 5], [0.5] * 3, [7] * 3]
    assert not longer[4:].any() and longer.shape == (2_000, 3)
    assert store.grown("weight", longer, 5) is longer
    file, _ = store._files["weight"]
    assert torch.equal(torch.frombuffer(bytearray(os.pread(file.fileno(), 48, 0)), dtype=torch.float32), rows.flatten())
    taken = store.taken(longer, torch.tensor([3, 1]))
    assert taken.tolist() == [[7] * 3, [3, 4, 5]]
    other = copy.deepcopy(store).grown("weight", longer[:0], 1)
    assert other.tolist() == [[0] * 3], "a copy has its own file"
    with pytest.raises(FileNotFoundError, match=r"`folder` must be a folder on this machine, got '.*/none'"):
        RawTable(2, RawIds(folder=tmp_path / "none"))
    with pytest.raises(TypeError, match="`folder` must be a path or None, got 3"):
        RawIds(folder=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`folder` must be on the CPU, got meta"):
        store.grown("weight", torch.zeros(1, 1, device="meta"), 2)


def misfit(folder: Path, saved: Any, loaded: Any) -> None:
    replicate(saved, "adagrad").save(folder)
    replicate(loaded, "adagrad").load(folder)


def test_a_checkpoint_of_another_table_is_refused(sessions: Sessions, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 4 columns here, and the checkpoint has one of 3 columns"):
        sessions[1].run(misfit, tmp_path / "one", RawTable(3, RawIds()), RawTable(4, RawIds()))


def given_up(ids: torch.Tensor) -> bool:
    """In a rank: gradients that zero_grad gives up change nothing."""
    one, other = (replicate(RawTable(3, RawIds()), OPTIMIZERS["momentum"]) for _ in range(2))
    for set_to_none in (True, False):
        one.optimizer.zero_grad(set_to_none=set_to_none)
        one.model(ids).sum().backward()
    step(one, ids)
    other.model(ids)  # so that both have counted as many
    other.model(ids)
    step(other, ids)
    return same(content(one.gather()), content(other.gather()))  # type: ignore[arg-type]


def added_up(ids: torch.Tensor) -> torch.Tensor:
    """In a rank: how far the rows of a table move in a step with the gradients of two halves, clipped."""
    one = replicate(RawTable(3, RawIds(bound=0)), lambda some: torch.optim.SGD(some, lr=1.0))
    for half in ids.chunk(2):
        one.model(half).sum().backward()
    norm = one.clip_gradients(1.0)
    one.optimizer.step()
    whole: Any = one.gather()
    return torch.tensor([norm, 0.0 if whole is None else float(whole.weight.norm())])


def test_gradients_are_given_up_added_up_and_clipped(sessions: Sessions) -> None:
    assert sessions[1].run(given_up, torch.arange(40))
    norm, moved = sessions[2].run(added_up, torch.arange(12) % 4).tolist()
    assert norm == pytest.approx((12 * 9) ** 0.5)  # four rows of three numbers, each with three times the gradient 1
    assert moved == pytest.approx(1.0, abs=1e-5)


def test_ids_are_looked_up_only_in_evaluation(sessions: Sessions) -> None:
    def look_up() -> Any:
        tables = replicate(PooledTables({"user": RawIds(unknown="learned"), "genre": 9}, embedding_dim=4), "adagrad")
        for _ in range(3):
            tables.optimizer.zero_grad()
            genres = Ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))
            tables.model({"user": torch.tensor([5, 2**40]), "genre": genres}).sum().backward()
            tables.optimizer.step()
        tables.model.eval()
        batch = {"user": Ragged(torch.tensor([7, 5]), torch.tensor([0, 1, 2])), "genre": torch.tensor([1, 2])}
        found = tables.model(batch)
        tables.model.train()
        with torch.no_grad():
            assert torch.equal(tables.model(batch), found)
        whole = tables.gather()
        return None if whole is None else (whole, batch, found.detach())

    whole, batch, found = sessions[2].run(look_up)
    assert whole.embedding_bags["user"].ids().tolist() == [5, 2**40]
    assert torch.equal(whole(batch), found)
    again = PooledTables({"user": RawIds(unknown="learned"), "genre": 9}, embedding_dim=4)
    again.load_state_dict(whole.state_dict())
    assert torch.equal(again(batch), found)
    assert torch.equal(copy.deepcopy(whole)(batch), found)


def rows(count: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    user, movie = ((torch.rand(count, generator=draw) ** 2 * n).long() for n in (60, 40))
    return {"user": user << 40, "movie": movie - 2**62, "liked": user % 2 == movie % 2}


def predict(model: nn.Module, batch: Any) -> Any:
    return model(batch), batch["liked"]


def fit_click_model(folder: Path, steps: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = DLRM({"user": RawIds(capacity=50), "movie": RawIds(admit_after=2)}, embedding_dim=8, top_mlp=[16])
    replicated = replicate(model, "adagrad", lr=0.2)
    snapshots = Snapshots(folder, every=20, resume=True)
    loaders = MemoryLoader(rows(1_000), 50, shuffle=True, seed=1), MemoryLoader(rows(300), 100)
    history = fit(
        replicated, predict, *loaders, steps=steps, log_every=20, snapshots=snapshots, progress=False, **options
    )
    return history, replicated.gather()


def test_a_run_with_raw_ids_is_resumed(sessions: Sessions, tmp_path: Path) -> None:
    history, whole = sessions[2].run(fit_click_model, tmp_path / "whole", 60, max_grad_norm=5.0)
    assert history[-1].metrics["auc"] > 0.9
    assert len(whole.features.embeddings.embedding_bags["user"].ids()) <= 50
    sessions[2].run(fit_click_model, tmp_path / "parts", 20, max_grad_norm=5.0)
    _, resumed = sessions[2].run(fit_click_model, tmp_path / "parts", 60, max_grad_norm=5.0)
    assert same(content(whole), content(resumed))
    history, _ = sessions[1].run(fit_click_model, tmp_path / "parts", 80)  # on another number of ranks
    assert [one.step for one in history] == [20, 40, 60, 80]


def test_what_is_not_supported_is_refused(sessions: Sessions, tmp_path: Path) -> None:
    session = sessions[1]
    with pytest.raises(ValueError, match="tables of raw ids, got LBFGS"):
        session.run(lambda: replicate(SequenceTables({"user": RawIds()}), torch.optim.LBFGS))
    with pytest.raises(ValueError, match='"bf16" or "fp32" for a model with tables of raw ids'):
        session.run(fit_click_model, tmp_path, 1, precision="fp16")
    with pytest.raises(ValueError, match="`captured` must be None or False"):
        session.run(fit_click_model, tmp_path, 1, captured=True)
    with pytest.raises(ValueError, match="must have memory"):
        PooledTables({"user": RawIds()}, device="meta")
    for options in (
        *({"capacity": 0}, {"capacity": True}, {"admit_after": None}, {"capacity": 1, "capacity_bytes": 9}),
        *({"admit_probability": 0}, {"evict": "fifo"}, {"unknown": None}, {"bound": -1.0}, {"time_to_live": 1.5}),
        *({"admit_probability": "0.1"}, {"admit_probability": 2}, {"bound": "x"}, {"capacity": "1M"}),
    ):
        with pytest.raises((TypeError, ValueError), match=r"must be|one of the two"):
            RawIds(**options)
    with pytest.raises(TypeError, match=r"raw ids must be integers, got torch\.float32"):
        RawTable(2, RawIds())(torch.tensor([1.5]))
    for score in (lambda counts, ages: counts[:1], lambda counts, ages: 1.0, lambda counts, ages: ages * math.nan):
        with pytest.raises(ValueError, match=r"must return a number for each of \d+ ids, got"):
            session.run(train, RawIds(capacity=9, evict=score), batches(2), OPTIMIZERS["adam"])


def test_torchrec_does_not_shard_them(sessions: Sessions) -> None:
    pytest.importorskip("torchrec")

    def refused() -> None:
        from nbdist.recsys.sharding import shard

        shard(PooledTables({"user": RawIds()}), batch_size=2, optimizer="adagrad")

    with pytest.raises(ValueError, match="table 'user' has raw ids"):
        sessions[1].run(refused)


def test_old_ids_go_where_a_step_has_several_batches(sessions: Sessions) -> None:
    def run() -> Any:
        one = replicate(RawTable(3, RawIds(time_to_live=24)), OPTIMIZERS["adagrad"])
        for number in range(10):
            one.optimizer.zero_grad()
            for _ in range(4):  # ids are looked for after each third
                one.model(torch.tensor([number])).sum().backward()
            one.optimizer.step()
        whole: Any = one.gather()
        return whole.ids().tolist()

    assert sessions[1].run(run) == [*range(3, 10)]
