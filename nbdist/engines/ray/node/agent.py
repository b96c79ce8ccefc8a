"""On a node of a cluster: its ranks, forked by the engine of that machine, and all that they say in one stream.

`driver.py` speaks to it: it asks what has happened (`poll`), stores big data (`storing.py`), hands over messages
(`deliver`), and has questions (`ask`); it has threads for that. Ranks go by their numbers in the whole session.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from ....system.cores import numa_nodes, shares, usable_cores
from ....wire import protocol
from ....wire.frames import MESSAGE
from ....wire.parcel import Parcel
from ....wire.rendezvous import Rendezvous, RendezvousAddress
from ...contract import Exit
from ...forkserver import for_notebook
from ...listening import Listener
from ...local import LocalEngine
from .output import Output, encoded
from .questions import Questions
from .storing import CHUNK, Stored

#: Seconds that output may wait for more of it.
OUTPUT_INTERVAL = 0.3
#: Bytes of output in the first answer of a call; the next may have four times as many each. Meanwhile a cell with many
#: lines notices that it shows the last ones alone.
FIRST_OUTPUT = 16 << 10
#: Seconds that the answer to a call may wait for the answers of the node's other ranks.
ANSWER_INTERVAL = 0.05
#: Seconds after which `poll` answers although nothing has happened: so its caller knows that the node lives.
HEARTBEAT = 5.0

#: What happened: its kind, and more.
Event = tuple[Any, ...]


class Node(NamedTuple):
    """A node as its ranks find it: address, environment, folder, search path, cores, devices."""

    address: str
    host: str
    interface: str
    """The network interface with this address; empty if there is none."""
    environ: dict[str, str]
    cwd: str
    path: tuple[str, ...]
    shares: list[list[int]]
    """Cores for each rank, where ranks are bound."""


def describe(address: str, path: Sequence[str], cwd: str | None, gpus: Sequence[str], count: int) -> Node:
    """Describe this node for `count` ranks.

    Args:
        address: Of this node in the cluster.
        path: The notebook's `sys.path`: what of it is here, too, holds.
        cwd: The notebook's folder, which holds if it is here. None: the folder of the runtime environment holds.
        gpus: The GPUs of the ranks, as CUDA_VISIBLE_DEVICES names them.
    """
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    interfaces = [name for name, found in psutil.net_if_addrs().items() if any(a.address == address for a in found)]
    own = tuple(part for part in sys.path if not part.endswith(os.path.join("ray", "_private", "workers")))
    there = tuple(part for part in path if not part or os.path.exists(part))
    ordered = (*there, *own) if cwd is not None else (*own, *there)
    folder = cwd if cwd is not None and os.path.isdir(cwd) else os.getcwd()
    own_shares = shares(usable_cores(), numa_nodes(), count)
    merged = tuple(dict.fromkeys(ordered))
    environ = {**os.environ, **_address_of_ray()}
    return Node(address, socket.gethostname(), (interfaces or [""])[0], environ, folder, merged, own_shares)


def _address_of_ray() -> dict[str, str]:
    """The variable by which a rank that uses Ray itself comes to this cluster, and starts no Ray of its own."""
    ray = sys.modules.get("ray")
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address} if ray is not None and ray.is_initialized() else {}


class Agent:
    """The ranks `first` to `first + count - 1` of a session.

    `poll` answers after `heartbeat` seconds in any case. `grouped` says whether they will be in a process group.
    """

    def __init__(
        self,
        first: int,
        count: int,
        modules: Iterable[str],
        notebook: bool,
        env: Mapping[str, str],
        heartbeat: float = HEARTBEAT,
        grouped: bool = True,
    ) -> None:
        for_notebook(notebook)
        engine = LocalEngine(env)
        self._engine, self._first, self._heartbeat = engine, first, heartbeat
        if grouped:
            engine.warm(modules)
        self._ranks = engine.start(count) if grouped else engine.start_workers(count, modules)
        self._rendezvous: Rendezvous | None = None
        self._rendezvous_number = 0
        self._opening = threading.Lock()
        self._joining: set[int] = set()
        self._calling: set[int] = set()
        """The ranks that have a call."""
        self.stored = Stored()
        self._delivered = 0
        self._told: tuple[int, int, list[Event]] = 0, 0, []
        self._news: collections.deque[Event] = collections.deque()
        self._due = float("inf")
        self._output = Output(count)
        self._questions = Questions(self._ranks, first, self._output.logs)
        self._output_at = 0.0
        self._output_most = FIRST_OUTPUT
        self._to_cut = -1
        self._sent = 0
        self._polling = threading.Lock()
        self._closing = False
        self._woken, self._wake = os.pipe()
        self._listener = Listener(
            self._ranks,
            on_output=self._on_output,
            on_message=self._on_message,
            on_exit=self._on_exit,
            on_start=lambda number, pid: self._tell("started", self._first + number, pid),
        )
        self._listener.watch(self._woken, lambda: None)

    # ------------------------------------------------------------------------------------------------- what happens

    def poll(self, number: int) -> tuple[int, int, list[Event]]:
        """Return the number of this answer, the bytes of output in it, and the events since the last answer.

        Events are pickles for the kernel (`_told`), parts of big data, and answers that refer to these. `number` is the
        number of the last answer that has arrived: an answer that was lost on the way is given again.
        """
        with self._polling:
            if self._told[0] == number:
                self._told = number + 1, *self._gather()
            return self._told

    def _gather(self) -> tuple[int, list[Event]]:
        if not self._closing:
            self._listener.resume()
        self._due = min(self._due, time.monotonic() + self._heartbeat) if not self._news else 0.0
        while not self._closing and (left := self._due - time.monotonic()) > 0:
            self._listener.select(left)
        self._leave_out()
        events, size, output = [], 0, 0
        while self._news and size < 4 * CHUNK and output < self._output_most:
            event = self._news.popleft()
            if event[0] == "output":
                number, kind, what = event[1:]
                event = "output", self._first + number, 0, encoded(kind, what)
                output += len(event[-1])
            events.append(event)
            size += len(event[-1]) if event[0] in ("part", "output") else 0
        if output:
            self._output_at = time.monotonic()
            self._output_most = min(4 * CHUNK, 4 * self._output_most)
        self._due = float("inf")
        return output, [("closed",)] if self._closing else list(packed(events))

    def _leave_out(self) -> None:
        """Leave out what waits to be sent, once the cell shows the last lines alone."""
        call, self._to_cut = self._to_cut, -1
        if call >= 0 and self._output.cut(call):
            waiting = list(self._news)
            self._news.clear()
            for event in waiting:
                if event[0] == "output" and event[2] != MESSAGE:
                    self._output.leave_out(*event[1:])
            self._news.extend(("output", *piece) for piece in self._output.notice())
            self._news.extend(event for event in waiting if event[0] != "output" or event[2] == MESSAGE)

    def _tell(self, *event: Any, within: float = 0.0) -> None:
        self._news.append(event)
        self._due = min(self._due, time.monotonic() + within)

    def _on_output(self, number: int, which: int, data: bytes) -> None:
        """Take what a rank has written. Nothing more of it is looked at before the next answer: it is not alone."""
        later = max(0.0, self._output_at + OUTPUT_INTERVAL - time.monotonic())
        pieces = list(self._output.take(number, which, data))
        for piece in pieces + (self._output.notice() if self._output.due() else []):
            self._tell("output", *piece, within=later)

    def _on_message(self, number: int, message: protocol.FromRank, parcel: Parcel | None) -> None:
        rank = self._first + number
        about = None if parcel is None else self._send_parts(parcel)
        within = 0.0
        match message:
            case protocol.Begun():  # only an interrupt has to know that
                within = 2 * ANSWER_INTERVAL
            case protocol.Done():
                self._calling.discard(rank)
                within = ANSWER_INTERVAL if self._calling else 0.0
                if not self._calling:
                    self._notice()
            case protocol.Error():
                self._calling.discard(rank)
                self._notice()
        if about is None or not about[2]:
            self._tell("message", [rank], message, None if about is None else about[0], within=within)
        else:
            self._tell("answered", rank, message, about, within=within)

    def _notice(self) -> None:
        """Send what was left out so far, as a number, and the last lines of it."""
        for piece in self._output.notice():
            self._tell("output", *piece)

    def _on_exit(self, exit: Exit) -> None:
        self._notice()
        self._calling.discard(self._first + exit.rank)
        self._tell("exit", self._first + exit.rank, exit.status, exit.reason)

    def _send_parts(self, parcel: Parcel) -> tuple[bytes | None, list[Any], list[str]]:
        import numpy as np

        keys = []
        for segment in parcel.segments:
            self._sent += 1
            keys.append(key := str(self._sent))
            bytes_of_it = np.frombuffer(segment.private(), dtype=np.uint8)
            for start in range(0, segment.size, CHUNK):
                self._tell("part", key, segment.size, start, bytes_of_it[start : start + CHUNK])
        parcel.close()
        return parcel.inline, list(parcel.spans), keys

    # ---------------------------------------------------------------------------------------------- what comes here

    def deliver(self, number: int, items: Sequence[tuple[bytes, Any]], keep: Iterable[str]) -> None:
        """Hand pickled messages to ranks, with parcels of segments that are here; those to `keep` may be sent again.

        `number` counts the calls: one that is repeated, since its answer was lost, does nothing.
        """
        if number <= self._delivered:
            return
        self._delivered = number
        for pickled, about in items:
            parcel = None
            if about is not None:
                inline, spans, keys = about
                parcel = Parcel(inline, spans, [self.stored[key] for key in keys])
            messages = pickle.loads(pickled)
            for rank, message in messages:
                if isinstance(message, protocol.Call):
                    self._calling.add(rank)
                    self._begin_output(rank, message.number, message.shown, message.lines)
                elif isinstance(message, protocol.Debug | protocol.Widget):
                    self._begin_output(rank, -1, True)
                self._send(rank, message, parcel)
        self.stored.forget_all_but(keep)

    def _begin_output(self, rank: int, call: int, shown: bool, lines: int | None = None) -> None:
        if self._output.begin(rank - self._first, call, shown, lines):
            self._output_most = FIRST_OUTPUT

    def _send(self, rank: int, message: protocol.ToRank, parcel: Parcel | None) -> None:
        joins = isinstance(message, protocol.Join)
        fds = self._rendezvous.fds(rank) if joins and self._rendezvous is not None else []
        with contextlib.suppress(OSError):  # it is dead, which is reported otherwise
            self._ranks.channels[rank - self._first].send(message, parcel, fds)
        if joins:
            self._joining.discard(rank)
            if not self._joining and self._rendezvous is not None:
                self._rendezvous.close()
                self._rendezvous = None

    def ask(self, what: str, *arguments: Any) -> Any:
        """Answer a question, or do something that no rank does itself."""
        questions: dict[str, Callable[..., Any]] = {
            "signals": self._questions.signal,
            "aborts": self._questions.abort,
            "widget": self._questions.tell_widget,
            "stacks": self._questions.stacks,
            "memory": self._questions.memory,
            "log": self._questions.log,
            "cut": self._cut_output,
            "connections": self._ranks.connections,
            "received": lambda: self.stored.received,
            "warm": self._engine.warm,
            "preemption": self._ranks.tell_preemption,
            "rendezvous": self._open_rendezvous,
            "close": self._close,
        }
        return questions[what](*arguments)

    def _cut_output(self, call: int) -> None:
        self._to_cut = call  # for the thread that answers `poll`

    def _open_rendezvous(self, number: int, host: str | None) -> RendezvousAddress | None:
        """Return the store with a number; None for a closed one. A question whose answer was lost is asked again."""
        with self._opening:
            if number > self._rendezvous_number:
                if self._rendezvous is not None:
                    self._rendezvous.close()
                self._rendezvous_number, self._rendezvous = number, Rendezvous(host)
                self._joining = {self._first + rank for rank in range(len(self._ranks.pids))}
            elif number < self._rendezvous_number or self._rendezvous is None:
                return None
            return self._rendezvous.address

    def _close(self, grace: float) -> None:
        self._closing = True
        os.write(self._wake, b"!")
        with self._polling:
            self._listener.close()
            self._ranks.close(grace)
            if self._rendezvous is not None:
                self._rendezvous.close()
            self.stored.forget_all_but(())
            os.close(self._woken)
            os.close(self._wake)


def packed(events: Sequence[Event]) -> Iterator[Event]:
    """Pack events for the kernel into as few pickles as keep their order; equal messages of ranks are sent once."""
    messages = [event for event in events if event[0] == "message"]
    answered = {rank for _, ranks, what, _ in messages if not isinstance(what, protocol.Begun) for rank in ranks}
    told: list[Event] = []
    for event in events:
        kind, *what = event
        if kind in ("part", "answered"):
            if told:
                yield "told", pickle.dumps(told, protocol=5)
                told = []
            yield event
        elif kind == "message" and isinstance(what[1], protocol.Begun) and what[0][0] in answered:
            continue  # it is over already
        elif kind == "message" and told and told[-1][0] == "message" and _alike(told[-1], event):
            told[-1] = "message", [*told[-1][1], *what[0]], *event[2:]
        else:
            told.append(event)
    if told:
        yield "told", pickle.dumps(told, protocol=5)


def _alike(one: Event, other: Event) -> bool:
    """Return whether two ranks have sent equal messages. Messages of different classes can be equal as tuples."""
    return type(one[2]) is type(other[2]) and one[2:] == other[2:]


def unpacked(items: Iterable[Event]) -> list[Event]:
    """Return the events from which `packed` has made `items`."""
    return [event for item in items for event in (pickle.loads(item[1]) if item[0] == "told" else [item])]
