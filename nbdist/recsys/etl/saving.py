"""A fitted workflow in a folder: JSON, and Parquet for what may be large. No pickle; readable without polars.

``workflow.json``::

    format, version   "nbdist.recsys.etl", 2
    polars            the version that has written the expressions
    rows              how many rows the workflow was fitted to
    codes             {"null": 0, "unseen": 1}: of null, and the first of those of values that are not known
    inputs, outputs   {column: type}: what `fit` saw, and what the steps make of it; in order
    steps             in the order in which they are applied, each with its "kind":
      join            on: columns of the key; columns: {column: type} that are added; table: file with the key and
                      these columns. Keys in it are unique and not null; where no row has the key, the columns are null.
      categorify      columns: {column: {type, size, min_count, max_size, num_buckets, nulls, unseen, vocabulary}}.
                      The file `vocabulary` has the columns `value` and `count`, and columns may have the same one; the
                      value in row i (from 0) has code i + 1 + num_buckets. size = rows + 1 + num_buckets; nulls and
                      unseen: how often code 0 and those of values that are not known were seen; `buckets`, where there
                      are several: the file with the `count` of each of them. What is not known has code 1 + hash modulo
                      num_buckets, with the hash of `hashing.py`. In lists, each element is coded, and a null list
                      becomes [0].
      compute         columns: {column: {reads, expression}}: the columns it is computed from, and polars' JSON
      drop            columns: names
      hashed_cross    columns: names; name: of the new column; num_buckets. See `crossing.py`
      fill_missing, log, clip, bucketize, list_slice
                      columns: names; and what else `elementwise.py` says of each
      filter          columns: those that it reads; expression: polars' JSON
      difference_lag  columns, by: names; shift: numbers of rows
      normalize, normalize_min_max
                      columns: names; shift, scale: {column: number}. The value x becomes (x - shift) / scale
      target_encoding
                      columns: {new column: those that it is of}; target, folds, smoothing, seed
      join_groupby    by: the columns of each key; columns, stats: names
                      Each of the last four has `learnt`: {name: file}, with the table that `moments.py` describes; and
                      target_encoding has `learnt_by_fold` too.

A type is int8 .. uint64, float32, float64, bool, string, list[<one of these>], or else polars' own name for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from . import expressions
from .crossing import HashedCross
from .elementwise import KINDS, ColumnStep
from .fitted import FittedStep, Learnt
from .groupby import JoinGroupby
from .normalizing import Normalize, NormalizeMinMax
from .rows import DifferenceLag, Filter
from .steps import Categorify, Compute, Drop, Join, Step, type_name
from .target_encoding import TargetEncoding
from .vocabulary import NULL_CODE, UNSEEN_CODE, Vocabulary

_FORMAT, _VERSION = "nbdist.recsys.etl", 2
FILES = ("workflow.json", "table-*.parquet", "vocabulary-*.parquet", "learnt-*.parquet")


def describe(
    steps: Sequence[Step],
    learnt: Learnt,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    rows: int,
) -> dict[str, Any]:
    """What ``workflow.json`` holds, as plain data."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "polars": pl.__version__,
        "rows": rows,
        "codes": {"null": NULL_CODE, "unseen": UNSEEN_CODE},
        "inputs": dict(inputs),
        "outputs": dict(outputs),
        "steps": [_describe(number, step, learnt) for number, step in enumerate(steps)],
    }


def _describe(number: int, step: Step, learnt: Learnt) -> dict[str, Any]:
    vocabularies = learnt.vocabularies
    if isinstance(step, Join):
        columns: Any = {name: type_name(step.table.schema[name]) for name in step.adds}
        return {"kind": "join", "on": step.on, "columns": columns, "table": f"table-{number}.parquet"}
    if isinstance(step, Categorify):
        columns = {}
        for i, name in ((i, name) for i, group in enumerate(step.groups) for name in group):
            inner = type_name(vocabularies[name].values.dtype)
            columns[name] = {
                "type": f"list[{inner}]" if vocabularies[name].lists else inner,
                "size": vocabularies[name].size,
                "min_count": step.min_count[name],
                "max_size": step.max_size[name],
                "num_buckets": step.num_buckets[name],
                "nulls": vocabularies[name].nulls,
                "unseen": vocabularies[name].unseen,
                "vocabulary": f"vocabulary-{number}-{i}.parquet",
            }
            if step.num_buckets[name] > 1:
                columns[name]["buckets"] = f"vocabulary-{number}-{i}-buckets.parquet"
        return {"kind": "categorify", "columns": columns}
    if isinstance(step, Compute):
        columns = {
            name: {"reads": expressions.reads(one), "expression": expressions.to_json(one, f"Compute: column {name!r}")}
            for name, one in step.columns.items()
        }
        return {"kind": "compute", "columns": columns}
    if isinstance(step, ColumnStep):
        return {"kind": step.kind, "columns": step.adds, **step.options}
    if isinstance(step, HashedCross):
        return {"kind": "hashed_cross", "columns": step.columns, "name": step.name, "num_buckets": step.num_buckets}
    if isinstance(step, Filter):
        expression = expressions.to_json(step.condition, "Filter")
        return {"kind": "filter", "columns": expressions.reads(step.condition), "expression": expression}
    if isinstance(step, DifferenceLag):
        return {"kind": "difference_lag", "columns": step.columns, "by": step.by, "shift": step.shifts}
    if isinstance(step, FittedStep):
        return _describe_fitted(number, step, learnt)
    assert isinstance(step, Drop)
    return {"kind": "drop", "columns": step.columns}


