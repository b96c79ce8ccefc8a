"""Ray's driver process, from the view of the kernel; and the resources that stay reserved between sessions."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import queue
import secrets
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....deaths import lost_connection
from ....errors import NbdistError
from ....system import ending, interpreter
from ....system.interrupts import deferred_interrupts
from ....system.processes import open_standard_descriptors, own_pidfd, redirect_to_devnull, register_after_fork
from ....wire.channel import Channel
from ....wire.parcel import Parcel
from ...forkserver import watched_by
from ..launch.starting import environment
from ..options import RayOptions

#: Seconds that a node may take to answer a question.
ANSWER = 3.0
#: With this, Ray's processes and what connects to them take the loopback interface for the machine's address; without
#: it Ray does so on macOS and Windows only, and listens on all interfaces.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class DriverProcess:
    """Ray's driver, from the view of the kernel: a process that reserves resources for `world_size` ranks on a cluster,
    or for at least `least`, or runs their work in Ray `tasks`.

    Raises `NbdistError` if the cluster cannot be reached, has too few resources, or has different versions.
    """

    def __init__(
        self,
        options: RayOptions,
        world_size: int,
        notice: Callable[[str], None],
        tasks: bool = False,
        least: int | None = None,
    ) -> None:
        self._options, self.world_size, self._tasks = options, world_size, tasks
        self.address, self.threads = options.address, max(1, int(options.cpus))
        self._numbers = itertools.count(1)
        self._asked: dict[int, concurrent.futures.Future[Any]] = {}
        self._replies: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._receiver: Callable[[str, Any, Parcel | None], None] | None = None
        self._sending = threading.RLock()
        self._timer: threading.Timer | None = None
        self._not_ours = False
        open_standard_descriptors()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        address, variables = _private_ray() if options.address is None else (options.address, {})
        ours, theirs = socket.socketpair()
        self._control = Channel(ours)
        with theirs, own_pidfd() as kernel:
            self.process = interpreter.start(
                "nbdist.engines.ray.driver.main",
                str(theirs.fileno()),
                str(kernel),
                env={**variables, **opened_by.get(address, {}), **environment(interpreter.module_path())},
                pass_fds=[fd for fd in (theirs.fileno(), kernel) if fd >= 0],
                stderr=self._log,
            )
        register_after_fork(self)
        try:
            plain = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
            self.send("connect", plain | {"address": address}, world_size, tasks, least)
            threading.Thread(target=self._listen, name="nbdist: cluster", daemon=True).start()
            while (reply := self._next())[0] == "notice":
                notice(reply[1])
            if reply[0] != "ready":
                raise NbdistError(reply[1] if reply[0] == "refused" else self.why_gone())
            self.counts: list[int] = reply[1]
            """The number of ranks on each node."""
            self.world_size = sum(self.counts)
            self.whole = self.world_size == world_size
            """True if there is room for the number of ranks that was asked for."""
            watched_by(self)
        except BaseException:
            self.stop(at_once=True)
            raise

    def _next(self) -> tuple[Any, ...]:
        while True:  # a second at a time: Python handles an interrupt right before a wait at its end
            with contextlib.suppress(queue.Empty):
                return self._replies.get(timeout=1.0)

    def after_fork(self) -> None:
        """Forget the resources in a child of this process: they belong to the parent."""
        self._not_ours = True
        redirect_to_devnull(self._control.fileno())

    def watch_folder(self, folder: str) -> None:
        """Have the process remove a folder if the kernel is killed."""
        if not self._not_ours:
            with contextlib.suppress(OSError):  # it has just ended: the next one gets it
                self.send("folder", 0, folder)

    def subscribe(self, receiver: Callable[[str, Any, Parcel | None], None] | None) -> None:
        """Pass all events of the nodes to `receiver`, in another thread: kind, content, parcel."""
        self._receiver = receiver

    def send(self, *message: Any, parcel: Parcel | None = None) -> None:
        """Send a message. Raises `OSError` if the process has ended."""
        with self._sending:
            try:
                self._control.send(message, parcel)
            except OSError:
                raise
            except BaseException:  # an interrupt, perhaps in the middle of the message: nothing could follow it
                self.process.kill()
                raise

    def request(self, what: str, *arguments: Any, seconds: float | None = 120.0) -> Any:
        """Send a request and wait for the answer; None without an answer."""
        number, future = next(self._numbers), concurrent.futures.Future[Any]()
        self._asked[number] = future
        try:
            self.send(what, number, *arguments)
            return future.result(seconds)
        except (OSError, concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            return None
        finally:
            self._asked.pop(number, None)

    def ask(self, node: int, what: str, *arguments: Any) -> Any:
        """Ask the agent of a node; None if it does not answer."""
        found = self.request("ask", [node], what, arguments, ANSWER, seconds=2 * ANSWER)
        return found[0] if found else None

    def ask_all(self, what: str, *arguments: Any, within: float = ANSWER) -> list[Any]:
        """Ask the agents of all nodes; None for each that does not answer within this number of seconds."""
        everybody = range(len(self.counts))
        found = self.request("ask", list(everybody), what, arguments, within, seconds=2 * within)
        return found or [None for _ in everybody]

    def _listen(self) -> None:
        try:
            while True:
                message, parcel, _ = self._control.receive()
                if message[0] == "event":
                    self._deliver(message[1], message[2], parcel)
                elif message[0] == "answer":
                    future = self._asked.get(message[1])
                    if future is not None and not future.done():
                        future.set_result(message[2])
                else:
                    self._replies.put(message)
        except (EOFError, OSError):
            self._replies.put(("gone",))
            if self._receiver is not None:
                self._deliver("lost", (None, self.why_gone()), None)
            for future in list(self._asked.values()):
                future.cancel()

    def _deliver(self, kind: str, what: Any, parcel: Parcel | None) -> None:
        receiver = self._receiver
        if receiver is not None:
            receiver(kind, what, parcel)
        elif parcel is not None:
            parcel.close()

    def why_gone(self) -> str:
        """Return the reason why the process has ended, if it has reported one."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        words = ""
        with contextlib.suppress(ValueError):  # another thread has closed the log: it stops the process
            self._log.seek(0)
            words = " ".join(self._log.read().decode(errors="replace").split())[-500:]
        return lost_connection(words)

    def keep(self) -> None:
        """Keep the resources for the next ranks, for a limited time."""
        if not self._options.linger:
            return self.stop()
        with _lock:
            _idle.setdefault((os.getpid(), repr(self._options), self.world_size, self._tasks), []).append(self)
            self._timer = threading.Timer(self._options.linger, self._retire)
            self._timer.daemon = True
            self._timer.start()

    def reusable(self) -> bool:
        """Return whether the reserved resources can be used again; give them back if not."""
        if self._timer is not None:
            self._timer.cancel()
        if self.process.poll() is None and None not in self.ask_all("received"):
            return True
        self.stop()
        return False

    def _retire(self) -> None:
        with _lock:
            kept = [drivers for drivers in _idle.values() if self in drivers]
            for drivers in kept:
                drivers.remove(self)
        if kept:
            self.stop()

    def stop(self, at_once: bool = False) -> None:
        """Release the resources: close the connection, so that the process ends everything. With `at_once`, kill the
        process, and Ray itself ends the rest.
        """
        if self._not_ours:
            return
        if at_once:
            self.process.kill()
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(OSError):
            self._control.sock.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._control.close()
        self._log.close()


