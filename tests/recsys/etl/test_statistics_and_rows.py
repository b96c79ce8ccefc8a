"""Steps that learn numbers, and those about rows: a naive reference says the same, and so does a server."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.recsys.etl import (
    Categorify,
    Compute,
    DifferenceLag,
    Drop,
    FillMissing,
    Filter,
    JoinGroupby,
    Normalize,
    NormalizeMinMax,
    TargetEncoding,
    Workflow,
)
from nbdist.recsys.etl.moments import COUNT, SQUARES, SUM, Sums, key
from nbdist.recsys.triton.export import Ensemble
from nbdist.recsys.triton.request import served_steps
from nbdist.recsys.triton.served.preprocess import Preprocessing

SCHEMA = {
    "row": pl.Int64,
    "user": pl.Int32,
    "genre": pl.String,
    "price": pl.Float64,
    "time": pl.Int64,
    "label": pl.Boolean,
}
STATS = ["count", "sum", "mean", "std", "var", "min", "max"]
STEPS = (
    Normalize("time"),
    NormalizeMinMax("row"),
    JoinGroupby("user", ("user", "genre"), columns="price", stats=STATS),
    TargetEncoding("genre", ("user", "genre"), target="label", folds=3, smoothing=2.5, seed=7),
    FillMissing("price", value=-1),
    Normalize("price", "user_price_mean"),
)
MADE = [
    "price",
    "time",
    "row",
    *(f"{by}_{one}" for by in ("user", "user_genre") for one in ("count", *(f"price_{stat}" for stat in STATS[1:]))),
    "TE_genre_label",
    "TE_user_genre_label",
]

floats = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf, 0.1, 1e-300, 0.0])
rows = st.lists(
    st.tuples(
        st.none() | st.integers(0, 4) | st.sampled_from([-(10**6), 10**9]),
        st.none() | st.sampled_from(["war", "", "é"]),
        st.none() | floats,
        st.integers(0, 1000) | st.integers(1_700_000_000, 1_700_000_009),
        st.none() | st.booleans(),
    ),
    min_size=1,
    max_size=15,
).map(lambda many: [(number, *row) for number, row in enumerate(many)])


def frame_of(rows: list[Any]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def learnable(rows: list[Any]) -> bool:
    """Return whether there is a price and a label to learn from."""
    return any(known(row[3]) for row in rows) and any(row[5] is not None for row in rows)


def known(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def close(found: Any, expected: Any) -> bool:
    return bool(np.isclose(found, expected, rtol=2e-6, atol=1e-9))


def numbers(values: list[Any]) -> dict[str, float]:
    """The statistics of some values, as far as there are any."""
    values = [Fraction(value) for value in values if known(value)]
    found = {"sum": float(sum(values))}
    if values:
        found |= {"mean": float(sum(values) / len(values)), "min": float(min(values)), "max": float(max(values))}
    if len(values) > 1:
        var = float(statistics.variance(values))
        found |= {"var": var, "std": math.sqrt(var)}
    return found


def write(folder: Path, frame: pl.DataFrame, cuts: list[int]) -> Path:
    """The rows in files that end at `cuts`, some of them empty."""
    folder.mkdir(parents=True)
    edges = sorted({min(cut, frame.height) for cut in cuts} | {0, frame.height})
    for number, (start, stop) in enumerate(zip(edges, [*edges[1:], edges[-1]], strict=True)):
        frame[start:stop].write_parquet(folder / f"{number:02}.parquet", row_group_size=3)
    return folder


@pytest.mark.slow
@given(rows.filter(learnable), rows, st.lists(st.integers(0, 25), max_size=4), st.sampled_from([1, 1 << 30]))
@settings(max_examples=5, deadline=None)
def test_statistics_match_the_reference(
    tmp_path_factory: pytest.TempPathFactory, seen: list[Any], asked: list[Any], cuts: list[int], memory: int
) -> None:
    path = tmp_path_factory.mktemp("features")
    train = frame_of(seen)
    one = Workflow(*STEPS).fit(write(path / "in", train, cuts), memory_bytes=memory, progress=False)
    assert one.state.tables.keys() == Workflow(*STEPS).fit(train, progress=False).state.tables.keys()
    for name, table in Workflow(*STEPS).fit(train, progress=False).state.tables.items():
        assert table.equals(one.state.tables[name]), f"{name} does not depend on files and memory"
    every = {"count": 0.0, "std": 0.0, "var": 0.0} | numbers([row[3] for row in seen]) | {"sum": 0.0}
    by_key: dict[Any, list[Any]] = defaultdict(list)
    for row in seen:
        for by in ((row[1],), (row[1], row[2]), ("genre", row[2])):
            by_key[by].append(row)
    labels = [row[5] for row in seen if row[5] is not None]
    prior = sum(labels) / len(labels)

    answers = one.transform(frame_of(asked), MADE).collect()
    times, last = [row[4] for row in seen], len(seen) - 1
    deviation = statistics.stdev(times) if last else 0
    for row, found in zip(asked, answers.iter_rows(named=True), strict=True):
        for name, by in (("user", (row[1],)), ("user_genre", (row[1], row[2]))):
            expected = every | numbers([other[3] for other in by_key[by]])
            assert found[f"{name}_count"] == len(by_key[by])
            for stat in STATS[1:]:
                if (name, stat) != ("user", "mean"):  # which is normalized
                    assert close(found[f"{name}_price_{stat}"], expected[stat]), (name, stat)
        for name, by in (("genre", ("genre", row[2])), ("user_genre", (row[1], row[2]))):
            mine = [other[5] for other in by_key[by] if other[5] is not None]
            assert close(found[f"TE_{name}_label"], (sum(mine) + 2.5 * prior) / (len(mine) + 2.5))
        assert close(found["time"], (row[4] - statistics.mean(times)) / (deviation or 1))
        assert close(found["row"], row[0] / (last or 1))

    # A server says the same, and so does a workflow that was saved.
    one.save(path / "saved")
    loaded = Workflow.load(path / "saved")
    assert repr(loaded) == repr(one) and loaded.describe() == one.describe()
    assert loaded.transform(frame_of(asked), MADE).collect().equals(answers)
    result = served_steps(loaded, MADE)
    result.write(path)
    assert "label" not in result.inputs
    request = Ensemble(path, "", result.inputs, "").request(
        frame_of(asked).with_columns(pl.col("price").fill_null(math.nan))
    )
    served = Preprocessing(path)(request)
    for name in MADE:
        assert served[name].dtype == answers[name].to_numpy().dtype
        np.testing.assert_array_equal(served[name][:, 0], answers[name].to_numpy(), err_msg=name)

    # And so do files.
    files = loaded.write(
        frame_of(asked), path / "out", training=False, shuffle=False, memory_bytes=memory, progress=False
    )
    assert pl.concat(map(pl.read_parquet, files)).equals(loaded.transform(frame_of(asked)).collect())


@given(rows.filter(learnable), st.data())
@settings(max_examples=8, deadline=None)
def test_no_row_sees_its_own_target(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("folds")
    number = data.draw(st.integers(0, len(rows) - 1))
    encoding = TargetEncoding(
        "genre", ("user", "genre"), target="label", folds=4, smoothing=data.draw(st.sampled_from([0, 3]))
    )
    found = []
    for label in (True, False):
        frame = frame_of([(*row[:5], label if row[0] == number else row[5]) for row in rows])
        one = Workflow(encoding).fit(frame, progress=False)
        files = one.write(frame, path / str(label), training=True, seed=3, progress=False)
        done = pl.concat(map(pl.read_parquet, files)).sort("row")
        assert (
            done["row"].to_list() == list(range(len(rows))) and not done[encoding.adds].null_count().sum_horizontal()[0]
        )
        folds = one.state.tables["target_encoding_folds", "TE_genre_label"]
        if len(folds.filter(pl.col(COUNT) > 0)[key("fold (nbdist)")].unique()) > 1:
            found.append(done[number].select(encoding.adds).row(0))
    assert len(set(found)) <= 1, "a row's own label changes what it is encoded as"


def test_means_are_out_of_fold(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame({"movie": rng.integers(0, 50, 5000), "label": rng.integers(0, 2, 5000)})
    one = Workflow(TargetEncoding("movie", target="label", smoothing=0)).fit(frame, progress=False)
    coded = {}
    for training in (True, False):
        (file,) = one.write(
            frame, tmp_path / str(training), training=training, num_files=1, shuffle=False, progress=False
        )
        coded[training] = pl.read_parquet(file)
    # The labels are random, so a movie's mean says nothing of a row; but where the row itself is in it, it does.
    correlation = {training: one.select(pl.corr("TE_movie_label", "label")).item() for training, one in coded.items()}
    assert correlation[False] > 0.05 and correlation[True] < 0.02
    assert coded[True]["TE_movie_label"].n_unique() > 100, "more than one mean for a movie"


@given(st.lists(st.floats(-1e150, 1e150) | st.floats(-10, 10) | st.just(-0.0), min_size=1, max_size=40), st.randoms())
@settings(max_examples=40, deadline=None)
def test_sums_do_not_depend_on_the_order(values: list[float], random: Any) -> None:
    def table(values: list[float], cut: int) -> pl.DataFrame:
        sums = Sums(["key"])
        frame = pl.DataFrame({key("key"): [1 if value > 0 else None for value in values], "value": values})
        for part in (frame[:cut], frame[cut:]):
            sums.add(part)
        return sums.everywhere()

    first = table(values, 0)
    random.shuffle(values)
    assert table(values, random.randint(0, len(values))).equals(first)
    for row in first.iter_rows(named=True):
        mine = [value for value in values if (value > 0) == (row[key("key")] == 1)]
        assert row[COUNT] == len(mine)
        scale = max(map(abs, mine))
        assert row[SUM] == pytest.approx(float(sum(map(Fraction, mine))), rel=1e-14, abs=scale * 1e-14)


def test_a_small_spread_of_large_numbers() -> None:
    times = pl.DataFrame({"time": [1_700_000_000.0 + i % 3 for i in range(999)]})
    one = Workflow(Normalize("time")).fit(times, progress=False)
    table = one.state.tables["normalize", "time"]
    assert table[SQUARES].item() == pytest.approx(666, rel=1e-12) and table[SUM].item() == times["time"].sum()


def test_the_largest_numbers_that_are_learned_from() -> None:
    values = [1e150, -1e150, math.nextafter(1e150, math.inf), math.nan, None]
    one = Workflow(Normalize("x")).fit(pl.DataFrame({"x": values}), progress=False)
    assert one.state.tables["normalize", "x"][COUNT].item() == 2


# --- the next day ---


@given(rows.filter(learnable), rows)
@settings(max_examples=5, deadline=None)
def test_fitting_continues_from_a_previous_workflow(
    tmp_path_factory: pytest.TempPathFactory, first: list[Any], second: list[Any]
) -> None:
    steps = STEPS[:4]
    old = Workflow(*steps).fit(frame_of(first), progress=False)
    path = tmp_path_factory.mktemp("days") / "old"
    old.save(path)
    both = Workflow(*steps).fit(pl.concat([frame_of(first), frame_of(second)]), progress=False)
    try:
        new = Workflow(*steps).fit(frame_of(second), previous=path, progress=False)
    except ValueError as error:
        assert not learnable(second) and "has no value" in str(error)
        raise
    assert new.rows == both.rows
    asked = frame_of(first + second)
    found, expected = (
        one.transform(asked, [name for name in MADE if name != "price"]).collect() for one in (new, both)
    )
    for name in found.columns:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-6, err_msg=name)
    files = new.write(frame_of(second), path.with_name("out"), training=True, progress=False)
    assert sum(pl.read_parquet(file).height for file in files) == len(second), "today's rows are those in folds"


@pytest.mark.parametrize("saved", [False, True])
def test_the_third_day_and_the_fourth(tmp_path: Path, saved: bool) -> None:
    draw = np.random.default_rng(0)
    day = pl.int_range(pl.len()) // 50
    log = pl.DataFrame({"user": draw.integers(0, 9, 200), "price": draw.normal(5, 2, 200)}).with_columns(
        liked=pl.col("price") > 5
    )
    steps = [
        TargetEncoding("user", target="liked", smoothing=3),
        JoinGroupby("user", columns="price", stats=["mean", "std", "max"]),
        Normalize("price"),
    ]
    first, *others = (log.filter(day == number) for number in range(4))
    workflow = Workflow(*steps).fit(first, progress=False)
    for number, rows in enumerate(others):
        if saved:
            workflow.save(tmp_path / str(number))
        previous: Any = tmp_path / str(number) if saved else workflow
        workflow = Workflow(*steps).fit(rows, previous=previous, progress=False)
    whole = Workflow(*steps).fit(log, progress=False)
    found, expected = (one.transform(log).collect() for one in (workflow, whole))
    for name in expected.columns:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, err_msg=name)


def test_a_previous_workflow_that_does_not_fit_is_refused() -> None:
    rows = pl.DataFrame({"user": [1, 2], "price": [1.0, 2.0]})
    old = Workflow(JoinGroupby("user", columns="price", stats="mean")).fit(rows, progress=False)
    with pytest.raises(ValueError, match="'user_price' cannot continue the previous workflow, which had other keys"):
        Workflow(*old.steps).fit(rows.cast({"user": pl.String}), previous=old, progress=False)
    with pytest.raises(ValueError, match="which had no std or var"):
        Workflow(JoinGroupby("user", columns="price", stats="std")).fit(rows, previous=old, progress=False)


# --- rows ---


@given(
    st.lists(
        st.tuples(st.none() | st.integers(0, 2), st.none() | st.integers(0, 9), st.booleans()), min_size=1, max_size=30
    ),
    st.lists(st.integers(0, 30), max_size=4),
    st.sampled_from([1, 1 << 30]),
    st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_filters_and_differences(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], cuts: list[int], memory: int, filtered: bool
) -> None:
    path = tmp_path_factory.mktemp("rows")
    frame = pl.DataFrame(rows, schema={"user": pl.Int64, "time": pl.Int64, "keep": pl.Boolean}, orient="row")
    steps: list[Any] = [
        Compute(twice=2 * pl.col("time")),
        DifferenceLag("twice", by="user", shift=[1, -2]),
        Drop("keep"),
    ]
    kept = [row for row in rows if row[2]] if filtered else rows
    if filtered:
        steps.insert(0, Filter(pl.col("keep")))
    expected = []
    for i, (user, time, _) in enumerate(kept):
        differences: list[Any] = []
        for shift in (1, -2):
            other = kept[i - shift] if 0 <= i - shift < len(kept) else (object(), None, None)
            there = user == other[0] and None not in (time, other[1])
            differences.append(2 * time - 2 * other[1] if there else None)
        expected.append((user, time, None if time is None else 2 * time, *differences))
    one = Workflow(*steps, Categorify("user"))
    folder = write(path / "in", frame, cuts)
    if not kept:
        with pytest.raises(ValueError, match="is true for none of the"):
            one.fit(folder, memory_bytes=memory, progress=False)
        return
    one.fit(folder, memory_bytes=memory, progress=False)
    assert one.rows == len(kept)
    codes = one.vocabularies["user"].mapping()
    expected = [(0 if user is None else codes[user], *rest) for user, *rest in expected]
    one.save(path / "saved")
    for training, each in ((None, one), (True, Workflow.load(path / "saved"))):
        options: dict[str, Any] = {"training": training, "num_files": 2, "memory_bytes": memory, "progress": False}
        files = each.write(folder, path / "plain", shuffle=False, row_group_size=2, overwrite=True, **options)
        assert [row for file in files for row in pl.read_parquet(file).rows()] == expected
        files = each.write(folder, path / "mixed", overwrite=True, **options)
        found = [row for file in files for row in pl.read_parquet(file).rows()]
        assert sorted(found, key=repr) == sorted(expected, key=repr)
    if not filtered:
        assert one.transform(frame).collect().rows() == expected
    answers = one.transform(frame.drop("keep"), ["user"]).collect()
    assert answers.height == len(rows), "every row is answered"


def test_steps_see_the_rows_that_are_left() -> None:
    rows = pl.DataFrame({"user": ["a", "a", "b", "c", "c", "c"], "x": [1, 2, 3, 4, 5, 6]})
    one = Workflow(
        Categorify("user", min_count=2),
        Filter(pl.col("user") > 1),  # those that are known
        JoinGroupby("user"),
        TargetEncoding("user", target="x", folds=2, smoothing=0),
        Filter(pl.col("TE_user_x") > 0),
        Normalize("x"),
    ).fit(rows, progress=False)
    assert one.vocabularies["user"].unseen == 1, "the step before the filter has seen all"
    assert one.state.tables["join_groupby", "user"]["rows"].to_list() == [3, 2]
    assert one.rows == 5 and one.state.tables["normalize", "x"][SUM].item() == 18


def test_transform_needs_only_the_columns_of_its_outputs(tmp_path: Path) -> None:
    rows = pl.DataFrame({"user": [1, 1, 2], "a": [1, 3, 9], "b": [5, 5, 5], "key user": [7, 8, 9], "value": [1, 2, 3]})
    one = Workflow(
        Compute(c=pl.col("a") + 1),
        DifferenceLag("a", "b", "c", by="user"),
        JoinGroupby(("user", "value"), ("key user", "user"), columns="value", stats="max"),
    ).fit(rows, progress=False)

    def done(columns: list[str], frame: pl.DataFrame) -> list[Any]:
        options: dict[str, Any] = {"num_files": 1, "shuffle": False, "progress": False, "overwrite": True}
        (file,) = one.write(frame, tmp_path / "out", columns=columns, **options)
        return pl.read_parquet(file).rows()

    assert done(["c_difference_lag_1"], rows.select("user", "a")) == [(None,), (2,), (None,)]
    assert done(["user"], rows.select("user")) == [(1,), (1,), (2,)]
    names = ["key user", "value", "key user_user_value_max"]
    assert done(names, rows.select("user", "key user", "value")) == [(7, 1, 1), (8, 2, 2), (9, 3, 3)]
    with pytest.raises(ValueError, match="no column 'b'"):
        done(["b_difference_lag_1"], rows.drop("b"))


def test_a_request_has_no_row_before_it() -> None:
    rows = pl.DataFrame({"user": [1, 1], "time": [1, 2]})
    one = Workflow(Filter(pl.col("time") > 0), DifferenceLag("time", by="user"), Normalize("user")).fit(
        rows, progress=False
    )
    with pytest.raises(ValueError, match="'time_difference_lag_1' is the difference from another row"):
        served_steps(one, ["time_difference_lag_1"])
    assert served_steps(one, ["user"]).inputs == {"user": "int64"}, "a request is not filtered"


def test_a_null_that_no_server_can_normalize(tmp_path: Path) -> None:
    one = Workflow(Normalize("x")).fit(pl.DataFrame({"x": [1, 3]}), progress=False)
    rows = pl.DataFrame({"x": [None, 2]}, schema={"x": pl.Int64})
    assert one.transform(rows).collect()["x"].to_list() == [None, 0.0]
    result = served_steps(one, ["x"])
    result.write(tmp_path)
    with pytest.raises(ValueError, match="x is null, which it never was in training"):
        Preprocessing(tmp_path)(Ensemble(tmp_path, "", result.inputs, "").request(rows))


# --- what makes no sense ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normalize(), "no columns are named"),
        (lambda: TargetEncoding(target="y"), "no columns are named"),
        (lambda: TargetEncoding("a", target="a"), "is the target, and cannot be a category"),
        (lambda: TargetEncoding("a", target="y", folds=1), "`folds` must be at least 2, got 1"),
        (lambda: TargetEncoding("a", target="y", smoothing=-1), "`smoothing` must be .* got -1"),
        (lambda: TargetEncoding("a", target="y", smoothing=math.nan), "`smoothing` must be .* got nan"),
        (lambda: TargetEncoding("a", "a", target="y"), "named twice"),
        (lambda: JoinGroupby(), "no keys are named"),
        (lambda: JoinGroupby("a", stats="median"), "must be among 'count', .* got 'median'"),
        (lambda: JoinGroupby("a", stats="mean"), "all statistics except 'count' need columns"),
        (lambda: JoinGroupby("a", columns="b"), "all statistics except 'count' need columns"),
        (lambda: JoinGroupby("a_b", ("a", "b")), "'a_b_count' would be made twice"),
        (lambda: DifferenceLag("a", by="b", shift=0), "`shift` must be .* got 0"),
        (lambda: DifferenceLag("a", by="b", shift=[]), r"`shift` must be .* got \[\]"),
        (lambda: Filter(pl.lit(True)), "must read at least one column"),
        (lambda: Filter(pl.col("x").map_elements(bool, pl.Boolean)), "Python function"),
        (lambda: Workflow(Normalize("a"), Normalize("a")), "'a' is learned by two Normalize steps"),
    ],
)
def test_arguments_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Normalize("name"), "Normalize: column 'name' is String: numbers are needed"),
        (Normalize("nothing"), "Normalize: column 'nothing' has no value to learn from"),
        (NormalizeMinMax("there"), "no column 'there'"),
        (TargetEncoding("x", target="y"), "column 'x' is Float64, which cannot be categorified"),
        (TargetEncoding("many", target="y"), r"column 'many' is List\(Int64\): single values are needed"),
        (TargetEncoding("y", target="name"), "column 'name' is String: numbers are needed"),
        (TargetEncoding("y", target="nothing"), "column 'nothing' has no value to learn from"),
        (JoinGroupby("y", columns="name", stats="max"), "column 'name' is String: numbers are needed"),
        (DifferenceLag("name", by="y"), "column 'name' is String: numbers are needed"),
        (DifferenceLag("x", by="z"), "no column 'z'"),
        (Filter(pl.col("x") + 1), "must be true or false, got .* of type Float64"),
        (Filter(pl.col("x") > pl.col("x").mean()), "not computed row by row"),
        (Filter(pl.col("x") > 100), "is true for none of the 2 rows"),
    ],
)
def test_columns_that_do_not_fit(step: Any, message: str) -> None:
    rows = pl.DataFrame(
        {"x": [0.5, 1.5], "y": [1, 2], "name": ["a", "b"], "nothing": [None, math.nan], "many": [[1], [2]]},
        schema_overrides={"nothing": pl.Float64},
    )
    with pytest.raises(ValueError, match=message):
        Workflow(step).fit(rows, progress=False)


def test_write_needs_training_with_a_target_encoding(tmp_path: Path) -> None:
    rows = pl.DataFrame({"user": [1, 2, 1], "label": [0, 1, 1]})
    one = Workflow(TargetEncoding("user", target="label")).fit(rows, progress=False)
    with pytest.raises(
        ValueError, match="`training` must be given for a workflow with a TargetEncoding: True for the rows"
    ):
        one.write(rows, tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="2 rows with training=True, but 'TE_user_label' was fitted to 3"):
        one.write(rows[:2], tmp_path / "out", training=True, progress=False)
    one.write(rows, tmp_path / "out", columns=["user"], progress=False)  # this column is not encoded
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_types_of_keys(tmp_path: Path) -> None:
    for dtype, values in (
        (pl.Categorical, ["b", "a", None, "b"]),
        (pl.Enum(["a", "b"]), ["b", "a", None, "b"]),
        (pl.Boolean, [True, False, None, True]),
        (pl.UInt64, [2**63, 1, None, 2**63]),
    ):
        rows = pl.DataFrame({"key": values, "y": [1, 2, 3, 4]}, schema={"key": dtype, "y": pl.UInt8})
        steps = JoinGroupby("key", ("key", "y"), columns="y", stats=["count", "max"]), TargetEncoding("key", target="y")
        one = Workflow(*steps).fit(rows, memory_bytes=1, progress=False)
        found = one.transform(rows, ["key_count", "key_y_max", "key_y_count"]).collect()
        assert found.rows() == [(2, 4, 1), (1, 2, 1), (1, 3, 1), (2, 4, 1)]
        one.save(tmp_path / "saved", overwrite=True)
        assert Workflow.load(tmp_path / "saved").transform(rows).collect().equals(one.transform(rows).collect())
    steps_file = json.loads((tmp_path / "saved" / "workflow.json").read_text())["steps"]
    assert [step["kind"] for step in steps_file] == ["join_groupby", "target_encoding"]


@given(
    st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9),
    st.integers(1, 120),
    st.integers(0, 40),
)
@settings(max_examples=25, deadline=None)
def test_values_that_are_all_the_same_have_no_distances(value: float, rows: int, more: int) -> None:
    """The mean of 0.1, 0.1, 0.1 is no 0.1 if it is their sum by three."""
    frame = pl.DataFrame({"key": [1] * rows, "price": [value] * rows})
    steps = [JoinGroupby("key", columns="price", stats=["mean", "std", "var"]), Normalize("price")]
    workflow = Workflow(*steps).fit(frame, progress=False)
    if more:
        workflow = Workflow(*steps).fit(frame[:more], previous=workflow, progress=False)
    found = workflow.transform(frame).collect()
    assert found["price"].abs().max() == found["key_price_std"].max() == found["key_price_var"].max() == 0
    assert found["key_price_mean"].unique().to_list() == [value]
    other = workflow.transform(pl.DataFrame({"key": [1], "price": [value + 1]})).collect()["price"].item()
    assert other == pytest.approx(1)


@pytest.mark.parametrize("step", [Normalize("price"), NormalizeMinMax("price")])
def test_values_that_differ_by_rounding_alone_are_one(step: Any) -> None:
    frame = pl.DataFrame({"price": [0.1 + 0.2, 0.3, 0.3]})
    workflow = Workflow(step).fit(frame, progress=False)
    found = workflow.transform(pl.concat([frame, pl.DataFrame({"price": [1.3]})])).collect()["price"]
    assert found[:3].abs().max() < 1e-9 and found[3] == pytest.approx(1)


def test_other_rows_than_those_of_fit_are_refused(tmp_path: Path) -> None:
    """Coin flips: a row that sees its own target in a mean has a column that shows it."""
    draw = np.random.default_rng(0)
    flips = {"user": draw.integers(0, 200, 2000), "label": draw.integers(0, 2, 2000), "time": range(2000)}
    rows = pl.DataFrame(flips).with_columns(gain=pl.col("label") + 0.5, name=pl.col("user").cast(pl.String))
    steps = (
        Filter(pl.col("time") > 100),
        TargetEncoding("user", ("user", "name"), target="label"),
        TargetEncoding("name", target="gain"),
        Drop("time"),
    )
    workflow = Workflow(*steps).fit(rows, progress=False)
    workflow.save(tmp_path / "workflow")
    rows.write_parquet(tmp_path / "rows.parquet", row_group_size=300)
    again = Workflow.load(tmp_path / "workflow")
    usual = {"training": True, "progress": False, "num_files": 1, "shuffle": False, "overwrite": True}
    files = [
        (workflow if one is rows else again).write(one, tmp_path / "out", memory_bytes=memory, **usual)  # type: ignore[arg-type]
        for one, memory in (
            (rows, 1 << 30),
            (tmp_path / "rows.parquet", 1 << 16),
            (rows.cast({"user": pl.Int16}), 1 << 20),
        )
    ]
    assert len(files) == 3
    again.write(rows.drop("name"), tmp_path / "one", columns=["TE_user_label"], **usual)  # type: ignore[arg-type]
    within = rows.with_columns(pl.col("label", "gain").shuffle(seed=1).over("user"))  # the keys are where they were
    for other in (rows.sample(fraction=1, shuffle=True, seed=1), rows.sort("user"), within, rows.reverse()):
        for columns in (None, ["TE_user_name_label"], ["TE_name_gain"]):
            with pytest.raises(ValueError, match=r"not in the order, that .* would see its own target.*training=False"):
                again.write(other, tmp_path / "other", columns=columns, **usual)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no column 'label'"):
        again.write(rows.drop("label"), tmp_path / "other", **usual)  # type: ignore[arg-type]
