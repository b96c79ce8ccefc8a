"""Common parts of benchmarks whose contestants take turns on MovieLens' sets: options, and formats of figures."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence


def parsed(about: str | None) -> argparse.Namespace:
    """The options of a benchmark, which `about` describes: `sets`, `turns`, `quick`, `print`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--sets", nargs="+", default=["100k", "1m"], choices=["100k", "1m"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one turn of a tenth of the ratings")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    if options.quick:
        options.turns = 1
    return options


def spread(seconds: Sequence[float]) -> str:
    """Median, least and most of the turns."""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"
