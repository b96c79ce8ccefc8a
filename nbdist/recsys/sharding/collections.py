"""The collections of tables in a model: from `nbdist.recsys.models`, which become TorchRec's, or TorchRec's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import PoolingType

from ..models.tables import PooledTables, SequenceTables
from ..raw_ids.table import RawTable
from .strategies import Table

POOLED = (PooledTables, EmbeddingBagCollection)
SEQUENCES = (SequenceTables, EmbeddingCollection)


def find_tables(model: nn.Module) -> dict[str, Table]:
    """Return the tables of a model, by name.

    Raises:
        ValueError: There are no tables, or two tables have one name.
    """
    found: dict[str, Table] = {}
    for path, module in model.named_modules():
        pooled = isinstance(module, POOLED)
        if not pooled and not isinstance(module, SEQUENCES):
            continue
        attribute = "embedding_bags" if pooled else "embeddings"
        for config in module.embedding_bag_configs() if pooled else module.embedding_configs():
            if config.name in found:
                raise ValueError(f"two tables are called {config.name!r}: give each a name of its own")
            table = getattr(module, attribute)[config.name]
            if isinstance(table, RawTable):
                raise ValueError(
                    f"table {config.name!r} has raw ids, which TorchRec's tables do not support: use replicate(), "
                    "which divides the rows of such a table among the ranks"
                )
            weight = table.weight
            key = f"{path}.{attribute}.{config.name}.weight".lstrip(".")
            found[config.name] = Table(config.name, key, config, weight, pooled)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no PooledTables, SequenceTables, EmbeddingBagCollection or "
            "EmbeddingCollection: nothing to shard"
        )
    return found


def plain_collections(model: nn.Module) -> dict[str, PooledTables | SequenceTables]:
    """Return the collections that are not TorchRec's, by path."""
    return {path: one for path, one in model.named_modules() if isinstance(one, (PooledTables, SequenceTables))}


def columns_of(collection: PooledTables | SequenceTables) -> list[str]:
    """Return the columns of a batch that a collection uses."""
    return [column for table in collection.tables for column in table.feature_names]


def replace(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Put modules into a model, by path. Return the model, or the one module that replaces it."""
    for path, module in modules.items():
        if not path:
            return module
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)
    return model


def to_torchrec(module: PooledTables | SequenceTables) -> nn.Module:
    """Return TorchRec's collection with the same parameters."""
    meta = torch.device("meta")  # so that no other weights are made
    described = [vars(table) for table in module.tables]
    collection: Any
    if isinstance(module, PooledTables):
        pooling = PoolingType[module.mode.upper()]
        bags = [EmbeddingBagConfig(**one, pooling=pooling) for one in described]
        collection = EmbeddingBagCollection(tables=bags, device=meta)
        held, plain = collection.embedding_bags, module.embedding_bags
    else:
        collection = EmbeddingCollection(tables=[EmbeddingConfig(**one) for one in described], device=meta)
        held, plain = collection.embeddings, module.embeddings
    for name, table in plain.items():
        held[name].weight = table.weight
    return collection  # type: ignore[no-any-return]
