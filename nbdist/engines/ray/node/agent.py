"""The agent on a node of a cluster: it forks the ranks of the node, and sends their output and messages in one stream.

The driver uses threads of the agent: it fetches events (`poll`), stores big data (`storing.py`), delivers messages
(`deliver`), and sends requests (`ask`). Ranks have their numbers in the whole session.
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
from .output import Output, Piece, encoded
from .questions import Questions
from .storing import CHUNK, Stored

#: Seconds that output may wait for more of it.
OUTPUT_INTERVAL = 0.3
#: Bytes of output in the first answer of a call; the next may have four times as many each. Meanwhile a cell with many
#: lines notices that it shows the last ones alone.
FIRST_OUTPUT = 16 << 10
#: Characters of output that wait to be sent at most, but for what one more read gives.
MOST_WAITING = 1 << 20
#: Seconds that the answer to a call may wait for the answers of the node's other ranks.
ANSWER_INTERVAL = 0.05
#: Seconds after which `poll` answers although nothing has happened: so its caller knows that the node lives.
HEARTBEAT = 5.0

#: What happened: its kind, and more.
Event = tuple[Any, ...]


class Node(NamedTuple):
    """A node from the view of its ranks: address, environment, folder, search path, cores, devices."""

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
        address: The address of this node in the cluster.
        path: The notebook's `sys.path`; the folders that exist on this node are used.
        cwd: The notebook's folder, which is used if it exists on this node. None: the folder of the runtime environment
            is used.
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
    """Return the variable by which a rank that uses Ray itself connects to this cluster, and does not start another
    Ray."""
    ray = sys.modules.get("ray")
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address} if ray is not None and ray.is_initialized() else {}


class Agent:
    """The ranks `first` to `first + count - 1` of a session.

    `poll` answers after at most `heartbeat` seconds. `grouped` says whether the ranks will be in a process group.
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
        """The ranks that have a call at present."""
        self.stored = Stored()
        self._delivered = 0
        self._last_poll: tuple[int, int, list[Event]] = 0, 0, []
        self._events: collections.deque[Event] = collections.deque()
        self._due = float("inf")
        self._output = Output(count)
        self._questions = Questions(self._ranks, first, self._output.logs)
        self._output_at = 0.0
        self._output_most = FIRST_OUTPUT
        self._to_cut = -1
        self._sent = 0
        self._waiting = 0  # characters of output that came since the last answer and are to be sent
        self._polling = threading.Lock()
        self._closing = False
        self._woken, self._wake = os.pipe()
        self._listener = Listener(
            self._ranks,
            on_output=self._on_output,
            on_message=self._on_message,
            on_exit=self._on_exit,
            on_start=lambda number, pid: self._add_event("started", self._first + number, pid),
            pause=OUTPUT_INTERVAL,
        )
        self._listener.watch(self._woken, lambda: None)

    # ------------------------------------------------------------------------------------------------- what happens

    def poll(self, number: int) -> tuple[int, int, list[Event]]:
        """Return the number of this answer, the bytes of output in it, and the events since the last answer.

        Events are pickles of several events for the kernel (`packed`), parts of big data, and answers that refer to
        these parts. `number` is the number of the last answer that has arrived. An answer that was lost is sent again.
        """
        with self._polling:
            if self._last_poll[0] == number:
                self._last_poll = number + 1, *self._gather()
            return self._last_poll

    def _gather(self) -> tuple[int, list[Event]]:
        self._due = min(self._due, time.monotonic() + self._heartbeat) if not self._events else 0.0
        while not self._closing and (left := self._due - time.monotonic()) > 0:
            self._listener.select(left)
        if self._closing:
            return 0, [("closed",)]
        self._leave_out()
        events, size, output = [], 0, 0
        while self._events and size < 4 * CHUNK and output < self._output_most:
            event = self._events.popleft()
            if event[0] == "output":
                event = self._encoded(event)
                output += len(event[-1])
            events.append(event)
            size += len(event[-1]) if event[0] in ("part", "output") else 0
        if output:
            self._output_at = time.monotonic()
            self._output_most = min(4 * CHUNK, 4 * self._output_most)
        self._due, self._waiting = float("inf"), 0
        return output, list(packed(events))

    def _encoded(self, event: Event) -> Event:
        """Return an event of output in the form that the kernel reads."""
        _, number, kind, what = event
        return "output", self._first + number, 0, encoded(kind, what)

    def _leave_out(self) -> None:
        """Drop the output that waits to be sent, once the cell shows only the last lines."""
        call, self._to_cut = self._to_cut, -1
        if call >= 0 and self._output.cut(call):
            self._events = collections.deque(without_text(self._events, self._output))

    def _add_event(self, *event: Any, within: float = 0.0) -> None:
        self._events.append(event)
        self._due = min(self._due, time.monotonic() + within)

    def _on_output(self, number: int, which: int, data: bytes) -> None:
        """Receive output of a rank. If much of it waits to be sent, the next answer is due, and no more is read before
        this answer: other ranks wait, too."""
        pieces = list(self._output.take(number, which, data))
        self._waiting += sum(len(what) for _, kind, what in pieces if kind != MESSAGE)
        full = self._waiting > MOST_WAITING
        later = 0.0 if full else max(0.0, self._output_at + OUTPUT_INTERVAL - time.monotonic())
        for piece in pieces + (self._output.notice() if self._output.due() else []):
            self._add_event("output", *piece, within=later)

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
            self._add_event("message", [rank], message, None if about is None else about[0], within=within)
        else:
            self._add_event("answered", rank, message, about, within=within)

    def _notice(self) -> None:
        """Send the number of lines that were left out so far, and the last of these lines."""
        for piece in self._output.notice():
            self._add_event("output", *piece)

    def _on_exit(self, exit: Exit) -> None:
        self._notice()
        self._calling.discard(self._first + exit.rank)
        self._add_event("exit", self._first + exit.rank, exit.status, exit.reason)

    def _send_parts(self, parcel: Parcel) -> tuple[bytes | None, list[Any], list[str]]:
        import numpy as np

        keys = []
        for segment in parcel.segments:
            self._sent += 1
            keys.append(key := str(self._sent))
            bytes_of_it = np.frombuffer(segment.private(), dtype=np.uint8)
            for start in range(0, segment.size, CHUNK):
                self._add_event("part", key, segment.size, start, bytes_of_it[start : start + CHUNK])
        parcel.close()
        return parcel.inline, list(parcel.spans), keys

    # ---------------------------------------------------------------------------------------------- what comes here

    def deliver(self, number: int, items: Sequence[tuple[bytes, Any]], keep: Iterable[str]) -> None:
        """Deliver pickled messages to ranks, with parcels of segments on this node; segments in `keep` may be used
        again.

        `number` counts the calls: a call that is repeated, because its answer was lost, has no effect.
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
        """Answer a request, or do work that no rank does itself."""
        questions: dict[str, Callable[..., Any]] = {
            "signals": self._questions.signal,
            "aborts": self._questions.abort,
            "widget": self._questions.deliver_widget_event,
            "stacks": self._questions.stacks,
            "memory": self._questions.memory,
            "log": self._questions.log,
            "cut": self._cut_output,
            "connections": self._ranks.connections,
            "starting": self._ranks.starting,
            "received": lambda: self.stored.received,
            "warm": self._engine.warm,
            "preemption": self._ranks.notify_of_preemption,
            "rendezvous": self._open_rendezvous,
            "close": self._close,
        }
        return questions[what](*arguments)

    def _cut_output(self, call: int) -> None:
        self._to_cut = call  # for the thread that answers `poll`

    def _open_rendezvous(self, number: int, host: str | None) -> RendezvousAddress | None:
        """Return the store with a number; None for a closed one. A request whose answer was lost is repeated."""
        with self._opening:
            if number > self._rendezvous_number:
                if self._rendezvous is not None:
                    self._rendezvous.close()
                self._rendezvous_number, self._rendezvous = number, Rendezvous(host)
                self._joining = {self._first + rank for rank in range(len(self._ranks.pids))}
            elif number < self._rendezvous_number or self._rendezvous is None:
                return None
            return self._rendezvous.address

    def _close(self, grace: float) -> list[Event]:
        """End the ranks, and return what they have written that the kernel has not got, as `poll` does."""
        self._closing = True
        os.write(self._wake, b"!")
        with self._polling:
            self._listener.close()
            self._ranks.close(grace, self._on_output)
            self._leave_out()
            self._notice()
            if self._rendezvous is not None:
                self._rendezvous.close()
            self.stored.forget_all_but(())
            os.close(self._woken)
            os.close(self._wake)
            return list(packed([self._encoded(event) for event in self._events if event[0] == "output"]))


def without_text(events: Iterable[Event], output: Output) -> list[Event]:
    """Return waiting events with one notice in place of their text. Earlier notices come before it: a notice ends the
    lines that were sent before it."""
    notices: list[Event] = []
    others: list[Event] = []
    texts: list[Piece] = []
    for event in events:
        if event[0] != "output":
            others.append(event)
        elif event[2] != MESSAGE:
            texts.append(event[1:])
        else:
            (notices if event[3][0] == "left_out" else others).append(event)
    output.leave_out_waiting(texts)
    return [*notices, *(("output", *piece) for piece in output.notice()), *others]


def packed(events: Sequence[Event]) -> Iterator[Event]:
    """Pack events for the kernel into few pickles, in order; equal messages of ranks are sent once."""
    messages = [event for event in events if event[0] == "message"]
    answered = {rank for _, ranks, what, _ in messages if not isinstance(what, protocol.Begun) for rank in ranks}
    batch: list[Event] = []
    for event in events:
        kind, *what = event
        if kind in ("part", "answered"):
            if batch:
                yield "events", pickle.dumps(batch, protocol=5)
                batch = []
            yield event
        elif kind == "message" and isinstance(what[1], protocol.Begun) and what[0][0] in answered:
            continue  # it is over already
        elif kind == "message" and batch and batch[-1][0] == "message" and _alike(batch[-1], event):
            batch[-1] = "message", [*batch[-1][1], *what[0]], *event[2:]
        else:
            batch.append(event)
    if batch:
        yield "events", pickle.dumps(batch, protocol=5)


def _alike(one: Event, other: Event) -> bool:
    """Return whether two ranks have sent equal messages of the same class. (Messages of different classes may be
    equal as tuples.)
    """
    return type(one[2]) is type(other[2]) and one[2:] == other[2:]


def unpacked(items: Iterable[Event]) -> list[Event]:
    """Return the events from which `packed` has made `items`."""
    return [event for item in items for event in (pickle.loads(item[1]) if item[0] == "events" else [item])]
