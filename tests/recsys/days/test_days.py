"""The next day: predicted before it is learned from, the same on any number of ranks, and saved with its delta."""

from __future__ import annotations

import functools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from conftest import Sessions
from torch import nn

from nbdist.recsys.days import Day, continue_training, follow, save_day
from nbdist.recsys.days.delta import digest_of
from nbdist.recsys.etl import Categorify, Drop, Filter, TargetEncoding, Workflow
from nbdist.recsys.models import DLRM, MMoE
from nbdist.recsys.raw_ids import RawIds
from nbdist.recsys.sharding import replicate, shard
from nbdist.recsys.training import log_loss

pytestmark = pytest.mark.slow
WARM = "import nbdist.recsys.days, nbdist.recsys.models, nbdist.recsys.sharding"


def day_of(number: int, users: int = 12, rows: int = 60) -> pl.DataFrame:
    """Return the rows of a day: each has users that the days before had not."""
    draw = torch.Generator().manual_seed(number)
    user = torch.randint(users + 4 * number, (rows,), generator=draw)
    item = torch.randint(6, (rows,), generator=draw)
    return pl.DataFrame({"user": user.numpy(), "item": item.numpy(), "liked": ((user + item) % 3 == 0).numpy()})


def predict(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch), batch["liked"]


class Sparse(nn.Module):
    """Two tables whose gradients are sparse, which ranks share."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.user, self.item = (nn.Embedding(rows, 4, sparse=True) for rows in (users, items))

    def forward(self, batch: Any) -> torch.Tensor:
        return (self.user(batch["user"]) * self.item(batch["item"])).sum(1)


def make(how: str, workflow: Workflow) -> Any:
    """In a rank: build a model for a workflow's codes, or for raw ids."""
    torch.manual_seed(0)
    if how == "raw":
        ids = {name: RawIds(admit_after=2, capacity=14, unknown="learned") for name in ("user", "item")}
        return replicate(DLRM(ids, embedding_dim=4, top_mlp=[4]), "adagrad")
    sizes = {name: workflow.vocabularies[name].size for name in ("user", "item")}
    if how == "sparse":
        return replicate(Sparse(*sizes.values()), "adagrad", lr=0.1)
    if how == "shard":
        model, dense = DLRM(sizes, embedding_dim=4, top_mlp=[4]), torch.optim.Adam
        return shard(model, {"*": "row_wise"}, batch_size=8, optimizer="adagrad", lr=0.1, dense_optimizer=dense)
    return replicate(DLRM(sizes, embedding_dim=4, top_mlp=[4]), lambda some: torch.optim.Adam(some, lr=0.05))


def days_in(folder: Path, how: str, count: int = 2) -> list[tuple[Day, Any]]:
    """In a rank: save a first day, and go on for some days; return each with rank 0's weights."""
    steps = Workflow(Drop("other")) if how == "raw" else Workflow(Categorify("user", "item"), Drop("other"))
    days = [day_of(number).with_columns(other=1) for number in range(count + 1)]
    workflow = steps.fit(days[0], progress=False)
    model = make(how, workflow)
    day = save_day(folder / "0", workflow, model)
    found = [(day, model.gather())]
    for number, rows in enumerate(days[1:], 1):

        def build(workflow: Workflow) -> Any:
            nonlocal model
            model = make(how, workflow)
            return model

        day = continue_training(day, rows, folder / str(number), build, predict, batch_size=16, progress=False)
        found.append((day, model.gather()))
    return found


