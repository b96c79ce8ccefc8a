"""Folders of source files that are not the user's: this package, Python's own modules, installed packages."""

from __future__ import annotations

import os
import sysconfig

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folder of nbdist, with a separator at its end."""
LIBRARY_FOLDERS = (
    PACKAGE,
    *{sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")},
)
"""The prefixes of the paths of all such files."""


def package_of(file: str) -> str:
    """Return the name of the package or module of a library that a file belongs to."""
    folder = max((one for one in LIBRARY_FOLDERS if file.startswith(one)), key=len, default="")
    if folder == PACKAGE:
        return os.path.basename(PACKAGE.rstrip(os.sep))
    return file[len(folder) :].partition(os.sep)[0].removesuffix(".py")
