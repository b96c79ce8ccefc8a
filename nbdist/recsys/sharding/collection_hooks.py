"""Changes of the collections of embedding tables in a model that is sharded, before and after its sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection

from ..models.tables import PooledTables, SequenceTables
from .collections import columns_of
from .exchange import exchange_at_once
from .hooks import (
    check_ids,
    divide_means,
    look_up_singly,
    pad_batches,
    restore_order,
    sum_instead,
    take_columns,
)
from .plan import Plan
from .strategies import ROW_STRATEGIES


def prepare_collections(
    model: nn.Module,
    plain: Mapping[str, PooledTables | SequenceTables],
    plan: Plan,
    checked: bool,
    by_gloo: Sequence[str],
) -> Callable[[nn.Module], dict[nn.Module, set[str]]]:
    """Prepare the collections of a model for sharding.

    Args:
        model: The model, with TorchRec's collections.
        plain: The original collections that TorchRec's collections replace, by path.
        plan: The strategies of the tables.
        checked: Whether ids outside a table are refused.
        by_gloo: The strategies whose results gloo sums and scatters.

    Returns:
        A function to call with the sharded model. It returns the features of each sharded collection.
    """
    hooks = [_hooks(path, module, plan, checked, by_gloo) for path, module in model.named_modules()]
    features = _features(model)

    def finish(module: nn.Module) -> dict[nn.Module, set[str]]:
        for add in hooks:
            add(module)
        for path, collection in plain.items():
            take_columns(module.get_submodule(path), columns_of(collection))
        collections = {module.get_submodule(path): names for path, names in features.items()}
        for one in collections:
            exchange_at_once(one)
        return collections

    return finish


def _hooks(
    path: str, module: nn.Module, plan: Plan, checked: bool, by_gloo: Sequence[str]
) -> Callable[[nn.Module], None]:
    """Prepare a module for sharding; return what to do with the sharded model that contains it."""
    if isinstance(module, EmbeddingCollection):
        rows = _rows(module.embedding_configs())

        def add_to_sequences(parallel: nn.Module) -> None:
            sharded = parallel.get_submodule(path)
            if checked:
                check_ids(sharded, rows)
            look_up_singly(sharded)
            pad_batches(sharded, False)

        return add_to_sequences
    if not isinstance(module, EmbeddingBagCollection):
        return lambda parallel: None
    features = {config.name: config.feature_names for config in module.embedding_bag_configs()}
    rows = _rows(module.embedding_bag_configs())
    names = list(module._embedding_names)
    by_rows = any(plan.strategies[name] in ROW_STRATEGIES for name in features)
    means = sum_instead(module) if by_rows else {}

    def add_to_bags(parallel: nn.Module) -> None:
        sharded = parallel.get_submodule(path)
        if checked:
            check_ids(sharded, rows)
        if any(means.values()):
            divide_means(sharded, means, features)
        restore_order(sharded, names)
        pad_batches(sharded, any(plan.strategies[name] in by_gloo for name in features))

    return add_to_bags


def _features(model: nn.Module) -> dict[str, set[str]]:
    """Return the features of each collection, by its path."""
    return {
        path: set(_rows(module.embedding_bag_configs() if bags else module.embedding_configs()))
        for path, module in model.named_modules()
        if (bags := isinstance(module, EmbeddingBagCollection)) or isinstance(module, EmbeddingCollection)
    }


def _rows(configs: Iterable[Any]) -> dict[str, list[tuple[str, int]]]:
    """Return the tables of each feature, with their numbers of rows."""
    rows: dict[str, list[tuple[str, int]]] = {}
    for config in configs:
        for feature in config.feature_names:
            rows.setdefault(feature, []).append((config.name, config.num_embeddings))
    return rows
