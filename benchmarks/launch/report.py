"""The figures as a table, as JSON and as a plot; and the requirements for nbdist, side by side."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks import ROOT
from benchmarks.machine import cpu

Values = Mapping[str, Mapping[str, list[float]]]  # by row and contestant

TITLES = {
    "nbdist": "nbdist",
    "floor": "bare forkserver (the floor)",
    "fabric": "Fabric ddp_notebook",
    "notebook_launcher": "accelerate notebook_launcher",
    "spawn": "torch.multiprocessing.spawn",
    "torchrunx": "torchrunx",
    "ipyparallel": "ipyparallel",
    "torchrun": "torchrun",
}
#: Other names that appear in some rows.
REFERENCES = {
    "import": "the same imports in a fresh interpreter",
    "after warm()": "nbdist, after `warm()` has finished",
    "again": "nbdist, the second call in such a kernel",
    "copy": "a fresh `DataFrame.copy()`",
    "clone": "a fresh `clone()`",
    "torchrun_piped": "torchrun without a terminal, and so without a bar",
}
#: The five rows that the README shows, and their titles there. `launch.md` has all.
IN_README = {
    "launch_2": "start 2 ranks, call, end",
    "launch_32": "start 32 ranks, call, end",
    "frame_8": "8 ranks with a 500 MB DataFrame",
    "tensor": "get a 300 MB tensor back",
    "latency": "call on 2 live ranks",
}
#: The columns of the README's table, and their titles.
CONTESTANTS_IN_README = {
    "nbdist": "nbdist",
    "notebook_launcher": "accelerate",
    "fabric": "Fabric",
    "ipyparallel": "ipyparallel",
    "spawn": "mp.spawn",
}
README = ROOT / "README.md"
BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"

WHERE = {"cells": "cells", "module": "a module file", "script": "a script file"}
PACKAGES = "torch fastai accelerate lightning-fabric torchrunx ipyparallel ipykernel pandas numpy".split()

Show = Callable[[float], str]


def seconds(value: float) -> str:
    if value < 0.01:
        return f"{1000 * value:.2f} ms"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.3g} s"


def megabytes(value: float) -> str:
    return f"{value / 1e6:.1f} MB" if abs(value) < 1e8 else f"{value / 1e6:.0f} MB"


def plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


#: Every row: its title, and how its numbers are shown.
ROWS: dict[str, tuple[str, Show]] = {
    "first_inside": ("first launch in a fresh kernel, 2 ranks: until all are inside the function", seconds),
    "first": ("… until the call returns", seconds),
    **{
        key: row
        for n in (2, 8, 32)
        for key, row in {
            f"launch_{n}_inside": (f"warm launch, {n} ranks: until all are inside the function", seconds),
            f"launch_{n}": ("… until the call returns", seconds),
        }.items()
    },
    "paused": ("warm launch, 2 ranks, after a pause of a second: until the call returns", seconds),
    "loop": ("… back to back, as a sweep in a loop launches", seconds),
    "private": ("private memory of a rank, torch and fastai imported (USS)", megabytes),
    "shared": ("shared memory of a rank (RSS − USS)", megabytes),
    **{
        key: row
        for n in (2, 8)
        for key, row in {
            f"frame_{n}_inside": (f"launch with a 500 MB DataFrame, {n} ranks: until all have it", seconds),
            f"frame_{n}": ("… until the call returns", seconds),
            f"held_{n}": ("… read by every rank: growth of all processes (PSS)", megabytes),
            f"peak_{n}": ("… and at the peak (AnonPages, Shmem, PageTables)", megabytes),
        }.items()
    },
    "resend_first": ("500 MB DataFrame to 2 live ranks, first time", seconds),
    "resend": ("… again, unchanged", seconds),
    "seen": ("… changed elements that the ranks see", lambda share: f"{share:.0%}"),
    "tensor": ("300 MB tensor back: from the rank's return to the notebook's value", seconds),
    "latency": ("call of a no-op on 2 live ranks", seconds),
    "rate": ("collab training, 2 ranks, its bar shown: samples per second", plain),
    "loss": ("… its validation loss", lambda loss: f"{loss:.4f}"),
}


@dataclass(frozen=True)
class Requirement:
    """A ratio (or a quantity) of medians, and the most or least it may be."""

    what: str
    row: str
    to: tuple[str, str] | None
    """Row and contestant that the number is divided by."""
    limit: float
    who: str = "nbdist"
    least: bool = False
    show: Show = lambda value: f"{value:.2f} ×"

    def measured(self, values: Values) -> float | None:
        mine = values.get(self.row, {}).get(self.who)
        other = values.get(self.to[0], {}).get(self.to[1]) if self.to else [1.0]
        if not mine or not other:
            return None
        return statistics.median(mine) / statistics.median(other)

    def line(self, values: Values) -> dict[str, str]:
        measured = self.measured(values)
        sign = "≥" if self.least else "≤"
        if measured is None:
            return {"what": self.what, "required": f"{sign} {self.show(self.limit)}", "measured": "–", "met": "–"}
        met = measured >= self.limit if self.least else measured <= self.limit
        required, got = f"{sign} {self.show(self.limit)}", self.show(measured)
        return {"what": self.what, "required": required, "measured": got, "met": "yes" if met else "**no**"}


REQUIREMENTS = [
    *(
        Requirement(f"warm `in_ddp(2, f)`, {until}: compared with {TITLES[peer]}", row, (row, peer), limit)
        for row, until in (("launch_2", "until it returns"), ("launch_2_inside", "until inside"))
        for peer, limit in (("fabric", 1.0), ("floor", 1.5))
    ),
    Requirement(
        "spawn compared with warm `in_ddp(2, f)`", "launch_2", ("launch_2", "nbdist"), 50, who="spawn", least=True
    ),
    Requirement("8 ranks compared with 2 ranks", "launch_8", ("launch_2", "nbdist"), 3),
    Requirement("32 ranks", "launch_32", None, 0.8, show=seconds),
    Requirement("launches back to back compared with one after a pause of a second", "loop", ("paused", "nbdist"), 1.2),
    Requirement("first call after `warm()` compared with the second", "first", ("first", "again"), 1.2, "after warm()"),
    Requirement("first call without `warm()` compared with the imports alone", "first", ("first", "import"), 1.2),
    Requirement("private memory of a rank", "private", None, 10e6, show=megabytes),
    *(
        Requirement(
            f"500 MB DataFrame to {n} ranks compared with a fresh copy", f"frame_{n}", (f"frame_{n}", "copy"), 2
        )
        for n in (2, 8)
    ),
    *(
        Requirement(f"growth of all processes, {n} ranks, {when}", f"{row}_{n}", None, 550e6, show=megabytes)
        for n in (2, 8)
        for row, when in (("held", "held"), ("peak", "at the peak"))
    ),
    Requirement("500 MB again, unchanged, compared with the first time", "resend", ("resend_first", "nbdist"), 0.4),
    Requirement("changed elements seen", "seen", None, 1.0, least=True, show=lambda share: f"{share:.0%}"),
    Requirement("300 MB tensor back compared with a fresh `clone()`", "tensor", ("tensor", "clone"), 2),
    Requirement("no-op call in a live session", "latency", None, 0.002, show=seconds),
    Requirement("… compared with ipyparallel", "latency", ("latency", "ipyparallel"), 1.0),
    Requirement(
        "collab training compared with torchrun",
        "rate",
        ("rate", "torchrun"),
        0.98,
        least=True,
        show=lambda r: f"{r:.3f} ×",
    ),
]


def cell(values: list[float] | None, reason: str | None, show: Show) -> str:
    """A median with its quartiles; or why there is none, or no more."""
    reason = (reason or "–").replace("|", "\\|")[:120]
    if not values:
        return reason
    low, median, high = statistics.quantiles(values * 2 if len(values) == 1 else values, method="inclusive")
    text = show(median) if show(low) == show(high) else f"{show(median)} ({show(low)}–{show(high)})"
    return text if reason == "–" else f"{text}; then {reason}"


def rows_of(
    rows: Mapping[str, str], values: Values, reasons: Mapping[str, Mapping[str, str]], where: Mapping[str, str]
) -> list[str]:
    """The Markdown table of these rows and their titles, a column for each contestant."""
    heads = ["", *(f"{TITLES[name]}<br>functions from {WHERE[place]}" for name, place in where.items())]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row, title in rows.items():
        found, why = values.get(row, {}), reasons.get(row, {})
        if not found and not why:
            continue
        show = ROWS[row][1]
        beside = "".join(
            f"<br>{label}: {cell(found[name], None, show)}" for name, label in REFERENCES.items() if name in found
        )
        cells = [cell(found.get(name), why.get(name), show) for name in where]
        lines.append("| " + " | ".join([title + beside, *cells]) + " |")
    return lines


def short_cell(values: list[float] | None, reason: str | None, show: Show) -> str:
    """Format a median alone, or the first words of the reason why there is none."""
    reason = reason or "–"
    if values:
        return show(statistics.median(values)) + ("" if reason == "–" else f"; one {reason}")
    kind, colon, text = reason.partition(": ")
    return kind if not colon or kind == "not run" or len(text) > 30 else text


def short_rows(values: Values, reasons: Mapping[str, Mapping[str, str]], foot: list[str]) -> list[str]:
    """Format the README's table, with its source below."""
    heads = ["", *CONTESTANTS_IN_README.values()]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row, title in IN_README.items():
        found, why = values.get(row, {}), reasons.get(row, {})
        cells = [short_cell(found.get(name), why.get(name), ROWS[row][1]) for name in CONTESTANTS_IN_README]
        lines.append("| " + " | ".join([title, *cells]) + " |")
    lines += ["", f"Medians; warm, with torch and fastai imported. {foot[1]}."]
    return [*lines, "All rows, spread and versions: [benchmarks/results/launch.md](benchmarks/results/launch.md)."]


