"""A summary of a model: its parameters with their shapes, bytes, and places on ranks."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from ..parallel.common_tables import CommonTables
from ..parallel.replicated import Replicated
from ..raw_ids import RawTable

if TYPE_CHECKING:
    import pandas as pd

    from .sharded import Sharded

_TABLES = (nn.Embedding, nn.EmbeddingBag, RawTable)
_HEAD = ("name", "rows", "shape", "bytes", "strategy")


@dataclass(frozen=True)
class Part:
    """A parameter of a model."""

    name: str
    rows: int | None
    """The number of rows of a table, on all ranks; None for other parameters."""
    shape: tuple[int, ...]
    bytes: int
    """The number of bytes of the values, counted once, without the optimizer's state."""
    strategy: str
    """The place of the parameter on ranks: a sharding strategy, "copied", "shared" (once in the memory of a machine),
    or, for a table of raw ids, "row_wise"; empty for a plain module."""


@dataclass(frozen=True)
class Summary:
    """The parameters of a model. A notebook shows them as a table, and a rank can return them like any value.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.sharding import summary
        >>> parameters = summary(torch.nn.Linear(8, 2))
        >>> parameters.bytes
        72
        >>> parameters.frame[["name", "bytes"]]
             name  bytes
        0  weight     64
        1    bias      8
    """

    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """Return the bytes of all parameters."""
        return sum(part.bytes for part in self.parts)

    @property
    def frame(self) -> pd.DataFrame:
        """Return a frame with a row for each parameter, and the fields of `Part` as columns."""
        import pandas as pd

        return pd.DataFrame([vars(part) for part in self.parts], columns=list(_HEAD))

    def _cells(self) -> list[tuple[str, ...]]:
        rows = [
            (
                part.name,
                "" if part.rows is None else f"{part.rows:,}",
                " × ".join(map(str, part.shape)),
                f"{part.bytes:,}",
                part.strategy,
            )
            for part in self.parts
        ]
        return [*rows, ("total", "", "", f"{self.bytes:,}", "")]

    def __repr__(self) -> str:
        rows = [_HEAD, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if 0 < i < 4 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEAD)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._cells()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def summary(model: nn.Module | Replicated | Sharded) -> Summary:
    """Return the parameters of a model, with shapes, bytes, rows of tables, and their places on ranks.

    Args:
        model: A module; or, on all ranks, the result of `shard` or `replicate`.

    Raises:
        TypeError: The argument is neither a module nor such a result.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.sharding import summary
        >>> summary(torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 1)))
        name      rows    shape  bytes  strategy
        0.weight   100  100 × 8  3,200
        1.weight          1 × 8     32
        1.bias                1      4
        total                    3,236
    """
    if isinstance(model, nn.Module):
        return _summary(model, {}, "")
    if isinstance(model, Replicated):
        tables = model._tables
        how = "shared" if isinstance(tables, CommonTables) else "copied"
        apart = {name: how for name, one in model.module.named_parameters() if tables is not None and one in tables}
        return _summary(model.module, apart, "copied")
    plan = getattr(model, "plan", None)
    if plan is None:
        raise TypeError(
            f"`model` must be a module, or the result of shard() or replicate(), got {type(model).__name__}"
        )
    template = model._template
    apart = {
        name: plan.strategies[table]
        for name, _ in template.named_parameters()
        if (table := name.split(".")[-2] if "." in name else "") in plan.strategies
    }
    return _summary(template, apart, "copied")


def _summary(module: nn.Module, apart: Mapping[str, str], others: str) -> Summary:
    tables = {f"{path}.weight".lstrip("."): one for path, one in module.named_modules() if isinstance(one, _TABLES)}
    parts = []
    for name, parameter in module.named_parameters():
        shape, strategy = tuple(parameter.shape), apart.get(name, others)
        table: Any = tables.get(name)
        if isinstance(table, RawTable):
            shape = (_rows(table), *shape[1:])
            strategy = "row_wise" if table.look_ups is not None else strategy
        size = parameter.element_size()
        for length in shape:
            size *= length
        parts.append(Part(name, None if table is None else shape[0], shape, size, strategy))
    return Summary(tuple(parts))


def _rows(table: RawTable) -> int:
    """Return the number of rows of a table of raw ids on all ranks."""
    size = table.rows.map.size
    if table.look_ups is None:
        return size
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, size)
    return sum(found)
