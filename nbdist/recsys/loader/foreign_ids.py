"""Ids of a batch that a table of a model has no row for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .columns import Ragged


def foreign_ids(model: nn.Module, batch: Any) -> str | None:
    """Describe the first ids of a batch that a table of the model has no row for; None if each has one."""
    for module in model.modules():
        for configs, tables in (("embedding_bag_configs", "embedding_bags"), ("embedding_configs", "embeddings")):
            for table in getattr(module, configs, list)():
                # A table of raw ids has a row for any id.
                plain = isinstance(getattr(module, tables)[table.name], (nn.Embedding, nn.EmbeddingBag))
                if plain and (found := _foreign_id(table, batch)):
                    return found
    return None


def _foreign_id(table: Any, batch: Any) -> str | None:
    for name in table.feature_names:
        column = batch.get(name) if isinstance(batch, Mapping) else None
        ids = column.values if isinstance(column, Ragged) else column
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex():
            continue
        wrong = ((ids < 0) | (ids >= table.num_embeddings)).nonzero()
        if len(wrong):
            place = int(wrong[0, 0])
            if isinstance(column, Ragged):
                place = int((column.offsets <= place).sum()) - 1
            return (
                f"column {name!r} must have ids 0 to {table.num_embeddings - 1}, since the table has "
                f"{table.num_embeddings} rows, got {int(ids[wrong[0, 0]])} in row {place}"
            )
    return None
