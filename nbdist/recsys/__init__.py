"""Recommender systems at notebook scale, from ratings on disk to answered requests, on any number of ranks.

`datasets` has ratings to begin with; `etl` makes training files of them, and `loader` batches of the files; `models`
has models, `sharding` and `parallel` put them on all ranks, and `training` trains them, by `metrics`; `retrieval` finds
items by their vectors; `recommenders` learn from a log alone, and are compared; `triton` serves what was trained. What
several of these use lies in `io` (files) and `ranks` (what ranks send each other). Uses the launcher like any notebook
would.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from .recommenders import benchmark as benchmark


def __getattr__(name: str) -> _Any:
    """Import `benchmark` when it is asked for: steps and loaders do without what it needs."""
    if name == "benchmark":
        from .recommenders import benchmark

        return benchmark
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
