"""fastai's learners on ranks: `fast`, and a switch for the changes that ranks make in fastai."""

import typing as _typing

from .patches import patch_ranks

if _typing.TYPE_CHECKING:
    from .learners import fast

__all__ = ["fast", "patch_ranks"]


def __getattr__(name: str) -> _typing.Any:
    # Each rank imports this file; fastai is imported where it is used.
    if name != "fast":
        raise AttributeError(f"module 'nbdist.fastai' has no attribute {name!r}", name=name, obj=None)
    from .learners import fast

    globals()["fast"] = fast
    return fast


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__"]
