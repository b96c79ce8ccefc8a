"""The files of a saved recommender: JSON, Parquet and NumPy arrays, without pickle.

``recommender.json``: format, version, kind (the class), parameters. ``users.parquet``: the `id` of each user, and
`items`, the codes of the items that the user has taken. ``items.parquet``: the `id` of each item, in the order of the
codes. ``arrays.npz``: the arrays that the model has learned, a row for each item.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from torch import Tensor

from ..loader.columns import Ragged
from .interactions import Interactions

_FORMAT, _VERSION = "nbdist.recsys.recommenders", 1
_JSON, _USERS, _ITEMS, _ARRAYS = FILES = ("recommender.json", "users.parquet", "items.parquet", "arrays.npz")


@dataclass(frozen=True)
class Saved:
    """A model that has learned, as plain data."""

    kind: str
    parameters: dict[str, Any]
    log: Interactions
    arrays: dict[str, Tensor]


def write(folder: Path, saved: Saved) -> None:
    """Write the files of a model."""
    log = saved.log
    taken = pa.LargeListArray.from_arrays(log.taken.offsets.numpy(), log.taken.values.numpy())
    pl.DataFrame({"id": log.users, "items": pl.from_arrow(taken)}).write_parquet(folder / _USERS)
    pl.DataFrame({"id": log.items}).write_parquet(folder / _ITEMS)
    arrays: dict[str, Any] = {name: array.numpy() for name, array in saved.arrays.items()}
    np.savez(folder / _ARRAYS, **arrays)
    description = {"format": _FORMAT, "version": _VERSION, "kind": saved.kind, "parameters": saved.parameters}
    (folder / _JSON).write_text(json.dumps(description, indent=1) + "\n", "utf8")


def read(folder: Path) -> Saved:
    """Read the files that `write` has written.

    Raises:
        FileNotFoundError: A file is not there.
        ValueError: The files hold no model, do not fit each other, or come from a later version.
    """
    if not (folder / _JSON).exists():
        raise FileNotFoundError(f"{folder} must hold a saved recommender, got no file {_JSON} there")
    try:
        described = json.loads((folder / _JSON).read_text("utf8"))
        if described["format"] != _FORMAT or described["version"] > _VERSION:
            raise ValueError(f"it is {described['format']!r}, version {described['version']}")
        items = pl.read_parquet(folder / _ITEMS, glob=False, hive_partitioning=False)["id"]
        users = pl.read_parquet(folder / _USERS, glob=False, hive_partitioning=False)
        taken = users["items"]
        if taken.dtype != pl.List(pl.Int64) or taken.has_nulls():
            raise ValueError(f"`items` of a user must be codes, got {taken.dtype}")
        values = torch.from_numpy(taken.explode().drop_nulls().to_numpy(writable=True))
        _check_codes(values, len(items))
        lengths = torch.from_numpy(taken.list.len().cast(pl.Int64).to_numpy(writable=True))
        lists = Ragged(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        with np.load(folder / _ARRAYS, allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        for name, array in arrays.items():
            if len(array) != len(items) or (array.is_floating_point() and not array.isfinite().all()):
                raise ValueError(f"{name} must hold finite numbers for {len(items)} items, got {tuple(array.shape)}")
            if not array.is_floating_point():
                _check_codes(array, len(items))
        return Saved(
            described["kind"], described["parameters"], Interactions(users["id"], items, lists, None, None), arrays
        )
    except FileNotFoundError:
        raise
    except (ValueError, LookupError, TypeError, OSError, zipfile.BadZipFile, pl.exceptions.PolarsError) as error:
        raise ValueError(f"{folder}: not a saved recommender: {error}") from error


def _check_codes(codes: Tensor, items: int) -> None:
    if len(codes) and not (int(codes.min()) >= 0 and int(codes.max()) < items):
        raise ValueError(f"codes must be below {items}, the number of items, got {int(codes.min())} to {codes.max()}")
