"""Vocabularies that grow without moving a code, that several columns share, and that hash what they do not know."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist import Session
from nbdist.recsys.etl import Categorify, Workflow, fill_unknown
from nbdist.recsys.etl.hashing import hashed
from nbdist.recsys.triton import export_ensemble
from nbdist.recsys.triton.export import Ensemble
from nbdist.recsys.triton.request import served_steps
from nbdist.recsys.triton.served import preprocess

days = st.lists(st.lists(st.one_of(st.none(), st.integers(-3, 12)), min_size=1, max_size=30), min_size=1, max_size=4)


def fitted(*values: Any, **options: Any) -> Workflow:
    """Fitted to one day after the other."""
    one: Workflow | None = None
    for day in values:
        rows = pl.DataFrame(
            {"user": day}, schema_overrides={} if day and isinstance(day[0], str) else {"user": pl.Int64}
        )
        one = Workflow(Categorify("user", **options)).fit(rows, previous=one, progress=False)
    assert one is not None
    return one


# --- growing ---


@given(days, st.integers(1, 3), st.one_of(st.none(), st.integers(8, 30)), st.sampled_from([1, 3]))
@settings(max_examples=25, deadline=None)
def test_codes_stay_whatever_the_days_bring(days: list[Any], min_count: int, size: int | None, buckets: int) -> None:
    one: Workflow | None = None
    codes: dict[int, int] = {}
    for day in days:
        rows = pl.DataFrame({"user": day}, schema={"user": pl.Int64})
        step = Categorify("user", min_count=min_count, max_size=size, num_buckets=buckets)
        one = Workflow(step).fit(rows, previous=one, progress=False)
        seen = Counter(value for value in day if value is not None)
        new = sorted((v for v in seen if seen[v] >= min_count and v not in codes), key=lambda v: (-seen[v], v))
        if size is not None:
            new = new[: max(0, size - 1 - buckets - len(codes))]
        codes |= {value: 1 + buckets + len(codes) + i for i, value in enumerate(new)}
        assert one.vocabularies["user"].mapping() == codes
    # What each code was seen as often as is the sum over the days, by the codes of each of them.
    assert one is not None
    vocabulary = one.vocabularies["user"]
    total = Counter(value for day in days for value in day)
    assert vocabulary.nulls == total.pop(None, 0) and one.rows == sum(map(len, days))
    assert vocabulary.counts.sum() + vocabulary.unseen == sum(total.values())
    assert vocabulary.size == 1 + buckets + len(codes) and len(vocabulary.bucket_counts) == buckets


def test_a_grown_workflow_is_saved_and_grows_on(tmp_path: Path) -> None:
    one = fitted(["b", "a", "b"], ["c", "a", "d", "d"])
    assert one.vocabularies["user"].mapping() == {"b": 2, "a": 3, "d": 4, "c": 5}
    assert one.vocabularies["user"].counts.to_list() == [2, 2, 2, 1] and one.rows == 7
    one.save(tmp_path / "one")
    again = Workflow(Categorify("user")).fit(pl.DataFrame({"user": ["e"]}), previous=tmp_path / "one", progress=False)
    assert again.vocabularies["user"].mapping() == {"b": 2, "a": 3, "d": 4, "c": 5, "e": 6}


def test_a_new_column_starts_a_new_vocabulary() -> None:
    old = Workflow(Categorify("user")).fit(pl.DataFrame({"user": ["a"]}), progress=False)
    rows = pl.DataFrame({"user": ["b"], "movie": [7]})
    new = Workflow(Categorify("user", "movie")).fit(rows, previous=old, progress=False)
    assert {name: v.mapping() for name, v in new.vocabularies.items()} == {"user": {"a": 2, "b": 3}, "movie": {7: 2}}


@pytest.mark.parametrize(
    ("step", "rows", "message"),
    [
        (Categorify("user"), {"user": ["1"]}, "its values were Int64 and are String"),
        (Categorify("user", max_size=3), {"user": [1]}, "it had 4 codes, and max_size=3"),
        (Categorify("user", num_buckets=2), {"user": [1]}, "it had num_buckets=1, and has 2"),
        (Categorify(("user", "friend")), {"user": [1], "friend": [1]}, "user, friend had not one vocabulary together"),
    ],
)
def test_codes_that_could_not_stay(step: Categorify, rows: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"column 'user' cannot keep the codes of the previous workflow: .*{message}"):
        Workflow(step).fit(pl.DataFrame(rows), previous=fitted([1, 2]), progress=False)


def test_an_unusable_previous_workflow_is_refused(tmp_path: Path) -> None:
    rows = pl.DataFrame({"user": [1]})
    for previous, error in (
        (Workflow(Categorify("user")), RuntimeError),
        (3, TypeError),
        (tmp_path, FileNotFoundError),
    ):
        with pytest.raises(error, match=r"not fitted|a fitted workflow, or the folder of one|workflow.json"):
            Workflow(Categorify("user")).fit(rows, previous=previous)
    one = fitted([1, 2])
    assert one.fit(pl.DataFrame({"user": [3]}), previous=one, progress=False).vocabularies["user"].size == 5, (
        "of itself"
    )


def test_ranks_grow_it_as_one_process_does() -> None:
    yesterday = pl.DataFrame({"user": np.random.default_rng(0).integers(0, 50, 300)})
    today = pl.DataFrame({"user": np.random.default_rng(1).integers(0, 90, 300)})

    def grow() -> dict[str, Any]:
        old = Workflow(Categorify("user", min_count=2, num_buckets=3)).fit(yesterday, progress=False)
        return Workflow(*old.steps).fit(today, previous=old, progress=False).describe()

    with Session(2) as session:
        assert session.run(grow) == grow()


# --- several columns ---


def test_columns_with_one_vocabulary(tmp_path: Path) -> None:
    rows = pl.DataFrame({"movie": ["x", "y", None], "seen": [["z", "y"], [], None], "tag": ["y", "y", "q"]})
    one = Workflow(Categorify(("movie", "seen"), "tag", min_count={"seen": 1})).fit(rows, progress=False)
    assert one.transform(rows).collect().to_dict(as_series=False) == {
        "movie": [3, 2, 0],  # y was seen twice, in both columns together
        "seen": [[4, 2], [], [0]],
        "tag": [2, 2, 3],
    }
    assert one.embedding_sizes["movie"] == one.embedding_sizes["seen"] and one.vocabularies["seen"].nulls == 2
    one.save(tmp_path / "one")
    saved = json.loads((tmp_path / "one" / "workflow.json").read_text())["steps"][0]["columns"]
    assert saved["movie"]["vocabulary"] == saved["seen"]["vocabulary"] != saved["tag"]["vocabulary"]
    loaded = Workflow.load(tmp_path / "one")
    assert repr(loaded) == repr(one) and loaded.transform(rows).collect().equals(one.transform(rows).collect())
    grown = Workflow(*one.steps).fit(rows.with_columns(movie=pl.lit("w")), previous=loaded, progress=False)
    assert (
        grown.vocabularies["movie"].mapping()
        == grown.vocabularies["seen"].mapping()
        == {"y": 2, "x": 3, "z": 4, "w": 5}
    )
    # One table for both: the mean counts each value once for each time that it was seen.
    table = torch.nn.Embedding(one.vocabularies["movie"].size, 1)
    expected = (2 * table.weight[2] + table.weight[3] + table.weight[4]) / 4
    assert fill_unknown(table, one, {"movie": table, "seen": table}) == {"movie": [1], "seen": [1]}
    torch.testing.assert_close(table.weight[1], expected)


def test_columns_of_different_types_have_no_vocabulary_together() -> None:
    rows = pl.DataFrame({"movie": ["1"], "seen": [[1]]})
    with pytest.raises(ValueError, match=r"'movie' and 'seen' share one vocabulary, .* String and Int64"):
        Workflow(Categorify(("movie", "seen"))).fit(rows)


# --- buckets ---


@given(st.lists(st.integers(-(2**63) + 2, 2**63 - 1), max_size=20), st.lists(st.text(max_size=8), max_size=20))
@settings(max_examples=20, deadline=None)
def test_the_server_hashes_as_polars_does(integers: list[int], strings: list[str]) -> None:
    numbers = pl.DataFrame({"x": pl.Series(integers, dtype=pl.Int64)}).select(hashed(pl.col("x"), pl.Int64()))["x"]
    assert numbers.to_list() == preprocess.hashed(np.array(integers, np.int64)).tolist()
    texts = pl.DataFrame({"x": pl.Series(strings, dtype=pl.String)}).select(hashed(pl.col("x"), pl.String()))["x"]
    assert texts.to_list() == preprocess.hashed(np.array([s.encode() for s in strings], object)).tolist()


def test_hashes_stay_what_they_are() -> None:
    """Models are trained with them: another release may not have others. The first is SplitMix64's of state 1."""
    frame = pl.DataFrame({"i": [1, -5, None], "s": ["123456789", "é", None]})
    assert frame.select(hashed(pl.col("i"), pl.Int64()))["i"].to_list() == [
        10451216379200822465,
        1635312068028924514,
        None,
    ]
    assert frame.select(hashed(pl.col("s"), pl.String()))["s"].to_list()[0] == 0xCBF43926  # CRC-32's check value
    spread = pl.DataFrame({"i": range(100_000)}).select(hashed(pl.col("i"), pl.Int64()) % 10)["i"].value_counts()
    assert spread.height == 10 and spread["count"].min() > 9_500


