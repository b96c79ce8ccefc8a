"""Recommender systems at notebook scale, from ratings on disk to answered requests, on any number of ranks.

`datasets` has ratings to start with; `etl` makes training files from them, and `loader` makes batches from the files;
`models` has models, `sharding` and `parallel` put them on all ranks, `training` trains them and measures `metrics`, and
`days` lets them learn day after day; `retrieval` finds items by their vectors; `recommenders` learn from a log alone,
and are compared; `triton` serves a trained model. `io` (files) and `ranks` (values that ranks exchange) contain their
common parts. This package uses the launcher like any notebook.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from .recommenders import benchmark as benchmark
    from .recommenders import fit_recommender as fit_recommender


def __getattr__(name: str) -> _Any:
    """Import `benchmark` and `fit_recommender` at their first use, because steps and loaders do not need their
    dependencies."""
    if name in ("benchmark", "fit_recommender"):
        from . import recommenders

        return getattr(recommenders, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
