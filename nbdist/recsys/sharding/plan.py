"""A sharding plan for the user: the rank of each part of each table, and the balance of the load."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Shard:
    """A part of an embedding table on one rank."""

    table: str
    strategy: str
    """The table's sharding, such as "row_wise"."""
    rank: int
    row: int
    """The number of the shard's first row."""
    rows: int
    column: int
    """The number of the shard's first column."""
    columns: int
    bytes: int
    """The number of bytes of the shard's weights."""
    memory: int
    """The number of bytes that the planner expects: weights, optimizer state, inputs and outputs."""
    work: float
    """The time in milliseconds that the planner expects for a step, forward and backward. It is an estimate for GPUs:
    compare it between ranks, and not with a clock."""


@dataclass(frozen=True)
class Plan:
    """All shards of a model. A notebook shows the plan as a table, and a rank can return it like any value.

    Examples:
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.models import PooledTables
        >>> from nbdist.recsys.sharding import shard
        >>> def planned():
        ...     model = PooledTables({"user": 100, "movie": 100}, embedding_dim=8, device="meta")
        ...     return shard(model, {"user": "row_wise", "movie": "table_wise"}, batch_size=64).plan
        >>> plan = in_ddp(2, planned)
        >>> plan.strategies
        {'user': 'row_wise', 'movie': 'table_wise'}
        >>> plan
        table   strategy    rank    rows  columns       bytes
        user    row_wise       0    0–49      0–7   1.562 KiB
        user    row_wise       1   50–99      0–7   1.562 KiB
        movie   table_wise   ...    0–99      0–7   3.125 KiB
        The fullest of 2 ranks has 1... × the mean memory and 1... × the mean work.
        >>> plan.imbalance("bytes")
        1.5
    """

    shards: tuple[Shard, ...]
    nranks: int

    @property
    def strategies(self) -> dict[str, str]:
        """The sharding strategy of each table."""
        return {shard.table: shard.strategy for shard in self.shards}

    @property
    def frame(self) -> pd.DataFrame:
        """A frame with a row per shard, and the fields of `Shard` as columns."""
        return pd.DataFrame([vars(shard) for shard in self.shards], columns=list(Shard.__dataclass_fields__))

    @property
    def ranks(self) -> pd.DataFrame:
        """A frame with a row per rank: `shards`, and the sums of `bytes`, `memory` and `work`."""
        groups = self.frame.groupby("rank")
        sums = groups[["bytes", "memory", "work"]].sum()
        sums.insert(0, "shards", groups.size())
        return sums.reindex(range(self.nranks), fill_value=0)

    def imbalance(self, what: str) -> float:
        """Return the largest rank's share of "bytes", "memory" or "work", divided by the mean share. 1.0 is a balanced
        plan."""
        values = self.ranks[what]
        return float(values.max() / values.mean()) if values.any() else 1.0

    def plot(self, axes: Any = None) -> Any:
        """Draw two bar charts, memory and work over ranks, with a part of each bar for each table.

        Args:
            axes: Two matplotlib axes to draw in. None: a new figure.

        Returns:
            The two axes.
        """
        import matplotlib.pyplot as plt

        if axes is None:
            axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")[1]
        for ax, what, unit, scale in zip(axes, ("memory", "work"), ("MiB", "ms (estimate)"), (2**20, 1), strict=True):
            wide = self.frame.pivot_table(index="rank", columns="table", values=what, aggfunc="sum", fill_value=0)
            wide = wide.reindex(range(self.nranks), fill_value=0) / scale
            wide.plot.bar(stacked=True, ax=ax, rot=0, legend=what == "work", xlabel="rank", ylabel=unit)
            ax.set_title(f"{what}: the fullest rank has {self.imbalance(what):.2f} × the mean", fontsize=10)
        axes[1].legend(title="table", bbox_to_anchor=(1, 1), loc="upper left", fontsize=8)
        return axes

    def __repr__(self) -> str:
        lines = [f"{'table':20} {'strategy':18} {'rank':>4} {'rows':>19} {'columns':>11} {'bytes':>10}"]
        for s in self.shards:
            rows, columns = _span(s.row, s.rows), _span(s.column, s.columns)
            lines.append(f"{s.table:20} {s.strategy:18} {s.rank:4} {rows:>19} {columns:>11} {_size(s.bytes):>10}")
        return "\n".join([*lines, self._balance()])

    def _balance(self) -> str:
        memory, work = self.imbalance("memory"), self.imbalance("work")
        return f"The fullest of {self.nranks} ranks has {memory:.2f} × the mean memory and {work:.2f} × the mean work."

    def _repr_html_(self) -> str:
        """Return a table with a row for each table and a column for each rank: the rows and columns that the rank
        stores."""
        cells: dict[tuple[str, int], list[str]] = {}
        for s in self.shards:
            text = f"rows {_span(s.row, s.rows)}<br>columns {_span(s.column, s.columns)}<br>{_size(s.bytes)}"
            cells.setdefault((s.table, s.rank), []).append(text)
        head = "".join(f"<th>rank {rank}</th>" for rank in range(self.nranks))
        body = ""
        for table, strategy in self.strategies.items():
            places = "".join(f"<td>{'<br>'.join(cells.get((table, rank), []))}</td>" for rank in range(self.nranks))
            body += f"<tr><th>{html.escape(table)}</th><td>{strategy}</td>{places}</tr>"
        ranks = self.ranks
        for title, texts in (
            ("weights", map(_size, ranks["bytes"])),
            ("memory, expected", map(_size, ranks["memory"])),
            ("work, expected", (f"{value:.3g} ms" for value in ranks["work"])),
        ):
            body += f"<tr><th colspan=2>{title}</th>" + "".join(f"<td><b>{text}</b></td>" for text in texts) + "</tr>"
        return (
            f"<table><thead><tr><th>table</th><th>strategy</th>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<p>{html.escape(self._balance())}</p>"
        )


def _span(first: int, count: int) -> str:
    return f"{first}–{first + count - 1}" if count else "none"


def _size(count: float) -> str:
    """Describe a number of bytes, such as "1.5 MB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