@pytest.mark.parametrize("values", [list(range(0, 4000, 100)), [f"user {i}" for i in range(40)]])
@pytest.mark.parametrize("listed", [False, True])
def test_unknown_values_are_hashed(values: list[Any], listed: bool, tmp_path: Path) -> None:
    seen, unknown = values[:10], values[10:]
    day = [*seen, *seen, *unknown]  # the unknown ones once

    def rows(values: list[Any]) -> pl.DataFrame:
        return pl.DataFrame({"user": [[value] for value in values] if listed else values})

    one = Workflow(Categorify("user", min_count=2, num_buckets=7)).fit(rows(day), progress=False)
    vocabulary = one.vocabularies["user"]
    assert (vocabulary.num_buckets, vocabulary.first_code, vocabulary.size) == (7, 8, 18)
    codes = one.transform(rows(day)).collect()["user"].explode().to_list()
    assert codes[:10] == list(range(8, 18)) and set(codes[20:]) <= set(range(1, 8)) and len(set(codes[20:])) > 4
    counted = Counter(codes[20:])
    assert vocabulary.bucket_counts.to_list() == [counted[code] for code in range(1, 8)]
    one.save(tmp_path / "one")
    loaded = Workflow.load(tmp_path / "one")
    assert loaded.transform(rows(day)).collect()["user"].explode().to_list() == codes
    assert loaded.vocabularies["user"].bucket_counts.equals(vocabulary.bucket_counts)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = torch.nn.EmbeddingBag(vocabulary.size, 1, mode="sum")

        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            column = batch["user"]
            return self.bag(*column) if listed else self.bag(column[:, None])

    if listed:
        return  # what is served of lists is the same code
    if isinstance(values[0], str):  # without a model, whose export takes seconds
        result = served_steps(one, ["user"])
        result.write(tmp_path)
        ensemble, folder = Ensemble(tmp_path, "", result.inputs, ""), tmp_path
    else:
        ensemble = export_ensemble(one, Model(), tmp_path / "repository", "bucket")
        folder = tmp_path / "repository" / "bucket_preprocess" / "1"
    assert preprocess.Preprocessing(folder)(ensemble.request(rows(day)))["user"][:, 0].tolist() == codes


