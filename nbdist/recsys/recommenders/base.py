"""The base class of recommenders, which learn from a log and return lists of raw ids."""

from __future__ import annotations

import abc
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import torch
from torch import Tensor
from typing_extensions import Self

from .. import ranks
from ..io.folders import atomic_folder
from ..io.frames import Tabular, series_of
from ..loader.columns import Ragged
from ..retrieval.codes import codes_of
from . import saving
from .best import best_of
from .interactions import Interactions, lists_of, part_of
from .spaces import Space


class Recommender(abc.ABC):
    """A model that scores items by the items that a user has taken.

    A subclass implements `_learn`, which learns from a log, and `_scores`, which scores items for histories. In a
    function that runs on several ranks, all ranks must call `fit` with the same log.

    Examples:
        >>> from nbdist.recsys.recommenders import EASE, Recommender
        >>> isinstance(EASE(), Recommender), EASE().parameters
        (True, {'regularization': 500.0})
    """

    SPACE: ClassVar[Mapping[str, Space]] = {}
    """Values that `benchmark` tries, by the name of the parameter."""
    ARRAYS: ClassVar[tuple[str, ...]]
    """Names of the attributes that `_learn` sets: tensors whose rows are items."""

    _log: Interactions | None = None

    def fit(self, log: Tabular, *, user: str = "user", item: str = "item", time: str | None = None) -> Self:
        """Learn from a log.

        Args:
            log: A row for each time that a user took an item, such as a purchase: a frame of polars or pandas, an Arrow
                table, a dict of columns, or Parquet files as for `Workflow.fit`.
            user: The column of users' ids: integers, strings or dates, none null.
            item: The column of items' ids.
            time: The column of times, for models that use them.

        Returns:
            The recommender itself.

        Raises:
            TypeError: `log` is no frame, or ids are of a different type.
            ValueError: A column is missing, an id is null, or there are no rows.
            MemoryError: The model would not fit into memory.
        """
        return self.fit_to(Interactions.of(log, user, item, time))

    def fit_to(self, log: Interactions) -> Self:
        """Learn from a log whose users and items are numbered already."""
        self._learn(log)
        self._log = log
        return self

    @property
    def users(self) -> pl.Series:
        """Ids of the users of the log."""
        return self._fitted.users

    @property
    def items(self) -> pl.Series:
        """Ids of the items of the log."""
        return self._fitted.items

    @property
    def taken(self) -> Ragged:
        """The items of each user of the log, as indices into `items`."""
        return self._fitted.taken

    def recommend(self, users: Any, k: int = 10, *, exclude_taken: bool = True) -> pl.DataFrame:
        """Find the items with the highest scores for users of the log.

        Args:
            users: Ids: a list, or a column of polars, pandas or Arrow.
            k: The number of items for each user.
            exclude_taken: Leave out items that the user has taken.

        Returns:
            A row for each user: `user`, `items` (a list of ids, the best first) and `scores`. If fewer than k items are
            left for a user, the list is shorter.

        Raises:
            KeyError: A user is not in the log: `recommend_for` takes a history.
        """
        ids = series_of(users, "users").alias("user")
        codes = codes_of(ids, self.users)
        if (codes < 0).any():
            missing = ids.filter(pl.Series(codes < 0))
            raise KeyError(
                f"{len(missing)} of {len(ids)} users are not in the log, the first is {missing[0]!r}: "
                f"recommend_for(histories) takes the items that a new user has taken"
            )
        taken = part_of(self.taken, torch.from_numpy(codes))
        found = self.best(taken, k, taken if exclude_taken else None)
        return found.insert_column(0, ids)

    def recommend_for(
        self, histories: Sequence[Sequence[Any]] | pl.Series, k: int = 10, *, exclude_taken: bool = True
    ) -> pl.DataFrame:
        """Find the items with the highest scores for users who are not in the log.

        Args:
            histories: For each user, the ids of the items that the user has taken. Ids that are not in the log are
                ignored.
            k: The number of items for each user.
            exclude_taken: Leave out items of the history.

        Returns:
            A row for each history, in their order: `items` (a list of ids, the best first) and `scores`.
        """
        taken = lists_of(histories, self.items)
        return self.best(taken, k, taken if exclude_taken else None)

    def similar(self, items: Any, k: int = 10) -> pl.DataFrame:
        """Find the items that are most similar to an item.

        These are the items that the model would recommend to a user who has taken this item and nothing else; for
        `IALS`, they are the items whose vectors have the largest cosine with the item's vector.

        Args:
            items: Ids of items of the log: a list, or a column of polars, pandas or Arrow.
            k: The number of similar items for each item.

        Returns:
            A row for each item: `item`, `items` (a list of ids, the most similar first) and `scores`.

        Raises:
            KeyError: An item is not in the log.
            ValueError: The model is `Popularity`, which does not compare items.

        Examples:
            >>> from nbdist.recsys.recommenders import ItemKNN
            >>> log = {"user": [1, 1, 2, 2, 3, 4], "item": ["a", "b", "a", "b", "c", "c"]}
            >>> ItemKNN().fit(log).similar(["a"], 1)["items"].to_list()
            [['b']]
        """
        ids = series_of(items, "items").alias("item")
        codes = self._codes_of_items(ids)
        itself = Ragged(codes, torch.arange(len(codes) + 1))
        found = best_of(self.items, itself, k, itself, self._similarities)
        return found.insert_column(0, ids)

    def explain(self, history: Sequence[Any] | pl.Series, item: Any) -> pl.DataFrame:
        """Divide an item's score among the items that a user has taken.

        Args:
            history: The ids of the items that the user has taken. Ids that are not in the log are ignored.
            item: The id of the item whose score is divided.

        Returns:
            A row for each item of the history: `item` and `contribution`, the largest first. The contributions add up
            to the score. The part of the score that does not depend on the history is in a row whose item is null.

        Raises:
            KeyError: The item is not in the log.

        Examples:
            >>> from nbdist.recsys.recommenders import EASE
            >>> log = {"user": [1, 1, 2, 2, 3, 4], "item": ["a", "b", "a", "b", "a", "c"]}
            >>> EASE(regularization=1.0).fit(log).explain(["a", "c"], "b")["item"].to_list()
            ['a', 'c']
        """
        code = self._codes_of_items(pl.Series("item", [item]))
        taken = lists_of([list(series_of(history, "history"))], self.items)
        shares, rest = self._contributions(taken.values, int(code[0]))
        ids = self.items.gather(taken.values.numpy()).alias("item")
        found = pl.DataFrame([ids, pl.Series("contribution", shares.numpy(), pl.Float32)])
        if rest is not None:
            row = {"item": pl.Series([None], dtype=ids.dtype), "contribution": pl.Series([rest], dtype=pl.Float32)}
            found = pl.concat([found, pl.DataFrame(row)])
        return found.sort("contribution", descending=True, maintain_order=True)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Save the model in a folder, as JSON, Parquet and NumPy arrays. The folder appears when it is complete.

        In a function that runs on several ranks, all ranks must call it. Rank 0 writes.

        Raises:
            FileExistsError: The folder exists, and `overwrite` is False or the folder holds no model.
        """
        _ = self._fitted
        with atomic_folder(folder, saving.FILES, overwrite) as scratch:
            if ranks.rank() == 0:
                self.write(scratch / "whole")

    def write(self, folder: Path) -> None:
        """Write the files of `save` into an existing folder."""
        arrays = {name: getattr(self, name) for name in self.ARRAYS}
        saving.write(folder, saving.Saved(type(self).__name__, self.parameters, self._fitted, arrays))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Load the model that was saved in a folder. No code in the folder is run, since there is no pickle in it.

        Raises:
            FileNotFoundError: A file of the model is missing.
            ValueError: The folder holds no model, or a model of a different class.

        Examples:
            >>> from nbdist.recsys.recommenders import EASE, Recommender
            >>> EASE().fit({"user": [1, 1, 2], "item": ["a", "b", "a"]}).save("linear")
            >>> Recommender.load("linear").recommend([2], 1)["items"].to_list()
            [['b']]
        """
        saved = saving.read(Path(folder).expanduser())
        kinds = {kind.__name__: kind for kind in (cls, *cls.__subclasses__())}
        if saved.kind not in kinds:
            raise ValueError(f"{folder} must hold a model of {' or '.join(sorted(kinds))}, got {saved.kind}")
        model = kinds[saved.kind](**saved.parameters)
        if set(saved.arrays) != set(model.ARRAYS):
            raise ValueError(f"{folder} must hold {', '.join(model.ARRAYS)}, got {', '.join(saved.arrays)}")
        for name, array in saved.arrays.items():
            setattr(model, name, array)
        model._log = saved.log
        return model

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments that the model was made with, by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @property
    def _fitted(self) -> Interactions:
        if self._log is None:
            raise RuntimeError(f"{type(self).__name__} has learned from no log yet: call fit(log) first")
        return self._log

    def best(self, histories: Ragged, k: int, excluded: Ragged | None) -> pl.DataFrame:
        """Return a row for each list of codes: the best `items` and their `scores`. Items in `excluded` are left
        out.
        """
        return best_of(self.items, histories, k, excluded, self._scores)

    def _codes_of_items(self, ids: pl.Series) -> Tensor:
        codes = codes_of(ids, self.items)
        if (codes < 0).any():
            missing = ids.filter(pl.Series(codes < 0))
            raise KeyError(
                f"{len(missing)} of {len(ids)} items are not in the log that {type(self).__name__} has learned from: "
                f"the first is {missing[0]!r}. The attribute `items` has the known ones"
            )
        return torch.from_numpy(codes)

    def _similarities(self, items: Ragged) -> Tensor:
        """Return a score for each of `items`, which are lists with one item, and each item of the log; shape
        (lists, items).
        """
        return self._scores(items)

    @abc.abstractmethod
    def _contributions(self, taken: Tensor, item: int) -> tuple[Tensor, float | None]:
        """Return the part of an item's score that comes from each item of a history, shape (taken,), and the rest of
        the score, or None."""

    def unfitted(self) -> Self:
        """Return a model with the same parameters that has not learned from a log."""
        return type(self)(**self.parameters)

    @abc.abstractmethod
    def _learn(self, log: Interactions) -> None:
        """Learn from a log."""

    @abc.abstractmethod
    def _scores(self, histories: Ragged) -> Tensor:
        """Return a score for each history and item, float32, shape (histories, items)."""
