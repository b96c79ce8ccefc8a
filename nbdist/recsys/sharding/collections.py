"""The collections of tables in a model: TorchRec's, and those of `nbdist.recsys.models`, which become TorchRec's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import PoolingType

from ..models.tables import PooledTables, SequenceTables
from .strategies import Table

POOLED = (PooledTables, EmbeddingBagCollection)
SEQUENCES = (SequenceTables, EmbeddingCollection)


def find_tables(model: nn.Module) -> dict[str, Table]:
    """The tables of a model, by their names.

    Raises:
        ValueError: There are none, or two of one name.
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
            weight = getattr(module, attribute)[config.name].weight
            key = f"{path}.{attribute}.{config.name}.weight".lstrip(".")
            found[config.name] = Table(config.name, key, config, weight, pooled)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no PooledTables, SequenceTables, EmbeddingBagCollection or "
            "EmbeddingCollection: nothing to shard"
        )
    return found


def to_torchrec(model: nn.Module) -> tuple[nn.Module, dict[str, list[str]]]:
    """The model with TorchRec's collections for those of `nbdist.recsys.models`; it is changed.

    Returns:
        The model, or what has become of it where it is such a collection itself; and path of each collection that was
        replaced → the columns that it takes of a batch.
    """
    plain = {path: one for path, one in model.named_modules() if isinstance(one, (PooledTables, SequenceTables))}
    for path, module in plain.items():
        if not path:
            return _convert(module), {"": _columns(module)}
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, _convert(module))
    return model, {path: _columns(module) for path, module in plain.items()}


def _columns(module: PooledTables | SequenceTables) -> list[str]:
    tables = module.embedding_bag_configs() if isinstance(module, PooledTables) else module.embedding_configs()
    return [column for table in tables for column in table.feature_names]


def _convert(module: PooledTables | SequenceTables) -> nn.Module:
    """TorchRec's collection of the same parameters."""
    meta = torch.device("meta")  # so that no other weights are made
    collection: Any
    if isinstance(module, PooledTables):
        pooling = PoolingType[module.mode.upper()]
        configs = [EmbeddingBagConfig(**vars(table), pooling=pooling) for table in module.embedding_bag_configs()]
        collection = EmbeddingBagCollection(tables=configs, device=meta)
        held, plain = collection.embedding_bags, module.embedding_bags
    else:
        collection = EmbeddingCollection(
            tables=[EmbeddingConfig(**vars(table)) for table in module.embedding_configs()], device=meta
        )
        held, plain = collection.embeddings, module.embeddings
    for name, table in plain.items():
        held[name].weight = table.weight
        collection._device = table.weight.device
    return collection  # type: ignore[no-any-return]
