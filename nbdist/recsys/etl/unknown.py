"""Embeddings for values that did not occur in training: null, or an unknown id, if all training rows had known ones."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .vocabulary import NULL_CODE, UNSEEN_CODE, Vocabulary
from .workflow import Workflow


def fill_unknown(
    model: nn.Module, workflow: Workflow, tables: Mapping[str, nn.Module] | None = None
) -> dict[str, list[int]]:
    """Fill rows of a trained model's tables that no training row has used: they get the mean of the known rows.

    Otherwise an unknown user has the initial vector of the table, and a random prediction. The mean is over the values
    in the vocabulary, weighted by their counts in `Workflow.fit`. Only the rows of codes 0 (null) and 1 (unseen values,
    or all buckets) are filled. Codes that occurred in `fit` stay as trained.

    Args:
        model: A plain module, as returned by `gather`. It is changed.
        workflow: The fitted workflow that made the codes for its training.
        tables: A mapping from columns to the `nn.Embedding` or `nn.EmbeddingBag` of their codes. None: the tables of
            TorchRec's collections whose features have the names of columns.

    Returns:
        A mapping from columns to the codes whose rows were filled.

    Raises:
        ValueError: A column has more codes than its table has rows, or a name is not the name of a column of codes.

    Examples:
        >>> import polars as pl
        >>> import torch
        >>> from nbdist.recsys.etl import Categorify, Workflow, fill_unknown
        >>> workflow = Workflow(Categorify("user")).fit(pl.DataFrame({"user": ["ann", "bob", "bob"]}))
        >>> weight = torch.tensor([[9.0], [7.0], [1.0], [4.0]])  # of null, of unseen, of bob, of ann
        >>> model = torch.nn.Embedding.from_pretrained(weight)
        >>> fill_unknown(model, workflow, {"user": model})
        {'user': [0, 1]}
        >>> model.weight[:, 0].tolist()
        [2.0, 2.0, 1.0, 4.0]
    """
    return _fill(_tables(model, workflow, tables), workflow)


def _fill(tables: Sequence[_Table], workflow: Workflow) -> dict[str, list[int]]:
    filled: dict[str, list[int]] = {}
    for weight, columns, padding in tables:
        known = {name: workflow.vocabularies[name] for name in columns}
        for name, vocabulary in known.items():
            if vocabulary.size > len(weight):
                raise ValueError(
                    f"column {name!r} has {vocabulary.size} codes, but its table has only {len(weight)} rows: the "
                    "model was trained with another workflow"
                )
        if len({vocabulary.num_buckets for vocabulary in known.values()}) > 1:
            raise ValueError(
                f"columns {', '.join(known)} share one table, but differ in num_buckets, so that their codes conflict"
            )
        codes = [code for code in _never_seen(list(known.values())) if code != padding]
        total = sum(int(vocabulary.counts.sum()) for vocabulary in known.values())
        if codes and total:
            with torch.no_grad():
                weight[codes] = sum(_sum(weight, vocabulary) for vocabulary in known.values()) / total
            filled |= dict.fromkeys(columns, codes)
    return filled


@contextlib.contextmanager
def unknown_filled(
    model: nn.Module, workflow: Workflow, columns: Collection[str], more: Sequence[tuple[nn.Module, list[str]]]
) -> Iterator[None]:
    """Apply `fill_unknown` in the block, and warn of columns whose unknown values have untrained vectors.

    Args:
        columns: The columns that the model uses.
        more: Further tables with their columns, for tables that do not name their columns themselves.
    """
    tables = _tables(model, workflow, None)
    known = [id(table.weight) for table in tables]
    others: dict[int, _Table] = {}
    for table, names in more:
        one = others.setdefault(id(table.weight), _Table.of(table, []))
        one.columns.extend(name for name in names if name in workflow.vocabularies and name not in one.columns)
    tables += [one for number, one in others.items() if number not in known and one.columns]
    filled = {name for one in tables for name in one.columns}
    codes = [name for name in columns if name in workflow.vocabularies and name not in filled]
    if left := [name for name in codes if _never_seen([workflow.vocabularies[name]])]:
        warnings.warn(
            f"no training row had a null or an unknown value in {', '.join(left)}, and the model's tables for these "
            "columns are not known: such values get the untrained rows of the tables. Call "
            f"etl.fill_unknown(model, workflow, {{{left[0]!r}: table}}) first, and pass fill=False",
            stacklevel=4,
        )
    before = []
    for weight, names, _ in tables:
        first = max(workflow.vocabularies[name].first_code for name in names)
        before.append((weight, weight[:first].detach().clone()))
    try:
        _fill(tables, workflow)
        yield
    finally:
        with torch.no_grad():
            for weight, rows in before:
                weight[: len(rows)] = rows


class _Table(NamedTuple):
    """A table of a model."""

    weight: Tensor
    columns: list[str]
    """The columns that are looked up in the table."""
    padding: int | None
    """The code of padding, whose row is not used."""

    @classmethod
    def of(cls, module: Any, columns: list[str]) -> _Table:
        """Return the table of a module."""
        return cls(module.weight, columns, getattr(module, "padding_idx", None))


def _tables(model: nn.Module, workflow: Workflow, tables: Mapping[str, nn.Module] | None) -> list[_Table]:
    """Return the tables whose columns are known."""
    found: list[_Table] = []
    if tables is not None:
        if wrong := [name for name in tables if name not in workflow.vocabularies]:
            raise ValueError(f"{wrong[0]!r} is no column of codes; there are {', '.join(workflow.vocabularies)}")
        for table in {id(table): table for table in tables.values()}.values():
            found.append(_Table.of(table, [name for name, one in tables.items() if one is table]))
        return found
    module: Any
    for module in model.modules():
        # TorchRec need not be imported to know its collections.
        for configs, held in (("embedding_bag_configs", "embedding_bags"), ("embedding_configs", "embeddings")):
            for config in getattr(module, configs)() if hasattr(module, configs) else ():
                columns = [name for name in config.feature_names if name in workflow.vocabularies]
                if columns:
                    found.append(_Table.of(getattr(module, held)[config.name], columns))
    return found


def _never_seen(vocabularies: list[Vocabulary]) -> list[int]:
    """Return the codes for null and unseen values that did not occur in any of a table's columns."""
    nulls = sum(vocabulary.nulls for vocabulary in vocabularies)
    buckets = zip(*(vocabulary.bucket_counts for vocabulary in vocabularies), strict=True)
    return [NULL_CODE] * (not nulls) + [code for code, counts in enumerate(buckets, UNSEEN_CODE) if not any(counts)]


def _sum(weight: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the sum of the rows of known values, each weighted by the count of its value; shape (columns,)."""
    counts = torch.from_numpy(vocabulary.counts.to_numpy(writable=True)).to(weight)
    return counts @ weight[vocabulary.first_code : vocabulary.size]
