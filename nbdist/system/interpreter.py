"""Fresh Python interpreters with the flags of this one and its nbdist."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from .search_path import search_path, standard_first, working_folder


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that calls `main(*arguments)` of a module.

    It does not use `-m`, because ranks replace `__main__`. `-c` puts the current folder before the standard library,
    and that folder may have a `queue.py`.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    code = f"import sys; sys.path[:1] = sys.path[:1] if sys.path[0] else []; from {module} import main"
    return [sys.executable, *flags, "-c", f"{code}; main(*sys.argv[1:])", *arguments]


def start(module: str, *arguments: str, env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
    """Call `main(*arguments)` of a module in a fresh interpreter, with `env` added to the environment.

    The process has a process session of its own, so that the notebook's interrupts do not reach it, and no standard
    input.
    """
    streams = {"stdin": subprocess.DEVNULL}
    for fd, stream in ((1, "stdout"), (2, "stderr")):
        if not _inheritable(fd):  # it is closed, or a file that was opened while it was
            streams[stream] = subprocess.DEVNULL
    options = {**streams, "cwd": working_folder(), **options}  # IPython needs a folder that exists
    environ = {**os.environ, **module_path(), **env}
    with _without_debugger():
        return subprocess.Popen(command(module, *arguments), env=environ, start_new_session=True, **options)


def _inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def _without_debugger() -> contextlib.AbstractContextManager[None]:
    """Keep a debugger of this process, such as JupyterLab's, out of the interpreters that are started in this block.

    It would trace each of them in a thread of its own, and a process with threads must not be forked.
    """
    skip = getattr(sys.modules.get("_pydev_bundle.pydev_monkey"), "skip_subprocess_arg_patch", None)
    return contextlib.nullcontext() if skip is None else skip()


def module_path() -> dict[str, str]:
    """Return the variable that lets a fresh interpreter find modules where this one does, with Python's own first."""
    return {"PYTHONPATH": os.pathsep.join(standard_first(search_path()))}
