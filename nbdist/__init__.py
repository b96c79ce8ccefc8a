"""Run a function of a notebook on every GPU, or on CPU ranks, with one line."""

from typing import Any

from .engines import use
from .engines.options import RayOptions
from .errors import CaptureError, NbdistError, RankDied, RankTimeout
from .explanation import explain
from .launch import in_ddp, post_mortem, warm
from .session import Session

__all__ = [
    "CaptureError",
    "NbdistError",
    "RankDied",
    "RankTimeout",
    "RayOptions",
    "Session",
    "explain",
    "in_ddp",
    "load_ipython_extension",
    "post_mortem",
    "unload_ipython_extension",
    "use",
    "warm",
]
__version__ = "0.1.0"


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext nbdist`: start the fork server in the background, and add `%ddp` and `%%ddp`."""
    from . import magic

    magic.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext nbdist`."""
    from . import magic

    magic.unload(shell)
