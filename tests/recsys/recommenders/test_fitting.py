"""From a log in one call: recommended items, their reasons, new users, and a recommender that was saved."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.recsys import fit_recommender
from nbdist.recsys.recommenders import EASE, IALS, ByTime, FittedRecommender, ItemKNN, Popularity, Recommender

MODELS = [EASE(5.0), ItemKNN(3, 1.0), IALS(4, 0.01, 0.1), Popularity()]
NAMES = [type(model).__name__ for model in MODELS]


def rated(users: int = 30) -> pl.DataFrame:
    """Users go round a circle of ten items and like it; everybody has tried and disliked item i10."""
    rows = [(f"u{u}", f"i{(u + i) % 10}", 5 - i % 2, 10 * i + u % 3) for u in range(users) for i in range(5)]
    rows += [(f"u{u}", "i10", 1, 100) for u in range(users)]
    return pl.DataFrame(rows, schema=["who", "what", "stars", "day"], orient="row")


def fitted(model: Any = None, log: Any = None, **options: Any) -> FittedRecommender:
    names = {"user": "who", "item": "what", "rating": "stars", "min_rating": 3, "time": "day"}
    models = EASE(5.0) if model is None else model
    return fit_recommender(rated() if log is None else log, **{**names, "models": models, "progress": False, **options})


def test_the_best_of_the_comparison_is_taken_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = fitted({"linear": EASE, "popular": Popularity}, progress=True, trials=2, k=2)
    assert isinstance(found.model, EASE) and found.comparison is not None
    assert found.comparison.table["model"].to_list() == ["linear", "popular"]
    assert found.model.regularization == found.comparison.parameters["linear"]["regularization"]
    said = capsys.readouterr().out
    assert said.startswith("linear (regularization ") and "above popular (" in said
    assert "learned from 150 rows of 180 (stars ≥ 3)" in said and said.count("\n") == 1
    assert "| linear |" in found._repr_markdown_() and repr(found).startswith("EASE(regularization=")
    assert (
        fitted({"p": Popularity}, protocol=ByTime(0.2, 0.2)).comparison.about["protocol"]
        == "ByTime(valid=0.2, test=0.2)"
    )  # type: ignore[union-attr]


def test_defaults_compare_four_models_in_the_order_of_the_log() -> None:
    log = rated().filter(pl.col("stars") > 3).sort("day", maintain_order=True)
    options = {"user": "who", "item": "what", "trials": 1, "k": 2, "progress": False}
    untimed, timed = (fit_recommender(log, **options, time=time).comparison for time in (None, "day"))
    assert untimed is not None and timed is not None
    assert sorted(untimed.table["model"]) == ["EASE", "iALS", "neighbors", "popularity"]
    assert untimed.table.drop("fit_seconds").equals(timed.table.drop("fit_seconds"))


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_items_are_new_to_the_user_and_unknown_users_get_what_is_popular(model: Recommender) -> None:
    found = fitted(model)
    log = rated()
    asked = found.recommend(["u1", "nobody", "u1"], 20)
    assert asked.columns == ["who", "what", "rank", "score", "by"]
    assert asked["who"].to_list() == ["u1"] * 5 + ["nobody"] * 10 + ["u1"] * 5
    assert asked["rank"].to_list() == [*range(1, 6), *range(1, 11), *range(1, 6)]
    assert not set(asked.filter(who="u1")["what"]) & set(log.filter(who="u1")["what"])
    assert set(asked.filter(who="nobody")["by"]) == {"Popularity"}
    assert set(asked.filter(who="u1")["by"]) == {type(model).__name__}
    assert asked.filter(who="nobody")["score"].to_list() == [15.0] * 10
    assert found.recommend(["u1"], 20, exclude_seen=False).height == 10, "what nobody likes is never recommended"
    assert found.recommend([], 3).is_empty()


def test_a_history_counts_for_new_and_known_users() -> None:
    found = fitted()
    history = pl.DataFrame({"who": ["new", "new", "u1", "cold"], "what": ["i1", "i2", "i9", "unheard of"]})
    asked = found.recommend(history=history, k=1)
    assert asked["who"].to_list() == ["new", "u1", "cold"] and asked["by"].to_list() == ["EASE", "EASE", "Popularity"]
    expected = found.model.recommend_for([["i1", "i2"], ["i1", "i2", "i3", "i4", "i5", "i9"]], 1)
    assert asked["what"].to_list()[:2] == expected["items"].explode().to_list()
    disliked = history.with_columns(stars=pl.lit(1))
    again = found.recommend(["new", "new"], 20, history=disliked)
    assert set(again["by"]) == {"Popularity"}
    assert again["what"].to_list() == 2 * [f"i{i}" for i in (0, *range(3, 10))]


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_contributions_add_up_to_the_score(model: Recommender) -> None:
    found = fitted(model)
    scores = found.recommend(["u1", "nobody"], 10, exclude_seen=False)
    for who, what, score in scores.select("who", "what", "score").iter_rows():
        shares = found.explain(who, what)
        np.testing.assert_allclose(shares["contribution"].sum(), score, atol=1e-5)
        taken = {f"i{(1 + i) % 10}" for i in range(5)} if who == "u1" else set()
        assert set(shares["what"].drop_nulls()) == taken
        assert shares["what"].null_count() == (who == "nobody" or isinstance(model, Popularity))
        assert shares["contribution"].is_sorted(descending=True)


@pytest.mark.parametrize("model", MODELS[:3], ids=NAMES[:3])
def test_similar_items_are_those_taken_together(model: Recommender) -> None:
    rows = [(f"u{u}", f"{'ab'[u % 2]}{i}") for u in range(20) for i in range(6) if (u * i) % 5 != 1]
    log = pl.DataFrame(rows, schema=["who", "what"], orient="row")
    found = fitted(model, log, rating=None, min_rating=None, time=None).similar(["a0", "b3"], 3)
    assert found.columns == ["what", "similar", "rank", "score"] and found["rank"].to_list() == [1, 2, 3] * 2
    for one, other in found.select("what", "similar").iter_rows():
        assert one != other and one[0] == other[0]


def test_cosines_of_vectors() -> None:
    found = fitted(IALS(4, 0.01, 0.1))
    similar = found.similar(["i3"], 10)
    vectors = found.model._vectors.double().numpy()  # type: ignore[attr-defined]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    by_item = dict(zip(found.known_items, vectors @ vectors[3], strict=True))
    np.testing.assert_allclose(similar["score"], [by_item[item] for item in similar["similar"]], atol=1e-5)


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_saved_and_loaded(model: Recommender, tmp_path: Path) -> None:
    found = fitted(model)
    found.save(tmp_path / "r")
    loaded = FittedRecommender.load(tmp_path / "r")
    users = ["u1", "u2", "nobody"]
    assert loaded.recommend(users, 4).equals(found.recommend(users, 4))
    assert loaded.explain("u1", "i8").equals(found.explain("u1", "i8"))
    more = pl.DataFrame({"who": ["nobody"], "what": ["i3"], "stars": [5], "day": [200]})
    assert loaded.refit(more).recommend(users, 4).equals(found.refit(more).recommend(users, 4))
    alone = type(model).load(tmp_path / "r")
    assert alone.parameters == model.parameters and alone.users.equals(found.model.users)
    with pytest.raises(FileExistsError):
        found.save(tmp_path / "r")
    found.save(tmp_path / "r", overwrite=True)


@pytest.mark.parametrize("name", ["log.json", "log.parquet", "recommender.json", "users.parquet", "items.parquet"])
@pytest.mark.parametrize("content", [b"", b"{}", b"no file of ours"])
def test_folders_that_are_something_else(name: str, content: bytes, tmp_path: Path) -> None:
    fitted().save(tmp_path / "r")
    (tmp_path / "r" / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"not a saved recommender"):
        FittedRecommender.load(tmp_path / "r")
    (tmp_path / "r" / name).unlink()
    with pytest.raises(FileNotFoundError):
        FittedRecommender.load(tmp_path / "r")


def test_arrays_that_do_not_fit_or_would_run_code_are_refused(tmp_path: Path) -> None:
    EASE(5.0).fit({"user": [1, 1, 2], "item": [1, 2, 1]}).save(tmp_path / "r")
    wrong: list[dict[str, Any]] = [
        {"_weights": np.zeros((3, 2), np.float32)},
        {"_weights": np.full((2, 2), np.nan, np.float32)},
        {"_weights": np.array([[print], [print]], object)},
        {"other": np.zeros((2, 2), np.float32)},
    ]
    for arrays in wrong:
        np.savez(tmp_path / "r" / "arrays.npz", **arrays)
        with pytest.raises(ValueError, match=r"not a saved recommender|must hold _weights"):
            Recommender.load(tmp_path / "r")
    described = json.loads((tmp_path / "r" / "recommender.json").read_text())
    for change in ({"version": 99}, {"kind": "Other"}, {"parameters": {"regularization": -1}}):
        (tmp_path / "r" / "recommender.json").write_text(json.dumps({**described, **change}))
        np.savez(tmp_path / "r" / "arrays.npz", _weights=np.zeros((2, 2), np.float32))
        with pytest.raises(ValueError, match=r"not a saved recommender|must hold a model of|finite number above 0"):
            Recommender.load(tmp_path / "r")


@pytest.mark.parametrize("form", [pl.DataFrame, pl.LazyFrame, pd.DataFrame, pa.table, dict])
def test_answers_are_frames_of_the_kind_of_the_log(form: Any, tmp_path: Path) -> None:
    log = form(rated().to_dict(as_series=False))
    found = fitted(log=log)
    kind = pl.DataFrame if form in (pl.LazyFrame, dict) else pa.Table if form is pa.table else form
    later = form({"who": ["u1", "new"], "what": ["i7", "i0"], "stars": [5, 5], "day": [200, 201]})
    answers = [
        found.recommend(["u1"], 2),
        found.recommend(history=later, k=2),
        found.similar(["i1"], 2),
        found.explain("u1", "i7"),
        found.evaluate(later, 5),
    ]
    assert [type(one) for one in answers] == [kind] * 5
    found.save(tmp_path / "r")
    assert type(FittedRecommender.load(tmp_path / "r").refit(later).recommend(["new"], 1)) is kind


KINDS_OF_CATEGORIES = {
    "polars": lambda ids: pl.Series(ids, dtype=pl.Categorical),
    "Enum": lambda ids: pl.Series(ids, dtype=pl.Enum(sorted(set(ids)))),
    "pandas": lambda ids: pd.Series(ids, dtype="category"),
    "an array of pandas": lambda ids: pd.Categorical(ids),
    "Arrow": lambda ids: pa.array(ids).dictionary_encode(),
}


@pytest.mark.parametrize("make", KINDS_OF_CATEGORIES.values(), ids=KINDS_OF_CATEGORIES)
def test_categories_are_asked_for_as_strings(make: Any) -> None:
    found = fitted()
    assert found.recommend(make(["u1", "u2", "u1"]), 2).equals(found.recommend(["u1", "u2", "u1"], 2))
    assert found.similar(make(["i1", "i2"]), 2).equals(found.similar(["i1", "i2"], 2))
    history = {"who": make(["u1", "new"]), "what": make(["i7", "i0"])}
    strings = {"who": ["u1", "new"], "what": ["i7", "i0"]}
    assert found.recommend(history=history, k=2).equals(found.recommend(history=strings, k=2))


def test_times_of_another_unit_or_zone_are_the_same_times() -> None:
    utc = rated().with_columns(day=pl.lit(0).cast(pl.Datetime("us", "UTC")) + pl.duration(hours="day"))
    today = pl.DataFrame({"who": ["new"], "what": ["i1"], "stars": [5], "day": [10**15]}).with_columns(
        pl.col("day").cast(pl.Datetime("us", "UTC"))
    )
    found = fitted(log=utc)
    there = today.with_columns(pl.col("day").dt.convert_time_zone("Europe/Berlin").dt.cast_time_unit("ns"))
    assert found.refit(there)._rows.equals(found.refit(today)._rows)
    with pytest.raises(TypeError, match=r"column 'day' must be Datetime.*UTC.*, as in the log, got Datetime"):
        found.refit(today.with_columns(pl.col("day").dt.replace_time_zone(None)))


@pytest.mark.parametrize("today", [{}, pd.DataFrame(), {"stars": [None], "who": ["new"], "what": ["i1"], "day": [900]}])
def test_a_day_without_rows_or_without_ratings(today: Any) -> None:
    found = fitted()
    rows = {name: today.get(name, []) for name in ("who", "what", "stars", "day")}
    again = found.refit(pd.DataFrame(rows) if isinstance(today, pd.DataFrame) else rows)
    assert again.recommend(["u1"], 3).equals(found.recommend(["u1"], 3))
    assert len(again.known_users) == len(found.known_users) + bool(rows["who"])


def test_labels_of_the_next_day_may_be_numbers() -> None:
    log = {"user": [1, 1, 2, 2], "item": [1, 2, 1, 3], "rating": [True, True, True, False]}
    found = fit_recommender(log, rating="rating", models=ItemKNN(), progress=False)
    later = {"user": [3, 3], "item": [2, 4]}
    expected = found.refit({**later, "rating": [True, False]}).model.items.to_list()
    assert expected == [1, 2]
    for ratings in ([1, 0], [1.0, 0.0]):
        assert found.refit({**later, "rating": ratings}).model.items.to_list() == expected
    with pytest.raises(TypeError, match="column 'rating' must be Boolean, as in the log, got Int64"):
        found.refit({**later, "rating": [5, 0]})


def test_integers_of_the_next_day() -> None:
    """Ids above 2**63 and below meet in one column; what the type of the log cannot hold is refused."""
    ids = {"user": pl.Series([2**63, 2**63, 2**63 + 1], dtype=pl.UInt64), "item": [1, 2, 1]}
    found = fit_recommender(pl.DataFrame(ids), models=ItemKNN(), progress=False)
    assert found.refit({"user": [5], "item": [2]}).known_users.to_list() == [5, 2**63, 2**63 + 1]
    assert found.evaluate({"user": [5, 2**63 + 1], "item": [2, 2]})["count"].to_list() == [2, 1, 1]
    with pytest.raises(TypeError, match="column 'user' must be UInt64, as in the log, got Int64 with values beyond it"):
        found.refit({"user": [-5], "item": [2]})
    small = fit_recommender({"user": [1, 1, 2], "item": [1, 2, 1]}, models=ItemKNN(), progress=False)
    with pytest.raises(TypeError, match="column 'user' must be Int64, as in the log, got UInt64 with values beyond it"):
        small.refit(ids)
    narrow = fit_recommender({**ids, "user": pl.Series([1, 1, 2], dtype=pl.Int32)}, models=ItemKNN(), progress=False)
    assert narrow.refit({"user": [2**40], "item": [1]}).known_users.to_list() == [1, 2, 2**40]
    for act in (small.refit, small.evaluate):
        with pytest.raises(TypeError, match="column 'user' must be of integers, strings or dates, got Float64"):
            act({"user": [5.0], "item": [1]})


@pytest.mark.parametrize(("user", "item"), [("row", "items"), ("items", "scores"), ("scores", "row"), ("item", "user")])
def test_columns_may_have_any_names(user: str, item: str) -> None:
    """Also those that frames have on the way to an answer."""
    plain = fit_recommender({"user": [1, 1, 2, 2, 3], "item": [1, 2, 1, 3, 1]}, models=ItemKNN(), progress=False)
    log = {user: [1, 1, 2, 2, 3], item: [1, 2, 1, 3, 1]}
    other = fit_recommender(log, user=user, item=item, models=ItemKNN(), progress=False)
    found, expected = (one.recommend([3, 9], 2) for one in (other, plain))
    assert found.rows() == expected.rows() and found.columns == [user, item, "rank", "score", "by"]
    assert other.similar([1], 2).rows() == plain.similar([1], 2).rows()
    assert other.explain(3, 2).rows() == plain.explain(3, 2).rows()
    assert other.evaluate({user: [3], item: [2]}).rows() == plain.evaluate({"user": [3], "item": [2]}).rows()


def test_more_items_than_there_are() -> None:
    found = fitted()
    rows = {"who": ["u1"], "what": ["i9"], "stars": [5], "day": [900]}
    whole, more = (found.evaluate(rows, k).rename(lambda name: name.partition("@")[0]) for k in (11, 10**12))
    assert whole.equals(more) and found.recommend(["u1"], 10**12).height == 5


def test_a_log_in_parquet_files_and_categories(tmp_path: Path) -> None:
    rated().with_columns(pl.col("who", "what").cast(pl.Categorical)).write_parquet(tmp_path / "log.parquet")
    for path in (tmp_path / "log.parquet", str(tmp_path / "*.parquet")):
        found = fitted(log=path)
        assert found.recommend(["u1"], 3).equals(fitted().recommend(["u1"], 3))
    with pytest.raises(FileNotFoundError):
        fitted(log=tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("no Parquet, but longer than a footer")
    with pytest.raises(ValueError, match=r"text\.parquet: not a whole Parquet file"):
        fitted(log=tmp_path / "text.parquet")


def test_a_log_in_folders_and_several_files(tmp_path: Path) -> None:
    """Columns in the names of folders, and in another order in another file, as at the doors of workflows."""
    for (day,), rows in rated().group_by("day"):
        (tmp_path / f"day={day}").mkdir()
        rows.drop("day").write_parquet(tmp_path / f"day={day}" / "rows.parquet")
    expected = fitted().recommend(["u1", "u2"], 3)
    assert fitted(log=tmp_path).recommend(["u1", "u2"], 3).equals(expected)
    files = [tmp_path / f"{half}.parquet" for half in (1, 2)]
    rated()[:70].write_parquet(files[0])
    rated()[70:].select(reversed(rated().columns)).write_parquet(files[1])
    found = fitted(log=files)
    assert found.recommend(["u1", "u2"], 3).equals(expected)
    rated().clear().write_parquet(tmp_path / "none.parquet")
    assert found.refit(tmp_path / "none.parquet").recommend(["u1", "u2"], 3).equals(expected)
    rated().with_columns(who=1).write_parquet(files[0])
    with pytest.raises(ValueError, match=r"2\.parquet: column 'who' is String, but Int32 in .*1\.parquet: cast it"):
        fitted(log=files)


RATINGS = {
    "decimals": pl.col("stars").cast(pl.Decimal(10, 2)),
    "bytes": pl.col("stars").cast(pl.Int8),
    "booleans": pl.col("stars") >= 3,
    "floats, some of them missing": pl.when(pl.col("stars") >= 3).then(pl.col("stars")).otherwise(float("nan")),
}


@pytest.mark.parametrize("ratings", RATINGS.values(), ids=RATINGS)
def test_ratings_of_any_numbers_and_booleans(ratings: pl.Expr) -> None:
    log = rated().with_columns(stars=ratings)
    least = None if log.schema["stars"] == pl.Boolean else 3
    found = fitted(log=log, min_rating=least)
    assert found.recommend(["u1"], 20).equals(fitted().recommend(["u1"], 20))
    today = log.tail(1).with_columns(who=pl.lit("new"), day=pl.lit(900))
    assert found.refit(today).known_users.len() == 31
    disliked = today.with_columns(stars=pl.lit(0).cast(log.schema["stars"]))
    assert set(found.recommend(history=disliked, k=1)["by"]) == {"Popularity"}


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), min_size=1, max_size=20), st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_an_evaluation_is_that_of_loops(later: list[tuple[int, int]], k: int) -> None:
    rows = [(u, (u + i) % 9) for u in range(6) for i in range(4)]
    log = pl.DataFrame(rows, schema=["user", "item"], orient="row")
    found = fit_recommender(log, models=EASE(2.0), progress=False)
    wanted: dict[int, set[int]] = {}
    for user, item in later:
        if (user, item) not in rows:
            wanted.setdefault(user, set()).add(item)
    rows_later = pl.DataFrame(later, schema=["user", "item"], orient="row")
    if not wanted:
        with pytest.raises(ValueError, match="rows of a user and an item that the user has not seen"):
            found.evaluate(rows_later, k)
        return
    table = found.evaluate(rows_later, k)
    lists = {user: found.recommend([user], k)["item"].to_list() for user in wanted}
    for who, some in (
        ("all", set(wanted)),
        ("known", set(wanted) & set(range(6))),
        ("new", set(wanted) - set(range(6))),
    ):
        recalls = [len(wanted[user] & set(lists[user])) / len(wanted[user]) for user in some]
        row = table.row(by_predicate=pl.col("users") == who, named=True)
        assert row["count"] == len(some)
        assert row["unknown_items"] == sum(len(wanted[user] - set(range(9))) for user in some)
        assert row[f"recall@{k}"] == (pytest.approx(np.mean(recalls)) if recalls else None)


def test_the_next_day_new_users_and_items_are_known() -> None:
    found = fitted()
    today = pl.DataFrame(
        {
            "who": ["new", "new", "u1", "u2"],
            "what": ["i1", "fresh", "fresh", "fresh"],
            "stars": [5] * 4,
            "day": [200] * 4,
        }
    )
    grown = found.refit(today)
    assert "fresh" in grown.known_items and "new" in grown.known_users and "new" not in found.known_users
    assert grown.recommend(["new"], 1)["by"].to_list() == ["EASE"]
    assert grown.model.parameters == found.model.parameters
    whole = fitted(log=pl.concat([rated(), today]))
    assert grown.recommend(["u1", "new"], 5).equals(whole.recommend(["u1", "new"], 5))


def test_steps_of_conjugate_gradients_end_at_the_exact_solution() -> None:
    rows = [(u, (u * u + i * i) % 23) for u in range(40) for i in range(u % 9 + 1)]
    log = pl.DataFrame(rows, schema=["user", "item"], orient="row")
    exact = IALS(6, 0.02, 0.2, solver_steps=None).fit(log)
    near = IALS(6, 0.02, 0.2, solver_steps=12).fit(log)
    torch.testing.assert_close(near._vectors, exact._vectors, atol=1e-3, rtol=1e-2)
    assert not torch.allclose(IALS(6, 0.02, 0.2, solver_steps=1).fit(log)._vectors, exact._vectors, atol=1e-3)


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        (lambda: fitted(user="name"), ValueError, "log must have a column 'name', got 'who'"),
        (lambda: fitted(user=3), TypeError, "`user` must be the name of a column, got 3"),
        (lambda: fitted(time="what"), ValueError, "must be different columns, got"),
        (
            lambda: fitted(log=rated().rename({"who": "by"}), user="by"),
            ValueError,
            "`user` must have another name than the columns of answers, rank, score, by, got 'by': rename the column",
        ),
        (
            lambda: fitted(log=rated().rename({"what": "similar"}), item="similar"),
            ValueError,
            "`item` must have another name than the columns of answers, .* got 'similar'",
        ),
        (
            lambda: fitted(rating="what", time=None, item="stars"),
            TypeError,
            "column 'what' must be of numbers or booleans, got String",
        ),
        (lambda: fitted(rating=None), ValueError, "`rating` must name the column of ratings where `min_rating`"),
        (lambda: fitted(min_rating="4"), TypeError, "`min_rating` must be a number, got '4'"),
        (lambda: fitted(min_rating=9), ValueError, "`min_rating` must be at most the largest rating, 5"),
        (
            lambda: fitted(log=rated().with_columns(stars=False), min_rating=None),
            ValueError,
            "`min_rating` must be at most the largest rating, 0, got 1",
        ),
        (
            lambda: fitted(log=rated().with_columns(who=pl.lit(1).cast(pl.Decimal(38, 0)))),
            TypeError,
            r"column 'who' must be of integers, strings or dates, got Decimal.*: cast it, .* `cast\(pl.Int64\)`",
        ),
        (
            lambda: fitted().recommend(history={"who": ["u1"], "what": ["i1"], "stars": ["5"]}),
            TypeError,
            "column 'stars' must be of numbers or booleans, got String",
        ),
        (lambda: fitted(log=rated().clear()), ValueError, "log must have rows, got none"),
        (
            lambda: fitted(log=rated().with_columns(day=pl.lit("2024-01-01"))),
            TypeError,
            "column 'day' must be of dates, times or numbers, got String: convert them, .* `str.to_datetime`",
        ),
        (
            lambda: fitted(log=rated().with_columns(day=pl.concat_list("day"))),
            TypeError,
            r"column 'day' must be of dates, times or numbers, got List\(Int64\)",
        ),
        (lambda: fitted(log=[1]), TypeError, "log must be a frame of polars or pandas"),
        (lambda: fitted(log=rated().with_columns(who=None)), ValueError, "column 'who' must have no nulls, got 180"),
        (lambda: fitted({"x": 3}), TypeError, "model 'x' must be a Recommender, such as EASE"),
        (lambda: fitted([EASE]), TypeError, "models must be a recommender, .* or a mapping from names to recommenders"),
        (lambda: fitted(EASE), TypeError, "models must be a recommender, such as EASE"),
        (lambda: fitted({"e": EASE}, protocol="time"), TypeError, "`protocol` must be LeaveOneOut"),
        (lambda: fitted({"e": EASE}, trials=0), ValueError, "`trials` must be at least 1, got 0"),
        (lambda: fitted({"e": EASE}, metric="auc"), ValueError, "`metric` must be one of"),
        (lambda: fitted().recommend(["u1"], 0), ValueError, "`k` must be at least 1, got 0"),
        (lambda: fitted().recommend(), ValueError, "`users` or `history` must be given, got neither"),
        (lambda: fitted().recommend([1]), TypeError, "ids must be String, as in the log or index, got Int64"),
        (lambda: fitted().recommend("u1"), TypeError, "`users` must be a list or another sequence of values"),
        (lambda: fitted().recommend(1), TypeError, "`users` must be a list or another sequence of values"),
        (
            lambda: fitted().recommend({"who": ["u1"]}),
            TypeError,
            "`users` must be a column of values, got a dict: give",
        ),
        (
            lambda: fitted().recommend(pl.DataFrame({"who": ["u1"]})),
            TypeError,
            "`users` must be a column .* a DataFrame",
        ),
        (
            lambda: fitted().similar(pd.DataFrame({"what": ["i1"]})),
            TypeError,
            "`items` must be a column .* a DataFrame",
        ),
        (lambda: fitted().recommend(["u1", 5]), TypeError, "`users` must hold values of one type: "),
        (
            lambda: fitted().recommend(pd.Timestamp("2024-01-01")),
            TypeError,
            "`users` must be a list or another sequence",
        ),
        (
            lambda: fitted(log=rated().with_columns(who=pl.Series([object()] * 180, dtype=pl.Object))),
            TypeError,
            "column 'who' must be of integers, strings or dates, got Object",
        ),
        (  # polars reads these as bytes: the ids returned would be others
            lambda: fitted(log=rated().to_pandas().assign(who=[uuid.UUID(int=row % 9) for row in range(180)])),
            TypeError,
            r"column 'who' must be of integers, strings or dates, got Binary: cast it, .* `astype\(str\)` of pandas",
        ),
        (
            lambda: fitted(log=rated().to_pandas().assign(who=pd.period_range("2020-01", periods=180, freq="M"))),
            TypeError,
            "column 'who' must be of integers, strings or dates, got ",
        ),
        (
            lambda: fitted({"e": EASE}, log=rated().unique("who")),
            ValueError,
            r"must have rows for validation.*fit_recommender with a single model, such as models=EASE\(100\.0\)",
        ),
        (lambda: fitted().explain(["u1"], "i1"), TypeError, "`user` must be the id of one user, got"),
        (lambda: FittedRecommender.load("none"), FileNotFoundError, "must hold a recommender of fit_recommender"),
        (lambda: Recommender.load("none"), FileNotFoundError, "must hold a saved recommender, got no file"),
        (
            lambda: fitted().recommend(history={"who": ["u1"]}),
            ValueError,
            "history must have a column 'what', got 'who'",
        ),
        (
            lambda: fitted().recommend(history={"who": [None], "what": ["i1"]}),
            ValueError,
            "column 'who' must have no nulls",
        ),
        (lambda: fitted().similar(["i1", "i10"]), KeyError, "1 of 2 items are not in the log .* the first is 'i10'"),
        (lambda: fitted().similar(["i1"], 0), ValueError, "`k` must be at least 1, got 0"),
        (lambda: fitted(Popularity()).similar(["i1"]), ValueError, "Popularity has no similar items"),
        (lambda: fitted().explain("u1", "i99"), KeyError, "1 of 1 items are not in the log"),
        *(
            (
                lambda log=log: fitted().evaluate(log),
                ValueError,
                "rows of a user and an item that the user has not seen",
            )
            for log in (rated(), {name: [] for name in rated().columns})
        ),
        (
            lambda: fitted().refit(rated().with_columns(who=1)),
            TypeError,
            "column 'who' must be String, as in the log, got Int",
        ),
    ],
)
def test_mistakes_are_named(action: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        action()
