"""Ranks on a Ray cluster, as the kernel holds them: the same descriptors as those of local ranks.

Their other ends are in a process of their own (`bridge.py`), which is Ray's driver, and from there one connection goes
to an agent on each node (`node.py`), which forks the ranks of that node as `local.py` does here.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import queue
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import psutil

from ..errors import NbdistError
from ..meeting import LOOPBACK_INTERFACE, Meeting
from ..relay import notebook_shell
from ..transport import Channel, readable
from ..worker import Place, Setting
from . import Exit
from .local import output_pipe
from .node import Node
from .options import RayOptions

#: Seconds that a node may take to answer a question.
_ANSWER = 3.0


class RayEngine:
    """Starts ranks on a cluster. Raises `NbdistError` where Ray is not installed."""

    def __init__(self, options: RayOptions) -> None:
        if importlib.util.find_spec("ray") is None:
            raise NbdistError('a Ray cluster needs Ray here, too: pip install "nbdist[ray]"')
        self._options = options
        self._modules: dict[str, None] = {}

    def devices(self, nranks: int, devices: str | Sequence[str] | None) -> list[str]:
        gpus = "cuda" if self._options.gpus else "cpu"
        if devices not in (None, gpus):
            raise ValueError(
                f"devices={devices!r}: on a cluster each rank works with what Ray reserves for it, which here is "
                f"{gpus!r}. RayOptions(gpus=1) gives each rank a GPU, gpus=0 none"
            )
        return [gpus] * nranks

    def start(self, world_size: int, notice: Callable[[str], None]) -> RayRanks:
        with _lock:
            idle = _idle.pop((os.getpid(), repr(self._options), world_size), [])
            bridge = idle.pop() if idle else None
            if idle:
                _idle[os.getpid(), repr(self._options), world_size] = idle
        if bridge is None or not bridge.rouse():
            bridge = Bridge(self._options, world_size, notice)
        return RayRanks(bridge, list(self._modules))

    def warm(self, modules: Iterable[str]) -> None:
        """The nodes load them before they fork ranks; those that have forked theirs, for the next ones."""
        self._modules.update(dict.fromkeys(modules))


class RayRanks:
    """Processes on the nodes of a cluster: see `engines.Ranks`."""

    patience = 30.0  # Ray needs as long to be sure that a node is lost which just does not answer

    def __init__(self, bridge: Bridge, modules: Sequence[str]) -> None:
        self._bridge, size = bridge, bridge.world_size
        self.pids: list[int | None] = [None] * size
        self.channels: list[Channel] = []
        self.outputs: list[tuple[int, int]] = []
        self._several = len(bridge.counts) > 1
        self._alive = set(range(size))
        self._exits: Channel | None = None
        self.exits_fd = -1
        try:
            for _ in range(size):
                self._hand_over()
            ours, theirs = socket.socketpair()
            self._exits, self.exits_fd = Channel(ours), ours.fileno()
            with theirs:
                surroundings = list(sys.path), os.getcwd(), modules, notebook_shell() is not None
                nodes = bridge.request("start", *surroundings, fds=[theirs.fileno()])
            if not isinstance(nodes, list):
                raise NbdistError(nodes or f"the ranks could not be started: the cluster {bridge.obituary()}")
            self._nodes = [Node(*node) for node in nodes]
            self.places = [
                Place(number, local, count, self._interface(node), bridge.threads, node.shares[local])
                for number, (node, count) in enumerate(zip(self._nodes, bridge.counts, strict=True))
                for local in range(count)
            ]
        except BaseException:
            self._release()
            bridge.stop(at_once=True)
            raise

    def _hand_over(self) -> None:
        """Make the descriptors of the next rank, and give the bridge its ends."""
        ours, theirs = socket.socketpair()
        self.channels.append(Channel(ours))
        writes: list[int] = []
        with theirs:
            try:
                reads = []
                self.outputs.append((-1, -1))
                for _ in range(2):
                    read, write = output_pipe()
                    reads.append(read)
                    writes.append(write)
                    self.outputs[-1] = reads[0], reads[-1]
                self._bridge.send("descriptors", 0, fds=[theirs.fileno(), *writes])
            finally:
                for fd in writes:
                    os.close(fd)

    def _interface(self, node: Node) -> str:
        return node.interface if self._several else LOOPBACK_INTERFACE

    def inherited(self) -> Mapping[str, str]:
        """What the notebook has set since it was started; the rest are matters of its machine."""
        started_with = psutil.Process().environ()
        return {
            name: value
            for name, value in os.environ.items()
            if started_with.get(name) != value and not name.startswith("RAY_")
        }

    def setting(self, rank: int, environ: Mapping[str, str]) -> Setting:
        node = self._nodes[self.places[rank].node]
        return Setting({**node.environ, **environ}, node.cwd, node.path, tuple(sys.argv))

    def meet(self) -> _RemoteMeetingPoint:
        met = self._bridge.ask(0, "meet", self._nodes[0].address if self._several else None)
        # None: the node is lost, which its exits are about to tell.
        return _RemoteMeetingPoint(Meeting("", 0, 0) if met is None else Meeting(*met))

    def exits(self) -> list[Exit]:
        found: list[Exit] = []
        while self._exits is not None and readable(self._exits):
            try:
                (rank, pid, status, reason), _, _ = self._exits.receive()
            except (EOFError, ConnectionError):
                lost = self._bridge.obituary()
                found += [Exit(rank, None, lost) for rank in sorted(self._alive)]
                self._alive.clear()
                return found
            if pid is not None:
                self.pids[rank] = pid
            else:
                self._alive.discard(rank)
                found.append(Exit(rank, status, reason))
        return found

    def signal(self, rank: int, signum: int) -> None:
        if rank in self._alive:
            with contextlib.suppress(OSError):
                self._bridge.send("ask", 0, [self.places[rank].node], "signal", (rank, signum), _ANSWER)

    def addresses(self) -> list[tuple[str, int]]:
        found = [tuple(address) for node in self._bridge.ask_all("addresses") for address in node or ()]
        if len({node.address for node in self._nodes}) == 1:
            return found
        return [(ip, port) for ip, port in found if not (ip.startswith("127.") or ip == "::1")]  # each node has these

    def stack(self, rank: int) -> str:
        return self._bridge.ask(self.places[rank].node, "stack", rank) or ""

    def memory(self, rank: int) -> int | None:
        found: int | None = self._bridge.ask(self.places[rank].node, "memory", rank)
        return found

    def received(self) -> list[int | None]:
        """Bytes of big data that each node has got from the notebook."""
        return self._bridge.ask_all("received")

    def close(self, grace: float = 0.0) -> None:
        if self._exits is None:
            return
        healthy = self._bridge.request("close", grace, seconds=grace + 30.0)
        self._release()
        if healthy:
            self._bridge.rest()
        else:
            self._bridge.stop()

    def _release(self) -> None:
        for channel in (*self.channels, *([self._exits] if self._exits is not None else [])):
            channel.close()
        for fd in {fd for pair in self.outputs for fd in pair if fd >= 0}:
            os.close(fd)
        self.channels, self.outputs, self._exits = [], [], None


class _RemoteMeetingPoint:
    """A store on the node of rank 0, whose agent gives the ranks their descriptors: see `engines.MeetingPoint`."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    def fds(self, rank: int) -> list[int]:
        return []

    def close(self) -> None: ...


