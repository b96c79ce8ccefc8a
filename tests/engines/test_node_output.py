"""Output that a node of a cluster sends, and output that it keeps, without a rank."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.engines.ray.node import agent, output
from nbdist.engines.ray.node.output import Output, encoded
from nbdist.kernel.cell.cell import Cell
from nbdist.kernel.cell.relay import Relay
from nbdist.wire.frames import MESSAGE, STDERR, STDOUT, FrameReader, frames


def taken(node: Output, rank: int, data: bytes, which: int = 0) -> list[tuple[int, int, Any]]:
    return list(node.take(rank, which, data))


def display(text: str) -> bytes:
    return frames(MESSAGE, json.dumps(["display", {"data": {"text/plain": text}, "update": False}]).encode())


@pytest.mark.parametrize("text", ["", "a line\n", "é" * 5000, "x" * 100_000 + "\n"])
def test_a_text_arrives_as_it_was_written(text: str) -> None:
    node, reader = Output(1), FrameReader(STDOUT)
    pieces = taken(node, 0, frames(STDERR, text.encode()))
    read = [piece for _, kind, what in pieces for piece in reader.feed(encoded(kind, what))]
    assert "".join(what for _, what in read) == text and {kind for kind, _ in read} <= {STDERR}
    assert node.logs[0].text() == text


def test_text_that_is_not_of_python_arrives_too() -> None:
    node = Output(2)
    assert taken(node, 1, b"from C\n", which=1) == [(1, STDERR, "from C\n")]
    assert taken(node, 1, b"half of \xc3") + taken(node, 1, b"\xa9") == [(1, STDOUT, "half of "), (1, STDOUT, "é")]


def test_a_rank_that_the_cell_does_not_show_sends_nothing_but_its_widgets() -> None:
    node = Output(2)
    assert node.begin(0, 1, True) and not node.begin(1, 1, False)
    comm = ["comm_open", {"comm_id": "1"}]
    data = b"text\n" + display("<Figure>") + frames(MESSAGE, json.dumps(comm).encode())
    assert taken(node, 1, data) == [(1, MESSAGE, comm)]
    assert [kind for _, kind, _ in taken(node, 0, data)] == [STDOUT, MESSAGE, MESSAGE]
    assert node.logs[1].text() == node.logs[0].text() == "text\n<Figure>\n"
    assert node.notice() == [], "what is not shown is not counted either"


def test_a_cell_that_is_full_gets_the_last_lines_and_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    node = Output(2)
    for rank in (0, 1):
        node.begin(rank, 7, True)
    assert taken(node, 0, b"shown\n") == [(0, STDOUT, "shown\n")]
    assert not node.cut(6) and taken(node, 0, b"shown\n"), "that was for an earlier call"
    assert node.cut(7)
    line = b"x" * 79 + b"\n"
    for _ in range(2000):
        assert not taken(node, 0, line) and not taken(node, 1, line)
    now[0] = 5.0
    assert node.due()
    (first, *last) = node.notice()
    assert first[1] == MESSAGE and first[2][0] == "left_out"
    assert first[2][1]["lines"] + len(last) == 4000 and first[2][1]["size"] == 80 * first[2][1]["lines"]
    assert len(last) == output.TAIL, "a cell shows no more"
    assert not node.due() and node.notice() == []
    assert node.logs[1].text() == 2000 * line.decode()


def test_a_notice_ends_with_the_last_lines_of_long_texts() -> None:
    node = Output(2)
    for rank in (0, 1):
        node.begin(rank, 1, True, 0)
    taken(node, 0, b"".join(b"a %d\n" % number for number in range(500)))
    taken(node, 1, b"".join(b"b %d\n" % number for number in range(40)) + b"half")
    (_, _, (_, about)), first, last = node.notice()
    assert first == (0, STDOUT, "".join(f"a {number}\n" for number in range(440, 500)))
    assert last == (1, STDOUT, "".join(f"b {number}\n" for number in range(40)) + "half")
    assert about["lines"] == 440


def test_a_notice_of_a_few_lines_leaves_none_out() -> None:
    node = Output(1)
    node.begin(0, 1, True)
    node.cut(1)
    taken(node, 0, b"one\n")
    assert node.notice() == [(0, STDOUT, "one\n")]


class NotebookCell(Cell):
    """A cell of a notebook that collects what is shown."""

    in_notebook = True

    def __init__(self, shown: list[str]) -> None:
        super().__init__()
        self._shown = shown

    def text(self, text: str, kind: int) -> None:
        self._shown.append(text)

    def message(self, kind: str, content: dict[str, Any]) -> None:
        self._shown.append(content["data"]["text/plain"])


@given(
    pieces=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans()), min_size=1, max_size=60),
    lines=st.integers(0, 5),
)
def test_each_line_of_a_full_cell_is_counted_once(pieces: list[tuple[int, int, bool]], lines: int) -> None:
    """Wherever the pieces in which ranks' output comes begin and end, and whenever the node sends a notice."""
    shown: list[str] = []
    node = Output(3)
    relay = Relay(SimpleNamespace(pids=[1, 2, 3], cut_output=lambda _: node.cut(7)))  # type: ignore[arg-type]
    relay.begin(NotebookCell(shown), "all", 0, lines)
    for rank in range(3):
        node.begin(rank, 7, True, lines)

    def send(parts: list[tuple[int, int, Any]]) -> None:
        for rank, kind, what in parts:
            relay.take(rank, 0, encoded(kind, what))

    written = [""] * 3
    for rank, size, noticed in pieces:
        text = "".join("a" if (len(written[rank]) + i) % 4 else "\n" for i in range(1, size + 1))
        written[rank] += text
        send(taken(node, rank, text.encode()))
        if noticed:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(output, "TAIL", 1)  # so that lines are left out
                send(node.notice())
    for rank in range(3):
        written[rank] += "\n"
        send(taken(node, rank, b"\n"))
    send(node.notice())
    relay.flush()
    count = sum(text.count("\n") for text in written)
    assert count <= lines or shown[-1].startswith(f"... {count:,} lines; ")


