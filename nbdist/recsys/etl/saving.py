"""A fitted workflow in a folder: JSON, and Parquet for large parts. No pickle; readable without polars.

``workflow.json``::

    format, version   "nbdist.recsys.etl", 2
    polars            the version that has written the expressions
    rows              the number of rows that the workflow was fitted to
    codes             {"null": 0, "unseen": 1}: the code of null, and the first code of values that are not known
    inputs, outputs   {column: type}: the columns of the data of `fit`, and those after all steps; in order
    tags              {column: [words]}, if there are any
    steps             in the order in which they are applied, each with its "kind" and its arguments, by their names;
                      further content is described at `describe` of its class in `ops/`

A type is int8 .. uint64, float32, float64, bool, string, list[<one of these>], or else polars' own name for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from .ops.step import Saved, State, Step, read_file
from .vocabulary import NULL_CODE, UNSEEN_CODE

_FORMAT, _VERSION = "nbdist.recsys.etl", 2
FILES = ("workflow.json", "table-*.parquet", "vocabulary-*.parquet", "learnt-*.parquet")


def describe(
    steps: Sequence[Step], state: State, inputs: Mapping[str, str], outputs: Mapping[str, str], rows: int
) -> dict[str, Any]:
    """Return the content of ``workflow.json``, as plain data."""
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
    """Return description, steps and learned state, as `write` has written them.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: The file, which the error names, has a different format or a later version.
    """
    path = folder / "workflow.json"
    try:
        description = json.loads(read_file(path).decode("utf8"))
        _check(description)
        saved = Saved(folder, description["polars"], State())
        steps = []
        for number, described in enumerate(description["steps"]):
            if described["kind"] not in Step.kinds:
                raise ValueError(f"there is no step {described['kind']!r}")
            step = Step.kinds[described["kind"]].restore(described, saved)
            _compare(described, step.describe(number, saved.state), f"step {number} ({step.kind})")
            steps.append(step)
        return description, steps, saved.state
    except FileNotFoundError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
        raise ValueError(f"{path}: not a saved workflow: {error!r}") from error
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path}: not a saved workflow: {error!r}") from error


def _check(description: Any) -> None:
    """Raise for a description whose parts do not have the types of `describe`."""
    if description["format"] != _FORMAT:
        raise ValueError(f"its format is {description['format']!r}")
    for name, least in (("version", 1), ("rows", 0)):
        if type(description[name]) is not int or description[name] < least:
            raise ValueError(f"`{name}` must be an integer of at least {least}, got {description[name]!r}")
    if description["version"] > _VERSION:
        raise ValueError(f"its version is {description['version']}, this nbdist reads up to {_VERSION}")
    if not isinstance(description["polars"], str):
        raise TypeError(f"`polars` must be a version, got {description['polars']!r}")
    codes = {"null": NULL_CODE, "unseen": UNSEEN_CODE}
    if description.get("codes", codes) != codes:
        raise ValueError(f"`codes` must be {codes}, got {description['codes']!r}")
    for name in ("inputs", "outputs"):
        types = description[name]
        if not isinstance(types, dict) or not all(isinstance(one, str) for one in types.values()):
            raise TypeError(f"`{name}` must be names of types by column, got {types!r}")
    tags = description.get("tags", {})
    if not isinstance(tags, dict) or not all(
        isinstance(words, list) and all(isinstance(word, str) for word in words) for words in tags.values()
    ):
        raise TypeError(f"`tags` must be lists of texts by column, got {tags!r}")
    if not isinstance(description["steps"], list):
        raise TypeError(f"`steps` must be a list, got {description['steps']!r}")


def _compare(said: Any, restored: Any, where: str) -> None:
    """Raise `ValueError` if a file describes a step differently than the restored step describes itself.

    Parts that an older version did not write are not compared, and neither are expressions, which other versions of
    polars write differently.
    """
    if isinstance(said, dict) and isinstance(restored, dict):
        for name in said.keys() & restored.keys() - {"expression"}:
            _compare(said[name], restored[name], f"{where}, {name}")
    elif json.dumps(said) != json.dumps(restored):  # 1, 1.0 and true are different
        raise ValueError(f"{where}: workflow.json has {said!r}, but the step that was read from it has {restored!r}")
