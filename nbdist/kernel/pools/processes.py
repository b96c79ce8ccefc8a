"""The running processes of contexts: a thread reads their output and messages, and records their ends."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...capture.call import Call
from ...engines.contract import Exit
from ...engines.listening import Listener
from ...engines.local import start_workers
from ...errors import WorkerDied
from ...notebook.shell import shell
from ...system.interrupts import NUDGE, NUDGES, accept_nudges
from ...system.processes import register_after_fork
from ...wire import protocol
from ...wire.messages import Setting
from ...wire.parcel import Parcel
from ..calls.waiting import OUTPUT_INTERVAL
from ..cell.cell import Cell
from ..cell.relay import Relay

#: The exit code that `multiprocessing` gives a process whose end was not seen.
_UNKNOWN = 255


@dataclass
class Role:
    """The purpose of a process: a process by itself, or a worker of a pool."""

    cell: Cell
    """The cell that shows the output of the process."""
    processes: int = 1
    """The number of processes of its kind, which share the cores."""
    worker: bool = False
    """True if it works for a pool."""
    owner: Callable[[], Any] | None = None
    """Returns the pool for which the process works, as long as the pool exists."""
    functions: Mapping[int, Call] = field(default_factory=dict)
    """The functions that the process may request, by number."""
    busy: Callable[[], bool] = lambda: True
    """Returns True if an interrupt of the notebook is meant for the process, too."""
    is_lost: Callable[[], bool] = lambda: False
    """Returns True if the pool has lost a worker, so that it needs no further ones."""
    on_exit: Callable[[Running], None] = lambda running: None
    """Called when the process has ended."""


class Running:
    """A process of a context, from its fork to its end.

    Attributes: `sentinel`, a descriptor that is readable when the process has ended and `status` is known; `returned`,
    whether a worker of a pool ended because its work was done; `asked_to_end`, whether this process has sent it a
    signal.

    Args:
        name: The name of the process in the library.
        modules: The modules that the process will import.
        role: The purpose of the process.
        on_exit: A function that is called when the process has ended.
    """

    def __init__(self, name: str, modules: Iterable[str], *, role: Role, on_exit: Callable[[Running], None]) -> None:
        self.name, self.role = name, role
        self.status: int | None = None
        self.returned = self.asked_to_end = False
        self._on_exit = on_exit
        self._started = threading.Event()
        self._lock = threading.RLock()
        self._reason = ""
        self._exited: Exit | None = None
        self._ranks = start_workers(1, modules)
        try:
            self.sentinel, self._end = os.pipe()
        except BaseException:
            self._ranks.close()
            raise
        self._pid: int | None = None
        self._relay = Relay(self._ranks)
        self._relay.begin(role.cell, "rank0", 0)
        self.listener = Listener(
            self._ranks,
            on_output=self._relay.take,
            on_message=self._message,
            on_exit=self._exit,
            on_start=self._start,
            pause=OUTPUT_INTERVAL,
        )

    @property
    def pid(self) -> int:
        """Return the process number. Waits for the start; raises `OSError` if the process cannot be started."""
        self._started.wait()
        if self._pid is None:
            raise OSError(f"{self.name} {self._reason}")
        return self._pid

    def setting(self) -> Setting:
        """Return what the process needs to know of the notebook: its folder, search path, variables and devices."""
        return self._ranks.setting(0, self._ranks.inherited())

    def send(self, message: protocol.ToRank, **parts: Any) -> None:
        """Send the process a message. Its death is noticed elsewhere."""
        with self._lock, contextlib.suppress(OSError, IndexError):
            self._ranks.send(0, message, **parts)

    def signal(self, signum: int) -> None:
        """Send the process a signal, if it lives."""
        self._started.wait()
        with self._lock:
            if self.status is None:
                self._ranks.signal(0, signum)

    def kill(self) -> None:
        """End the process, on request of the user or of a pool."""
        self.asked_to_end = True
        self.signal(signal.SIGKILL)

    def show(self, cell: Cell | None = None) -> None:
        """Show all output so far; later output goes to `cell`."""
        with self._lock:
            if self._exited is None:
                self._relay.drain()
                if cell is not None:
                    self._relay.begin(cell, "rank0", 0)

    def mute(self) -> None:
        """Show no more output, because the cell cannot receive it."""
        with self._lock:
            self._relay.begin(self._relay.cell, "none", 0)

    def died(self, doing: str = "") -> WorkerDied:
        """Return the exception for the end of the process."""
        status = None if self.status == _UNKNOWN else self.status
        return WorkerDied(self.name, self._pid, status, self._relay.logs[0].tail(), doing, self._reason)

    # What follows is called by the thread.

    def step(self) -> bool:
        """Pass on the messages and output that have arrived, and return whether more may follow."""
        with self._lock:
            self.listener.select(0.0)
            if self._exited is None:
                return True
            self._relay.flush()
            self._relay.cell.close()
            self.listener.close()
            self._ranks.close()
            self._reason = self._exited.reason
            self.status = _UNKNOWN if self._exited.status is None else self._exited.status
        self._started.set()
        try:
            self._on_exit(self)
        finally:
            os.close(self._end)
        return False

    def _message(self, rank: int, message: protocol.FromRank, parcel: Parcel | None) -> None:
        if isinstance(message, protocol.Returned):
            self.returned = True
        elif isinstance(message, protocol.FunctionWanted):
            call = self.role.functions.get(message.number)
            if call is None:
                self.send(protocol.Function(None))
            else:
                self.send(protocol.Function(call.header), parcel=call.parcel)

    def _start(self, rank: int, pid: int) -> None:
        self._pid = pid
        self._started.set()

    def _exit(self, exit: Exit) -> None:
        self._exited = exit


class ProcessReader:
    """The thread that reads from all processes of contexts. It runs while such processes exist."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Running, None] = {}
        self._wake = -1
        register_after_fork(self)

    def after_fork(self) -> None:
        """Forget the processes in a child of this process: they belong to its parent, and the child has no such
        thread."""
        self.__init__()  # type: ignore[misc]

    def add(self, running: Running) -> None:
        """Read from a process, to its end."""
        with self._lock:
            self._running[running] = None
            if self._wake < 0:
                read, self._wake = os.pipe()
                os.set_blocking(read, False)
                threading.Thread(target=self._serve, args=(read,), name="nbdist: processes", daemon=True).start()
            os.write(self._wake, b"!")

    def processes(self) -> list[Running]:
        """Return the running processes."""
        with self._lock:
            return list(self._running)

    def _serve(self, wake: int) -> None:
        watched: set[Running] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            while True:
                for running in set(self.processes()) - watched:
                    watched.add(running)
                    selector.register(running.listener, selectors.EVENT_READ, running)
                ready = {key.data for key, _ in selector.select(self._due(watched))}
                if None in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                for running in [one for one in watched if one in ready or one.listener.due() == 0.0]:
                    if not self._step(running, selector):
                        watched.discard(running)
                if not watched and self._leave(wake):
                    return

    def _due(self, watched: set[Running]) -> float | None:
        return min((due for one in watched if (due := one.listener.due()) is not None), default=None)

    def _step(self, running: Running, selector: selectors.BaseSelector) -> bool:
        try:
            fd = running.listener.fileno()
            more = running.step()
        except Exception:  # somebody's callback, or the cell's own stream
            traceback.print_exc()
            running.mute()
            more = running.status is None
        if not more:
            selector.unregister(fd)
            with self._lock:
                self._running.pop(running, None)
        return more

    def _leave(self, wake: int) -> bool:
        """End the thread, unless a new process has been added."""
        with self._lock:
            if self._running:
                return False
            os.close(wake)
            os.close(self._wake)
            self._wake = -1
            return True


