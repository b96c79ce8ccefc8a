"""A fitted workflow in a folder: JSON, and Parquet for what may be large. No pickle; readable without polars.

``workflow.json``::

    format, version   "nbdist.recsys.etl", 2
    polars            the version that has written the expressions
    rows              how many rows the workflow was fitted to
    codes             {"null": 0, "unseen": 1}: of null, and the first of those of values that are not known
    inputs, outputs   {column: type}: what `fit` saw, and what the steps make of it; in order
    steps             in the order in which they are applied, each with its "kind" and its arguments, by their names;
                      what else there is, the `describe` of its class in `ops/` says

A type is int8 .. uint64, float32, float64, bool, string, list[<one of these>], or else polars' own name for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from .ops.step import Saved, State, Step
from .vocabulary import NULL_CODE, UNSEEN_CODE

_FORMAT, _VERSION = "nbdist.recsys.etl", 2
FILES = ("workflow.json", "table-*.parquet", "vocabulary-*.parquet", "learnt-*.parquet")


def describe(
    steps: Sequence[Step], state: State, inputs: Mapping[str, str], outputs: Mapping[str, str], rows: int
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
        "steps": [{"kind": step.kind, **step.describe(number, state)} for number, step in enumerate(steps)],
    }


def write(folder: Path, description: Mapping[str, Any], steps: Sequence[Step], state: State) -> None:
    """Write the files of a workflow."""
    for step, described in zip(steps, description["steps"], strict=True):
        for name, table in step.files(described, state).items():
            table.write_parquet(folder / name)
    (folder / "workflow.json").write_text(json.dumps(description, indent=1, ensure_ascii=False) + "\n", "utf8")


def read(folder: Path) -> tuple[dict[str, Any], list[Step], State]:
    """Description, steps, and what they have learned, as `write` has written them.

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
        saved = Saved(folder, description["polars"], State())
        steps = []
        for described in description["steps"]:
            if described["kind"] not in Step.kinds:
                raise ValueError(f"there is no step {described['kind']!r}")
            steps.append(Step.kinds[described["kind"]].restore(described, saved))
        return description, steps, saved.state
    except FileNotFoundError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"{path}: not a saved workflow: {error!r}") from error
