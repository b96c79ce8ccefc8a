"""A rank in a fresh interpreter, for modules that cannot be imported before a fork: `Session(start="spawn")`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from ..system.interpreter import command
from ..wire.forking import RankDescriptors
from . import main as of_forks
from . import shell


def execute(server: int, kind: str, fds: RankDescriptors, scratch: str, environ: Mapping[str, str]) -> NoReturn:
    """Replace this fork of the server by a fresh interpreter that runs `main` with this environment. All
    descriptors except `fds` are closed.
    """
    for fd in fds:
        os.set_inheritable(fd, True)
    arguments = command("nbdist.rank.fresh", str(server), kind, scratch, *map(str, fds))
    os.execve(sys.executable, arguments, dict(environ))


def main(server: str, kind: str, scratch: str, *fds: str) -> None:
    """Run a rank until its end, as a child of the `server`, for a "notebook" or a "script"."""
    descriptors = RankDescriptors(*map(int, fds))
    for fd in descriptors:
        os.set_inheritable(fd, False)
    if kind == "notebook":
        shell.make()
    of_forks.main(int(server), descriptors, scratch, [])
