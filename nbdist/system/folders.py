"""The folder that this process works in, and where it finds modules, in words that hold in other processes."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings

_warned = False


def working_folder() -> str:
    """The working folder; that for temporary files, with a warning, where the working folder no longer exists."""
    global _warned
    try:
        folder, _warned = os.getcwd(), False
    except FileNotFoundError:
        folder = tempfile.gettempdir()
        if not _warned:
            _warned = True
            text = f"the notebook's working folder no longer exists, so ranks work in {folder}. Go to another one: %cd"
            warnings.warn(text, stacklevel=2)
    return folder


def search_path() -> list[str]:
    """`sys.path`, whose relative folders Python looks for where this process was when it first used them."""
    return [part if not part or os.path.isabs(part) else _used(part) for part in sys.path]


def _used(part: str) -> str:
    found = getattr(sys.path_importer_cache.get(part), "path", part)
    return found if isinstance(found, str) else part
