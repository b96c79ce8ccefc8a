"""A comparison finds what was planted, counts what it leaves out, and is the same on any number of ranks."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest

from nbdist import Session, recsys
from nbdist.recsys.recommenders import EASE, IALS, ByTime, Candidate, LeaveOneOut, Popularity, benchmark
from nbdist.recsys.recommenders.spaces import Range


def planted(users: int = 60) -> pl.DataFrame:
    """Each user goes round a circle of items; the first item is everybody's, too."""
    rows = [(f"u{u}", (u + i) % 11 + 1, 10 * i + u % 3) for u in range(users) for i in range(5)]
    rows += [(f"u{u}", 0, -1) for u in range(users)]
    return pl.DataFrame(rows, schema=["user", "item", "timestamp"], orient="row")


class Oracle:
    """Knows what comes next."""

    def fit(self, log: pl.DataFrame, *, user: str, item: str, time: str | None) -> None:
        assert time is not None
        last = log.sort(time).group_by(user).last()
        self.next = {u: i % 11 + 1 for u, i in last.select(user, item).iter_rows()}

    def recommend(self, users: pl.Series, k: int) -> pl.DataFrame:
        return pl.DataFrame({"items": [[self.next[user]] for user in users]})


def test_the_best_is_who_knows() -> None:
    models = {"popular": Popularity, "oracle": Oracle(), "linear": EASE(1.0)}
    found = benchmark(models, planted(), k=3, progress=False)
    assert found.table["model"][0] == "oracle"
    assert found.table["verdict"].to_list() == ["best", "behind", "behind"]
    assert found.table["recall@3"][0] == found.table["mrr@3 low"][0] == 1.0
    assert set(found.per_user) == set(models)
    assert len(found.per_user["oracle"]) == found.about["users"] == 60
    text = found.to_markdown()
    assert "| oracle | 1.0000 (1.0000 to 1.0000) |" in text
    assert "LeaveOneOut()" in repr(found)
    low, mean, high = found.table.filter(model="linear").select("ndcg@3 low", "ndcg@3", "ndcg@3 high").row(0)
    assert low < mean < high


def test_equals_are_level() -> None:
    found = benchmark({"a": EASE(1.0), "b": EASE(1.0)}, planted(), k=3, progress=False)
    assert found.table["verdict"].to_list() == ["best", "level"]
    assert found.table["p_value"].to_list() == [1.0, 1.0]


def test_settings_are_searched_and_the_best_is_taken() -> None:
    tried = []

    def make(shift: int, scale: float) -> Oracle:
        tried.append(shift)
        oracle = Oracle()
        if shift != 2:
            oracle.recommend = lambda users, k: pl.DataFrame({"items": [[0]] * len(users)})  # type: ignore[method-assign]
        return oracle

    candidate = Candidate(make, {"shift": (1, 2, 3), "scale": (0.5,)})
    found = benchmark({"mine": candidate}, planted(), k=3, trials=20, progress=False)
    assert sorted(tried[:-1]) == [1, 2, 3]
    assert tried[-1] == 2
    assert found.table.select("trials", "parameters").row(0) == (3, "shift 2, scale 0.5")
    assert benchmark({"e": EASE}, planted(), k=3, trials=4, progress=False).table["trials"][0] == 4


def test_what_nobody_can_know_is_counted() -> None:
    log = planted()
    new = pl.DataFrame({"user": ["u1", "new", "u2"], "item": [99, 3, 9], "timestamp": [1000, 1001, 1002]})
    repeated = log.filter(user="u3").head(1).with_columns(timestamp=pl.lit(1003, pl.Int64))
    found = benchmark(
        {"p": Popularity}, pl.concat([log, new, repeated]), protocol=ByTime(0.1, 4 / 364), k=3, progress=False
    )
    about = {name: found.about[name] for name in ("test", "users", "cold_users", "cold_items", "repeated")}
    assert about == {"test": 2, "users": 2, "cold_users": 1, "cold_items": 1, "repeated": 1}