def _describe_fitted(number: int, step: FittedStep, learnt: Learnt) -> dict[str, Any]:
    files = {name: f"learnt-{number}-{i}.parquet" for i, name in enumerate(step.aggregates())}
    described: dict[str, Any] = {"kind": step.kind, "columns": step.columns, "learnt": files}
    if isinstance(step, (Normalize, NormalizeMinMax)):
        both = {name: step.shift_and_scale(learnt, name) for name in step.columns}
        shift, scale = ({name: one[i] for name, one in both.items()} for i in range(2))
        return {**described, "shift": shift, "scale": scale}
    if isinstance(step, JoinGroupby):
        return {**described, "by": step.by, "stats": step.stats}
    assert isinstance(step, TargetEncoding)
    options = {"target": step.target, "folds": step.folds, "smoothing": step.smoothing, "seed": step.seed}
    by_fold = {name: f"learnt-{number}-{i}-folds.parquet" for i, name in enumerate(step.groups)}
    return {**described, "columns": step.groups, **options, "learnt_by_fold": by_fold}


def write(folder: Path, description: Mapping[str, Any], steps: Sequence[Step], learnt: Learnt) -> None:
    """Write the files of a workflow."""
    for step, described in zip(steps, description["steps"], strict=True):
        if isinstance(step, Join):
            step.table.write_parquet(folder / described["table"])
        elif isinstance(step, Categorify):
            for name, column in described["columns"].items():
                one = learnt.vocabularies[name]
                pl.DataFrame({"value": one.values, "count": one.counts}).write_parquet(folder / column["vocabulary"])
                if "buckets" in column:
                    one.bucket_counts.to_frame("count").write_parquet(folder / column["buckets"])
        elif isinstance(step, FittedStep):
            for part, kind in (("learnt", step.kind), ("learnt_by_fold", f"{step.kind}_folds")):
                for name, file in described.get(part, {}).items():
                    learnt.tables[kind, name].write_parquet(folder / file)
    (folder / "workflow.json").write_text(json.dumps(description, indent=1, ensure_ascii=False) + "\n", "utf8")


def read(folder: Path) -> tuple[dict[str, Any], list[Step], Learnt]:
    """What `write` has written: description, steps, what they have learnt.

    Raises:
        FileNotFoundError: A file is not there.
        ValueError: naming the file: it is not what it should be, or of a later version.
    """
    path = folder / "workflow.json"
    try:
        description = json.loads(path.read_text("utf8"))
        if description["format"] != _FORMAT:
            raise ValueError(f"its format is {description['format']!r}")
        if description["version"] > _VERSION:
            raise ValueError(f"its version is {description['version']}, this nbdist reads up to {_VERSION}")
        learnt = Learnt()
        steps = [_step(folder, one, description["polars"], learnt) for one in description["steps"]]
        return description, steps, learnt
    except FileNotFoundError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"{path}: not a saved workflow: {error!r}") from error


def _step(folder: Path, described: dict[str, Any], polars: str, learnt: Learnt) -> Step:
    kind, columns = described["kind"], described["columns"]
    if kind == "join":
        return Join(_parquet(folder / described["table"]), described["on"], list(columns))
    if kind == "categorify":
        groups: dict[str, list[str]] = {}
        for name, one in columns.items():
            frame, lists = _parquet(folder / one["vocabulary"]), one["type"].startswith("list[")
            buckets = pl.Series("count", [one["unseen"]], pl.Int64)
            if "buckets" in one:
                buckets = _parquet(folder / one["buckets"])["count"]
            learnt.vocabularies[name] = Vocabulary(frame["value"], frame["count"], lists, one["nulls"], buckets)
            groups.setdefault(one["vocabulary"], []).append(name)
        limits = {
            what: {name: one.get(what, 1) for name, one in columns.items()}  # version 1 had no num_buckets
            for what in ("min_count", "max_size", "num_buckets")
        }
        return Categorify(*groups.values(), **limits)
    if kind == "compute":
        return Compute(
            **{
                name: expressions.from_json(one["expression"], f"column {name!r}", polars)
                for name, one in columns.items()
            }
        )
    if kind == "drop":
        return Drop(*columns)
    if kind == "hashed_cross":
        return HashedCross(*columns, name=described["name"], num_buckets=described["num_buckets"])
    if kind == "filter":
        return Filter(expressions.from_json(described["expression"], "Filter", polars))
    if kind == "difference_lag":
        return DifferenceLag(*columns, by=described["by"], shift=described["shift"])
    for part, what in (("learnt", kind), ("learnt_by_fold", f"{kind}_folds")):
        for name, file in described.get(part, {}).items():
            learnt.tables[what, name] = _parquet(folder / file)
    if kind in ("normalize", "normalize_min_max"):
        return (Normalize if kind == "normalize" else NormalizeMinMax)(*columns)
    if kind == "join_groupby":
        return JoinGroupby(*described["by"], columns=columns, stats=described["stats"])
    if kind == "target_encoding":
        options = {name: described[name] for name in ("target", "folds", "smoothing", "seed")}
        return TargetEncoding(*columns.values(), **options)
    if kind in KINDS:
        return KINDS[kind](
            *columns, **{name: one for name, one in described.items() if name not in ("kind", "columns")}
        )
    raise ValueError(f"there is no step {kind!r}")


def _parquet(path: Path) -> pl.DataFrame:
    return pl.read_parquet(path, glob=False, hive_partitioning=False)
