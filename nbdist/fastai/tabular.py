"""Batches of fastai's tabular and collaborative loaders, without a data frame for each batch."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import islice
from typing import Any

from .replacing import Originals, replace

#: What a loader does between its rows' numbers and a batch; one that does any of it otherwise is left alone.
_METHODS = ("chunkify", "do_item", "create_item", "create_batch", "do_batch", "retain")


@dataclass
class _Batch:
    """The rows of a batch for `ReadTabBatch`: categories, continuous values if there are any, targets."""

    tables: list[list[Any]]  # columns, as arrays
    with_cont: bool
    device: Any
    rows: Any

    @property
    def shape(self) -> tuple[int]:
        """Return the shape, because fastai asks for the size of a batch."""
        return (len(self.rows),)


class _Fastai:
    """The parts of fastai that are used here, with the original functions that this module replaces.

    Args:
        module: `fastai.tabular.core`.
    """

    def __init__(self, module: types.ModuleType) -> None:
        self.tensor, self.to_device = module.tensor, module.to_device
        self.loader, self.reader, self.weighted = module.TabDataLoader, module.ReadTabBatch, module.TabWeightedDL
        self.base = sys.modules["fastai.data.load"].DataLoader
        self.create_batches, self.read = self.loader.create_batches, self.reader.__call__
        self.sample, self.draw = self.base.sample, self.weighted.get_idxs
        self.methods = {name: getattr(self.loader, name) for name in _METHODS}


_fastai: _Fastai


def patch_tabular(module: types.ModuleType) -> Originals:
    """Gather batches from a frame's columns: selecting rows of a frame takes half of a small model's step."""
    global _fastai
    if module.TabDataLoader.create_batches.__module__ == __name__:  # patched already
        return []
    _fastai = own = _Fastai(module)
    return replace(
        [
            (own.base, "sample", _sample),
            (own.weighted, "get_idxs", _get_idxs),
            (own.loader, "create_batches", _create_batches),
            (own.reader, "__call__", _read),
        ]
    )


def _columns(dataset: Any, names: Iterable[str]) -> list[Any] | None:
    import numpy as np

    found = [dataset.items[name] for name in names]
    plain = all(c.ndim == 1 and isinstance(c.dtype, np.dtype) and c.dtype.kind in "iuf" for c in found)
    return [c.to_numpy() for c in found] if plain else None


def _whole(self: Any) -> _Batch | None:
    """Return all rows of a loader, or None if fastai must make its batches."""
    own = _fastai
    same = all(name not in vars(self) and getattr(type(self), name) is own.methods[name] for name in _METHODS)
    if not same or self.prebatched or not self.indexed or self.fake_l.num_workers:
        return None
    if self.after_item.fs or self.before_batch.fs or [type(f) for f in self.after_batch.fs] != [own.reader]:
        return None
    rows = self.dataset
    wanted = [rows.cat_names, rows.cont_names] if rows.with_cont else [rows.cat_names]
    if set(rows.y_names) <= set(rows.items.columns):
        wanted.append(rows.y_names)
    tables = [_columns(rows, names) for names in wanted]
    return None if None in tables else _Batch(tables, rows.with_cont, rows.device, ())  # type: ignore[arg-type]


def _get_idxs(self: Any) -> Any:
    """Draw rows like `np.random.choice` with weights; without its search for each row if all weights are equal."""
    import numpy as np

    if not (self.n and self.shuffle) or np.ptp(self.wgts):
        return _fastai.draw(self)
    ends = self.wgts.cumsum()
    ends /= ends[-1]
    where = np.random.random_sample(self.n)
    rows = (where * self.n).astype(np.intp)  # off by one at most, as the sums are rounded
    rows += ends[rows] <= where
    rows -= (rows > 0) & (ends[rows - 1] > where)
    return rows.tolist()


def _chunks(self: Any, numbers: Iterator[int]) -> Iterator[Any]:
    """Yield `bs` numbers at a time; `numbers` may have no end."""
    import numpy as np

    while len(rows := np.fromiter(islice(numbers, self.bs), np.intp)):
        if len(rows) == self.bs or not self.drop_last:
            yield rows


def _sample(self: Any) -> Any:
    """Return the row numbers of this worker. Of several workers, each takes every `num_workers`-th row."""
    return _fastai.sample(self) if self.num_workers > 1 else iter(self._DataLoader__idxs)


def _create_batches(self: Any, samps: Any) -> Any:
    whole = _whole(self)
    if whole is None:
        return _fastai.create_batches(self, samps)
    return (changed(whole, rows=rows) for rows in _chunks(self, iter(samps)))


def _read(self: Any, x: Any, **kwargs: Any) -> Any:
    import numpy as np

    if type(x) is not _Batch:
        return _fastai.read(self, x, **kwargs)
    tables = [[column[x.rows] for column in columns] for columns in x.tables]
    empty = np.empty((len(x.rows), 0), np.float32)
    batch = [_fastai.tensor(np.stack(columns, 1) if columns else empty) for columns in tables]
    batch[0] = batch[0].long()
    if x.with_cont:
        batch[1] = batch[1].float()
    return tuple(batch) if x.device is None else _fastai.to_device(tuple(batch), x.device)
