"""Sharding strategies and tables: which combinations are possible, and why others are not."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..versions import has_grid_shard, lacks_sequences
from .optimizers import EVERYWHERE

T = TypeVar("T")

STRATEGIES = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)
_SEQUENCE_STRATEGIES = ("table_wise", "row_wise", "column_wise", "data_parallel")  # what TorchRec has without pooling
ROW_STRATEGIES = ("row_wise", "table_row_wise", "grid_shard")


@dataclass(frozen=True)
class Table:
    """An embedding table of the original model."""

    name: str
    key: str
    """The key of the table's weights in the model's state dict."""
    config: Any
    weight: torch.Tensor
    pooled: bool


SMALL = 4 << 20
"""The number of bytes of a table up to which a copy on every rank costs little."""


def choose(strategies: Mapping[str, str], tables: Mapping[str, Table]) -> dict[str, str]:
    """Return the strategy of each table that `strategies` matches."""
    for pattern, strategy in strategies.items():
        if strategy not in STRATEGIES:
            raise ValueError(
                f"{pattern!r}: {strategy!r} is not a sharding strategy; choose one of {', '.join(STRATEGIES)}"
            )
    return by_table(strategies, tables)


def of_each(what: str, given: Mapping[str, T] | T, tables: Mapping[str, Table]) -> dict[str, T]:
    """Return a value for each table, given a value for all tables or a mapping with one for each."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(tables, given)
    found = by_table(given, tables)
    for name in tables:
        if name not in found:
            raise ValueError(f"{what} has no entry for table {name!r}: add it, or '*' for all others")
    return found


def by_table(given: Mapping[str, T], tables: Mapping[str, Table]) -> dict[str, T]:
    """Return a value for each table, given names and glob patterns. A name takes precedence over patterns, and an
    earlier pattern over a later one."""
    for pattern in given:
        if not fnmatch.filter(tables, pattern) and pattern not in tables:
            raise ValueError(f"{pattern!r} matches no table; there are {', '.join(tables)}")
    chosen = {}
    for name in tables:
        for pattern, value in sorted(given.items(), key=lambda item: item[0] != name):
            if pattern == name or fnmatch.fnmatchcase(name, pattern):
                chosen[name] = value
                break
    return chosen


def too_large_to_copy(table: Table, samples: int) -> str:
    """Return the reason why a table should not be copied on every rank; empty if it may. `samples` is the number of
    samples of all ranks in a step."""
    rows, size = table.config.num_embeddings, table.weight.numel() * table.weight.element_size()
    if size <= SMALL or rows <= 4 * samples:
        return ""
    return (
        f"each step sends and applies a gradient of all its {rows:,} rows, {size / 2**20:,.0f} MiB, where {samples:,} "
        "samples touch a few"
    )


def column_parts(strategy: str, nranks: int, local: int) -> int:
    """Return the number of parts of equal width into which a strategy splits a table's columns.

    Args:
        strategy: One of `STRATEGIES`.
        nranks: The number of ranks.
        local: The number of ranks on this machine.
    """
    # A grid has a block of columns per machine, and is one on a single machine too.
    return {"column_wise": nranks, "table_column_wise": local, "grid_shard": max(2, nranks // local)}.get(strategy, 1)


def refusal(strategy: str, table: Table, optimizer: str, nranks: int, local: int, device: str) -> str:
    """Return the reason why a table cannot be sharded in this way; empty if it can. `device` is "cpu" or
    "cuda"; for the other arguments, see `column_parts`."""
    rows, columns = table.config.num_embeddings, table.config.embedding_dim
    if not table.pooled and strategy not in _SEQUENCE_STRATEGIES:
        return f"TorchRec shards the tables of an EmbeddingCollection only {', '.join(_SEQUENCE_STRATEGIES)}"
    if not table.pooled and strategy != "data_parallel" and device == "cpu" and lacks_sequences():
        return (
            "on CPUs, the FBGEMM of this torch cannot return the single rows that an EmbeddingCollection needs: take "
            "torch 2.8 or newer, with the TorchRec that goes with it, or data_parallel, or replicate(model, optimizer)"
        )
    if strategy == "grid_shard" and not has_grid_shard():
        return "TorchRec 1.0 does not have it: take torch 2.6 or newer, with the TorchRec that goes with it"
    if strategy == "data_parallel":
        some = ", ".join(EVERYWHERE)
        return "" if optimizer in EVERYWHERE else f"copies of a table train with {some} only, not with {optimizer}"
    ranks = {"row_wise": nranks, "table_row_wise": local, "grid_shard": local}.get(strategy, 1)
    filled = math.ceil(rows / math.ceil(rows / ranks))
    if filled < ranks:
        return f"TorchRec gives {rows} rows to {filled} of {ranks} ranks, and FBGEMM cannot hold a part without rows"
    parts = column_parts(strategy, nranks, local)
    if columns % (4 * parts):
        width = f"{columns} columns in {parts} parts" if parts > 1 else f"{columns} columns"
        return f"{width}: FBGEMM needs a multiple of 4 in each, so the table has to have a multiple of {4 * parts}"
    return ""
