"""The queue of a keeper's actions, in the order of events that two threads can cause at one moment."""

from __future__ import annotations

import contextlib
import pickle
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nbdist import NbdistError
from nbdist.keeper.actions import Actions
from nbdist.keeper.executor import JournalCell
from nbdist.keeper.wakeups import Wakeups
from nbdist.keeper.writing import Journal
from nbdist.kernel.calls.futures import Ticket
from nbdist.kernel.calls.outcomes import UnreadOutcome
from nbdist.kernel.named.spec import WAKEUP, Action, Answer, decode_answers
from nbdist.wire.journal import Reader


class Executor:
    """A stand-in for the ranks: each change of a widget is noted."""

    def debug(self) -> None: ...

    empty_cache = restart = debug

    def __init__(self) -> None:
        self.will_wait: Callable[[], None] = lambda: None
        self.done: list[str] = []
        self.value = b""
        self.meanwhile: Callable[[], None] = lambda: None

    def ranks(self) -> dict[str, int]:
        return {"group": 0, "ranks": 0}

    def raised(self) -> list[int]:
        return []

    def carry_out(self, *_: Any) -> list[UnreadOutcome]:
        self.meanwhile()
        return [UnreadOutcome(memoryview(self.value), [])]

    def deliver_widget_event(self, name: str, cell: JournalCell) -> None:
        self.done.append(name)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(str(tmp_path), 1 << 20, lambda: None)) as journal:
        yield journal


@pytest.fixture
def wakeups() -> Wakeups:
    return Wakeups()


@pytest.fixture
def executor() -> Any:
    return Executor()


@pytest.fixture
def actions(journal: Journal, executor: Any, wakeups: Wakeups) -> Actions:
    return Actions(executor, journal, wakeups)


def widget(name: str) -> Action:
    return Action("widget", name, asks=False, values=(name,))


