"""Writes the golden workflows: what was fitted, saved, answered, written and served once, and has to stay so.

    python tests/recsys/etl/golden/make.py [CASE ...]

Each case is a folder: `saved/` is the workflow as `Workflow.save` wrote it; `transformed.parquet` and
`written.parquet` are the answers to `ASKED` and the training rows as they are written; `served.json` is the answer of
the NumPy form. Only a change that is meant to change them writes them again.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from nbdist.recsys.etl import (
    Bucketize,
    Categorify,
    Clip,
    Compute,
    DifferenceLag,
    Drop,
    FillMissing,
    Filter,
    HashedCross,
    Join,
    JoinGroupby,
    ListSlice,
    Log,
    Normalize,
    NormalizeMinMax,
    TargetEncoding,
    Workflow,
)
from nbdist.recsys.triton.export import Ensemble
from nbdist.recsys.triton.request import served_steps
from nbdist.recsys.triton.served.preprocess import Preprocessing

HERE = Path(__file__).parent
SCHEMA = pl.Schema(
    {
        "user": pl.Int32(),
        "movie": pl.Int64(),
        "genre": pl.String(),
        "tags": pl.List(pl.String()),
        "seen": pl.List(pl.Int64()),
        "price": pl.Float64(),
        "score": pl.Float32(),
        "age": pl.Int16(),
        "visits": pl.UInt8(),
        "time": pl.Int64(),
        "free": pl.Boolean(),
        "kind": pl.Enum(["b", "a"]),
        "label": pl.Boolean(),
    }
)
NAN, INF = math.nan, math.inf
TRAIN = pl.DataFrame(
    [
        (1, 10, "war", ["x", "y"], [10, 20], 1.5, 0.5, 17, 3, 1_700_000_000, True, "a", True),
        (1, 20, "war", ["x"], [20], 0.1, 1.5, 18, 0, 1_700_000_060, False, "b", False),
        (2, 10, "", [], [], NAN, -2.0, 65, 255, 1_700_000_100, True, "a", True),
        (2, 30, None, None, None, None, 0.25, None, 7, 1_700_000_160, None, None, None),
        (3, -(2**62), "é", [None, "y"], [None, 30], -3.25, NAN, -5, None, 1_700_000_160, True, "a", False),
        (None, 20, "drama", ["z", "x", "x"], [30, 10, 20], 99.0, 1e30, 30, 90, 1_700_000_170, False, "b", True),
        (3, 2**63 - 1, "drama", ["y"], [99], 0.0, -0.0, 66, 2, 1_700_000_200, True, "b", False),
        (1, 10, "war", ["x", "y", "z"], [10, 10], INF, 2.5, 40, 5, 1_700_000_210, False, "a", True),
        (4, None, "war", ["q"], [20, 99, 7], 1e-300, 3.5, 17, 1, 1_700_000_300, True, None, True),
        (2, 20, "drama", ["x"], [10], 12.5, 7.0, 18, 4, 1_700_000_310, False, "a", False),
    ],
    schema=SCHEMA,
    orient="row",
)
ASKED = pl.DataFrame(
    [
        (1, 10, "war", ["y", "new"], [20, 5], 2.0, 0.5, 18, 3, 5, True, "a", None),
        (9, 77, "new", [], [], NAN, NAN, None, 0, 0, None, "b", None),
        (None, None, None, None, None, INF, -INF, -32768, 255, 2**62, False, None, None),
        (3, 2**63 - 1, "", [None, "x", "y", "z"], [None, 99, 10], -1e300, 1.0, 32767, 9, -(2**62), True, "b", None),
        (2, 30, "é", ["z"], [7, 7, 7], 0.1, -0.5, 65, 200, 1_700_000_000, True, "a", None),
    ],
    schema=SCHEMA,
    orient="row",
)
MOVIES = pl.DataFrame(
    {
        "movie": [10, 20, 30, 99],
        "year": [1979, None, 2001, 1979],
        "studio": ["A", None, "B", "A"],
        "cast": [["ann", "bob"], [], None, ["bob", None]],
        "color": [True, None, False, True],
    },
    schema_overrides={"year": pl.Int16},
)
PAIRS = pl.DataFrame({"genre": ["war", "war", "", None], "free": [True, False, True, True], "rank": [1, 2, 3, 4]})
FAR = pl.DataFrame({"movie": [10, -(2**62), 2**63 - 1], "far": ["p", "q", "p"]})
COSTS = pl.DataFrame(
    {"user": [1, 2, 3, 9, None], "cost": [0.5, 1.5, NAN, 2.5, 3.0]}, schema_overrides={"user": pl.Int32}
)
STATS = ["count", "sum", "mean", "std", "var", "min", "max"]


@dataclass
class Case:
    steps: Sequence[Any]
    served: Sequence[str] = ()
    """The columns of a request's answer."""
    asked: pl.DataFrame = field(default_factory=ASKED.clone)
    before: Sequence[Any] = ()
    """The steps of a workflow, fitted to `ASKED`, to go on from."""