def test_a_vocabulary_of_buckets_alone() -> None:
    one = fitted(list(range(100)), num_buckets=5, max_size=6)
    assert one.vocabularies["user"].mapping() == {} and one.embedding_sizes["user"][0] == 6
    codes = one.transform(pl.DataFrame({"user": [*range(200), None]})).collect()["user"]
    assert codes[-1] == 0 and set(codes.to_list()) == set(range(6))


def test_buckets_that_training_has_not_seen_are_filled() -> None:
    one = fitted([1, 1, 2, 2, 3], min_count=2, num_buckets=4)
    bucket = one.vocabularies["user"].bucket_counts.arg_max()
    assert bucket is not None
    table = torch.nn.Embedding(one.vocabularies["user"].size, 2)
    before = table.weight.detach().clone()
    filled = fill_unknown(table, one, {"user": table})["user"]
    assert filled == [0, *(code for code in range(1, 5) if code != 1 + bucket)]
    torch.testing.assert_close(table.weight[filled], before[5:].mean(0).expand(4, 2))
    torch.testing.assert_close(table.weight[1 + bucket], before[1 + bucket])


def test_weights_of_the_unknown_value() -> None:
    assert fitted([1, 1, 1, 2]).vocabularies["user"].unknown_weights().tolist() == [0, 0, 0.75, 0.25]
    assert fitted([1, 1, 2], min_count=2).vocabularies["user"].unknown_weights().tolist() == [0, 1, 0]
    buckets = fitted([1, 1, 2], min_count=2, num_buckets=2).vocabularies["user"]
    assert buckets.unknown_weights().tolist() == [0, 0.5, 0.5, 0]
    assert fitted([None]).vocabularies["user"].unknown_weights().tolist() == [0, 1]


def test_a_vocabulary_without_a_value_is_served(tmp_path: Path) -> None:
    rows = pl.DataFrame({"genre": [None, None]}, schema={"genre": pl.String})
    one = Workflow(Categorify("genre")).fit(rows, progress=False)
    result = served_steps(one, ["genre"])
    result.write(tmp_path)
    request = Ensemble(tmp_path, "", result.inputs, "").request(pl.DataFrame({"genre": ["war", None]}))
    assert preprocess.Preprocessing(tmp_path)(request)["genre"].tolist() == [[1], [0]]


