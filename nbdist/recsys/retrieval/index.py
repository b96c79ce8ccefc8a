"""An index of items: raw ids and vectors, to search, and to save in a file that other systems can read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from .. import ranks
from ..io.folders import atomic_folder
from ..io.frames import Tabular, series_of
from ..loader.columns import Column, Columns, Ragged, rows_of
from ..loader.loaders import MemoryLoader
from ..loader.tables import to_table
from .codes import places_of
from .modes import evaluating, modules_of
from .search import top_k

_FILE = "items.parquet"


@dataclass(frozen=True, eq=False)
class ItemIndex:
    """Items by their raw ids, each with its vector.

    Examples:
        >>> import polars as pl
        >>> import torch
        >>> from nbdist.recsys.retrieval import ItemIndex
        >>> vectors = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> index = ItemIndex(pl.Series(["Alien", "Solaris", "Stalker"]), vectors)
        >>> index.search(torch.tensor([[0.0, 2.0]]), 2)["items"].to_list()
        [['Stalker', 'Solaris']]
        >>> index.search(torch.tensor([[0.0, 2.0]]), 2, exclude=[["Stalker"]])["items"].to_list()
        [['Solaris', 'Alien']]
        >>> index.save("index")
        >>> ItemIndex.load("index").ids.to_list()
        ['Alien', 'Solaris', 'Stalker']
    """

    ids: pl.Series
    """The raw ids, as in requests and tables, and not the codes: distinct, without nulls. A column of pandas or Arrow,
    an array, or a list is converted to a series."""
    vectors: Tensor
    """The vectors, float32, shape (items, width), on the CPU. Other types of numbers and NumPy arrays are converted."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "ids", series_of(self.ids))
            vectors = torch.as_tensor(self.vectors).detach()
        except (TypeError, ValueError, RuntimeError, pl.exceptions.PolarsError) as error:
            raise TypeError(f"ids must be a column of ids and vectors a matrix of numbers: {error}") from error
        object.__setattr__(self, "vectors", vectors.to("cpu", torch.float32).contiguous())
        if len(self.ids) != len(self.vectors) or self.vectors.ndim != 2:
            shape = tuple(self.vectors.shape)
            raise ValueError(
                f"vectors must have a row for each of {len(self.ids)} ids, and at least one column, got shape {shape}"
            )
        if self.ids.null_count() or self.ids.n_unique() != len(self.ids):
            raise ValueError("ids must be unique and not null")
        wrong = ~self.vectors.isfinite().all(1)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"{int(wrong.sum())} of {len(self.ids)} vectors are not finite, the first belongs to id "
                f"{self.ids[row]!r} in row {row}"
            )

    @classmethod
    @torch.no_grad()
    def of(cls, tower: Callable[[Columns], Tensor], items: Tabular, ids: Any, *, batch_size: int = 4096) -> ItemIndex:
        """Make an index from a tower's vectors of items, in this process.

        Args:
            tower: A function or module that returns the vectors of items, such as `TwoTower.item` of a model from
                `gather`. The module, or the modules that the function refers to, are in evaluation mode during the
                call.
            items: The columns for the tower, with codes from the workflow; a row for each item. Any `data` of
                `MemoryLoader`; it may have no rows.
            ids: The raw id of each row.
            batch_size: The number of rows in a call of the tower.

        Examples:
            >>> import polars as pl
            >>> from nbdist.recsys.etl import Categorify, Workflow
            >>> from nbdist.recsys.models import TwoTower
            >>> from nbdist.recsys.retrieval import ItemIndex
            >>> likes = pl.DataFrame({"user": ["ann", "bob"], "movie": ["Alien", "Solaris"]})
            >>> workflow = Workflow(Categorify("user", "movie")).fit(likes)
            >>> sizes = {name: vocabulary.size for name, vocabulary in workflow.vocabularies.items()}
            >>> model = TwoTower({"user": sizes["user"]}, {"movie": sizes["movie"]})  # stands for a trained one
            >>> movies = likes.select("movie")
            >>> ItemIndex.of(model.item, workflow.transform(movies, ["movie"]).collect(), movies["movie"]).vectors.shape
            torch.Size([2, 64])
        """
        weight = next((one for module in modules_of(tower) for one in module.parameters()), None)
        device = torch.device("cpu") if weight is None else weight.device
        table = to_table(items)
        if rows_of(next(iter(table.values()))):
            batches: Any = MemoryLoader(table, batch_size, device=device, rank=0, world_size=1)
        else:  # which shows how wide vectors are
            batches = [{name: _on(device, column) for name, column in table.items()}]
        with evaluating(tower):
            return cls(ids, torch.cat([tower(batch).float().cpu() for batch in batches]))

    def search(
        self, queries: Tensor, k: int, *, exclude: Sequence[Sequence[Any]] | pl.Series | None = None
    ) -> pl.DataFrame:
        """Return the k items with the largest products for each query, exactly.

        Args:
            queries: Vectors, shape (queries, width).
            k: The number of items.
            exclude: The ids that each query must not get. Ids that the index lacks are ignored.

        Returns:
            A row for each query: `items`, a list of ids, the best first, and `scores`. If fewer than k items are left,
            the lists are shorter.

        Raises:
            ValueError: The errors of `top_k`.
        """
        ragged = None if exclude is None else self.places(exclude)
        scores, places = top_k(torch.as_tensor(queries).float().cpu(), self.vectors, k, exclude=ragged)
        return frame_of_best(self.ids, scores, places)

    def places(self, ids: Sequence[Sequence[Any]] | pl.Series) -> Ragged:
        """Return lists of ids as positions in the index, for `top_k` and `ranking_metrics`.

        An unknown id gets position -1: `top_k` ignores it, and `ranking_metrics` counts it as not found. A repeated id
        occurs once in the result, and a null is left out.
        """
        return places_of(ids, self.ids)

    def to_faiss(self, factory: str = "Flat") -> Any:
        """Return a FAISS index of the vectors, by inner product. The numbers in its answers are positions in `ids`.

        Args:
            factory: The argument of `faiss.index_factory`: "Flat" is exact; "HNSW32" and "IVF256,Flat" are approximate,
                and faster.

        Raises:
            ImportError: FAISS is not installed.

        Examples:
            >>> import polars as pl
            >>> import torch
            >>> from nbdist.recsys.retrieval import ItemIndex
            >>> index = ItemIndex(pl.Series(["Alien", "Solaris"]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
            >>> scores, places = index.to_faiss().search(torch.tensor([[0.1, 0.9]]).numpy(), 1)
            >>> index.ids.gather(places[0]).to_list()
            ['Solaris']
        """
        try:
            import faiss
        except ImportError as error:
            raise ImportError(
                'FAISS is not installed: pip install "nbdist[faiss]"; search() does not need it'
            ) from error
        index = faiss.index_factory(self.vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        vectors = np.ascontiguousarray(self.vectors.numpy())
        if not index.is_trained and len(vectors):
            index.train(vectors)
        index.add(vectors)
        return index

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Save the index as ``items.parquet``, with the columns `id` and `vector`, a list of float32. The folder
        appears when it is complete.

        In a function that runs on several ranks, all ranks must call it. Rank 0 writes.

        Raises:
            FileExistsError: The folder exists, and `overwrite` is False or the folder holds other files.
        """
        vector = pl.Series("vector", self.vectors.numpy(), dtype=pl.Array(pl.Float32, self.vectors.shape[1]))
        with atomic_folder(folder, (_FILE,), overwrite) as scratch:
            if ranks.rank() == 0:
                pl.DataFrame([self.ids.alias("id"), vector]).write_parquet(scratch / "whole" / _FILE)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> ItemIndex:
        """Load the index that was saved in a folder.

        Raises:
            FileNotFoundError, ValueError: The folder has no index, or a file that is not one.
        """
        path = Path(folder).expanduser() / _FILE
        try:
            frame = pl.read_parquet(path, glob=False, hive_partitioning=False)
            vectors = frame["vector"]
            if not isinstance(vectors.dtype, pl.Array) or vectors.has_nulls():
                raise TypeError(f"`vector` must be arrays of numbers, got {vectors.dtype}")
            return cls(frame["id"], torch.from_numpy(vectors.to_numpy().copy()).float())
        except FileNotFoundError:
            raise
        except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a saved index of items: {error}") from error


def frame_of_best(ids: pl.Series, scores: Tensor, places: Tensor) -> pl.DataFrame:
    """Return a row for each query: `items`, the ids at the given positions, and `scores`. Position -1 is left out.

    Args:
        ids: The ids of all items.
        scores: The scores, shape (queries, k), the best first.
        places: The positions in `ids`, shape (queries, k).
    """
    there = places >= 0
    flat = pl.DataFrame({"items": ids.gather(places[there].numpy()), "scores": scores[there].numpy()})
    row = pl.Series("row", np.repeat(np.arange(len(places)), there.sum(1).numpy()))
    grouped = flat.group_by(row, maintain_order=True).agg("items", "scores")
    every = pl.DataFrame({"row": np.arange(len(places))}).join(grouped, on="row", how="left", maintain_order="left")
    return every.select(pl.col("items", "scores").fill_null([]))


def _on(device: torch.device, column: Column) -> Column:
    if isinstance(column, Ragged):
        return Ragged(column.values.to(device), column.offsets.to(device))
    return column.to(device)