def test_ties_in_time_keep_the_order_of_the_log() -> None:
    log = pl.DataFrame({"user": [1] * 5, "item": [5, 1, 4, 2, 3], "timestamp": [0] * 5})
    train, valid, test = LeaveOneOut().split(log, "user", "timestamp")
    assert (train["item"].to_list(), valid["item"].to_list(), test["item"].to_list()) == ([5, 1, 4], [2], [3])


def test_ranks_find_what_the_notebook_finds(session: Session) -> None:
    def compare() -> str:
        found = benchmark({"e": EASE, "i": IALS(4, 0.01, 0.1)}, planted(), k=3, trials=3, progress=False)
        return json.dumps(found.table.drop("fit_seconds").to_dict(as_series=False))

    assert session.run_all(compare) == [compare()] * 2


def test_a_line_for_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert recsys.benchmark is benchmark
    recsys.benchmark({"popular": Popularity}, planted(), k=3)
    assert capsys.readouterr().out.startswith("popular: ndcg@3 0.")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"models": {}}, ValueError, "models must name at least one recommender"),
        ({"models": [EASE]}, TypeError, "models must be a mapping from names to recommenders"),
        (
            {"models": {"x": 3}},
            TypeError,
            "model 'x' must be a class such as EASE, a recommender, or a Candidate, got int",
        ),
        (
            {"log": planted(6).with_columns(item=pl.Series([object()] * 36, dtype=pl.Object))},
            TypeError,
            "column 'item' must be of integers, strings or dates, got Object",
        ),
        (
            {"log": planted(6).with_columns(timestamp=pl.lit("monday"))},
            TypeError,
            "column 'timestamp' must be of dates, times or numbers, got String",
        ),
        ({"metric": "auc"}, ValueError, "`metric` must be one of 'recall'"),
        ({"trials": 0}, ValueError, "`trials` must be at least 1, got 0"),
        ({"k": 1.5}, TypeError, "`k` must be an integer, got 1.5"),
        ({"item": "movie"}, ValueError, "log must have a column 'movie', got"),
        (
            {"log": planted(2).head(2)},
            ValueError,
            "`log` must have rows for validation, got none of 2 rows",
        ),
        ({"protocol": "time"}, TypeError, r"`protocol` must be LeaveOneOut\(\) or ByTime\(valid, test\), got 'time'"),
        ({"protocol": ByTime}, TypeError, "`protocol` must be"),
    ],
)
def test_mistakes_in_a_comparison_are_named(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments = {"models": {"p": Popularity}, "log": planted(6), "progress": False, **options}
    with pytest.raises(kind, match=message):
        benchmark(arguments.pop("models"), arguments.pop("log"), **arguments)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"item": [[1]]}, "recommend must return a frame with a column 'items', got item"),
        ({"items": [["a"]]}, "ids must be Int64, as in the log or index, got String"),
        ([[1]], "the result of recommend must be a frame of polars or pandas, .*, got list"),
        ({"items": [[1]] * 7}, "recommend must return a row for each of 6 users, got 7"),
    ],
)
def test_answers_of_a_model_of_ones_own_are_checked(answer: Any, message: str) -> None:
    class Own:
        def fit(self, log: pl.DataFrame, **columns: Any) -> None: ...

        def recommend(self, users: pl.Series, k: int) -> Any:
            same = isinstance(answer, dict) and len(next(iter(answer.values()))) == 1
            return {name: column * len(users) for name, column in answer.items()} if same else answer

    with pytest.raises((TypeError, ValueError), match=message):
        benchmark({"own": Own()}, planted(6), progress=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Range(2, 1), "`low` must be below `high`, got 2 and 1"),
        (lambda: Range(0, 1, log=True), "`low` must be above 0 on a logarithmic scale, got 0"),
        (lambda: ByTime(0.6, 0.6), "`valid` and `test` must together be below 1, got 0.6 and 0.6"),
        (lambda: ByTime(valid=0), "`valid` must be a finite number above 0, got 0"),
    ],
)
def test_ranges_and_shares_that_hold_nothing(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
