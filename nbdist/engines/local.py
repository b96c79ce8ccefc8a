"""Ranks on this machine, forked from a warm server; the kernel itself is never forked."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib.machinery
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import psutil

from .. import affinity, lending, meeting
from ..devices import choose_devices
from ..relay import notebook_shell
from ..transport import Channel, readable
from ..worker import Place, Setting, connections
from . import Exit
from .forkserver import REPORT, STACK_SIGNAL, STARTED, command

#: Where installed modules lie.
_INSTALLED = tuple(sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib", "platstdlib"))


class LocalEngine:
    """Starts ranks through this process's fork server, which it starts at first use and again whenever it died."""

    def devices(self, nranks: int, devices: str | Sequence[str] | None) -> list[str]:
        return choose_devices(nranks, devices)

    def start(self, world_size: int, notice: Callable[[str], None] | None = None) -> LocalRanks:
        return LocalRanks(world_size)

    def warm(self, modules: Iterable[str]) -> None:
        _with_server(lambda server: server.preload(["torch", "torch.distributed", *modules]))

    def idle(self, seconds: float) -> None:
        """How long the fork server stays when nothing uses it."""
        _with_server(lambda server: server.ask("idle", seconds))


class LocalRanks:
    """Processes on this machine: see `engines.Ranks`."""

    patience = 0.0  # they are this machine's children: it knows at once

    def __init__(self, world_size: int) -> None:
        self.pids: list[int | None] = [None] * world_size
        self.channels: list[Channel] = []
        self.outputs: list[tuple[int, int]] = []
        self._reads: list[int] = []  # three pipes a rank: standard output, standard error, stacks
        self._alive = set(range(world_size))
        self._asking = threading.RLock()  # another thread may ask for a stack while the ranks are given up
        self.exits_fd, report = os.pipe()
        try:
            os.set_blocking(self.exits_fd, False)
            for rank in range(world_size):
                self._fork(rank, report)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(report)

    def _fork(self, rank: int, report: int) -> None:
        ours, theirs = socket.socketpair()
        self.channels.append(Channel(ours))
        writes: list[int] = []
        with theirs:
            try:
                for _ in range(3):
                    read, write = output_pipe()
                    self._reads.append(read)
                    writes.append(write)
                self.outputs.append((self._reads[-3], self._reads[-2]))
                fds = [theirs.fileno(), *writes, report]
                _with_server(lambda server: server.ask("fork", rank, fds=fds))
            finally:
                for fd in writes:
                    os.close(fd)

    @property
    def places(self) -> list[Place]:
        cores, size = affinity.usable_cores(), len(self.pids)
        shares = affinity.shares(cores, affinity.numa_nodes(), size)
        threads = max(1, len(cores) // size)
        return [Place(0, rank, size, meeting.LOOPBACK_INTERFACE, threads, shares[rank]) for rank in range(size)]

    def inherited(self) -> Mapping[str, str]:
        return os.environ

    def setting(self, rank: int, environ: Mapping[str, str]) -> Setting:
        return Setting(environ, os.getcwd(), tuple(sys.path), tuple(sys.argv), lending.POSSIBLE)

    def meet(self) -> meeting.MeetingPoint:
        return meeting.MeetingPoint()

    def addresses(self) -> list[tuple[str, int]]:
        return connections(pid for pid in self.pids if pid is not None)

    def exits(self) -> list[Exit]:
        exits: list[Exit] = []
        while True:
            try:
                data = os.read(self.exits_fd, REPORT.size)
            except BlockingIOError:
                return exits
            if not data:  # only the fork server writes here: it is gone, and cannot end what its ranks have started
                for rank in self._alive:
                    pid = self.pids[rank]
                    if pid is not None:
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.killpg(pid, signal.SIGKILL)
                exits += [Exit(rank, None) for rank in sorted(self._alive)]
                self._alive.clear()
                return exits
            rank, pid, status = REPORT.unpack(data)
            self.pids[rank] = pid
            if status != STARTED:
                self._alive.discard(rank)
                exits.append(Exit(rank, status))

    def signal(self, rank: int, signum: int) -> None:
        pid = self.pids[rank]
        if pid is not None and rank in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def stack(self, rank: int) -> str:
        with self._asking:
            if not self._reads:
                return ""
            text, patience = b"", 0.5
            self.signal(rank, STACK_SIGNAL)
            pipe = self._reads[3 * rank + 2]
            while readable(pipe, patience):
                data = os.read(pipe, 1 << 16)
                if not data:
                    break
                text, patience = text + data, 0.05  # faulthandler writes in pieces, and does not say when it is done
            return text.decode(errors="backslashreplace")

    def memory(self, rank: int) -> int | None:
        pid = self.pids[rank]
        try:
            return None if pid is None else int(psutil.Process(pid).memory_full_info().uss)
        except psutil.Error:
            return None

    def close(self, grace: float = 0.0) -> None:
        for channel in self.channels:
            with contextlib.suppress(OSError):
                channel.send(("close",))
        self._wait_for_exits(grace)
        for rank in list(self._alive):
            self.signal(rank, signal.SIGKILL)
        for channel in self.channels:  # a rank that has not started yet ends when it finds its channel closed
            channel.close()
        self._wait_for_exits(5.0)
        with self._asking:
            for fd in (*self._reads, self.exits_fd):
                os.close(fd)
            self.channels, self.outputs, self._reads = [], [], []

    def _wait_for_exits(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.exits()
        while any(self.pids[rank] is not None for rank in self._alive):
            if not readable(self.exits_fd, max(0.0, deadline - time.monotonic())):
                return
            self.exits()


def output_pipe() -> tuple[int, int]:
    """A pipe for what a rank writes: its ends for reading, without waiting, and for writing."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    with contextlib.suppress(AttributeError, OSError):  # Linux, and only as far as the user's limit goes
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)  # a burst of output does not stall
    return read, write


class _ForkServer:
    """The kernel's end of the fork server process."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        ours, theirs = socket.socketpair()
        self._control = Channel(ours)
        # The server finds nbdist wherever the kernel found it.
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(p or os.getcwd() for p in sys.path))
        # OpenBLAS and pyarrow start threads when they are imported, and a process with threads must not fork.
        env["OPENBLAS_NUM_THREADS"] = "1"
        env["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
        kind = "notebook" if _works_for_notebook or notebook_shell() is not None else "script"
        with theirs:
            self.process = subprocess.Popen(
                command(str(theirs.fileno()), kind),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=env,
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, *request: Any, fds: Sequence[int] = ()) -> None:
        self._control.send(request, fds=fds)

    def preload(self, modules: Iterable[str]) -> None:
        new = [name for name in modules if name not in self._asked]
        self._asked.update(new)
        new = [name for name in new if installed(name)]
        if new:
            self.ask("preload", new, sys.path)

    def stop(self) -> None:
        """Hang up: the server ends its ranks and itself."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


_works_for_notebook = False


def for_notebook(is_one: bool) -> None:
    """Say for whom ranks are started from here on, in a process that is no notebook itself."""
    global _works_for_notebook
    _works_for_notebook = is_one


_lock = threading.Lock()
_servers: dict[int, _ForkServer] = {}  # by pid: a process forked from the kernel has to start its own


def _server() -> _ForkServer:
    with _lock:
        server = _servers.get(os.getpid())
        if server is None or not server.alive():
            _servers.clear()
            server = _servers[os.getpid()] = _ForkServer()
        return server


def _with_server(action: Callable[[_ForkServer], None]) -> None:
    """Do something with the server; with a new one if it has just retired."""
    try:
        action(_server())
    except BrokenPipeError:
        with _lock:
            _servers.clear()
        action(_server())


@atexit.register
def _stop_server() -> None:
    server = _servers.pop(os.getpid(), None)
    if server is not None:
        server.stop()


def installed(module: str) -> bool:
    """Whether `module` is installed, and so does not change while the notebook runs.

    The user's own modules (in the working directory, or installed in editable mode) are for the ranks to import.
    """
    top = importlib.machinery.PathFinder.find_spec(module.partition(".")[0])
    if top is None:
        return False
    places = [top.origin] if top.origin else list(top.submodule_search_locations or [])
    return any(place.startswith(_INSTALLED) for place in places)
