"""`%load_ext nbdist`."""

from __future__ import annotations

from typing import Any

from .launch import warm


def load_ipython_extension(shell: Any) -> None:
    """Start the fork server in the background, so that the first call finds it warm."""
    warm()
