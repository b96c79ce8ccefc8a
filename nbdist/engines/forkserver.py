"""The fork server: a process that has imported what ranks need, has done nothing else, and forks them.

Started by `local.py` with one end of a socket whose other end only the kernel holds. It is single-threaded, never
touches CUDA and never runs user code, so a fork of it is safe whatever the notebook has done. It is also the ranks'
janitor: it reaps them, ends what they leave behind, and when the kernel is gone, even by SIGKILL, ends them and
itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Collection

import psutil

from .. import shell, transport, worker

#: What the server says of a rank to the kernel: rank, pid, wait status (or `STARTED`).
REPORT = struct.Struct("<iii")
STARTED = -(2**31)

#: Seconds after which a server without ranks ends, unless the kernel says otherwise.
IDLE = 1800.0
#: Makes a rank write its Python stacks, also while it is in C code. Not one that people use for themselves.
STACK_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_HUGE, _MADV_COLLAPSE = 2 << 20, 25


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


class Server:
    """The server's state: its children, and the modules that they find imported."""

    def __init__(self, control: socket.socket) -> None:
        self.control = transport.Channel(control)
        self.ranks: dict[int, tuple[int, int]] = {}  # pid → rank, descriptor that its end is reported on
        self.loaded: list[str] = []
        self.refused: list[str] = []  # modules that must not be imported before a fork
        self.idle = IDLE
        self._scattered: list[int] = []  # addresses of memory to gather in huge pages when there is nothing else to do

    def serve(self) -> None:
        """Do what the kernel asks until it is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # or it would kill a rank that is not ready to answer it
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        self._private_fds = [self.control.fileno(), wake_read, wake_write]
        self._reap()
        with selectors.DefaultSelector() as selector:
            self._private_fds.append(selector.fileno() if hasattr(selector, "fileno") else -1)
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while True:
                idle = 0.0 if self._scattered else self.idle
                ready = [key.fileobj for key, _ in selector.select(None if self.ranks else idle)]
                if not ready and self._scattered:
                    _gather(self._scattered.pop())
                elif not ready and self._retire():
                    return
                if wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()
                if self.control in ready:
                    try:
                        (request, *arguments), _, fds = self.control.receive()
                    except (EOFError, ConnectionError):
                        return
                    if request == "preload":
                        self._preload(*arguments)
                    elif request == "idle":
                        self.idle = arguments[0]
                    else:
                        self._fork(arguments[0], fds)

    def _retire(self) -> bool:
        """Take no more requests; whether none came in the last moment. The kernel starts another server at need."""
        self.control.sock.shutdown(socket.SHUT_RD)
        try:
            return not self.control.sock.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _preload(self, modules: list[str], path: list[str]) -> None:
        sys.path[:] = path
        importlib.invalidate_caches()
        before = len(sys.modules)
        for name in modules:
            if name in self.loaded or name in self.refused:
                continue
            try:
                importlib.import_module(name)
            except Exception:  # it fails again, and visibly, in the rank that imports it
                traceback.print_exc()
                self.refused.append(name)
                continue
            if _spoilt():
                print(
                    f"nbdist: {name} starts threads or CUDA when imported: ranks import it themselves",
                    file=sys.stderr,
                )
                self.refused.append(name)
                self._restart([*self.loaded, *modules])
            self.loaded.append(name)
        if len(sys.modules) == before:
            return
        importlib.invalidate_caches()  # once for all ranks: they may look for files that are made later
        gc.freeze()  # or the first collection in each rank would copy every page that holds an object
        self._scattered = _huge_pages()

    def _restart(self, modules: list[str]) -> None:
        """Become a fresh server with the same children: what an import has started cannot be undone."""
        keep = [self.control.fileno(), *(fd for _, fd in self.ranks.values())]
        for fd in keep:
            os.set_inheritable(fd, True)
        state = json.dumps([self.ranks, modules, self.refused, sys.path, self.idle])
        os.execv(sys.executable, command(str(self.control.fileno()), sys.argv[2], state))

    def restore(self, state: str) -> None:
        """Take over from the server that this one was before `_restart`."""
        ranks, modules, self.refused, path, self.idle = json.loads(state)
        self.ranks = {int(pid): (rank, fd) for pid, (rank, fd) in ranks.items()}
        for _, fd in self.ranks.values():
            os.set_inheritable(fd, False)
        self._preload(modules, path)

    def _fork(self, rank: int, fds: list[int]) -> None:
        channel, out, err, stacks, report = fds
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            others = [fd for _, fd in self.ranks.values()]
            _be_rank(server, channel, out, err, stacks, [*self._private_fds, *others, report])
        self.ranks[pid] = rank, report
        for fd in (channel, out, err, stacks):
            os.close(fd)
        _report(report, rank, pid, STARTED)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self.ranks:
                continue  # an orphan of a rank
            rank, report = self.ranks.pop(pid)
            _end_leftovers(pid, self.ranks)
            _report(report, rank, pid, os.waitstatus_to_exitcode(status))
            os.close(report)

    def end(self) -> None:
        """Kill every process that descends from this one, also those that appear meanwhile."""
        for _ in range(100):
            children = psutil.Process().children(recursive=True)
            if not children:
                return
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, 0)[0]:
                    pass


def _huge_pages() -> list[int]:
    """The addresses at which this process's memory could lie in huge pages."""
    if sys.platform != "linux":
        return []
    with open("/proc/self/maps") as file:
        maps = [line.split() for line in file]
    spans = [
        [int(address, 16) for address in addresses.split("-")]
        for addresses, access, _, _, inode, *_ in maps
        if access == "rw-p" and inode == "0"
    ]
    return [page for start, end in spans for page in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE)]