def test_the_next_call_is_shown_again() -> None:
    node = Output(1)
    node.begin(0, 1, True)
    node.cut(1)
    assert not taken(node, 0, b"left out\n")
    node.begin(0, 2, True)
    assert taken(node, 0, b"shown\n") and node.notice() == []


def test_a_node_stops_by_itself_at_the_number_of_lines_that_its_cell_shows() -> None:
    node = Output(2)
    for rank in (0, 1):
        node.begin(rank, 1, True, 3)
    assert taken(node, 0, b"1\n2\n") == [(0, STDOUT, "1\n2\n")]
    assert taken(node, 1, b"3\n4\n5\n") == [(1, STDOUT, "3\n")]
    assert not taken(node, 0, b"6\n")
    assert node.notice() == [(1, STDOUT, "4\n5\n"), (0, STDOUT, "6\n")]


def test_a_node_stops_by_itself_at_the_number_of_characters_that_its_cell_shows() -> None:
    """Text without newlines is no reason to send all of it."""
    node = Output(1)
    node.begin(0, 1, True, 3)
    assert taken(node, 0, b"x" * 1000) == [(0, STDOUT, "x" * 1000)]
    assert taken(node, 0, b"y" * 1000) == [(0, STDOUT, "y" * 500)]
    assert not taken(node, 0, b"z" * 1000)
    assert node.notice() == [(0, STDOUT, "y" * 500), (0, STDOUT, "z" * 1000)]
    node.begin(0, 2, True, None)
    assert taken(node, 0, b"x" * 1_000_000) == [(0, STDOUT, "x" * 1_000_000)]


def test_a_long_text_without_lines_is_left_out_but_for_its_end() -> None:
    node = Output(1)
    node.begin(0, 1, True, 0)
    assert not taken(node, 0, b"x" * 300_000 + b"\nend\n")
    (kind, text) = [(kind, what) for _, kind, what in node.notice()][-1]
    assert kind == STDOUT and text.endswith("x\nend\n")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[agent.Agent, int]]:
    """A node with one rank, and the pipe to which the rank writes. Without an event, an answer takes hours."""
    (read, write), (exits, end), (ours, theirs) = os.pipe(), os.pipe(), socket.socketpair()
    os.set_blocking(read, False)
    silent, silent_end = os.pipe()
    ranks = SimpleNamespace(outputs=[(read, silent)], pids=[1], channels=[ours], exits_fd=exits, exits=lambda: [])
    engine = SimpleNamespace(start_workers=lambda count, modules: ranks)
    monkeypatch.setattr(agent, "LocalEngine", lambda env: engine)
    monkeypatch.setattr(agent, "for_notebook", lambda notebook: None)
    one = agent.Agent(0, 1, [], False, {}, heartbeat=100_000.0, grouped=False)
    yield one, write
    one._listener.close()
    for fd in (read, write, exits, end, silent, silent_end, one._woken, one._wake):
        os.close(fd)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("shown", [False, True])
def test_output_that_is_not_sent_is_read_without_an_answer(shown: bool, node: tuple[agent.Agent, int]) -> None:
    """A node waits for its heartbeat if it has nothing to send: until then, ranks were stopped at a full pipe."""
    one, write = node
    one._output.begin(0, 1, shown, 0)
    one._output._noticed = float("inf")  # no notice is due
    polling = threading.Thread(target=one.poll, args=(0,), daemon=True)
    polling.start()
    for _ in range(64):
        os.write(write, b"x" * 65_536)
    one._closing = True
    os.write(one._wake, b"!")
    polling.join()


def test_much_output_that_waits_makes_an_answer_due(node: tuple[agent.Agent, int]) -> None:
    one, _ = node
    one._output.begin(0, 1, True, None)
    one._output_at = time.monotonic() + 100_000.0  # an answer has just had output
    one._on_output(0, 0, b"x" * (agent.MOST_WAITING // 2))
    assert one._due > time.monotonic() + 1000.0
    one._on_output(0, 0, b"x" * (agent.MOST_WAITING // 2 + 1))
    assert one.poll(0)[1] > 0


def test_an_earlier_notice_stays_before_the_text_that_waits() -> None:
    """A notice ends the lines of earlier text. After the last lines, it would add a part of an earlier line to them.
    Text that waits is older than text that was left out since.
    """
    left_out: list[Any] = ["left_out", {"lines": 7, "size": 70}]
    waiting = [
        ("message", [1], "begun", None),
        ("output", 1, MESSAGE, left_out),
        ("output", 1, STDOUT, "the last\n"),
        ("output", 0, MESSAGE, ["display", {}]),
    ]
    output = Output(2)
    output.leave_out(0, STDOUT, "written later\n")
    assert agent.without_text(waiting, output) == [
        ("output", 1, MESSAGE, left_out),
        ("output", 1, STDOUT, "the last\n"),
        ("output", 0, STDOUT, "written later\n"),
        ("message", [1], "begun", None),
        ("output", 0, MESSAGE, ["display", {}]),
    ]
