"""A day in a folder: workflow, snapshot of the model, the difference from the day before, and its predictions.

The folder contains ``workflow/``, as `Workflow.save` writes it; ``model/``, weights and optimizer state, as `save` of a
model on all ranks writes them; ``day.json``; and, except on the first day, ``delta.zst`` (see `Delta`) and
``curve.parquet``.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from ..etl.workflow import Workflow
from ..io.folders import atomic_folder
from ..parallel.protocol import Parallel
from .delta import Delta, digest_of, tensors_of

_FORMAT, _VERSION = "nbdist.recsys.days", 1
_JSON, _WORKFLOW, _MODEL, _DELTA, _CURVE = FILES = ("day.json", "workflow", "model", "delta.zst", "curve.parquet")


@dataclass(frozen=True)
class Day:
    """A day of a model that learns day after day, as `save_day` and `continue_training` return it.

    Examples:
        >>> import polars as pl
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.days import Day, save_day
        >>> from nbdist.recsys.etl import Categorify, Workflow
        >>> from nbdist.recsys.sharding import replicate
        >>> workflow = Workflow(Categorify("user")).fit(pl.DataFrame({"user": ["ann", "bob"]}))
        >>> def first():
        ...     return save_day("day-0", workflow, replicate(torch.nn.Embedding(4, 8), "sgd"))
        >>> in_ddp(2, first)
        Day('day-0'): the first, 128 bytes of weights
        >>> Day.load("day-0").workflow.vocabularies["user"].size
        4
    """

    folder: Path
    weights: str
    """The digest of the weights, by which a `Delta` knows them."""
    model_bytes: int
    """Bytes of the weights."""
    rows: int = 0
    """Rows that were learned from on this day."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Loss and metrics over the rows of the day, each predicted before it was learned from. Empty on the first
    day, and on a day without rows."""
    delta_bytes: int = 0
    """Bytes of the file with the delta. 0 on the first day."""

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Day:
        """Read the day in a folder.

        Raises:
            FileNotFoundError: There is no such folder.
            ValueError: The folder holds no day.
        """
        path = Path(folder).expanduser()
        try:
            found = json.loads((path / _JSON).read_text("utf8"))
            if found.pop("format") != _FORMAT or found.pop("version") > _VERSION:
                raise ValueError("it has a different format, or a later version")
            return _checked(cls(**{**found, "folder": path}))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path / _JSON}: not a day of save_day or continue_training: {error}") from error

    @property
    def workflow(self) -> Workflow:
        """The fitted workflow."""
        return Workflow.load(self.folder / _WORKFLOW)

    @property
    def snapshot(self) -> Path:
        """The folder with weights and optimizer state, for `load` of a model on any number of ranks."""
        return self.folder / _MODEL

    @property
    def delta(self) -> Delta:
        """The difference of the weights from the day before.

        Raises:
            FileNotFoundError: It is the first day.
        """
        return Delta.load(self.folder / _DELTA)

    @property
    def curve(self) -> pl.DataFrame:
        """A row for each step: `step` from 1, `rows`, `loss`, and the metrics of its rows before it was taken.

        Raises:
            FileNotFoundError: It is the first day.
        """
        return pl.read_parquet(self.folder / _CURVE)

    def __repr__(self) -> str:
        text = f"Day({os.fspath(self.folder)!r}): "
        if not self.delta_bytes:
            return f"{text}the first, {self.model_bytes:,} bytes of weights"
        values = "".join(f", {name} {value:.4f}" for name, value in self.metrics.items())
        return f"{text}{self.rows:,} rows{values}; a delta of {self.delta_bytes:,} of {self.model_bytes:,} bytes"


def _checked(day: Day) -> Day:
    """Return `day`, which was read from a file. Raises `TypeError` unless its fields have the types of `Day`."""
    counts = day.model_bytes, day.rows, day.delta_bytes
    if not isinstance(day.weights, str) or not all(type(count) is int and count >= 0 for count in counts):
        raise TypeError(f"`weights` must be a text, bytes and rows must be counts, got {day.weights!r}, {counts}")
    if not isinstance(day.metrics, dict) or not all(type(value) in (int, float) for value in day.metrics.values()):
        raise TypeError(f"`metrics` must be numbers by name, got {day.metrics!r}")
    return day


def save_day(folder: str | os.PathLike[str], workflow: Workflow, model: Parallel, *, overwrite: bool = False) -> Day:
    """Save the first day, which `continue_training` starts from. All ranks must call it.

    Args:
        folder: The folder to write, which all ranks reach. It appears when it is complete.
        workflow: The fitted workflow that has made the codes of the training.
        model: The trained model, the result of `shard` or `replicate`.
        overwrite: Whether to replace a day in the folder.

    Raises:
        RuntimeError: The workflow is not fitted.
        FileExistsError: The folder exists, and `overwrite` is False or the folder holds something else.

    Examples:
        >>> import polars as pl
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.days import save_day
        >>> from nbdist.recsys.etl import Categorify, Workflow
        >>> from nbdist.recsys.sharding import replicate
        >>> workflow = Workflow(Categorify("user")).fit(pl.DataFrame({"user": ["ann", "bob"]}))
        >>> def first():
        ...     return save_day("first", workflow, replicate(torch.nn.Embedding(4, 8), "sgd"))
        >>> in_ddp(2, first).snapshot.is_dir()
        True
    """
    with atomic_folder(folder, FILES, overwrite) as scratch:
        write_day(scratch / "whole", workflow, model)
    return Day.load(folder)


def write_day(
    folder: Path,
    workflow: Workflow,
    model: Parallel,
    before: tuple[str, dict[str, Any]] | None = None,
    curve: pl.DataFrame | None = None,
    metrics: dict[str, float] | None = None,
) -> None:
    """Write the files of a day into an existing folder. All ranks must call it.

    Args:
        folder: The folder.
        workflow, model: As for `save_day`.
        before: The digest and, on rank 0, the state of the day before. None: it is the first day.
        curve, metrics: The quality of the predictions, by step and over all rows.
    """
    workflow.save(folder / _WORKFLOW)
    model.save(folder / _MODEL)
    whole = model.gather()  # after save, which makes buffers alike
    if whole is None:
        return
    state = whole.state_dict()
    weights, written = digest_of(state), 0
    if before is not None:
        digest, old = before
        Delta.between(old, state, digest, weights).save(folder / _DELTA)
        written = (folder / _DELTA).stat().st_size
    if curve is not None:
        curve.write_parquet(folder / _CURVE)
    rows = 0 if curve is None else int(curve["rows"].sum())
    size = sum(one.nbytes for one in tensors_of(state))
    day = asdict(Day(folder, weights, size, rows, metrics or {}, written))
    day["folder"] = None
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **day}, indent=1)
    (folder / _JSON).write_text(text + "\n", "utf8")
