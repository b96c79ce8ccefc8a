"""The queue of a keeper's actions, in the order of events that two threads can cause at one moment."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nbdist import NbdistError
from nbdist.keeper.actions import Actions
from nbdist.keeper.executor import JournalCell
from nbdist.keeper.writing import Journal
from nbdist.kernel.calls.futures import Ticket
from nbdist.kernel.calls.outcomes import UnreadOutcome
from nbdist.kernel.named.spec import Action
from nbdist.wire.journal import Reader


class Executor:
    """A stand-in for the ranks: each change of a widget is noted."""

    def debug(self) -> None: ...

    empty_cache = restart = debug

    def __init__(self) -> None:
        self.will_wait: Callable[[], None] = lambda: None
        self.done: list[str] = []
        self.value = b""

    def ranks(self) -> dict[str, int]:
        return {"group": 0, "ranks": 0}

    def raised(self) -> list[int]:
        return []

    def carry_out(self, *_: Any) -> list[UnreadOutcome]:
        return [UnreadOutcome(memoryview(self.value), [])]

    def deliver_widget_event(self, name: str, cell: JournalCell) -> None:
        self.done.append(name)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(str(tmp_path), 1 << 20, lambda: None)) as journal:
        yield journal


@pytest.fixture
def executor() -> Any:
    return Executor()


@pytest.fixture
def actions(journal: Journal, executor: Any) -> Actions:
    return Actions(executor, journal)


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

    header: Any = types.SimpleNamespace(cells=[])
    monkeypatch.setattr("os.write", no_room)
    for number, size in enumerate((300_000, 600_000, 400_000, 1_000_000), 1):  # the bound is 1 MiB
        executor.value = bytes(size)
        actions.queue(str(number), Action("call", "f", asks=False, header=header), None, lambda: None)()
        assert actions.held.get(number, 0).pickled == executor.value
    assert [len(actions.held.get(number, 0).pickled or b"") for number in (2, 3)] == [600_000, 400_000]
    with pytest.raises(NbdistError, match="removed to make room"):
        actions.held.get(1, 0)


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