@pytest.mark.parametrize("how", ["dense", "sparse", "raw", "shard"])
def test_a_day_is_the_same_on_any_number_of_ranks_and_its_delta_is_the_snapshot(
    sessions: Sessions, tmp_path: Path, how: str
) -> None:
    found = {ranks: sessions[ranks].run(days_in, tmp_path / str(ranks), how) for ranks in (1, 2)}
    for days in found.values():
        state = days[0][1].state_dict()
        for day, model in days[1:]:
            assert day.rows == 60 and day.curve["rows"].to_list() == [15] * 4
            state = day.delta.apply(state)
            assert digest_of(state) == digest_of(model.state_dict()) == day.weights
            model.load_state_dict(state)
    for (one, model), (two, other) in zip(*found.values(), strict=True):
        if one.rows:
            assert one.metrics == pytest.approx(two.metrics, rel=1e-4)
            for name in ("loss", "auc"):
                torch.testing.assert_close(*(day.curve[name].to_torch() for day in (one, two)), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(
            torch.cat([one.flatten().float() for one in model.parameters()]),
            torch.cat([one.flatten().float() for one in other.parameters()]),
            rtol=1e-3,
            atol=1e-5,
        )


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_step_is_predicted_by_the_model_before_it(sessions: Sessions, tmp_path: Path, ranks: int) -> None:
    """The first by yesterday's model, with new users as unknown ones; the curve is in the order of the rows."""
    (first, model), (day, _) = sessions[ranks].run(days_in, tmp_path, "dense", 1)
    workflow = day.workflow
    parts = first.workflow.vocabularies
    state = model.state_dict()
    for name in ("user", "item"):
        weight = state[f"features.embeddings.embedding_bags.{name}.weight"]
        more = workflow.vocabularies[name].size - len(weight)
        unknown = parts[name].unknown_weights() @ weight
        state[f"features.embeddings.embedding_bags.{name}.weight"] = torch.cat([weight, unknown.expand(more, -1)])
    sizes = {name: workflow.vocabularies[name].size for name in ("user", "item")}
    assert sizes["user"] > parts["user"].size
    grown = DLRM(sizes, embedding_dim=4, top_mlp=[4])
    grown.load_state_dict(state)
    rows = workflow.transform(day_of(1), ["user", "item", "liked"]).collect()[:15]
    batch = {name: column.to_torch() for name, column in rows.to_dict().items()}
    with torch.no_grad():
        expected = float(log_loss(grown.eval()(batch), batch["liked"]))
    assert day.curve["loss"][0] == pytest.approx(expected, rel=1e-5)
    assert day.curve["step"].to_list() == [1, 2, 3, 4]
    assert day.metrics["loss"] == pytest.approx(day.curve["loss"].mean(), rel=1e-6)


def test_what_is_predicted_contains_nothing_of_the_days_labels(sessions: Sessions, tmp_path: Path) -> None:
    """Means of labels are of the days before; today's are in the workflow that is saved."""
    users = torch.arange(40) % 8
    before = pl.DataFrame({"user": users.numpy(), "liked": (users % 2 == 0).numpy()})
    after = before.with_columns(liked=~pl.col("liked"))  # each user has changed

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, batch: Any) -> torch.Tensor:
            return (batch["TE_user_liked"] - 0.5) * 8 * self.scale

    def two_days() -> tuple[Day, Workflow]:
        workflow = Workflow(TargetEncoding("user", target="liked", smoothing=0.0)).fit(before, progress=False)

        def build(workflow: Workflow) -> Any:
            return replicate(Told(), "sgd", lr=1e-6)

        first = save_day(tmp_path / "0", workflow, build(workflow))
        options: dict[str, Any] = {"columns": ["TE_user_liked", "liked"], "batch_size": 20, "progress": False}
        day = continue_training(first, after, tmp_path / "1", build, predict, **options)
        return day, day.workflow

    day, workflow = sessions[1].run(two_days)
    assert day.metrics["auc"] == 0, "predicted by yesterday's likes alone"
    today = workflow.transform(before, ["TE_user_liked"]).collect()["TE_user_liked"]
    assert today.to_list() == pytest.approx([0.5] * 40), "tomorrow both days are known"