LOGS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=7)


@settings(max_examples=40, deadline=None)
@given(LOGS, st.integers(1, 3), st.integers(1, 3))
def test_values_come_and_go(logs: list[list[int]], time: int, least: int) -> None:
    """Against a list of the values, with the day on which each was last seen and the number of its rows."""
    workflow, codes, seen, rows = None, [], {}, {}
    for day, log in enumerate(logs):
        before = None if workflow is None else workflow.vocabularies["user"]
        fitted = Workflow(Categorify("user", time_to_live=time, min_count=least))
        workflow = fitted.fit(pl.DataFrame({"user": log}), previous=workflow, progress=False)
        seen |= dict.fromkeys(log, day)
        for one in log:
            rows[one] = rows.get(one, 0) + 1
        old = list(codes)
        for one in [one for one, last in seen.items() if day - last >= time]:
            del seen[one], rows[one]
            codes = [None if code == one else code for code in codes]
        enough = [one for one in set(log) - set(codes) if rows[one] >= least]
        for one in sorted(enough, key=lambda one: (-log.count(one), one)):
            codes = [*codes, one] if None not in codes else codes
            codes[codes.index(None) if None in codes else -1] = one
        vocabulary = workflow.vocabularies["user"]
        assert vocabulary.values.to_list() == codes
        known = {one: code for code, one in enumerate(codes, 2) if one is not None}
        assert vocabulary.mapping() == known
        coded = workflow.transform(pl.DataFrame({"user": [*range(10), None]})).collect()["user"]
        assert coded.to_list() == [known.get(one, 1) for one in range(10)] + [0]
        if before is not None:
            changed = [place + 2 for place, (one, other) in enumerate(zip(old, codes, strict=False)) if one != other]
            assert vocabulary.renewed(before).tolist() == changed
        if least > 1:
            assert vocabulary.waiting is not None
            waiting = dict(vocabulary.waiting.select("value", "count").iter_rows())
            assert waiting == {one: rows[one] for one in seen if one not in codes}


def test_what_waits_and_what_has_left_is_saved_and_served(tmp_path: Path) -> None:
    workflow = None
    for number, users in enumerate((["a", "a", "b"], ["b", "c"], ["c", "d"])):
        fitted = Workflow(Categorify("user", min_count=2, time_to_live=2))
        fitted.fit(pl.DataFrame({"user": users, "past": [users] * len(users)}), previous=workflow, progress=False)
        fitted.save(tmp_path / str(number))
        workflow = Workflow.load(tmp_path / str(number))
    assert workflow is not None
    one = workflow.vocabularies["user"]
    assert (one.values.to_list(), one.counts.to_list()) == (["c", "b"], [1, 1]), "c has the code of a"
    assert one.waiting is not None and one.waiting.rows() == [("d", 1, 0)]
    workflow = Workflow(*workflow.steps).fit(pl.DataFrame({"user": ["e"]}), previous=workflow, progress=False)
    assert workflow.vocabularies["user"].values.to_list() == ["c", None], "b has left, and nobody has its code"
    workflow.save(tmp_path / "last")
    workflow = Workflow.load(tmp_path / "last")
    result = served_steps(workflow, ["user"])
    (tmp_path / "served").mkdir()
    result.write(tmp_path / "served")
    asked = pl.DataFrame({"user": ["b", "c", None, "e"]})
    request = Ensemble(tmp_path / "served", "", result.inputs, "").request(asked)
    served = preprocess.Preprocessing(tmp_path / "served")(request)["user"]
    assert served[:, 0].tolist() == workflow.transform(asked).collect()["user"].to_list() == [1, 2, 0, 1]


def test_a_time_to_live_is_saved_and_checked(tmp_path: Path) -> None:
    workflow = Workflow(Categorify("user", "movie", time_to_live={"user": 2}))
    for number, users in enumerate((["a", "b"], ["b", "b"], ["b", "c"])):
        rows = pl.DataFrame({"user": users, "movie": users})
        previous = None if not number else workflow
        workflow = Workflow(*workflow.steps).fit(rows, previous=previous, progress=False)
        workflow.save(tmp_path / str(number))
        workflow = Workflow.load(tmp_path / str(number))
    assert workflow.vocabularies["user"].values.to_list() == ["c", "b"], "a had not been seen for two fits"
    assert workflow.vocabularies["movie"].values.to_list() == ["a", "b", "c"]
    assert workflow.vocabularies["user"].counts.to_list() == [1, 4]
    assert "time_to_live={'user': 2}" in repr(workflow)
    with pytest.raises(ValueError, match="`time_to_live` of column 'user' must be at least 1, got 0"):
        Categorify("user", time_to_live=0)