CASES = {
    "elementwise": Case(
        [
            Bucketize("age", boundaries=[-5, 18.5, 65]),
            FillMissing("visits", value=3),
            Clip("visits", min_value=2, max_value=90),
            FillMissing("price", "score", value=1),
            Clip("score", min_value=0),
            Clip("time", max_value=1_700_000_100),
            Clip("price", min_value=-0.5),
            Log("visits", "price", "score"),
            ListSlice("seen", last=2),
            Categorify("seen", "tags"),
            ListSlice("tags", first=2),
            ListSlice("seen", last=1),
        ],
        ["age", "visits", "price", "score", "time", "seen", "tags"],
    ),
    "join": Case(
        [
            Join(MOVIES, "movie"),
            Join(PAIRS, ["genre", "free"]),
            Join(FAR, "movie", columns="far"),
            Categorify("studio", "cast", "color", "far", "rank"),
            FillMissing("year", value=2000),
            Bucketize("year", boundaries=[1980, 2000]),
        ],
        ["studio", "cast", "color", "far", "rank", "year"],
    ),
    "joined_floats": Case([Join(COSTS, "user")], ["cost"], ASKED.filter(pl.col("user").is_in([1, 2, 3, 9]))),
    "joined_after_codes": Case(
        [
            Categorify("user"),
            Join(pl.DataFrame({"user": [0, 1, 2, 3], "group": ["p", "q", "q", None]}), "user"),
            Join(pl.DataFrame({"group": ["p", "q"], "size": [7, 8]}), "group"),
            Categorify("group", "size"),
        ],
        ["user", "group", "size"],
    ),
    "categorify": Case(
        [
            Categorify(("movie", "seen"), "user", min_count={"user": 2}, max_size={"movie": 4}),
            Categorify("genre", "time", num_buckets={"genre": 3, "time": 1000}, max_size={"genre": 6, "time": 1001}),
            Categorify("tags", num_buckets=5),
            Categorify("free", "kind"),
        ],
        ["movie", "seen", "user", "genre", "time", "tags", "free", "kind"],
    ),
    "crosses": Case(
        [
            HashedCross("genre", "age", "free", name="all", num_buckets=50),
            HashedCross("user", "movie", name="ids", num_buckets=1 << 20),
            HashedCross("genre", "kind", name="kind", num_buckets=1),
            Categorify("user"),
            HashedCross("user", "all", name="user", num_buckets=9),
        ],
        ["all", "ids", "kind", "user"],
    ),
    "scales": Case(
        [
            NormalizeMinMax("time"),
            FillMissing("visits", value=0),
            Normalize("price", "score", "visits"),
            Clip("time", min_value=0, max_value=1),
        ],
        ["time", "price", "score", "visits"],
    ),
    "statistics": Case(
        [
            JoinGroupby("user", ("genre", "free"), columns=["price", "age"], stats=STATS),
            JoinGroupby("kind", "movie"),
            Log("user_count"),
            Normalize("user_price_mean"),
        ],
        [
            *(f"{by}_{one}" for by in ("user", "genre_free") for one in ("count", *(f"price_{x}" for x in STATS[1:]))),
            "genre_free_age_max",
            "kind_count",
            "movie_count",
        ],
    ),
    "targets": Case(
        [
            TargetEncoding("genre", ("user", "genre"), target="label", folds=3, smoothing=2.5, seed=7),
            Categorify("movie"),
            TargetEncoding("movie", target="price", smoothing=0),
            NormalizeMinMax("TE_genre_label"),
        ],
        ["TE_genre_label", "TE_user_genre_label", "TE_movie_price", "movie"],
    ),
    "rows": Case(
        [
            Filter(pl.col("visits") > 0),
            DifferenceLag("time", "price", by=["user"], shift=[1, -2]),
            Categorify("user"),
            Drop("movie", "tags"),
        ],
        ["user"],
    ),
    "computed": Case(
        [
            Compute(label=pl.col("score") > 1, hour=pl.col("time") // 3600 % 24),
            Categorify("hour"),
            TargetEncoding("user", target="label", smoothing=1),
            Drop("time"),
        ],
        ["TE_user_label"],
    ),
    "back_again": Case(
        [Drop("genre"), Join(MOVIES.select("movie", genre="studio"), "movie"), Categorify("genre")], ["genre"]
    ),
    "grown": Case(
        [
            Categorify("user", "genre", "seen", num_buckets={"genre": 2}),
            JoinGroupby("kind", columns="price", stats=["mean", "std"]),
            NormalizeMinMax("score"),
        ],
        ["user", "genre", "seen", "kind_price_mean", "kind_price_std", "score"],
        before=[
            Categorify("user", "genre", "seen", num_buckets={"genre": 2}),
            JoinGroupby("kind", columns="price", stats=["mean", "std"]),
            NormalizeMinMax("score"),
        ],
    ),
}


def fitted(case: Case) -> Workflow:
    """The workflow of a case."""
    previous = Workflow(*case.before).fit(ASKED, progress=False) if case.before else None
    return Workflow(*case.steps).fit(TRAIN, previous=previous, progress=False)


def transformed(workflow: Workflow, case: Case) -> pl.DataFrame:
    """The answer in this process."""
    return workflow.transform(case.asked).collect()


def written(workflow: Workflow) -> pl.DataFrame:
    """The training rows as they are written, those that a `TargetEncoding` gives by fold included."""
    with tempfile.TemporaryDirectory() as folder:
        files = workflow.write(
            TRAIN, Path(folder, "out"), training=True, num_files=2, shuffle=False, row_group_size=3, progress=False
        )
        return pl.concat(pl.read_parquet(file) for file in files)


def served(workflow: Workflow, case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """The answer of the NumPy form. A request has NaN where a float is missing."""
    with tempfile.TemporaryDirectory() as folder:
        result = served_steps(workflow, list(case.served))
        result.write(Path(folder))
        asked = case.asked.with_columns(pl.col(pl.Float32, pl.Float64).fill_null(NAN))
        return Preprocessing(Path(folder))(Ensemble(Path(folder), "", result.inputs, "").request(asked))


def as_json(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Arrays as plain data."""
    return {name: {"dtype": str(array.dtype), "values": array.tolist()} for name, array in arrays.items()}


def main(names: Sequence[str]) -> None:
    """Write the folders of some cases."""
    for name in names or CASES:
        case, folder = CASES[name], HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        workflow = fitted(case)
        workflow.save(folder / "saved")
        transformed(workflow, case).write_parquet(folder / "transformed.parquet")
        written(workflow).write_parquet(folder / "written.parquet")
        text = json.dumps(as_json(served(workflow, case)))
        (folder / "served.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
