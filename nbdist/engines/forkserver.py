"""The fork server as the process that uses it sees it: started at first use, and again whenever it is gone."""

from __future__ import annotations

import contextlib
import importlib.machinery
import itertools
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ..notebook.shell import kernel_shell
from ..server.cuda_driver import WITHOUT_DRIVER
from ..system import ending, interpreter
from ..system.folders import search_path
from ..system.processes import blind, forget_in_children, own_pidfd
from ..wire.channel import Channel

T = TypeVar("T")

#: Beginnings of the names of variables that libraries read while they are imported, which the server does for its
#: ranks. Where these differ, ranks need another server.
READ_AT_IMPORT = (
    *("TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "ATEN_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMBA_"),
)
#: Those of them that hold without that: ranks size the pools of threads themselves, NCCL is asked when a process group
#: is made, and the rest are set by libraries (scikit-learn, torch) in the notebook when these are imported or used.
_HOLD = re.compile(
    r"\w+_NUM_THREADS|TORCH_NCCL_\w+|KMP_DUPLICATE_LIB_OK|KMP_INIT_AT_FORK|TORCHINDUCTOR_CACHE_DIR"
    r"|PYTORCH_NVML_BASED_CUDA_CHECK"
)
#: Seconds after which a server that is not the first one ends when nothing uses it.
_IDLE = 300.0

Variables = frozenset[tuple[str, str]]


def read_at_import(environ: Mapping[str, str]) -> Variables:
    """Those of these variables that ranks can only inherit."""
    names = [name for name in environ if name.startswith(READ_AT_IMPORT) and not _HOLD.fullmatch(name)]
    return frozenset((name, environ[name]) for name in names)


class ForkServer:
    """The fork server's process, and the connection to it. `variables` are set for what it imports.

    Attributes: `process`; `control`, the connection by which it is asked.
    """

    def __init__(self, variables: Variables) -> None:
        self._asked: set[str] = set()
        ours, theirs = socket.socketpair()
        self.control = Channel(ours)
        self._launches = itertools.count()
        # OpenBLAS and pyarrow start threads when they are imported, and a process with threads must not fork.
        env = {**dict(variables), "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        env |= WITHOUT_DRIVER  # nor may one that has initialised CUDA
        if sys.platform == "darwin":  # or what imports have used of Objective-C ends a fork that uses it, too
            env["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = "YES"
        kind = "notebook" if _works_for_notebook or kernel_shell() is not None else "script"
        self._pid, self._scratch = os.getpid(), ""
        with contextlib.suppress(OSError):  # a full disk, say: no reason to start no ranks
            self._scratch = os.path.join(tempfile.gettempdir(), f"nbdist-{secrets.token_hex(8)}")
        try:
            with theirs, own_pidfd() as kernel:
                self.process = interpreter.start(
                    "nbdist.server.main",
                    str(theirs.fileno()),
                    kind,
                    str(kernel),
                    self._scratch,
                    env=env,
                    pass_fds=[fd for fd in (theirs.fileno(), kernel) if fd >= 0],
                )
        except BaseException:
            self.hang_up()
            raise
        forget_in_children(self)

    def after_fork(self) -> None:
        """In a child of this process: the server is not its own."""
        blind(self.control.fileno())

    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, *request: Any, fds: Sequence[int] = ()) -> None:
        self.control.send(request, fds=fds)

    def launch(self, size: int, report: int) -> int:
        """Announce the ranks of a launch, and where to report on them; returns its number."""
        number = next(self._launches)
        self.ask("launch", number, size, fds=[report])
        return number

    def preload(self, modules: Iterable[str]) -> None:
        new = [name for name in modules if name not in self._asked]
        self._asked.update(new)
        new = [name for name in new if installed(name)]
        if new:
            self.ask("preload", new, search_path())

    def hang_up(self) -> None:
        """Close the connection: a server that still lives ends its ranks and itself."""
        self.control.close()
        if self._pid == os.getpid():  # one that was killed has removed nothing
            shutil.rmtree(self._scratch, ignore_errors=True)

    def stop(self) -> None:
        """Hang up, and wait for the server's end."""
        with contextlib.suppress(OSError):
            self.ask("folder", None)  # this process removes its own at its end
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


_works_for_notebook = False


def remove_at_the_end(folder: str) -> None:
    """See to it that a folder goes, even if this process is killed."""
    with_server(lambda server: server.ask("folder", folder))


def for_notebook(is_one: bool) -> None:
    """Say for whom ranks are started from here on, in a process that is no notebook itself."""
    global _works_for_notebook
    _works_for_notebook = is_one


_lock = threading.RLock()
# By pid, since a process forked from the kernel has to start its own, and by what they are started with.
_servers: dict[tuple[int, Variables], ForkServer] = {}


def server(variables: Variables | None = None) -> ForkServer:
    """Return this process's server of ranks with these variables (default: the current ones). Start one if need be."""
    key = os.getpid(), read_at_import(os.environ) if variables is None else variables
    with _lock:
        found = _servers.get(key)
        if found is None or not found.alive():
            for other in [other for other in _servers if other[0] != key[0] or other == key]:
                _servers.pop(other).hang_up()
            found = ForkServer(key[1])
            if _servers:
                found.ask("idle", _IDLE)
            _servers[key] = found
        return found


def with_server(action: Callable[[ForkServer], T], variables: Variables | None = None) -> T:
    """Do something with the server, all of it with the same; with a new one if it has just retired, or is lost.

    `variables` are what it was started with; None: the notebook's as they are now.
    """
    used = server(variables)
    try:
        return action(used)
    except ConnectionError:
        with _lock:
            for key in [key for key, found in _servers.items() if found is used]:
                _servers.pop(key).hang_up()
        return action(server(variables))


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it


os.register_at_fork(after_in_child=_after_fork)


@ending.last
def stop() -> None:
    """Stop all servers of this process; the next ranks are forked from a new one."""
    for key in [key for key in _servers if key[0] == os.getpid()]:
        _servers.pop(key).stop()


def installed(module: str) -> bool:
    """Whether `module` is installed, and so does not change while the notebook runs.

    The user's own modules (in the working directory, or installed in editable mode) are for the ranks to import.
    """
    top = importlib.machinery.PathFinder.find_spec(module.partition(".")[0])
    if top is None:
        return False
    places = [top.origin] if top.origin else list(top.submodule_search_locations or [])
    return any(place.startswith(interpreter.INSTALLED) for place in places)
