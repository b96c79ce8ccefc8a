"""fastai's learners on ranks: `fast`, `RecordSteps`, and a switch for the changes that ranks make in fastai."""

import importlib as _importlib
import typing as _typing

from .patches import patch_ranks

if _typing.TYPE_CHECKING:
    from .learners import fast
    from .recording import RecordSteps

__all__ = ["RecordSteps", "fast", "patch_ranks"]
_HOMES = {"RecordSteps": "recording", "fast": "learners"}


def __getattr__(name: str) -> _typing.Any:
    # Each rank imports this file; fastai is imported where it is used.
    if name not in _HOMES:
        raise AttributeError(f"module 'nbdist.fastai' has no attribute {name!r}", name=name, obj=None)
    value = globals()[name] = getattr(_importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__"]