class Bridge:
    """The kernel's end of a bridge process, which holds room for `world_size` ranks on a cluster.

    Raises `NbdistError` where the cluster cannot be reached, has no room, or differs.
    """

    def __init__(self, options: RayOptions, world_size: int, notice: Callable[[str], None]) -> None:
        self._options, self.world_size = options, world_size
        self.threads = max(1, int(options.cpus))
        self._numbers = itertools.count(1)
        self._asked: dict[int, concurrent.futures.Future[Any]] = {}
        self._news: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._sending = threading.RLock()
        self._timer: threading.Timer | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        address, opened_by = (options.address, {}) if options.address is not None else _local_ray()
        ours, theirs = socket.socketpair()
        self._control = Channel(ours)
        with theirs:
            self.process = _start(
                "main(sys.argv[1])", str(theirs.fileno()), env=opened_by, pass_fds=[theirs.fileno()], stderr=self._log
            )
        try:
            plain = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
            self.send("connect", plain | {"address": address}, world_size)
            threading.Thread(target=self._listen, name="nbdist: cluster", daemon=True).start()
            while (news := self._news.get())[0] == "notice":
                notice(news[1])
            if news[0] != "ready":
                raise NbdistError(news[1] if news[0] == "refused" else self.obituary())
            self.counts: list[int] = news[1]
            """Ranks on each node."""
        except BaseException:
            self.stop(at_once=True)
            raise

    def send(self, *message: Any, fds: Iterable[int] = ()) -> None:
        """Send a message. Raises `OSError` when the process is gone."""
        with self._sending:
            self._control.send(message, fds=fds)

    def request(self, what: str, *arguments: Any, fds: Iterable[int] = (), seconds: float | None = 120.0) -> Any:
        """Ask, and wait for the answer; None where there is none."""
        number, future = next(self._numbers), concurrent.futures.Future[Any]()
        self._asked[number] = future
        try:
            self.send(what, number, *arguments, fds=fds)
            return future.result(seconds)
        except (OSError, concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            return None
        finally:
            self._asked.pop(number, None)

    def ask(self, node: int, what: str, *arguments: Any) -> Any:
        """Ask the agent of a node; None where it does not answer."""
        found = self.request("ask", [node], what, arguments, _ANSWER, seconds=2 * _ANSWER)
        return found[0] if found else None

    def ask_all(self, what: str, *arguments: Any) -> list[Any]:
        """Ask the agents of all nodes; None for each that does not answer."""
        everybody = range(len(self.counts))
        found = self.request("ask", list(everybody), what, arguments, _ANSWER, seconds=2 * _ANSWER)
        return found or [None for _ in everybody]

    def _listen(self) -> None:
        try:
            while True:
                message, _, _ = self._control.receive()
                if message[0] == "answer":
                    future = self._asked.get(message[1])
                    if future is not None and not future.done():
                        future.set_result(message[2])
                else:
                    self._news.put(message)
        except (EOFError, OSError):
            self._news.put(("gone",))
            for future in list(self._asked.values()):
                future.cancel()

    def obituary(self) -> str:
        """Why the process is gone, as far as it has said."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        self._log.seek(0)
        words = " ".join(self._log.read().decode(errors="replace").split())[-500:]
        return "was lost: the connection to the Ray cluster has ended" + (f" ({words})" if words else "")

    def rest(self) -> None:
        """Keep the room for the next ranks, but not for long."""
        if not self._options.linger:
            return self.stop()
        with _lock:
            _idle.setdefault((os.getpid(), repr(self._options), self.world_size), []).append(self)
            self._timer = threading.Timer(self._options.linger, self._retire)
            self._timer.daemon = True
            self._timer.start()

    def rouse(self) -> bool:
        """Be used again; whether that can be."""
        if self._timer is not None:
            self._timer.cancel()
        if self.process.poll() is None and None not in self.ask_all("received"):
            return True
        self.stop()
        return False

    def _retire(self) -> None:
        with _lock:
            resting = [bridges for bridges in _idle.values() if self in bridges]
            for bridges in resting:
                bridges.remove(self)
        if resting:
            self.stop()

    def stop(self, at_once: bool = False) -> None:
        """Give the room back: hang up, and the process ends all there. Ray does so, too, if it goes `at_once`."""
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


_lock = threading.RLock()  # ranks that nobody refers to any more are given up at any time, in any thread
_idle: dict[tuple[int, str, int], list[Bridge]] = {}  # by process, options, number of ranks
_local: dict[int, tuple[subprocess.Popen[Any], str, str]] = {}  # by process: a Ray of its own, address, token


def _start(code: str, *arguments: str, env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process of `bridge.py`, which finds nbdist wherever the kernel found it."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), **env}
    command = [
        sys.executable,
        *flags,
        "-c",
        f"import sys; from nbdist.engines import bridge; bridge.{code}",
        *arguments,
    ]
    return subprocess.Popen(command, env=environ, start_new_session=True, **{"stdin": subprocess.DEVNULL} | options)


def _local_ray() -> tuple[str, Mapping[str, str]]:
    """The address of a Ray of this machine alone, which ends with this process, and the variables that open it."""
    with _lock:
        process, address, token = _local.get(os.getpid(), (None, "", ""))
        if process is None or process.poll() is not None:
            token = secrets.token_hex(32)
        opened_by = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        if process is None or process.poll() is not None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = _start("hold()", env=opened_by, **pipes)
            assert process.stdout is not None
            address = str(process.stdout.readline().decode()).strip()
            if not address:
                raise NbdistError("Ray does not start on this machine: `ray start --head` says why")
            _local[os.getpid()] = process, address, token
        return address, opened_by


@atexit.register
def release() -> None:
    """Give back at once what is kept on clusters for the next calls, and end the Ray of this machine."""
    with _lock:
        bridges = [bridge for (pid, _, _), found in _idle.items() if pid == os.getpid() for bridge in found]
        _idle.clear()
        local, _, _ = _local.pop(os.getpid(), (None, "", ""))
    for bridge in bridges:
        bridge.stop()
    if local is not None:
        assert local.stdin is not None and local.stdout is not None
        local.stdin.close()
        local.stdout.close()
        local.wait()