_lock = threading.RLock()  # ranks without a reference are given up at any time, in any thread
_idle: dict[tuple[int, str, int, bool], list[DriverProcess]] = {}  # by process, options, number of ranks, tasks
#: By address: the variables that open a Ray which was started from here.
opened_by: dict[str, Mapping[str, str]] = {}
#: By address of a Ray that ends with this process: returns the descriptors by which another process can keep it.
kept_by: dict[str, Callable[[], Sequence[int]]] = {}
#: By process: a Ray of its own, its address, and its token.
private_rays: dict[int, tuple[subprocess.Popen[Any], str, str]] = {}


def acquire(
    options: RayOptions,
    world_size: int,
    notice: Callable[[str], None],
    taken: list[DriverProcess],
    tasks: bool = False,
    least: int | None = None,
) -> None:
    """Append to `taken` a driver with resources for a number of ranks, or for at least `least`: one that was kept after
    an earlier session, or a new one. `taken` is a list so that the caller can stop the driver after an interrupt.
    """
    with _lock, deferred_interrupts():
        kept = _idle.get((os.getpid(), repr(options), world_size, tasks), [])
        taken += kept[-1:]
        del kept[-1:]
    if not (taken and taken[0].reusable()):
        taken[:] = [DriverProcess(options, world_size, notice, tasks, least)]