def test_rows_of_ids_that_are_gone_go_to_new_ones(sessions: Sessions, tmp_path: Path) -> None:
    """The tables stop growing, the delta has the rows that begin as new ones, and no id gets the vector of one that
    has left."""
    logs = [pl.DataFrame({"user": users, "item": [0] * 8, "liked": [True, False] * 4}) for users in days_of_users()]

    def all_days() -> list[tuple[Day, Any]]:
        workflow = Workflow(Categorify("user", "item", time_to_live={"user": 2})).fit(logs[0], progress=False)
        model = make("dense", workflow)
        day = save_day(tmp_path / "0", workflow, model)
        found = [(day, model.gather())]
        for number, log in enumerate(logs[1:], 1):

            def build(workflow: Workflow) -> Any:
                nonlocal model
                model = make("dense", workflow)
                return model

            day = continue_training(day, log, tmp_path / str(number), build, predict, batch_size=4, progress=False)
            found.append((day, model.gather()))
        return found

    days = sessions[2].run(all_days)
    sizes = [day.workflow.vocabularies["user"].size for day, _ in days]
    assert sizes == [10, 18, 18, 18, 18], "from the third day on, new users get the codes of those of two days before"
    *_, before, last = (day.workflow.vocabularies["user"] for day, _ in days)
    free = last.values.is_null().arg_true().to_torch() + last.first_code
    assert len(free) == 8 and torch.equal(free, last.renewed(before)), "no user came, and those of two days before left"
    (name,) = (name for name in days[-1][1].state_dict() if name.endswith("user.weight"))
    yesterday, today = (model.state_dict()[name] for _, model in days[-2:])
    torch.testing.assert_close(today[free], (before.unknown_weights() @ yesterday).expand(8, -1))
    state = days[0][1].state_dict()
    for day, model in days[1:]:
        state = day.delta.apply(state)
        assert digest_of(state) == digest_of(model.state_dict())


def days_of_users() -> list[list[int]]:
    return [list(range(8 * day, 8 * day + 8)) for day in (0, 1, 2, 3, 3)]


def test_a_day_without_rows_changes_nothing(sessions: Sessions, tmp_path: Path) -> None:
    """The next day begins where the day before it ended; ids do not come closer to their end."""
    rows = day_of(0)
    rows.clear().write_parquet(tmp_path / "none.parquet")
    lazy = rows.lazy().filter(pl.col("user") < 0)
    empty = [
        rows.clear(),
        {name: [] for name in rows.columns},
        lazy,
        tmp_path / "none.parquet",
        day_of(1).with_columns(user=-1),
    ]

    def all_days() -> list[Day]:
        ids = Categorify("user", "item", time_to_live=1)
        workflow = Workflow(Filter(pl.col("user") >= 0), ids).fit(rows, progress=False)
        day = save_day(tmp_path / "0", workflow, make("dense", workflow))
        found = [day]
        for number, log in enumerate([*empty, rows], 1):
            build = functools.partial(make, "dense")
            day = continue_training(
                day, log, tmp_path / str(number), build, predict, batch_size=16, progress=number < 2
            )
            found.append(day)
        build = functools.partial(make, "dense")
        again = continue_training(found[0], rows, tmp_path / "at once", build, predict, batch_size=16, progress=False)
        return [*found, again]

    first, *without, day, at_once = sessions[2].run(all_days)
    assert len(without) == len(empty)
    for one in without:
        assert (one.rows, one.metrics, one.weights, one.delta.rows) == (0, {}, first.weights, {})
        assert one.curve.schema == day.curve.schema and one.curve.is_empty()
        assert one.workflow.vocabularies["user"].mapping() == first.workflow.vocabularies["user"].mapping()
    assert repr(without[0]).startswith(f"Day('{tmp_path / '1'}'): 0 rows; a delta of ")
    assert day.weights == at_once.weights and day.rows == 60 and day.curve.equals(at_once.curve)