def _gather(page: int) -> None:
    """Gather a piece of this process's memory in a huge page.

    A fork copies the page table, and a rank's exit takes it down: with huge pages both take half the time. What a rank
    writes to is still copied by small pages.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(page, _HUGE, _MADV_COLLAPSE)  # before Linux 6.1 this is an error, and nothing is lost


def _pretend_objects(count: int) -> None:
    """Let Python believe that it has so many objects in which it found no garbage.

    It looks through all when those that are new are a quarter of these. Frozen ones do not count, so in a rank it would
    look again and again while `fn` makes its own: 0.16 s of a training of 6 s (a fresh interpreter: 0.03 s).
    To collect after the imports would do too, but leaves holes all over the memory: what a rank puts there copies 5 MB
    of pages.
    """
    objects: list[list[None]] = [[] for _ in range(count)]
    gc.collect()
    del objects


def _spoilt() -> bool:
    """Whether a fork of this process would be unsafe."""
    torch = sys.modules.get("torch")
    return psutil.Process().num_threads() > 1 or (torch is not None and torch.cuda.is_initialized())


def _report(fd: int, rank: int, pid: int, status: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the session is gone, and nobody wants to know
        os.write(fd, REPORT.pack(rank, pid, status))


def _end_leftovers(rank_pid: int, others: Collection[int]) -> None:
    """Kill what a rank that ended has started: its process group, its session, and all orphans if it was the last."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank_pid, signal.SIGKILL)
    for orphan in set(_children()) - set(others):  # what has lost its parent is this process's child
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if not others or os.getsid(orphan) == rank_pid:
                process = psutil.Process(orphan)
                for child in (*process.children(recursive=True), process):
                    child.kill()


def _children() -> list[int]:
    """The pids of this process's children, zombies too."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # no Linux. psutil reads all of /proc for this, at ten times the cost of a rank's exit
        return [child.pid for child in psutil.Process().children()]


def _be_rank(server: int, channel: int, out: int, err: int, stacks: int, private_fds: list[int]) -> None:
    """In the fork: become a rank. Does not return."""
    status = 1
    try:
        os.setsid()  # an interrupt of the notebook's process group is passed on by the kernel, in order
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        gc.enable()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in private_fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        faulthandler.enable(2)  # a crash in compiled code leaves its Python stack among the rank's last words
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
        worker.Rank(transport.Channel(socket.socket(fileno=channel))).serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def command(*arguments: str) -> list[str]:
    """The command line of a server. Not `-m`: ranks put their own module in the place of `__main__`."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    code = "import sys; from nbdist.engines.forkserver import main; main(sys.argv[1:])"
    return [sys.executable, *flags, "-c", code, *arguments]


def main(argv: list[str]) -> None:
    """Serve on the socket whose descriptor is `argv[0]`, for a notebook if `argv[1]` says so.

    `argv[2]`, if there, is the state of a server that this one takes the place of.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of ranks become children of this process, so that it can end them
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray's threads block signals, and what they start inherits that
    gc.disable()  # imports take a fifth less; ranks turn it on again
    _pretend_objects(400_000)  # about as many as torch and fastai make
    control = socket.socket(fileno=int(argv[0]))
    control.set_inheritable(False)
    if argv[1] == "notebook":
        shell.make()
    server = Server(control)
    try:
        if argv[2:]:
            server.restore(argv[2])
        server.serve()
    finally:
        server.end()
