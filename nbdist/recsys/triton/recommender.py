"""A recommender of a log as a model of Triton's Python backend: user and history in, items and scores out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ..etl.ops.step import type_name
from ..io.folders import atomic_folder
from .config import Batching, TensorSpec, model_config, write_config
from .export import Ensemble, check_name, copy_source, tensor_of
from .request import arrow_type


def export_lists(
    path: str | os.PathLike[str],
    name: str,
    columns: tuple[str, str],
    ids: Mapping[str, pl.Series],
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    overwrite: bool,
) -> Ensemble:
    """Write a model repository with one model, whose code is `served.recommend`.

    Args:
        path: The repository.
        name: The name of the model.
        columns: The names of the inputs for users and histories.
        ids: The ids of "users" and "items", by place.
        arrays: The learned arrays of the model, and the lists of the users that it knows.
        options: Further settings of the model, as JSON.
        overwrite: Whether to replace an existing repository of this kind.

    Raises:
        ValueError: A request cannot carry the ids, or `name` cannot be the name of a model.
    """
    path = Path(path).expanduser().absolute()
    check_name(name)
    kinds = {}
    for what, series in ids.items():
        if not (series.dtype.is_integer() or series.dtype == pl.String):
            raise ValueError(f"ids of {what} must be integers or strings, got {series.dtype}: cast them in the log")
        kinds[what] = type_name(series.dtype)
    inputs = {columns[0]: kinds["users"], columns[1]: f"list[{kinds['items']}]"}
    raw = [tensor_of(column, arrow_type(column, kind)) for column, kind in inputs.items()]
    made = [TensorSpec("items", raw[1].dtype, options["k"]), TensorSpec("scores", np.float32, options["k"])]
    texts = {what: series.to_list() if series.dtype == pl.String else None for what, series in ids.items()}
    numbers = {
        what: series.cast(pl.UInt64 if series.dtype == pl.UInt64 else pl.Int64).to_numpy()
        for what, series in ids.items()
        if texts[what] is None
    }
    with atomic_folder(path, [name], overwrite) as scratch:
        folder = scratch / "whole" / name / "1"
        folder.mkdir(parents=True)
        copy_source("recommend.py", folder)
        everything: dict[str, Any] = {**arrays, **numbers}
        np.savez(folder / "arrays.npz", **everything)
        described = {"inputs": list(inputs), **texts, **options}
        (folder / "recommend.json").write_text(json.dumps(described), encoding="utf-8")
        write_config(model_config(name, "python", Batching(4096, 100e-6), raw, made), folder.parent)
    return Ensemble(path, name, inputs, "items")
