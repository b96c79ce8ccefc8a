"""The recommender that `fit_recommender` returns. Its answers are frames of the log's kind, also for new users."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import polars as pl
import torch
from typing_extensions import Self

from ...checks import check_count, check_flag, shown
from .. import ranks
from ..io.folders import atomic_folder
from ..io.frames import Tabular, series_of
from ..loader.columns import Ragged
from ..retrieval.codes import codes_of
from ..triton.export import Ensemble
from ..triton.recommender import export_lists
from . import log_columns, saving
from .base import Recommender
from .comparison import Comparison
from .hidden import Hidden, unseen
from .interactions import Interactions, part_of, ragged_of, together
from .intervals import table_by
from .log_columns import LogColumns, ratings_of
from .popularity import Popularity

FILES = (*log_columns.FILES, *saving.FILES)
ANSWERS = {"user": ("rank", "score", "by"), "item": ("rank", "score", "by", "similar", "contribution")}
"""For each column of ids, the names of other columns of answers, which it cannot have."""


class FittedRecommender:
    """A model together with the log that it has learned from. `fit_recommender` returns it.

    Its answers are frames of the same library as the log (polars, pandas, or Arrow tables), with a row for each user
    and item. It never changes: `refit` returns a new one.

    Examples:
        >>> from nbdist.recsys import fit_recommender
        >>> from nbdist.recsys.recommenders import ItemKNN
        >>> log = {"user": ["ann", "ann", "bob", "bob", "cleo"], "item": ["a", "b", "a", "b", "a"]}
        >>> recommender = fit_recommender(log, models=ItemKNN())
        >>> recommender.recommend(["cleo", "dave"], 1).select("user", "item", "by").rows()
        [('cleo', 'b', 'ItemKNN'), ('dave', 'a', 'Popularity')]
        >>> recommender.explain("cleo", "b")["item"].to_list()
        ['a']
    """

    model: Recommender
    """The model that has learned from the log."""
    comparison: Comparison | None
    """The comparison by which the model was chosen. None: the model was given, or loaded from a folder."""

    def __init__(
        self, model: Recommender, rows: pl.DataFrame, columns: LogColumns, comparison: Comparison | None = None
    ) -> None:
        self.model, self.comparison = model, comparison
        self._rows, self._columns = rows, columns
        self._users = rows[columns.user].unique().sort()
        self._seen = self._lists(rows, self._users)
        self._popular = Popularity.of_taken(model)

    def recommend(
        self, users: Any = None, k: int = 10, *, history: Tabular | None = None, exclude_seen: bool = True
    ) -> Any:
        """Find the items with the highest scores for users.

        A user without known items gets the items that most users have taken. The column `by` of the answer then names
        `Popularity` as the model.

        Args:
            users: The ids of users, in the log or new: a list, or a column. None: the users of `history`.
            k: The number of items for each user.
            history: Further rows, which are not in the log, with the columns of users and items. The model uses them
                like rows of the log.
            exclude_seen: Leave out all items that the user has in the log or in `history`, liked or not.

        Returns:
            A row for each user and item, best first: both ids, in columns named as in the log, `rank` from 1, `score`,
            and `by`, the name of the model. If fewer than k items are left for a user, there are fewer rows.

        Raises:
            TypeError: The type of the ids is not the type in the log.
            ValueError: Neither users nor a history are given, `k` is less than 1, or `history` lacks a column.
        """
        check_count(k, least=1, name="`k`")
        check_flag(exclude_seen, name="`exclude_seen`")
        user, item = self._columns.user, self._columns.item
        rows = None if history is None else self._columns.read_history(history)
        if users is None:
            if rows is None:
                raise ValueError(
                    "`users` or `history` must be given, got neither: `known_users` are the users of the log"
                )
            users = rows[user].unique(maintain_order=True)
        asked = series_of(users, "users").alias("user")
        found = self._found(asked, k, rows, exclude_seen)
        flat = found.insert_column(0, asked).with_row_index("row").explode("items", "scores").drop_nulls("items")
        ids, rank = (pl.col("user").alias(user), pl.col("items").alias(item)), pl.int_range(1, pl.len() + 1).over("row")
        return self._columns.like(flat.select(*ids, rank=rank, score="scores", by="by"))

    @property
    def known_users(self) -> pl.Series:
        """Ids of the users of the log, a series of polars."""
        return self._users

    @property
    def known_items(self) -> pl.Series:
        """Ids of the items that can be recommended, a series of polars."""
        return self.model.items

    def similar(self, items: Any, k: int = 10) -> Any:
        """Find the items that are most similar to each of some items, as `Recommender.similar` defines it.

        Args:
            items: The ids of items of the log: a list, or a column.
            k: The number of similar items for each item.

        Returns:
            A row for each pair, the most similar first: the item, in a column named as in the log, `similar`, `rank`
            from 1, and `score`.

        Raises:
            KeyError: An item is not in the log.
            ValueError: The model is `Popularity`, or `k` is less than 1.
        """
        found = self.model.similar(items, k).with_row_index("row").explode("items", "scores").drop_nulls("items")
        rank = pl.int_range(1, pl.len() + 1).over("row").alias("rank")
        columns = pl.col("item").alias(self._columns.item), pl.col("items").alias("similar"), rank
        return self._columns.like(found.select(*columns, score="scores"))

    def explain(self, user: Any, item: Any, *, history: Tabular | None = None) -> Any:
        """Divide the score of an item among the items that a user has taken.

        Args:
            user: The id of a user.
            item: The id of an item of the log.
            history: As for `recommend`.

        Returns:
            A row for each item that the user has taken, largest contribution first: the item, and `contribution`. The
            contributions add up to the score. The part of the score that does not depend on the user's items is in a
            row whose item is null; for `Popularity`, and for users without items, it is the only row.

        Raises:
            KeyError: The item is not in the log.
            TypeError: `user` is a list, or of a different type than the ids of the log.
        """
        rows = None if history is None else self._columns.read_history(history)
        asked = pl.Series(self._columns.user, [user])
        if asked.dtype.is_nested():
            raise TypeError(f"`user` must be the id of one user, got {shown(user)}")
        codes = self._taken(asked, rows)
        model = self.model if len(codes.values) else self._popular
        found = model.explain(self.model.items.gather(codes.values.numpy()), item)
        return self._columns.like(found.rename({"item": self._columns.item}))

    def evaluate(self, log: Tabular, k: int = 10, *, by: str | None = None) -> Any:
        """Measure how well the recommender predicts the items that users took after the log ended.

        For each user, all items of the log that the user has not seen are ranked. Later rows whose pair of user and
        item is already in the log are left out, and so are rows whose rating is too low.

        Args:
            log: Later rows, with the columns of the log.
            k: The number of items for each user.
            by: A column of `log` with the segment of each user, such as a country: users are grouped by it. None: they
                are grouped into users of the log, and new ones.

        Returns:
            Three rows: for all users, for users in the log, and for new users (`users` is "all", "known" or "new").
            `count` is the number of users; recall, NDCG, MRR and hit rate at k are means over users, null without
            users; `unknown_items` is the number of rows whose item is not in the log, which count as missed. With
            `by`, a row for each segment: its value, `count`, and the means, each with the bounds of its 95 % interval,
            " low" and " high" (percentiles of the bootstrap over users).

        Raises:
            ImportError: `by` is given, and SciPy is not installed.
            ValueError: A column is missing, no row is left to be predicted, or a user is in two segments.

        Examples:
            >>> from nbdist.recsys import fit_recommender
            >>> from nbdist.recsys.recommenders import ItemKNN
            >>> log = {"user": [1, 1, 2, 2, 3, 4], "item": ["a", "b", "a", "b", "a", "b"]}
            >>> later = {"user": [3, 4], "item": ["b", "a"], "country": ["fr", "de"]}
            >>> found = fit_recommender(log, models=ItemKNN()).evaluate(later, 1, by="country")
            >>> found.select("country", "count", "recall@1", "recall@1 low").rows()
            [('de', 1, 1.0, 1.0), ('fr', 1, 1.0, 1.0)]
        """
        check_count(k, least=1, name="`k`")
        user, item = self._columns.user, self._columns.item
        if by in (user, item, "count"):
            raise ValueError(
                f"`by` must be another column than the ones of users and items, and not have the name 'count', which "
                f"is a column of the answer, got {by!r}"
            )
        rows = self._columns.read(log, more=[] if by is None else [by])
        if len(rows):  # columns without values have any type
            rows = unseen(self._columns.liked(rows), self._rows, user, item)
        later = rows.unique([user, item], maintain_order=True)
        if not len(later):
            raise ValueError("`log` must have rows of a user and an item that the user has not seen, got none")
        hidden = Hidden.of(self.model.items, later, user, item, k)
        lists = self._found(hidden.users, k, None, True)["items"]
        if by is None:
            return self._columns.like(hidden.table(lists, self._users, self.model.items))
        return self._columns.like(table_by(hidden.metrics(lists), hidden.segments(later, user, by), k))

    def refit(self, more: Tabular) -> FittedRecommender:
        """Learn from the log and from later rows together, with the same settings.

        Args:
            more: The later rows, with the columns of the log.

        Returns:
            A new recommender. This one stays as it is.

        Raises:
            TypeError: The type of a column is not its type in the log.
            ValueError: A column is missing, or an id is null.
        """
        rows = self._together(self._columns.read(more, "more"))
        liked = Interactions.of(self._columns.liked(rows), self._columns.user, self._columns.item, self._columns.time)
        return FittedRecommender(self.model.unfitted().fit_to(liked), rows, self._columns, self.comparison)

    def export(
        self,
        path: str | os.PathLike[str],
        name: str = "recommend",
        k: int = 10,
        *,
        history: str = "history",
        overwrite: bool = False,
    ) -> Ensemble:
        """Write a Triton model repository that recommends as `recommend` does.

        A request has a user's id, and a list of the ids of items that the user has taken since the log ended, which
        count as liked. The answer has `items` and `scores`, shape (rows, k), the best first. If fewer than k items are
        left, the id is null and the score minus infinity. The server needs only NumPy.

        Args:
            path: The folder to write.
            name: The name of the model.
            k: The number of items for each user.
            history: The name of the input with lists. The input with users has the name of the users' column.
            overwrite: Whether to replace an existing model of this kind. `load` of the result makes a running server
                use the new one.

        Returns:
            The exported model, which makes requests of frames.

        Raises:
            ValueError: Ids are dates, `k` is less than 1, or `name` or `history` cannot be a name.
            FileExistsError: `path` exists, and `overwrite` is False or the folder holds something else.

        Examples:
            >>> from nbdist.recsys import fit_recommender
            >>> from nbdist.recsys.recommenders import ItemKNN
            >>> log = {"user": ["ann", "ann", "bob", "bob", "cleo"], "item": ["a", "b", "a", "b", "a"]}
            >>> exported = fit_recommender(log, models=ItemKNN()).export("repository", k=2)
            >>> exported.inputs, exported.output
            ({'user': 'string', 'history': 'list[string]'}, 'items')
            >>> exported.request({"user": ["cleo", "dave"], "history": [[], ["a"]]})["user"].tolist()
            [[b'cleo'], [b'dave']]
        """
        check_count(k, least=1, name="`k`")
        if history == self._columns.user:
            raise ValueError(f"`history` must differ from the name of the users' column, got {history!r}")
        taken = part_of(self.model.taken, torch.from_numpy(codes_of(self._users, self.model.users)))
        lists = {"taken": taken, "seen": self._seen}
        arrays = {f"{what}.values": one.values.numpy() for what, one in lists.items()}
        arrays |= {f"{what}.offsets": one.offsets.numpy() for what, one in lists.items()}
        learned = {one: getattr(self.model, one).numpy() for one in self.model.ARRAYS}
        arrays |= {**learned, "popularity": self._popular._counts.numpy()}
        options = {"kind": type(self.model).__name__, "k": k, **self.model.parameters}
        ids = {"users": self._users, "items": self.model.items}
        return export_lists(path, name, (self._columns.user, history), ids, arrays, options, overwrite)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Save model and log in a folder, as JSON, Parquet and NumPy arrays. The folder appears when it is complete.

        In a function that runs on several ranks, all ranks must call it. Rank 0 writes.

        Raises:
            FileExistsError: The folder exists, and `overwrite` is False or the folder holds no recommender.
        """
        with atomic_folder(folder, FILES, overwrite) as scratch:
            if ranks.rank() == 0:
                self.model.write(scratch / "whole")
                self._columns.write(scratch / "whole", self._rows)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Load the recommender that was saved in a folder. No code in the folder is run, since there is no pickle in
        it.

        Raises:
            FileNotFoundError: A file of the recommender is missing.
            ValueError: The folder holds no recommender.
        """
        path = Path(folder).expanduser()
        columns, rows = LogColumns.load(path)
        return cls(Recommender.load(path), rows, columns)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.model.parameters.items())
        text = (
            f"{type(self.model).__name__}({given}) of {len(self._rows):,} rows, {len(self._users):,} users, "
            f"{len(self.model.items):,} items"
        )
        return text if self.comparison is None else f"{text}\n{self.comparison!r}"

    def _repr_markdown_(self) -> str:
        text = repr(self).partition("\n")[0]
        return text if self.comparison is None else f"{text}\n\n{self.comparison.to_markdown()}"

    def _found(self, asked: pl.Series, k: int, rows: pl.DataFrame | None, exclude_seen: bool) -> pl.DataFrame:
        """Return for each user the best `items`, their `scores`, and the name of the model, `by`."""
        taken = self._taken(asked, rows)
        seen = None
        if exclude_seen:
            seen = part_of(self._seen, torch.from_numpy(codes_of(asked, self._users)))
            if rows is not None:
                seen = together(seen, self._lists(rows, asked))
        tables = []
        known = taken.lengths > 0
        for model, some in ((self.model, known), (self._popular, ~known)):
            places = some.nonzero().flatten()
            if len(places):
                excluded = None if seen is None else part_of(seen, places)
                best = model.best(part_of(taken, places), k, excluded)
                tables.append(best.with_columns(by=pl.lit(type(model).__name__), at=pl.Series(places.numpy())))
        if not tables:
            return self.model.best(taken, k, None).with_columns(by=pl.lit(""))
        return pl.concat(tables).sort("at").drop("at")

    def _taken(self, asked: pl.Series, rows: pl.DataFrame | None) -> Ragged:
        """Return the codes of the items that users have taken and liked."""
        codes = codes_of(asked, self.model.users)
        taken = part_of(self.model.taken, torch.from_numpy(codes))
        return taken if rows is None else together(taken, self._lists(self._columns.liked(rows), asked))

    def _lists(self, rows: pl.DataFrame, users: pl.Series) -> Ragged:
        """Return the codes of the items in some rows, a list for each of `users`."""
        pairs = rows.select(user=self._columns.user, item=self._columns.item)
        items = codes_of(pairs["item"], self.model.items)
        distinct = users.unique(maintain_order=True)  # who is asked for twice has one list
        places = codes_of(pairs["user"], distinct)
        known = (items >= 0) & (places >= 0)
        lists = ragged_of(places[known], items[known], len(distinct))
        return part_of(lists, torch.from_numpy(codes_of(users, distinct)))

    def _together(self, more: pl.DataFrame) -> pl.DataFrame:
        if not len(more):  # columns without values have any type
            return self._rows
        for name, dtype in self._rows.schema.items():
            other, labels = more.schema[name], ratings_of(pl.col(name))
            if other == pl.Null or (
                isinstance(dtype, pl.Datetime)
                and isinstance(other, pl.Datetime)
                and (dtype.time_zone is None) == (other.time_zone is None)
            ):
                more = more.with_columns(pl.col(name).cast(dtype))  # all are null, or times of another unit or zone
            elif dtype != other and pl.UInt64 in (dtype, other) and dtype.is_integer() and other.is_integer():
                as_before = more[name].cast(dtype, strict=False)
                if as_before.null_count() > more[name].null_count():
                    raise TypeError(
                        f"column {name!r} must be {dtype}, as in the log, got {other} with values beyond it"
                    )
                more = more.with_columns(as_before)
            elif dtype == pl.Boolean and other.is_numeric() and more.select(labels.is_in([0.0, 1.0]).all()).item():
                more = more.with_columns(labels.cast(dtype))
            elif dtype != other and not (dtype.is_numeric() and other.is_numeric()):
                raise TypeError(f"column {name!r} must be {dtype}, as in the log, got {other}")
        return pl.concat([self._rows, more], how="vertical_relaxed")
