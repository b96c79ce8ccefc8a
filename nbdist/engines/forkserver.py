"""The fork server from the view of the process that uses it: started at first use, and again after its end."""

from __future__ import annotations

import contextlib
import errno
import importlib.machinery
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ..deaths import NEVER_STARTED, lost_in_import, not_started
from ..errors import NbdistError
from ..notebook.shell import kernel_shell
from ..server.cuda_driver import WITHOUT_DRIVER
from ..system import ending, interpreter
from ..system.processes import open_standard_descriptors, own_pidfd, redirect_to_devnull, register_after_fork
from ..system.scratch import new_name
from ..system.search_path import search_path
from ..system.source_files import is_of_environment
from ..wire.channel import Channel
from ..wire.forking import BREAK_OFF
from .prerequisites import check_proc

T = TypeVar("T")

#: Beginnings of the names of variables that libraries read while they are imported, which the server does for its
#: ranks. Where these differ, ranks need another server.
READ_AT_IMPORT = (
    *("TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "ATEN_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMBA_"),
)
#: Of these, the ones that hold without it: ranks size the pools of threads and of torch.compile themselves, NCCL is
#: asked when a process group is made, and the rest are set by libraries (scikit-learn, torch) in the notebook when they
#: are imported or used.
_HOLD = re.compile(
    r"\w+_NUM_THREADS|TORCHINDUCTOR_COMPILE_THREADS|TORCH_NCCL_\w+|KMP_DUPLICATE_LIB_OK|KMP_INIT_AT_FORK"
    r"|TORCHINDUCTOR_CACHE_DIR|PYTORCH_NVML_BASED_CUDA_CHECK"
)
#: Seconds after which a server that is not the first one ends when nothing uses it.
_IDLE = 300.0
#: Bytes that the path of the ranks' folder may have. A socket's may have 107 on Linux and 103 on macOS; in that folder
#: each rank has one named by its pid, and in this multiprocessing names a socket `listener-` and eight letters.
_LONGEST = 103 - len("/4194304") - len("/listener-12345678")
#: Seconds that it may import while ranks wait. Then a stop of their call is a stop of the import.
_LONG_IMPORT = 25.0

Variables = frozenset[tuple[str, str]]


def read_at_import(environ: Mapping[str, str]) -> Variables:
    """Return the variables in `environ` that take effect only if the fork server has them, too."""
    names = [name for name in environ if name.startswith(READ_AT_IMPORT) and not _HOLD.fullmatch(name)]
    return frozenset((name, environ[name]) for name in names)


class WatchesFolders(Protocol):
    """An object with a process that lives on if this process is killed."""

    def watch_folder(self, folder: str) -> None:
        """Remove a folder if this process is killed."""


class ForkServer:
    """The fork server's process, and the connection to it. `variables` are set for its imports.

    Attributes: `process`; `control`, the connection for requests to it.
    """

    def __init__(self, variables: Variables) -> None:
        check_proc()
        self._asked: set[str] = set()
        self.importing: Sequence[str] = ()
        """The modules that were requested, and may not be imported yet."""
        self._importing_since, self._broken_off = 0.0, False
        self._last_launch = self._importing_after = -1
        open_standard_descriptors()
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
            self._scratch = _name_scratch()
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
        except BaseException as exc:
            self.hang_up()
            if isinstance(exc, BlockingIOError):
                raise NbdistError(f"the fork server {not_started(errno.EAGAIN)}") from exc
            raise
        register_after_fork(self)

    def after_fork(self) -> None:
        """Forget the server in a child of this process: it belongs to the parent."""
        redirect_to_devnull(self.control.fileno())

    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, *request: Any, fds: Sequence[int] = ()) -> None:
        self.control.send(request, fds=fds)

    def launch(self, size: int, report: int) -> int:
        """Announce the ranks of a launch with the pipe to report on; return the number of the launch."""
        self._last_launch = number = next(self._launches)
        self.ask("launch", number, size, fds=[report])
        return number

    def has_started(self, launch: int) -> None:
        """Record that a rank of a launch has started: imports that were requested before the launch are over."""
        if launch > self._importing_after:
            self.importing, self._broken_off = (), False

    def preload(self, modules: Iterable[str]) -> None:
        new = [name for name in modules if name not in self._asked]
        self._asked.update(new)
        new = [name for name in new if installed(name)]
        if new:
            self.ask("preload", new, search_path())
            self.importing = [*self.importing, *new]
            self._importing_since, self._broken_off = time.monotonic(), False
            self._importing_after = self._last_launch

    def why_lost(self) -> str:
        """Return the reason why a rank was never started, once this server has closed its connections."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.importing and (status := self.process.wait(5)):
                return lost_in_import(self.importing, status)
        return NEVER_STARTED

    def break_off(self) -> None:
        """Stop a server's import that takes too long, because ranks wait: the ranks then import the module themselves.
        The second time, end the server.
        """
        if self.importing and time.monotonic() > self._importing_since + _LONG_IMPORT and self.alive():
            self.process.send_signal(signal.SIGKILL if self._broken_off else BREAK_OFF)
            self._broken_off = True

    def hang_up(self) -> None:
        """Close the connection: a server that still lives ends its ranks and itself."""
        self.control.close()
        if self._pid == os.getpid():  # one that was killed has removed nothing
            shutil.rmtree(self._scratch, ignore_errors=True)

    def stop(self) -> None:
        """Close the connection, and wait for the server's end."""
        with contextlib.suppress(OSError):
            self.ask("folder", None)  # this process removes its own at its end
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


