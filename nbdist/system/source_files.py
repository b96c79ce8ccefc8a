"""Source files that are not the user's: of this package, of Python itself, of installed packages."""

from __future__ import annotations

import functools
import os
import sysconfig

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folder of nbdist, with a separator at its end."""
_STANDARD = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib")})
"""The folders of Python's own modules."""
_INSTALLED = frozenset(["site-packages", "dist-packages"])
"""Names of folders that hold installed packages and nothing else: of the environment, of the user, of the system."""


@functools.lru_cache(maxsize=1 << 14)
def is_installed(path: str) -> bool:
    """Return whether a path is a folder of installed packages, or in one. They do not change while a notebook runs."""
    return not _INSTALLED.isdisjoint(path.split(os.sep))


@functools.lru_cache(maxsize=1 << 14)
def is_standard(path: str) -> bool:
    """Return whether a path is the folder of the standard library, or in it but not installed."""
    return os.path.join(path, "").startswith(_STANDARD) and not is_installed(path)


def is_library(file: str) -> bool:
    """Return whether a file is not the user's."""
    return is_installed(file) or is_standard(file) or file.startswith(PACKAGE)


def package_of(file: str) -> str:
    """Return the name of the package or module of a library that a file belongs to."""
    if file.startswith(PACKAGE):
        return os.path.basename(PACKAGE.rstrip(os.sep))
    folder = next((one for one in _STANDARD if file.startswith(one)), "")
    parts = file[len(folder) :].split(os.sep)
    for number, part in enumerate(parts):
        if part in _INSTALLED:
            parts = parts[number + 1 :]
            break
    return parts[0].removesuffix(".py")
