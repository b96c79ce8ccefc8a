"""The pictures for the tables in `results/`."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import ROOT

Curve = Sequence[tuple[float, float]]
"""Seconds, and a quality then."""


def _plain(name: str) -> str:
    return name.replace("`", "")


def _kept(figure: plt.Figure, name: str, alt: str) -> list[str]:
    """The picture as `results/<name>.png`; the lines that show it in a result."""
    figure.savefig(ROOT / "benchmarks" / "results" / f"{name}.png", dpi=100)
    plt.close(figure)
    return ["", f"![{alt}]({name}.png)"]


def curves(name: str, title: str, quality: str, found: Mapping[str, Curve], target: float) -> list[str]:
    """A quality over seconds, one line a contestant, and the one that is to be reached. Returns lines for a result."""
    figure, axis = plt.subplots(figsize=(10, 6), layout="constrained")
    for number, (contestant, curve) in enumerate(found.items()):
        axis.plot(*zip(*curve, strict=True), "o-" if number < 10 else "s--", markersize=4, label=_plain(contestant))
    axis.axhline(target, color="gray", linestyle=":", label="to be reached")
    spread = [value for curve in found.values() for _, value in curve]
    low, high = min(*spread, target), max(min(max(spread), target * 1.25), target)
    axis.set(title=title, xlabel="seconds of training", ylabel=quality, xscale="log")
    axis.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axis.legend(fontsize="small")
    return _kept(figure, name, f"{quality} over seconds of training")


def bars(
    name: str, panels: Mapping[str, Mapping[str, Sequence[float]]], ours: Collection[str], log: bool = False
) -> list[str]:
    """The medians of each contestant's turns, and their spread, with `ours` in colour; one panel next to the other, by
    what it shows. Returns lines for a result."""
    figure, axes = plt.subplots(1, len(panels), figsize=(6.5 * len(panels), 4.5), layout="constrained", squeeze=False)
    for axis, (shown, found) in zip(axes[0], panels.items(), strict=True):
        medians = [statistics.median(values) for values in found.values()]
        low = [middle - min(values) for middle, values in zip(medians, found.values(), strict=True)]
        high = [max(values) - middle for middle, values in zip(medians, found.values(), strict=True)]
        colours = ["tab:blue" if key in ours else "lightgray" for key in found]
        axis.barh([_plain(key) for key in found], medians, xerr=[low, high], color=colours, capsize=3)
        axis.set(xlabel=shown, xscale="log" if log else "linear")
        axis.invert_yaxis()
    return _kept(figure, name, "; ".join(panels))