def test_a_log_that_can_be_read_once(sessions: Sessions, tmp_path: Path) -> None:
    """A stream has no rows the second time, and a lazy frame that draws rows has others."""
    drawn = day_of(1).lazy().with_columns(user=pl.int_range(10**6).sample(pl.len()))

    def known(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert (batch["user"] > 1).all(), "the workflow has seen each user of the day"
        return predict(model, batch)

    def next_day(log: Any, folder: str) -> Day:
        workflow = Workflow(Categorify("user", "item")).fit(day_of(0), progress=False)
        first = save_day(tmp_path / f"before {folder}", workflow, make("dense", workflow))
        build = functools.partial(make, "dense")
        rows = log.to_arrow().to_reader() if isinstance(log, pl.DataFrame) else log
        return continue_training(first, rows, tmp_path / folder, build, known, batch_size=16, progress=False)

    assert sessions[1].run(next_day, day_of(1), "stream").rows == 60
    assert sessions[2].run(next_day, drawn, "lazy").rows == 60


def test_columns_of_a_day_may_have_other_types(sessions: Sessions, tmp_path: Path) -> None:
    """Integers are floats in pandas where one is missing, and have no type at all where all are."""
    rows = day_of(0).with_columns(when=pl.lit(datetime(2024, 1, 1)))
    missing = pl.when(pl.col("user") > 2).then("user")
    logs = {
        "integers": rows.with_columns(user=missing),
        "floats": rows.with_columns(user=missing.cast(pl.Float64).fill_null(float("nan"))),
        "unit": rows.with_columns(user=missing, when=pl.col("when").cast(pl.Datetime("ns"))),
        "none": rows.with_columns(user=None),
        "labels": rows.with_columns(user=missing, liked=pl.col("liked").cast(pl.Int64)),
        "numbers": rows.with_columns(user=missing, liked=pl.col("liked").cast(pl.Float32)),
        "more": rows.with_columns(user=missing, price=1.5).select("price", "when", "liked", "item", "user"),
    }

    def next_day(log: pl.DataFrame, folder: str) -> Day:
        workflow = Workflow(Categorify("user", "item", "when")).fit(rows, progress=False)
        first = save_day(tmp_path / "0", workflow, make("dense", workflow), overwrite=True)
        options: dict[str, Any] = {"columns": ["user", "item", "liked"], "batch_size": 16, "progress": False}
        return continue_training(first, log, tmp_path / folder, functools.partial(make, "dense"), predict, **options)

    weights = {name: sessions[1].run(next_day, log, name).weights for name, log in logs.items()}
    others = {name: one for name, one in weights.items() if name != "none"}
    assert len({*others.values()}) == 1 and weights["none"] != weights["integers"]
    with pytest.raises(
        ValueError, match="the frame: there is no column 'liked'; the columns are 'user', 'item', 'when'"
    ):
        sessions[1].run(next_day, rows.drop("liked"), "unlabelled")
    with pytest.raises(ValueError, match="column 'user' is string, but it was int64 in fit"):
        sessions[1].run(next_day, rows.cast({"user": pl.String}), "strings")
    with pytest.raises(ValueError, match="column 'liked' has 2, but it was bool in fit"):
        sessions[1].run(next_day, rows.with_columns(liked=pl.lit(2)), "grades")


def test_several_tasks_with_weights_and_metrics(sessions: Sessions, tmp_path: Path) -> None:
    rows = day_of(0).with_columns(stars=pl.col("item") / 6, rated=pl.col("user") % 2 == 0)

    def both(model: nn.Module, batch: Any) -> Any:
        found = model(batch)
        return {"click": (found["click"], batch["liked"]), "stars": (found["stars"], batch["stars"].float())}

    def build(workflow: Workflow) -> Any:
        sizes = {name: workflow.vocabularies[name].size for name in ("user", "item")}
        return replicate(MMoE(["click", "stars"], sizes, embedding_dim=4), "adagrad")

    def day() -> Day:
        workflow = Workflow(Categorify("user", "item")).fit(rows, progress=False)
        first = save_day(tmp_path / "0", workflow, build(workflow))
        return continue_training(
            first,
            rows,
            tmp_path / "1",
            build,
            both,
            batch_size=30,
            loss={"click": log_loss, "stars": nn.functional.mse_loss},
            sample_weight={"stars": "rated"},
            progress=False,
        )

    found = sessions[2].run(day)
    assert found.curve.columns == ["step", "rows", "loss"], "no metrics are chosen for a loss of one's own"
    assert found.curve["loss"].is_finite().all()


def test_what_makes_no_sense_is_refused_early(sessions: Sessions, tmp_path: Path) -> None:
    rows = day_of(0)
    workflow = Workflow(Categorify("user", "item")).fit(rows, progress=False)

    def first() -> Any:
        return save_day(tmp_path / "0", workflow, make("dense", workflow))

    def go_on(yesterday: Any = tmp_path / "0", log: Any = rows, folder: str = "1", **options: Any) -> None:
        options = {"batch_size": 16, "progress": False, **options}
        continue_training(yesterday, log, tmp_path / folder, lambda one: make("dense", one), predict, **options)

    sessions[2].run(first)
    with pytest.raises(FileNotFoundError, match=r"day\.json"):
        sessions[2].run(go_on, tmp_path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        sessions[1].run(go_on, folder="0")
    with pytest.raises(ValueError, match="`batch_size` must be at least 2, got 1"):
        sessions[2].run(go_on, batch_size=1)
    with pytest.raises(ValueError, match=r"`tables` must have columns of codes, user, item, got 'x'"):
        sessions[1].run(go_on, tables={"x": "user"})
    with pytest.raises(ValueError, match=r"`tables` must name weights of .*, got 'x' for column 'user'"):
        sessions[1].run(go_on, tables={"user": "x"})
    with pytest.raises(RuntimeError, match="works in a rank"):
        go_on()
    assert [path.name for path in tmp_path.iterdir()] == ["0"], "nothing is left of days that failed"
    (tmp_path / "0" / "day.json").write_text("{}")
    with pytest.raises(ValueError, match=r"day\.json: not a day of save_day"):
        Day.load(tmp_path / "0")


@pytest.mark.parametrize(
    "wrong",
    [{"weights": ["x"]}, {"rows": -1}, {"model_bytes": "8"}, {"metrics": {"loss": "x"}}, {"metrics": []}, {"a": 1}],
)
def test_every_field_of_a_day_from_elsewhere_is_checked(wrong: dict[str, Any], tmp_path: Path) -> None:
    whole = {"format": "nbdist.recsys.days", "version": 1, "folder": None, "weights": "x", "model_bytes": 8}
    (tmp_path / "day.json").write_text(json.dumps(whole))
    assert Day.load(tmp_path).model_bytes == 8
    (tmp_path / "day.json").write_text(json.dumps(whole | wrong))
    with pytest.raises(ValueError, match=r"day\.json: not a day of save_day"):
        Day.load(tmp_path)


def test_files_of_a_log_are_followed_once_they_are_complete(tmp_path: Path) -> None:
    days = follow(tmp_path / "log", after=["a.parquet"], poll_seconds=0.01)
    assert list(follow(tmp_path / "log", timeout=0)) == []
    (tmp_path / "log").mkdir()
    for name in ("c", "a", "b", "_hidden", ".hidden"):
        day_of(0).write_parquet(tmp_path / "log" / f"{name}.parquet")
    whole = (tmp_path / "log" / "c.parquet").read_bytes()
    (tmp_path / "log" / "c.parquet").write_bytes(whole[:-10])  # as while it is written
    assert next(days).name == "b.parquet"
    (tmp_path / "log" / "d.parquet").write_bytes(whole)
    assert next(days).name == "d.parquet"
    (tmp_path / "log" / "c.parquet").write_bytes(whole)
    assert next(days).name == "c.parquet"
    assert [path.name for path in follow(tmp_path / "log", timeout=0)] == [f"{one}.parquet" for one in "abcd"]
    with pytest.raises(NotADirectoryError, match="got the file"):
        follow(tmp_path / "log" / "a.parquet")
    with pytest.raises(ValueError, match="`poll_seconds` must be"):
        follow(tmp_path, poll_seconds=0)