def test_of_two_clients_that_queue_at_one_moment_the_second_is_heard_while_it_waits(
    actions: Actions, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, waits = actions.lock.draw, []

    def draw_after_the_other() -> Ticket:
        monkeypatch.undo()
        actions.queue("first", Action("call", "first", asks=False), None, lambda: waits.append("first"))
        return draw()

    monkeypatch.setattr(actions.lock, "draw", draw_after_the_other)
    actions.queue("second", Action("call", "second", asks=False), None, lambda: waits.append("second"))
    assert waits == ["second"], "another thread reads what this client sends during the first client's call"


def test_a_stop_that_follows_at_once_is_not_lost(actions: Actions, executor: Executor, tmp_path: Path) -> None:
    # `will_wait` lets another thread read, and here that thread is faster.
    run = actions.queue("a", widget("a"), None, lambda: actions.stop("a"))
    run()
    assert not executor.done
    found = list(Reader(str(tmp_path)).read())
    assert [record.kind for record in found] == ["begin", "raised", "end"]
    assert found[0].head["token"] == "a" and found[0].head["action"] == "stopped"


def test_the_next_action_of_a_client_keeps_its_place(actions: Actions, executor: Executor) -> None:
    later: list[Callable[[], None]] = []
    first = actions.queue(
        "a", widget("a"), None, lambda: later.append(actions.queue("b", widget("b"), None, lambda: None))
    )
    with ThreadPoolExecutor(2) as pool:
        for one in pool.map(lambda run: run(), [later[0], first]):
            assert one is None
    assert executor.done == ["a", "b"]


def test_values_of_earlier_calls_that_the_disk_has_no_room_for_stay_within_the_bound(
    actions: Actions, executor: Executor, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", no_room)
    for number, size in enumerate((300_000, 600_000, 400_000, 1_000_000), 1):  # the bound is 1 MiB
        executor.value = bytes(size)
        actions.queue(str(number), Action("call", "f", asks=False), None, lambda: None)()
        assert actions.held.get(number, 0).pickled == executor.value
    assert [len(actions.held.get(number, 0).pickled or b"") for number in (2, 3)] == [600_000, 400_000]
    with pytest.raises(NbdistError, match="removed to make room"):
        actions.held.get(1, 0)


@pytest.fixture
def client(wakeups: Wakeups) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wakeups.add("client", theirs)
        yield ours


def call(actions: Actions, token: str) -> None:
    actions.queue(token, Action("call", "f", asks=False), None, lambda: None, "client")()


def test_a_client_that_has_its_value_finds_it_in_the_journal(
    actions: Actions, executor: Executor, journal: Journal, wakeups: Wakeups, client: socket.socket, tmp_path: Path
) -> None:
    executor.value = pickle.dumps(7)
    answer, answered = wakeups.answer, []
    with ThreadPoolExecutor(1) as pool:

        def answer_first(*of_what: Any) -> bool:
            assert not list(Reader(str(tmp_path)).read())
            answered.append(answer(*of_what))
            assert not pool.submit(journal.lock.acquire, blocking=False).result(), "who reads it now has to wait"
            return answered[-1]

        wakeups.answer = answer_first  # type: ignore[method-assign]
        call(actions, "token")
    assert answered == [True]
    assert [record.kind for record in Reader(str(tmp_path)).read()] == ["begin", "value", "end"]
    assert decode_answers(client.recv(1 << 16)) == ([Answer("token", [(0, pickle.dumps(7))])], b"")


@pytest.mark.parametrize("why", ["output", "big", "no client"])
def test_other_values_come_from_the_journal(
    why: str, actions: Actions, executor: Executor, journal: Journal, client: socket.socket, tmp_path: Path
) -> None:
    if why == "output":
        executor.meanwhile = lambda: journal.append("output", {"rank": 0, "which": 0}, b"text")
    executor.value = bytes(1 << 20 if why == "big" else 1)
    if why == "no client":
        client.close()
    call(actions, "token")
    assert why == "no client" or client.recv(1 << 16) == WAKEUP
    assert [one.kind for one in Reader(str(tmp_path)).read() if one.kind != "output"] == ["begin", "value", "end"]


def test_an_answer_that_its_client_does_not_read_is_sent_piece_by_piece(
    wakeups: Wakeups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the client reads the journal, and later answers are whole."""

    class Connection:
        """A connection with room for three bytes."""

        def __init__(self) -> None:
            self.unread, self.read = b"", b""

        def setblocking(self, blocks: bool) -> None: ...

        def send(self, data: bytes) -> int:
            done = data[: 3 - len(self.unread)]
            if not done:
                raise BlockingIOError
            self.unread += done
            return len(done)

        def recv(self) -> None:
            self.read, self.unread = self.read + self.unread, b""

    connection: Any = Connection()
    wakeups.add("client", connection)
    first, second = Answer("first", [(0, b"1")]), Answer("second", [(1, b"2")])
    assert not wakeups.answer("client", first)
    assert not wakeups.answer("client", second)
    found: list[Answer] = []
    while not found:
        wakeups.wake()
        wakeups.wake()
        connection.recv()
        found, rest = decode_answers(connection.read)
    assert (found, rest) == ([first], b"")


def question(journal: Journal, meanwhile: Callable[[JournalCell], Any]) -> JournalCell:
    cell = JournalCell(journal, asks=True, will_wait=lambda: meanwhile(cell))
    return cell


def test_a_question_whose_client_goes_at_the_same_moment_ends(journal: Journal) -> None:
    cell = question(journal, JournalCell.leave_alone)
    for _ in range(2):
        with pytest.raises(EOFError):
            cell.ask("name? ", False)


def test_an_interrupt_after_the_answer_is_not_the_answer_to_the_next_question(journal: Journal) -> None:
    interrupts = []

    def answer(cell: JournalCell) -> None:
        assert cell.answer("a line")
        interrupts.append(cell.answer(KeyboardInterrupt()))

    cell = question(journal, answer)
    assert [cell.ask("one? ", False), cell.ask("two? ", False)] == ["a line"] * 2
    assert interrupts == [False, False], "it stops the call instead"
