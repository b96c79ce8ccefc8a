"""The measurements of a run so far, as a table, a plot and a frame."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_SHOWN = 20
NUMBERS = ("step", "epoch", "loss", "lr", "rows_per_second")
"""The names of a record's numbers that are no metrics."""


@dataclass(frozen=True)
class Record:
    """A row of the table: the training since the previous record, and the evaluation after it.

    Examples:
        >>> from nbdist.recsys.training import History, Record
        >>> history = History([Record(10, 1.0, 0.62, {"auc": 0.7}, [0.1], 2000.0)])  # `fit` returns one
        >>> history[-1].step, history[-1].metrics
        (10, {'auc': 0.7})
    """

    step: int
    """The number of steps so far."""
    epoch: float
    loss: float
    """The mean loss over the rows that all ranks trained on since the last record."""
    metrics: dict[str, float]
    """The metrics over the whole validation set; empty if there was no evaluation."""
    rates: list[float]
    """The learning rates of the last step: each different rate in the rank's optimizer, the largest first."""
    rows_per_second: float
    """The number of rows per second of all ranks together, not counting the time for evaluations and snapshots."""
    failed: dict[str, str] = field(default_factory=dict)
    """For each metric that could not be computed, whose value is NaN, the reason."""


class History:
    """The records of a run, which `fit` returns. A notebook shows them as a table, and a rank can return them like any
    value.

    Args:
        records: The records, in the order of their steps.

    Examples:
        >>> from nbdist.recsys.training import History, Record
        >>> first = Record(5, 0.5, 0.69, {"auc": 0.6}, [0.1], 2000.0)
        >>> history = History([first, Record(10, 1.0, 0.65, {"auc": 0.7}, [0.1], 2000.0)])
        >>> history.frame[["step", "epoch", "lr"]]
           step  epoch   lr
        0     5    0.5  0.1
        1    10    1.0  0.1
        >>> history.values("auc")
        [0.6, 0.7]
        >>> history.plot().savefig("history.png")
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __getitem__(self, number: int) -> Record:
        return self.records[number]

    def values(self, metric: str) -> list[float]:
        """Return the values of a metric in the records that have it."""
        return [record.metrics[metric] for record in self.records if metric in record.metrics]

    @property
    def frame(self) -> pd.DataFrame:
        """Return a frame with a row for each record and a column for each number. `lr_2` is the second of several
        learning rates."""
        import pandas as pd

        return pd.DataFrame([numbers(record) for record in self.records])

    def plot(self) -> Figure:
        """Plot the loss, each metric, the learning rates and the rows per second over the steps. Metrics with names
        like ``..._loss`` share a plot."""
        from matplotlib.figure import Figure  # not pyplot: it would show the figure once more at the end of the cell

        steps = [record.step for record in self.records]
        panels: dict[str, dict[str, list[float]]] = {"loss": {"train": [record.loss for record in self.records]}}
        for name in self._metrics:
            panels.setdefault("loss" if name.endswith("loss") else name, {})[name] = self.values(name)
        evaluated = [record.step for record in self.records if record.metrics]
        rates = zip(*(record.rates for record in self.records), strict=True)
        panels["learning rate"] = {_rate(i): list(values) for i, values in enumerate(rates)}
        panels["rows/s"] = {"rows/s": [record.rows_per_second for record in self.records]}
        figure = Figure(figsize=(3.2 * len(panels), 2.5), layout="constrained")
        for axes, (title, lines) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            for label, values in lines.items():
                at = evaluated if label in self._metrics else steps
                axes.plot(at, values, marker="." if len(at) < 40 else None, label=label)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("step", fontsize=8)
            axes.tick_params(labelsize=8)
            if len(lines) > 1:
                axes.legend(fontsize=7)
                if title == "learning rate":  # tables have often a hundred times the others' rate
                    axes.set_yscale("log")
            if title == "rows/s":
                axes.set_ylim(bottom=0)
        return figure

    def _to_json(self) -> list[dict[str, Any]]:
        return [asdict(record) for record in self.records]

    @classmethod
    def _from_json(cls, records: list[dict[str, Any]]) -> History:
        return cls(Record(**record) for record in records)

    def __repr__(self) -> str:
        if not self.records:
            return "no records yet"
        metrics = self._metrics
        return "\n".join([text_row(head(metrics)), *(text_row(cells(record, metrics)) for record in self)])

    @property
    def _metrics(self) -> list[str]:
        return list(dict.fromkeys(name for record in self.records for name in record.metrics))

    def _repr_html_(self) -> str:
        if not self.records:
            return ""
        rows = [cells(record, self._metrics) for record in self.records[-_SHOWN:]]
        top = "".join(f"<th>{html.escape(name)}</th>" for name in head(self._metrics))
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        more = len(self) - len(rows)
        failed = "".join(f"<p>{html.escape(text)}</p>" for text in failures(self[-1]))
        note = f"<p>{more} earlier ones are in <code>.frame</code>.</p>" if more else ""
        return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>{note}{failed}"


def numbers(record: Record) -> dict[str, float]:
    """Return a record's numbers by their names in `History.frame`."""
    rates = {_rate(i): rate for i, rate in enumerate(record.rates)}
    return {
        "step": record.step,
        "epoch": record.epoch,
        "loss": record.loss,
        **record.metrics,
        **rates,
        "rows_per_second": record.rows_per_second,
    }


def head(metrics: Iterable[str]) -> list[str]:
    """Return the names of the columns."""
    return ["step", "epoch", "loss", *metrics, "learning rate", "rows/s"]


def cells(record: Record, metrics: Iterable[str]) -> list[str]:
    """Return a record's numbers as texts, in the order of the column names `head`."""
    return [
        f"{record.step:,}",
        f"{record.epoch:.2f}",
        f"{record.loss:.4f}",
        *(f"{record.metrics[name]:.4f}" if name in record.metrics else "" for name in metrics),
        ", ".join(f"{rate:.3g}" for rate in record.rates),
        f"{record.rows_per_second:,.0f}",
    ]


def failures(record: Record) -> list[str]:
    """Return sentences about the metrics that could not be computed."""
    return [f"{name} after step {record.step:,} could not be computed: {why}" for name, why in record.failed.items()]


def _rate(number: int) -> str:
    return f"lr_{number + 1}" if number else "lr"


def text_row(row: list[str]) -> str:
    return " ".join(f"{cell:>14}" for cell in row)
