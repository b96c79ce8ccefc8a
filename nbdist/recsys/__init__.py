"""Recommender systems at notebook scale, from ratings on disk to answered requests, on any number of ranks.

`datasets` has ratings to start with; `etl` makes training files from them, and `loader` makes batches from the files;
`models` has models, `sharding` and `parallel` put them on all ranks, `training` trains them and measures `metrics`, and
`days` lets them learn day after day; `retrieval` finds items by their vectors; `recommenders` learn from a log alone,
and are compared; `triton` serves a trained model. `io` (files) and `ranks` (values that ranks exchange) contain their
common parts. This package uses the launcher like any notebook.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from .recommenders import benchmark, fit_recommender

__all__ = ["benchmark", "fit_recommender"]

_PACKAGES = (
    "datasets",
    "days",
    "etl",
    "loader",
    "metrics",
    "models",
    "raw_ids",
    "recommenders",
    "retrieval",
    "sharding",
    "training",
    "triton",
)


def __getattr__(name: str) -> _typing.Any:
    """Import packages and `recommenders` at the first use of a name: steps and loaders do not need all
    dependencies."""
    if name in _PACKAGES:
        return _importlib.import_module(f".{name}", __name__)
    if name in __all__:
        return getattr(_importlib.import_module(".recommenders", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=None)


def __dir__() -> list[str]:
    """Return the names of what is public, for completion."""
    return sorted({*globals(), *__all__, *_PACKAGES})