def _private_ray() -> tuple[str, Mapping[str, str]]:
    """Return the address of a Ray on this machine, which ends with this process, and the variables that give access
    to it.
    """
    with _lock:
        process, address, token = private_rays.get(os.getpid(), (None, "", ""))
        if process is None or process.poll() is not None:
            check_token_support()
            token = secrets.token_hex(32)
        variables = {**token_variables(token), **_LOOPBACK}
        if process is None or process.poll() is not None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            with own_pidfd() as kernel:
                fds = [kernel] if kernel >= 0 else []
                environ = {**variables, **environment(interpreter.module_path())}
                process = interpreter.start(
                    "nbdist.engines.ray.launch.private", str(kernel), env=environ, pass_fds=fds, **pipes
                )
            assert process.stdout is not None
            said = json.loads(process.stdout.readline() or b"{}")
            if "address" not in said:
                ended = f"its process ended with exit code {process.wait()}"
                raise NbdistError(f"Ray does not start on this machine: {said.get('refused', ended)}")
            address = said["address"]
            private_rays[os.getpid()] = process, address, token
        return address, variables


def token_variables(token: str) -> Mapping[str, str]:
    """Return the environment variables with which Ray asks for this token and sends it."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def check_token_support() -> None:
    """Raise `NbdistError` for a version of Ray without tokens: everybody who reaches its machine could use it."""
    version = importlib.metadata.version("ray")
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 52):
        raise NbdistError(
            f"Ray {version} has no tokens, so everybody who reaches this machine could run code in it: to start Ray on "
            f"this machine, nbdist needs Ray 2.52 or newer. Or use a cluster that is running: "
            f"RayOptions(address=...)"
        )


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it
    for process, _, _ in private_rays.values():
        if process.stdin is not None and not process.stdin.closed:
            redirect_to_devnull(process.stdin.fileno())  # its end ends the process


os.register_at_fork(after_in_child=_after_fork)


def release_at(address: str) -> None:
    """Give back at once the resources that are kept on one cluster for later calls."""
    with _lock:
        here = [(key, drivers) for key, drivers in _idle.items() if key[0] == os.getpid()]
        found = [driver for _, drivers in here for driver in drivers if driver.address == address]
        for _, drivers in here:
            drivers[:] = [driver for driver in drivers if driver not in found]
    for driver in found:
        driver.stop()


@ending.last
def release() -> None:
    """Give back at once the resources that are kept on clusters for later calls, and end the Ray on this machine."""
    with _lock:
        drivers = [driver for (pid, *_), found in _idle.items() if pid == os.getpid() for driver in found]
        _idle.clear()
        ray, _, _ = private_rays.pop(os.getpid(), (None, "", ""))
    for driver in drivers:
        driver.stop()
    if ray is not None:
        assert ray.stdin is not None and ray.stdout is not None
        ray.stdin.close()
        ray.stdout.close()
        ray.wait()
