"""Source files that are not the user's: of this package, of Python itself, of installed packages."""

from __future__ import annotations

import functools
import os
import re
import sysconfig

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folder of nbdist, with a separator at its end."""
_NAME = os.path.basename(_PACKAGE.rstrip(os.sep))
_STANDARD_ANYWHERE = re.compile(r"/lib(64)?/python3\.\d+/")
"""The folder of Python's own modules, wherever Python is installed."""
_STANDARD = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib")})
"""The folders of Python's own modules."""
_INSTALLED = frozenset(["site-packages", "dist-packages"])
"""Names of folders that hold installed packages and nothing else: of the environment, of the user, of the system."""


@functools.lru_cache(maxsize=1 << 14)
def is_installed(path: str) -> bool:
    """Return whether a path is a folder of installed packages, or in one."""
    return not _INSTALLED.isdisjoint(path.split(os.sep))


@functools.lru_cache(maxsize=1 << 14)
def is_standard(path: str) -> bool:
    """Return whether a path is the folder of the standard library, or in it but not installed."""
    return os.path.join(path, "").startswith(_STANDARD) and not is_installed(path)


def is_of_environment(path: str) -> bool:
    """Return whether a path is Python's own or installed, so that it does not change while a notebook runs."""
    return is_installed(path) or is_standard(path)


@functools.lru_cache(maxsize=1 << 14)
def is_library(file: str) -> bool:
    """Return whether a file of this process, or of a rank on another machine, is not the user's."""
    if is_of_environment(file) or _STANDARD_ANYWHERE.search(file):
        return True
    within = file.rpartition(f"{os.sep}{_NAME}{os.sep}")[2]
    return within != file and os.path.exists(os.path.join(_PACKAGE, within))


def package_of(file: str) -> str:
    """Return the name of the package or module of a library that a file belongs to."""
    if file.startswith(_PACKAGE):
        return _NAME
    folder = next((one for one in _STANDARD if file.startswith(one)), "")
    parts = file[len(folder) :].split(os.sep)
    for number, part in enumerate(parts):
        if part in _INSTALLED:
            parts = parts[number + 1 :]
            break
    return parts[0].removesuffix(".py")