process_reader = ProcessReader()


def show_output(*args: Any) -> None:
    """Show the output of processes so far, at the end of a cell or of the program."""
    for running in process_reader.processes():
        running.show()


def interrupt() -> None:
    """Send an interrupt to the processes, as if they were in the notebook's process group. Works in any thread."""
    interrupted = [running for running in process_reader.processes() if running.role.busy()]
    for running in interrupted:
        running.signal(signal.SIGINT)
    threading.Thread(target=_nudge, args=(interrupted,), name="nbdist: nudges", daemon=True).start()


def _nudge(interrupted: list[Running]) -> None:
    """Make the processes, and the notebook's main thread, handle an interrupt that came just before a wait."""
    begin, main = time.monotonic(), threading.main_thread().ident
    assert main is not None
    for seconds in NUDGES:
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        signal.pthread_kill(main, NUDGE)
        for running in interrupted:
            running.signal(NUDGE)


_interrupts: tuple[int, int] | None = None


def watch_interrupts() -> None:
    """Make interrupts of the notebook reach the processes from now on, even while the notebook waits.

    Python writes the number of each signal to a descriptor before it calls a handler, and IPython changes the handler
    with each cell. If another library has set such a descriptor, it stays.
    """
    global _interrupts
    if _interrupts is not None or threading.current_thread() is not threading.main_thread():
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if before >= 0:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)
        return
    _interrupts = read, write
    accept_nudges()
    os.register_at_fork(after_in_child=_heed_no_interrupts)

    def listen() -> None:
        with contextlib.suppress(OSError):
            while numbers := os.read(read, 4096):
                if signal.SIGINT in numbers:
                    interrupt()

    threading.Thread(target=listen, name="nbdist: interrupts", daemon=True).start()


def _heed_no_interrupts() -> None:
    """Stop following interrupts in a child of this process: the descriptor belongs to its parent."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


def follow_cells() -> None:
    """Make each cell show the output of processes until its end."""
    found = shell()
    if found is not None and show_output not in found.events.callbacks["post_run_cell"]:
        found.events.register("post_run_cell", show_output)
