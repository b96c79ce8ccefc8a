"""Fresh Python interpreters of this project's own: with the flags of this one, and nbdist where this one found it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

from .search_path import search_path, standard_first

#: Where installed modules lie: they do not change while the notebook runs.
INSTALLED = tuple(sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib", "platstdlib"))


def command(module: str, *arguments: str) -> list[str]:
    """The command line that calls `main(*arguments)` of a module.

    Not `-m`: ranks put a module of their own in the place of `__main__`. `-c` has put the folder in which it starts
    before the standard library, and there may be a `queue.py`.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    code = f"import sys; sys.path[:1] = sys.path[:1] if sys.path[0] else []; from {module} import main"
    return [sys.executable, *flags, "-c", f"{code}; main(*sys.argv[1:])", *arguments]


def start(module: str, *arguments: str, env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
    """Call `main(*arguments)` of a module in an interpreter of its own, with `env` on top of the environment.

    The process has a session of its own, so that the notebook's interrupts do not reach it, and no standard input.
    """
    options = {"stdin": subprocess.DEVNULL, **options}
    environ = {**os.environ, **module_path(), **env}
    return subprocess.Popen(command(module, *arguments), env=environ, start_new_session=True, **options)


def module_path() -> dict[str, str]:
    """The variable that lets a fresh interpreter find modules where this one does, Python's own first."""
    return {"PYTHONPATH": os.pathsep.join(standard_first(search_path()))}