def _name_scratch() -> str:
    """Return a name for the folder in which ranks keep their sockets, short enough for socket paths; "" if there is
    none."""
    name = new_name()
    for folder in (tempfile.gettempdir(), "/tmp"):
        path = os.path.join(folder, name)
        if len(os.fsencode(path)) <= _LONGEST and os.access(folder, os.W_OK):
            return path
    return ""


_works_for_notebook = False


def remove_if_killed(folder: str) -> None:
    """Make the servers, and Ray's drivers, remove a folder if this process is killed. At its own end, this process
    removes it itself.

    This includes servers and drivers that start later.
    """
    with _lock:
        _folders.append((os.getpid(), folder))
        for driver in _drivers:
            driver.watch_folder(folder)
        for key, found in _servers.items():
            if key[0] == os.getpid():
                with contextlib.suppress(OSError):  # it has just retired: the next one gets it
                    found.ask("folder", folder)


def watched_by(driver: WatchesFolders) -> None:
    """Make a driver of Ray remove this process's folders if this process is killed."""
    with _lock:
        _drivers.add(driver)
        for pid, folder in _folders:
            if pid == os.getpid():
                driver.watch_folder(folder)


def for_notebook(is_one: bool) -> None:
    """Set the notebook for which later ranks work, in a process that is not a notebook itself."""
    global _works_for_notebook
    _works_for_notebook = is_one


_lock = threading.RLock()
# By pid, since a process forked from the kernel has to start its own, and by what they are started with.
_servers: dict[tuple[int, Variables], ForkServer] = {}
_folders: list[tuple[int, str]] = []  # by pid of the process whose they are
_drivers: weakref.WeakSet[WatchesFolders] = weakref.WeakSet()


def server(variables: Variables | None = None) -> ForkServer:
    """Return this process's server of ranks with these variables (default: the current ones). Start one if
    necessary."""
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
            for pid, folder in _folders:
                if pid == key[0]:
                    found.ask("folder", folder)
        return found


def with_server(action: Callable[[ForkServer], T], variables: Variables | None = None) -> T:
    """Run an action with the server. If the server has just retired or is lost, run it once more with a new one.

    `variables` are those that the server was started with; None: the notebook's current ones.
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


def kill() -> None:
    """Kill all servers of this process, which is ending and has no ranks left. There is no wait: an orderly end takes a
    second, and until the system has reclaimed their memory takes some hundredths more."""
    for key in [key for key in _servers if key[0] == os.getpid()]:
        found = _servers.pop(key)
        found.process.kill()
        found.hang_up()


def installed(module: str) -> bool:
    """Return whether `module` is installed, so that it does not change while the notebook runs.

    The user's own modules (in the working directory, or installed in editable mode) are for the ranks to import.
    """
    top = importlib.machinery.PathFinder.find_spec(module.partition(".")[0])
    if top is None:
        return False
    places = [top.origin] if top.origin else list(top.submodule_search_locations or [])
    return any(map(is_of_environment, places))