def markdown(
    values: Values, reasons: Mapping[str, Mapping[str, str]], where: Mapping[str, str], foot: list[str]
) -> str:
    lines = ["# nbdist compared with its peers", "", "## What is required, and what was measured", ""]
    lines += ["| | required | measured | met |", "|---|---|---|---|"]
    for requirement in REQUIREMENTS:
        lines.append("| " + " | ".join(requirement.line(values).values()) + " |")
    lines += ["", "## All rows", "", *rows_of({row: title for row, (title, _) in ROWS.items()}, values, reasons, where)]
    return "\n".join([*lines, "", *(f"- {line}" for line in foot), ""])


def into_readme(readme: Path, lines: list[str]) -> None:
    """Put lines between the two marks in the README, in the place of what is there."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{readme} has no {BEGIN} … {END}")
    readme.write_text("\n".join([before + begin, *lines, end + after]))


def plot(values: Values, where: Mapping[str, str], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        "Warm launch until the call returns (s)": [(f"launch_{n}", f"{n} ranks", 1.0) for n in (2, 8, 32)],
        "Private memory of a rank (MB)": [("private", "2 ranks", 1e6)],
        "Launch with a 500 MB DataFrame (s)": [(f"frame_{n}", f"{n} ranks", 1.0) for n in (2, 8)],
    }
    names = list(reversed(where))
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4), sharey=True, layout="constrained")
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        for row, label, unit in rows:
            found = {n: [v / unit for v in values.get(row, {}).get(n, [])] for n in names}
            have = [name for name in names if found[name]]
            middle = [statistics.median(found[name]) for name in have]
            spread = [
                [m - min(found[name]) for m, name in zip(middle, have, strict=True)],
                [max(found[name]) - m for m, name in zip(middle, have, strict=True)],
            ]
            axis.errorbar(middle, [names.index(n) for n in have], xerr=spread, fmt="o", capsize=3, label=label)
        axis.set_xscale("log")
        axis.set_title(title, fontsize=10)
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_yticks(range(len(names)), [TITLES[name] for name in names])
    figure.savefig(file, dpi=120)


def write(
    folder: Path,
    values: Values,
    reasons: Mapping[str, Mapping[str, str]],
    where: Mapping[str, str],
    quick: bool,
    command: str,
    load: float,
) -> None:
    """`launch.md`, `launch.json` and `launch.png` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    foot = [
        "Medians (lower–upper quartile); the contestants took turns. “–” and text: why there is no number.",
        f"{cpu()}, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.system()} {platform.release()}; "
        f"Python {platform.python_version()}",
        ", ".join(f"{package} {version(package)}" for package in PACKAGES),
        f"`{command}`, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC; load average before it: {load:.1f}",
    ]
    if quick:
        foot.insert(0, "**A quick run with small data: not a measurement.**")
    text = markdown(values, reasons, where, foot)
    (folder / "launch.md").write_text(text)
    lines = [requirement.line(values) for requirement in REQUIREMENTS]
    everything = {"foot": foot, "requirements": lines, "values": values, "reasons": reasons}
    (folder / "launch.json").write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n")
    plot(values, where, folder / "launch.png")
    if not quick and all(values.get(row) for row in IN_README):
        into_readme(README, short_rows(values, reasons, foot))
    print(text)
