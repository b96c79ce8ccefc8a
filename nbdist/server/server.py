"""The server's loop: it forks ranks, reaps them, and reports how they end.

The server has one thread, never uses CUDA and never runs user code, so forking it is safe, whatever the notebook has
done. It also cleans up after ranks: it reaps them, and ends the processes that they leave. When the kernel has ended,
even by SIGKILL, it ends the ranks and itself.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import math
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from ..rank import fresh
from ..rank.main import main as rank_main
from ..rank.settings import note_inherited
from ..rank.threads import find_pools
from ..system.huge_pages import gather
from ..system.interpreter import command
from ..system.scratch import make_held
from ..wire.channel import Channel, LostDescriptors, readable
from ..wire.forking import REPORT, STACK_SIGNAL, STARTED, RankDescriptors
from .importing import find_crash, ignore_break_off, watched
from .memory import HUGE, huge_pages
from .orphans import end_all, end_leftovers
from .preload import Preloaded, log

#: Seconds after which a server without ranks ends, unless the kernel says otherwise.
IDLE = 1800.0


class Launch:
    """A group of ranks: the pipe on which their starts and ends are reported, and the numbers of ranks that have not
    started or not ended yet."""

    def __init__(self, report: int, left: int) -> None:
        self.report, self.left = report, left


class Server:
    """The server's state: its children, and the modules that are imported for them."""

    def __init__(self, control: socket.socket, kind: str, kernel: int, scratch: str) -> None:
        """
        Args:
            control: The server's end of its connection to the kernel.
            kind: The program for which ranks work: "notebook" or "script".
            kernel: A descriptor that is readable when the kernel's process has ended; -1: none.
            scratch: The path of a folder that is made when there are ranks. Each rank has a folder in it, named by its
                pid, for the sockets of its processes.
        """
        self._control, self._kind, self._kernel = Channel(control), kind, kernel
        self._parent = os.getppid()
        self._ranks: dict[int, tuple[int, int]] = {}  # pid → rank, number of its launch
        self._launches: dict[int, Launch] = {}
        self._preloaded = Preloaded()
        self._idle = IDLE
        self._folders: list[str] = []  # the notebook's, for temporary files: if it is killed, nothing else removes them
        self._scratch, self._held = scratch, -1  # the descriptor that holds this folder; -1: it is not made
        self._scattered: list[int] = []  # addresses of memory to gather in huge pages when there is nothing else to do

    def serve(self) -> None:
        """Answer the kernel's requests until the kernel ends."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ignore_break_off()
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # or it would kill a rank that is not ready to answer it
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        self._private_fds = [self._control.fileno(), wake_read, wake_write]
        self._reap()
        with selectors.DefaultSelector() as selector:
            self._private_fds.append(selector.fileno() if hasattr(selector, "fileno") else -1)
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            if self._kernel >= 0:  # a child of the kernel may hold the other end of `control`
                self._private_fds.append(self._kernel)
                selector.register(self._kernel, selectors.EVENT_READ)
            while True:
                idle = 0.0 if self._scattered else self._idle
                ready = self._select(selector, None if self._ranks else idle)
                if ready is None:
                    return
                if not ready and self._scattered:
                    gather(self._scattered.pop(), HUGE)
                elif not ready and self._retire():
                    self._folders = []  # the notebook lives, and uses them
                    return
                if wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()
                if self._control in ready and not self._answer():
                    return

    def _select(self, selector: selectors.BaseSelector, seconds: float | None) -> list[Any] | None:
        """Return the descriptors that are ready within a number of seconds; None when the kernel has ended."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            left = None if seconds is None else max(0.0, deadline - time.monotonic())
            if self._kernel < 0:  # no pidfd: it has ended when this process has another parent
                left = 1.0 if left is None else min(1.0, left)
            ready = [key.fileobj for key, _ in selector.select(left)]
            if self._kernel in ready or os.getppid() != self._parent:
                return None
            if ready or time.monotonic() >= deadline:
                return ready

    def _answer(self) -> bool:
        """Answer the kernel's next request; False when the kernel has ended. A request that fails does not affect other
        sessions."""
        requests: dict[str, Any] = {
            "preload": self.preload,
            "idle": self._stay,
            "folder": self._watch_folder,
            "launch": self._launch,
            "abandon": self._abandon,
            "fork": self._fork,
        }
        try:
            (request, *arguments), _, fds = self._control.receive()
            requests[request](*arguments, *fds)
        except (EOFError, ConnectionError):
            return False
        except LostDescriptors as lost:
            if lost.message[0] == "fork":
                _, number, rank, _ = lost.message
                self._refuse(number, rank, errno.EMFILE)
        except Exception:
            log(traceback.format_exc())
        return True

    def _retire(self) -> bool:
        """Stop taking requests. Return False if a request has arrived at the last moment. The kernel starts another
        server when it needs one.
        """
        self._control.sock.shutdown(socket.SHUT_RD)
        try:
            return not self._control.sock.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _stay(self, seconds: float) -> None:
        self._idle = seconds

    def _watch_folder(self, folder: str | None) -> None:
        """Start a process that removes a folder if the notebook is killed. None: the server is about to end and removes
        it itself."""
        self._folders = list(dict.fromkeys([*self._folders, folder])) if folder is not None else []

    def remove_folders(self) -> None:
        """Remove the ranks' temporary files, and the notebook's once it has ended."""
        self._remove_scratch()
        if self._folders and (readable(self._kernel, 5.0) if self._kernel >= 0 else os.getppid() != self._parent):
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _make_scratch(self) -> str:
        """Make the folder for the ranks' folders. Return an empty string if that fails; ranks start anyway."""
        if self._held < 0:
            with contextlib.suppress(OSError):  # a full disk; or somebody else's has this name
                self._held = make_held(self._scratch)
        return self._scratch if self._held >= 0 else ""

    def _remove_scratch(self, rank: str = "") -> None:
        """Remove the folder of a rank that has ended. After the last rank, remove the folder of all ranks."""
        if self._held < 0:
            return
        if self._ranks and rank:
            shutil.rmtree(os.path.join(self._scratch, rank), ignore_errors=True)
        else:
            shutil.rmtree(self._scratch, ignore_errors=True)
            os.close(self._held)
            self._held = -1

    def preload(self, modules: list[str], path: list[str]) -> None:
        """Import modules for later ranks. If one of them makes this process unusable, a fresh one replaces it."""
        before = len(sys.modules), len(self._preloaded.loaded)
        with watched(self._end_without_kernel):
            if self._ranks:
                self._refuse_crashes(modules, path)
            fit = self._preloaded.load(modules, path)
        if not fit:
            self._restart([*self._preloaded.loaded, *modules])
        if (len(sys.modules), len(self._preloaded.loaded)) != before:
            find_pools()
            note_inherited()
            gc.freeze()  # or the first collection in each rank would copy every page that holds an object
            self._scattered = huge_pages()

    def _refuse_crashes(self, modules: list[str], path: list[str]) -> None:
        """Refuse the modules whose import would end this process, and with it the ranks of other sessions."""
        new = [name for name in modules if name not in sys.modules and name not in self._preloaded.refused]
        while new and (crash := find_crash(new, path)):
            print(f"nbdist: {crash.module} {crash.why} when imported, so each rank imports it", file=sys.stderr)
            self._preloaded.refused.append(crash.module)
            new.remove(crash.module)

    def _end_without_kernel(self) -> None:
        """End this process and all its descendants if the kernel has ended."""
        if readable(self._kernel) if self._kernel >= 0 else os.getppid() != self._parent:
            end_all()
            self.remove_folders()
            os._exit(1)

    def _restart(self, modules: list[str]) -> None:
        """Replace this process by a fresh server with the same children: the effects of an import cannot be undone."""
        launches = {number: (launch.report, launch.left) for number, launch in self._launches.items()}
        inherited = self._control.fileno(), self._kernel, self._held, *(report for report, _ in launches.values())
        for fd in inherited:
            if fd >= 0:
                os.set_inheritable(fd, True)
        refused = self._preloaded.refused
        own = self._folders, self._held
        state = json.dumps([self._ranks, launches, modules, refused, sys.path, self._idle, *own])
        arguments = str(self._control.fileno()), self._kind, str(self._kernel), self._scratch, state
        os.execv(sys.executable, command("nbdist.server.main", *arguments))

    def restore(self, state: str) -> None:
        """Continue with the state of the server before `_restart`."""
        ranks, launches, modules, self._preloaded.refused, path, self._idle, *own = json.loads(state)
        self._folders, self._held = own
        self._ranks = {int(pid): (rank, number) for pid, (rank, number) in ranks.items()}
        self._launches = {int(number): Launch(*launch) for number, launch in launches.items()}
        for fd in (self._held, *(launch.report for launch in self._launches.values())):
            if fd >= 0:
                os.set_inheritable(fd, False)
        self.preload(modules, path)

    def _launch(self, number: int, size: int, report: int) -> None:
        """Begin a launch, with the descriptor on which the ends of its ranks are reported."""
        self._launches[number] = Launch(report, size)

    def _abandon(self, number: int, missing: int) -> None:
        """Kill the ranks of a launch. Its `missing` ranks, which were not requested yet, will not be requested any
        more."""
        for pid, (_, own) in self._ranks.items():
            if own == number:
                os.kill(pid, signal.SIGKILL)
        self._end(number, missing)

    def _end(self, number: int, ranks: int = 1) -> None:
        launch = self._launches.get(number)
        if launch is None:
            return
        launch.left -= ranks
        if launch.left <= 0:
            os.close(launch.report)
            del self._launches[number]

    def _fork(self, number: int, rank: int, environ: Mapping[str, str] | None, *fds: int) -> None:
        """Start a rank: a fork of this process, or with `environ`, a fresh interpreter with these variables."""
        server = os.getpid()
        try:
            if number not in self._launches:  # there was no descriptor for it
                return
            scratch = self._make_scratch()
            pid = os.fork()
        except OSError as exc:
            self._refuse(number, rank, exc.errno or errno.EAGAIN)
        else:
            if pid == 0 and environ is not None:
                self._become_fresh(server, RankDescriptors(*fds), scratch, environ)
            if pid == 0:
                reports = [launch.report for launch in self._launches.values()]
                rank_main(server, RankDescriptors(*fds), scratch, [*self._private_fds, *reports])
            self._ranks[pid] = rank, number
            self._report(number, rank, pid, STARTED)
        finally:
            for fd in fds:
                os.close(fd)

    def _become_fresh(self, server: int, fds: RankDescriptors, scratch: str, environ: Mapping[str, str]) -> NoReturn:
        try:
            fresh.execute(server, self._kind, fds, scratch, environ)
        except BaseException:
            log(traceback.format_exc())
        finally:
            os._exit(1)

    def _refuse(self, number: int, rank: int, why: int) -> None:
        """Report that a rank cannot be started."""
        self._report(number, rank, 0, why)
        self._end(number)

    def _reap(self) -> None:
        """Report the ranks that have ended. Then look for the orphans of all of them together."""
        ended: dict[int, tuple[int, int, int]] = {}  # pid → rank, number of its launch, wait status
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid in self._ranks:  # and no orphan of a rank
                    ended[pid] = *self._ranks.pop(pid), status
        if not ended:
            return
        try:
            end_leftovers(ended, self._ranks)
        except Exception:  # out of descriptors, or of memory
            log(traceback.format_exc())
        for pid, (rank, number, status) in ended.items():
            self._remove_scratch(str(pid))
            self._report(number, rank, pid, os.waitstatus_to_exitcode(status))
            self._end(number)

    def _report(self, number: int, rank: int, pid: int, status: int) -> None:
        launch = self._launches.get(number)
        if launch is not None:
            with contextlib.suppress(BrokenPipeError):  # the session is gone, and needs no answer
                os.write(launch.report, REPORT.pack(rank, pid, status))
