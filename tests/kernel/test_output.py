"""Output and displays of ranks arrive in the cell: nothing lost, in order, live, as the outputs it would be there."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import functools
import io
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import nbformat
import numpy as np
import pytest
import torch
from cells import cells
from conftest import Kernel, Result, endless, poll
from hypothesis import assume, given
from hypothesis import strategies as st
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from nbdist import Session, in_ddp
from nbdist.kernel.cell import excerpt
from nbdist.kernel.cell import relay as output
from nbdist.kernel.cell.cell import Cell
from nbdist.wire import frames
from nbdist.wire.frames import MAGIC, MESSAGE, STDERR, STDOUT, FrameReader, FrameWriter
from nbdist.wire.log import KEPT, Log

ROOT = str(Path(__file__).parent.parent.parent)
CELLS = cells("kernel/cells/output.py")

# --------------------------------------------------------------------------------------------------------- the wire

TEXT = st.text(st.characters(codec="utf-8"))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("stdout"), TEXT),
        st.tuples(st.just("stderr"), TEXT),
        st.tuples(st.just("raw"), TEXT),
        st.tuples(st.just("message"), TEXT),
    )
)
CHUNKS = st.sampled_from([4, 5, 7, 64, frames._CHUNK])


def written(actions: list[tuple[str, str]], process: int, chunk: int) -> list[bytes]:
    """The writes, each of them atomic, by which a process does these actions."""
    writes: list[bytes] = []
    system = SimpleNamespace(write=lambda fd, data: writes.append(bytes(data)), getpid=lambda: process)
    with mock.patch.object(frames, "os", system), mock.patch.object(frames, "_CHUNK", chunk):
        writer = FrameWriter()
        for action, text in actions:
            if action == "raw":
                writes.append(text.encode())
            elif action == "message":
                writer.message("display", text=text)
            else:
                writer.write(STDOUT if action == "stdout" else STDERR, text.encode())
    return writes


def split(data: bytes, lengths: Iterator[int]) -> Iterator[bytes]:
    """The same bytes, in pieces of these lengths, and the empty one that says it is the end."""
    position = 0
    while position < len(data):
        length = next(lengths)
        yield data[position : position + length]
        position += length
    yield b""


def fed(reads: Iterator[bytes], pipe_kind: int = STDOUT) -> list[tuple[int, Any]]:
    """Return the texts that a pipe makes of these reads, neighbors of one kind joined."""
    pipe = FrameReader(pipe_kind)
    return joined([part for read in reads for part in pipe.feed(read)])


def joined(parts: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    result: list[tuple[int, Any]] = []
    for kind, group in itertools.groupby(parts, key=lambda part: part[0]):
        whole = [what for _, what in group]
        result += [(kind, what) for what in whole] if kind == MESSAGE else [(kind, "".join(whole))]
    return [part for part in result if part[1]]


def expected(actions: list[tuple[str, str]]) -> list[tuple[int, Any]]:
    kinds = {"stdout": STDOUT, "raw": STDOUT, "stderr": STDERR, "message": MESSAGE}
    return joined(
        [
            (kinds[a], ["display", {"text": text}] if a == "message" else text)
            for a, text in actions
            if text or a[0] == "m"
        ]
    )


@given(ACTIONS, CHUNKS, st.lists(st.integers(1, 40), min_size=1))
def test_any_output_in_any_pieces(actions: list[tuple[str, str]], chunk: int, lengths: list[int]) -> None:
    stream = b"".join(written(actions, 1, chunk))
    assert fed(split(stream, itertools.cycle(lengths))) == expected(actions)


@given(
    st.lists(st.one_of(st.binary(), st.integers(1, len(MAGIC) - 1).map(lambda n: MAGIC[:n]))),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_any_bytes_between_frames(pieces: list[bytes], lengths: list[int]) -> None:
    """Also those that are no text, or that begin as a frame does."""
    raw = b"".join(pieces)
    assume(MAGIC not in raw)
    frame = b"".join(written([("message", "there")], 1, frames._CHUNK))
    before, message, after = fed(split(b"<" + raw + frame + raw + b">", itertools.cycle(lengths)))
    assert before[1] + after[1] == (b"<" + raw + raw + b">").decode(errors="backslashreplace")
    assert message == (MESSAGE, ["display", {"text": "there"}])
    text = raw.decode(errors="backslashreplace")
    assert fed(split(raw, itertools.cycle(lengths)), STDERR) == ([(STDERR, text)] if text else [])


def test_a_signal_handler_writes_in_the_middle_of_a_write() -> None:
    """The handler may come between any two frames, and write all that the interrupted code may."""
    writes: list[bytes] = []
    handled = iter(["short", "long" * 10, "short"])

    def write(fd: int, data: bytes) -> None:
        writes.append(bytes(data))
        for text in itertools.islice(handled, 1):
            writer.write(STDERR, text.encode())
            writer.message("display", text=text)

    writer = FrameWriter()

    def interrupted() -> None:
        writer.message("display", text="outer" * 10)
        writer.write(STDERR, b"end" * 10)

    system = SimpleNamespace(write=write, getpid=lambda: 1)
    with mock.patch.object(frames, "os", system), mock.patch.object(frames, "_CHUNK", 16):
        thread = threading.Thread(target=interrupted, daemon=True)
        thread.start()
        thread.join()  # forever, if it waits for itself
    found = fed(split(b"".join(writes), itertools.repeat(7)))
    messages = [what[1]["text"] for kind, what in found if kind == MESSAGE]
    assert sorted(messages) == sorted(["outer" * 10, "short", "long" * 10, "short"])
    assert "".join(what for kind, what in found if kind == STDERR).endswith("end" * 10)


UPDATES = st.lists(st.tuples(st.sampled_from(["update", "display", "text"]), st.sampled_from("ab")))


@given(UPDATES)
def test_only_outdated_updates_of_a_display_are_dropped(actions: list[tuple[str, str]]) -> None:
    frames: list[tuple[int, Any]] = []
    for number, (action, display_id) in enumerate(actions):
        content = {"update": action == "update", "transient": {"display_id": display_id}, "data": number}
        frames.append((STDOUT, str(number)) if action == "text" else (MESSAGE, ["display", content]))
    expected = [
        frame
        for number, (frame, action) in enumerate(zip(frames, actions, strict=True))
        if action[0] != "update" or action not in actions[number + 1 :]
    ]
    assert list(output._without_overtaken(frames)) == expected


@given(
    st.lists(st.text("aä€😀\n")),
    st.lists(st.text("bö…🤖\r")),
    CHUNKS,
    st.lists(st.booleans(), min_size=1),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_two_processes_at_once(
    ours: list[str], theirs: list[str], chunk: int, turns: list[bool], lengths: list[int]
) -> None:
    """A rank and a process that it forked write to one pipe: each one's text and messages arrive whole, in order."""
    queues = [
        written([(kind, text) for text in texts for kind in ("stdout", "message")], process, chunk)
        for process, texts in ((1, ours), (2, theirs))
    ]
    stream = b""
    for turn in itertools.cycle(turns):
        queue = queues[turn] or queues[not turn]
        if not queue:
            break
        stream += queue.pop(0)
    parts = fed(split(stream, itertools.cycle(lengths)))
    text = "".join(what for kind, what in parts if kind == STDOUT)
    messages = [what[1]["text"] for kind, what in parts if kind == MESSAGE]
    for alphabet, texts in (("aä€😀\n", ours), ("bö…🤖\r", theirs)):
        assert "".join(c for c in text if c in alphabet) == "".join(texts)
        assert [m for m in messages if m and m[0] in alphabet] == [t for t in texts if t]
    assert set(text) <= set("aä€😀\nbö…🤖\r")


def test_a_frame_is_written_at_once() -> None:
    for write in written([("stdout", "€" * 100_000), ("message", "x" * 100_000)], 1, frames._CHUNK):
        assert len(write) <= frames.select.PIPE_BUF


@given(st.lists(st.text(max_size=50), max_size=300), st.integers(10, 1000))
def test_a_log_keeps_the_last_text(texts: list[str], kept: int) -> None:
    log = Log()
    with mock.patch("nbdist.wire.log.KEPT", kept):
        for text in texts:
            log.write(text)
    assert "".join(texts).endswith(log.text())
    assert min(kept, len("".join(texts))) - 50 <= len(log.text()) <= kept + 50
    assert log.tail(3) == "\n".join(log.text().splitlines()[-3:])


def test_a_pipe_that_does_not_block() -> None:
    """A program that the function runs may set O_NONBLOCK for all who share the pipe: nothing is lost or raised."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    writer = FrameWriter()
    writer._fd = write
    found: list[bytes] = []

    def reads() -> None:
        while data := os.read(read, 1 << 16):
            found.append(data)

    reader = threading.Thread(target=reads)
    lines = [f"{number} {'x' * 1000}\n" for number in range(1000)]
    started = False
    for line in lines:
        if not started and not select.select([], [write], [], 0)[1]:
            reader.start()
            started = True
        writer.write(STDOUT, line.encode())
    os.close(write)
    reader.join()
    os.close(read)
    assert fed(iter([*found, b""])) == [(STDOUT, "".join(lines))]


def displayed(**content: Any) -> dict[str, Any]:
    """Send a display, and return its content as the kernel reads it."""
    writes: list[bytes] = []
    writer = FrameWriter()
    with mock.patch.object(writer, "_write", writes.append):
        writer.message("display", **content)
    ((_, (_, found)),) = fed(iter([*writes, b""]))
    return dict(found)


def test_numbers_in_a_display_stay_numbers() -> None:
    data = {
        "loss": np.float32(0.5),
        "step": np.int64(3),
        "done": np.bool_(True),
        "curve": np.array([1.5, 2.5]),
        "weights": torch.ones(2),
        "at": datetime.datetime(2024, 1, 1),
        "day": datetime.date(2024, 1, 2),
        "names": {"a"},
        "raw": b"abc",
    }
    assert displayed(data=data)["data"] == {
        **{"loss": 0.5, "step": 3, "done": True, "curve": [1.5, 2.5], "weights": [1.0, 1.0]},
        **{"at": "2024-01-01T00:00:00Z", "day": "2024-01-02", "names": ["a"], "raw": "YWJj"},
    }


def test_a_display_of_anything_ends_no_call() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert displayed(data={np.int64(3): 1, (1, 2): 2})["data"] == {"3": 1, "(1, 2)": 2}
    assert "[" in str(displayed(data={"endless": endless}))


# ------------------------------------------------------------------------------------------- lines, and their file


@pytest.fixture
def relay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> output.Relay:
    """Shows the output of two ranks in a terminal, and unfinished lines as soon as it is asked for them."""
    monkeypatch.setattr(output, "UNFINISHED", -1.0)
    relay = output.Relay(SimpleNamespace(pids=[1, 2]))  # type: ignore[arg-type]
    relay.begin(Cell(), "all", 0)
    return relay


def test_bars_of_all_ranks_are_shown_while_they_grow(relay: output.Relay, capsys: pytest.CaptureFixture[str]) -> None:
    def shown() -> str:
        relay.show_unfinished()
        return capsys.readouterr().out

    relay.take(0, 0, b"\r1/60")
    assert shown() == "\r[rank 0] 1/60"
    assert shown() == "", "once"
    relay.take(1, 0, b"\r1/60\r22/60")
    assert shown() == "\r[rank 0] 1/60 [rank 1] 22/60"
    relay.take(0, 0, b"\r60/60\n")
    assert shown() == f"\r{' ' * 28}\r[rank 0] \r1/60\r60/60\n\r[rank 1] 22/60"
    relay.take(1, 0, b"\r")
    assert shown() == "", "the next state is about to come"
    relay.take(1, 0, b"9")
    assert shown() == "\r[rank 1] 9    "
    relay.flush()
    assert capsys.readouterr().out.endswith("9\n")


def test_dots_of_all_ranks_are_shown_while_they_come(relay: output.Relay, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(300):
        relay.take(0, 0, b".")
        relay.show_unfinished()
        text = capsys.readouterr().out
        assert text in (f"\r[rank 0] {'.' * (number + 1)}", "") and len(text) <= 81
    assert number > text.count(".") == 0, "no longer than the terminal's line"
    relay.flush()
    assert capsys.readouterr().out.endswith(f"[rank 0] {'.' * 300}\n")


def test_a_line_of_any_length_costs_its_length(relay: output.Relay, capsys: pytest.CaptureFixture[str]) -> None:
    """Each piece joined to those before it would take hours here."""
    for _ in range(20_000):
        for rank in range(2):
            relay.take(rank, 0, b"z" * 1000)
        relay.show_unfinished()
    capsys.readouterr()
    relay.flush()
    lines = capsys.readouterr().out.rpartition("\r")[2].splitlines()
    assert [len(line) for line in lines] == [20_000_009] * 2


def test_only_the_last_state_of_a_progress_bar_is_kept(relay: output.Relay) -> None:
    for number in range(10_000):
        relay.take(0, 0, b"\r%d" % number)
    assert len(relay._lines[0, STDOUT].text()) < 2000


class FakeCell:
    """A notebook's cell that keeps what it is to show."""

    in_notebook = True

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.shown: list[str] = []

    def text(self, text: str, kind: int) -> None:
        self.texts.append(text)

    def message(self, name: str, content: dict[str, Any]) -> None:
        self.shown.append(content["data"]["text/plain"])


class FullDisk:
    """A file on a disk that is full after some characters."""

    def __init__(self, path: Path, room: int) -> None:
        self.name, self._room = str(path), room
        path.touch()

    def write(self, text: str) -> None:
        self._room -= len(text)
        self.flush()

    def flush(self) -> None:
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.flush()


@pytest.mark.parametrize("room", [None, 0, 100])
def test_a_full_disk_ends_no_call(room: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        if room is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return FullDisk(tmp_path / "file", room)

    monkeypatch.setattr(excerpt, "_new_file", make)
    cell = FakeCell()
    shown = excerpt.Excerpt(cell, 3)  # type: ignore[arg-type]
    for number in range(1000):
        shown.text(f"line {number}\n", STDOUT)
    shown.show()
    title, *lines = cell.shown[-1].splitlines()
    assert title.endswith("the others are in no file: No space left on device") and title.startswith("... 1,000 lines")
    assert lines == [f"line {number}" for number in range(900, 1000)]
    assert "".join(cell.texts) == "line 0\nline 1\nline 2\n"
    assert not list(tmp_path.iterdir()), "its room is given back"


def test_lines_that_stay_on_their_nodes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(excerpt, "_new_file", functools.partial((tmp_path / "file").open, "w"))
    cell, full = FakeCell(), []
    shown = excerpt.Excerpt(cell, 3, lambda: full.append(True))  # type: ignore[arg-type]
    shown.text("1\n2\n3\n", STDOUT)
    assert not full
    shown.text("4\n", STDOUT)
    shown.left_out(1_000_000, 2_000_000)
    shown.text("5\n", STDOUT)
    shown.show()
    title, *lines = cell.shown[-1].splitlines()
    assert title.startswith("... 1,000,005 lines; these are the last") and full == [True]
    assert title.endswith("/file, but for 1,000,000 lines that the nodes keep: session.logs(rank)"), title
    assert lines[-2:] == ["4", "5"] and (tmp_path / "file").read_text().endswith("4\n5\n")


class Odd:
    """A stream that a program has put in the place of its standard output: it can do no more than write."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def test_unusual_standard_outputs_end_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell, kept = Cell(), io.BytesIO()
    closed = io.StringIO()
    closed.close()
    odd = Odd()
    with open("/dev/full", "w") as full:
        ascii_only = io.TextIOWrapper(kept, encoding="ascii")
        for stream in (None, closed, full, odd, ascii_only):
            monkeypatch.setattr(sys, "stdout", stream)
            cell.text("5 €\n", STDOUT)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert odd.text == "5 €\n" and kept.getvalue() == b"5 \\u20ac\n"


# ------------------------------------------------------------------------------------------------- in a session


def redirects() -> bytes:
    """The common way to see what C code writes; the rank prints meanwhile."""
    with tempfile.TemporaryFile() as file:
        own = os.dup(1)
        os.dup2(file.fileno(), 1)
        os.system("echo from a child")
        print("from Python")
        os.dup2(own, 1)
        os.close(own)
        file.seek(0)
        return file.read()


def test_frames_are_in_no_file_that_takes_the_place_of_standard_output(session: Session) -> None:
    assert session.run(redirects) == b"from a child\n"
    assert "from Python\n" in session.logs(0) and MAGIC.decode() not in session.logs(0)


def test_a_function_that_lets_its_standard_output_not_block(session: Session) -> None:
    def prints() -> int:
        os.set_blocking(1, False)
        for number in range(3000):
            print("x" * 1000, number)
        os.set_blocking(1, True)
        return 7

    assert session.run(prints) == 7
    assert all(f"x {number}\n" in session.logs(1) for number in range(2500, 3000))


def test_output_of_atexit_functions_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def registers() -> None:
        atexit.register(lambda: print("the end", "x" * 3_000_000, "the summary"))  # more than a pipe has room for

    with Session(2) as session:
        session.run(registers)
        assert "summary" not in capsys.readouterr().out
    assert capsys.readouterr().out.count("the summary") == 1
    in_ddp.options(output="all")(2, registers)
    assert capsys.readouterr().out.count("the summary") == 2


def test_a_weak_proxy_without_its_object_is_no_trouble_at_the_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def leaves() -> None:
        main = vars(sys.modules["__main__"])
        main["proxy"] = weakref.proxy(Odd())
        main["file"] = open(tmp_path / "file", "w")  # noqa: SIM115
        main["file"].write("not flushed")

    in_ddp(1, leaves)
    assert (tmp_path / "file").read_text() == "not flushed"
    assert "Traceback" not in "".join(capsys.readouterr())


# --------------------------------------------------------------------------------------------------- in a notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("relay"))
    try:
        kernel.ok(CELLS["first cell"])
        yield kernel
    finally:
        kernel.close()


def run(kernel: Kernel, body: str, call: str = "in_ddp(2, f)") -> Result:
    """Run a cell that calls a function with this body in two ranks."""
    return kernel.ok("def f():\n" + textwrap.indent(body, "    ") + "\n" + call)


def streams(result: Result, name: str = "stdout") -> str:
    return "".join(o["text"] for o in result.outputs if o["kind"] == "stream" and o["name"] == name)


def kinds(result: Result) -> list[str]:
    return [output["kind"] for output in result.outputs]


def live(kernel: Kernel, actions: list[str]) -> None:
    """Each action makes rank 0 show its number; the next is not begun before that has been seen."""
    lines = [f"{action}; wait_for('seen{i}')" for i, action in enumerate(actions)]
    for mark in kernel.cwd.glob("seen*"):
        mark.unlink()
    cell = kernel.start("def f():\n" + textwrap.indent("\n".join(lines), "    ") + "\nin_ddp(1, f)")
    for i in range(len(actions)):
        kernel.finish(cell, until=lambda result, i=i: f"<{i}>" in str(result.outputs))  # type: ignore[misc]
        (kernel.cwd / f"seen{i}").touch()
    assert kernel.finish(cell).error is None


def test_output_is_live(notebook: Kernel) -> None:
    live(
        notebook,
        [
            "print('<0>')",
            "print('<1>', end='')",
            "sys.stderr.write('<2>')",
            "os.write(1, b'<3>')",
            "os.write(2, b'<4>')",
            "subprocess.run(['echo', '<5>'])",
            "display('<6>')",
            "warnings.warn('<7>')",
            "logging.warning('<8>')",
            "ctypes.CDLL(None).printf(b'<9>'), ctypes.CDLL(None).fflush(None)",
        ],
    )


def test_everything_that_writes_in_order(notebook: Kernel) -> None:
    result = notebook.ok(CELLS["everything that writes"])
    shown = streams(result).splitlines()
    assert shown == ["print", "descriptor 1", "child", "C", "ünï€odé 😀 " + "x" * 10_000, "bytes", "no newline"]
    errors = streams(result, "stderr")
    for first, second in (("INFO:root:logging", "UserWarning: warning"), ("descriptor 2", "complaint")):
        assert 0 <= errors.find(first) < errors.find(second)
    assert "ipykernel" in errors  # the warning names the cell's file, as it does in the notebook


def test_displays_in_order(notebook: Kernel) -> None:
    result = notebook.ok(CELLS["displays"])
    assert (
        kinds(result)
        == "stream display_data stream display_data stream update_display_data clear_output stream".split()
    )
    first, table, _, bold, _, bolder, cleared, last = result.outputs
    assert "<table" in table["data"]["text/html"] and first["text"] == "first\n" and last["text"] == "last\n"
    assert bold["data"]["text/html"] == "<b>bold</b>" and bolder["data"]["text/html"] == "<b>bolder</b>"
    assert bold["transient"]["display_id"] == bolder["transient"]["display_id"] == "mine"
    assert cleared["wait"] is True


def test_figures(notebook: Kernel) -> None:
    result = notebook.ok(CELLS["figures"])
    assert kinds(result) == ["display_data", "stream", "display_data"]  # one shown, one left open
    assert all(output["data"]["image/png"].startswith("iVBOR") for output in result.outputs[::2])


def test_plain_tqdm(notebook: Kernel) -> None:
    result = notebook.ok(CELLS["plain tqdm"])
    assert re.search(r"\r100%\|█+\| 20/20", streams(result, "stderr")) and streams(result) == "done\n"


def test_widget_of_tqdm(notebook: Kernel) -> None:
    (notebook.cwd / "seen").unlink(missing_ok=True)
    cell = notebook.start(CELLS["widget of tqdm"])
    view = "application/vnd.jupyter.widget-view+json"
    result = notebook.finish(cell, until=lambda result: "'value': 9.0" in str(result.outputs))
    (shown,) = [o["data"] for o in result.outputs if o["kind"] == "display_data"]
    (shown_at,) = [o["transient"] for o in result.outputs if o["kind"] == "display_data"]
    opened = {o["comm_id"]: o for o in result.outputs if o["kind"] == "comm_open"}
    box = opened[shown[view]["model_id"]]
    assert box["target_name"] == "jupyter.widget" and box["envelope"]["version"].startswith("2.")
    assert box["data"]["state"]["_model_name"] == "HBoxModel"
    assert kinds(result).index("display_data") > kinds(result).index("comm_open")
    # What the view says to the rank's widget does not disturb anybody.
    said = {"comm_id": shown[view]["model_id"], "data": {"method": "update", "state": {"layout": None}}}
    for kind in ("comm_msg", "comm_close"):
        notebook.client.shell_channel.send(notebook.client.session.msg(kind, said))
    (notebook.cwd / "seen").touch()
    result = notebook.finish(cell)
    # The kernel repeats what the view said, at any time.
    of_ranks = [o for o in result.outputs if o.get("data", {}).get("state") != {"layout": None}]
    updates = [o["data"]["state"] for o in of_ranks if o["kind"] == "comm_msg" and o["comm_id"] in opened]
    assert updates[-1] == {"bar_style": "success"} and {"value": 20.0} in updates
    assert result.error is None and "display_data" not in kinds(result)
    # At the end its last state takes its place: a page that is loaded again would find no model.
    last = of_ranks[-1]
    assert last["kind"] == "update_display_data" and last["transient"] == shown_at
    assert set(last["data"]) == {"text/plain", "text/html"}
    assert "20/20" in last["data"]["text/html"] and "width: 100%" in last["data"]["text/html"]
    assert notebook.ok("print(len(get_ipython().kernel.comm_manager.comms))").text == "0\n"


def test_output_widget_and_rich(notebook: Kernel) -> None:
    """Parts that rich clears while its bar grows are in its own widget, and not in the cell."""
    result = notebook.ok(CELLS["rich"])
    assert result.outputs[0]["data"]["text/html"].count("before") == 1
    assert any("Rich" in str(o.get("data", {}).get("text/html")) for o in result.outputs)
    inside = False
    for shown in result.outputs:
        state = shown["data"].get("state", {}) if shown["kind"] == "comm_msg" else {}
        if "msg_id" in state:
            assert state["msg_id"] != frames.CELL
            inside = bool(state["msg_id"])
        elif shown["kind"] == "clear_output":
            assert inside, "the whole cell is cleared"
    assert not inside


def test_text_in_an_output_widget(notebook: Kernel) -> None:
    result = notebook.ok(CELLS["an output widget"])
    outputs = [output for output in result.outputs if output["kind"] in ("comm_msg", "stream")]
    marks = []
    for kind, group in itertools.groupby(outputs, key=lambda output: output["kind"]):
        if kind == "comm_msg":
            marks += [output["data"]["state"]["msg_id"] for output in group]
        else:  # what takes long, such as making a traceback, is between two messages
            marks.append("".join(output["text"] for output in group))
    begin, inside, end, outside = marks
    assert begin and not end
    assert inside.startswith("inside\n") and "ZeroDivisionError" in inside
    assert outside.startswith("outside\n") and "1 loop" in outside


def test_bar_of_fastprogress(notebook: Kernel) -> None:
    for mark in notebook.cwd.glob("seen*"):
        mark.unlink()
    cell = notebook.start(CELLS["bar of fastprogress"])
    outputs = []
    for epoch in range(3):  # a row that the next one overtakes is not shown
        outputs += notebook.finish(cell, until=lambda result: f"<td>0.{epoch}" in str(result.outputs)).outputs  # noqa: B023
        (notebook.cwd / f"seen{epoch}").touch()
    outputs += notebook.finish(cell).outputs
    assert {output["kind"] for output in outputs} == {"display_data", "update_display_data"}
    identified = [o for o in outputs if "display_id" in o["transient"]]
    assert len({o["transient"]["display_id"] for o in identified}) == 1
    assert sum(output["kind"] == "display_data" for output in outputs) == 2  # its style, and itself
    pages = [o["data"]["text/html"] for o in identified]
    assert any("<progress" in page for page in pages)
    rows = [page.count("<td>0.") for page in pages]
    assert rows == sorted(rows) and set(rows) == {0, 1, 2, 3}  # the table grows
    assert "<progress" not in pages[-1]


def test_all_ranks_with_prefix(notebook: Kernel) -> None:
    with endless(notebook, "UNFINISHED", of="cell.relay"):  # what is shown of a line before it is finished
        result = notebook.ok(CELLS["all ranks with prefix"])
    for rank in range(2):
        lines = [line for line in streams(result).splitlines() if line.startswith(f"[rank {rank}]")]
        assert lines == [f"[rank {rank}]{rest}" for rest in (" ab", " c", "", " no newline")]
        assert f"[rank {rank}] complaint\n" in streams(result, "stderr")
    assert result.text.index("[rank 0]\n") < result.text.index("'shown 0'")
    assert result.text.index("[rank 1]\n") < result.text.index("'shown 1'")


def test_logs(notebook: Kernel) -> None:
    notebook.ok("session = Session(2, output='none')")
    result = notebook.ok(CELLS["logs"])
    assert not result.outputs
    assert notebook.ok("print([session.logs(0), session.logs(1)])").text == (
        r"""["from 0\ncomplaint\n'shown'\nend", "from 1\ncomplaint\n'shown'\nend"]""" + "\n"
    )
    run(notebook, "for i in range(60_000): print(f'{i:050}')", "session.run(f)")
    notebook.ok("logs = [session.logs(rank) for rank in range(2)]; session.close()")
    sizes = [int(size) for size in notebook.ok("print(*map(len, logs))").text.split()]
    assert all(0.8 * KEPT < size <= 1.3 * KEPT for size in sizes)
    assert notebook.ok("print(logs[1][-51:])").text == f"{59_999:050}\n\n"


def test_much_output_at_once(notebook: Kernel) -> None:
    with endless(notebook, "UNFINISHED", of="cell.relay"):
        result = notebook.ok(CELLS["much output at once"])
    for stream, word in (("stdout", "out"), ("stderr", "err")):
        lines = streams(result, stream).splitlines()
        for rank in range(2):
            prefix = f"[rank {rank}] "
            own = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
            assert own == [f"{word} {rank} {i}" for i in range(20_000)]
        assert len(lines) == 40_000


def test_a_flood_is_shown_in_part(notebook: Kernel) -> None:
    result = notebook.ok(CELLS["a flood"])
    head = streams(result)
    assert head == "".join(f"line {i}\n" for i in range(2000))
    shown: dict[str, str] = {}
    for one in result.outputs:
        if "data" in one:
            shown[one.get("transient", {}).get("display_id", "")] = one["data"].get("text/plain", "")
    tail, between, after = shown.values()
    title, *lines = tail.splitlines()
    assert lines == [f"line {i}" for i in range(29_900, 30_000)] and "HTML" in between
    assert title.startswith("... 30,000 lines; these are the last 100; all: ")
    assert after.splitlines()[-5:] == [f"after {i}" for i in range(5)] and after.startswith("... 30,005 lines")
    file = Path(title.partition("all: ")[2])
    assert file.read_text().splitlines() == [*(f"line {i}" for i in range(30_000)), *(f"after {i}" for i in range(5))]
    assert len(result.outputs) < 40, "a page is not drawn anew with each line"


def test_how_much_is_shown_can_be_chosen(notebook: Kernel) -> None:
    call = "in_ddp.options(lines=3, output='all')(1, f)"
    result = run(notebook, "for i in range(5): print(i)", call)
    assert streams(result) == "[rank 0] 0\n[rank 0] 1\n[rank 0] 2\n"
    assert result.outputs[-1]["data"]["text/plain"].endswith("[rank 0] 3\n[rank 0] 4")
    wide = run(notebook, "print('x' * 5_000_000)")
    assert len(streams(wide)) <= 1_000_000 and len(wide.outputs[-1]["data"]["text/plain"]) < 2000
    assert notebook.run("in_ddp.options(lines=-1)(1, f)").message.startswith("lines must be at least 0, got -1")


def test_the_file_of_a_flood_is_gone_with_the_kernel(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, env={"TMPDIR": str(tmp_path)})
    try:
        kernel.ok("from nbdist import in_ddp\nin_ddp.options(lines=1)(1, lambda: print('1\\n2'))")
        assert len(list(tmp_path.glob("nbdist-output-*/*.txt"))) == 1
    finally:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=False)
    assert not list(tmp_path.glob("nbdist-output-*"))


def test_the_file_of_a_flood_is_gone_with_a_kernel_that_is_killed(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, env={"TMPDIR": str(tmp_path)})
    try:
        kernel.ok("from nbdist import in_ddp\nin_ddp.options(lines=1)(1, lambda: print('1\\n2'))")
        assert len(list(tmp_path.glob("nbdist-output-*/*.txt"))) == 1
        os.kill(kernel.pid, signal.SIGKILL)
        assert poll(lambda: not list(tmp_path.glob("nbdist*")))
    finally:
        kernel.close()


def test_the_notebook_stays_responsive(notebook: Kernel) -> None:
    """While ranks flood it with output, the kernel passes it on as it comes, and can be interrupted: the ranks are
    not killed at the end of what they get to clean up, for that has none here."""
    with endless(notebook, "GRACE_AFTER_INTERRUPT"):
        cell = notebook.start(CELLS["a flood without end"])
        notebook.finish(cell, until=lambda result: result.text.count("flood") > 1000)
        notebook.interrupt()
        assert notebook.finish(cell).error == "KeyboardInterrupt"


def test_workers_of_a_data_loader_print_whole_lines(notebook: Kernel) -> None:
    result = notebook.ok(CELLS["workers of a data loader"])
    assert sorted(result.text.splitlines()) == sorted(f"worker {i}" for i in range(2000))


def test_threads_print(notebook: Kernel) -> None:
    result = notebook.ok(CELLS["threads"])
    lines = result.text.splitlines()
    for n in range(4):
        assert [line for line in lines if line.startswith(f"thread {n} ")] == [
            f"thread {n} {i} {'x' * 5000}" for i in range(500)
        ]
    assert len(lines) == 2000


def test_source_of_a_notebook_function(notebook: Kernel) -> None:
    assert "return 42  # the answer" in notebook.ok(CELLS["source of a notebook function"]).text


# ------------------------------------------------------------------------------------------------- a saved notebook


@pytest.mark.long("notebooks")
@pytest.mark.slow
def test_saved_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with fastai leaves a handful of ordinary outputs: the table, not every step of the bar."""
    monkeypatch.setenv("PYTHONPATH", ROOT)
    node = new_notebook(cells=[new_code_cell(CELLS["training with fastai"])])
    # On a busy machine it would leave out what it has not read 4 s after the end of a cell.
    about = {"iopub_timeout": 600, "resources": {"metadata": {"path": str(tmp_path)}}}
    client = NotebookClient(node, kernel_name="python3", **about)
    client.create_kernel_manager().kernel_spec.argv[0] = sys.executable
    client.execute()
    nbformat.validate(node)
    outputs = node.cells[0].outputs
    assert len(outputs) <= 8, outputs
    assert {output.output_type for output in outputs} <= {"display_data", "stream"}
    pages = [output.data.get("text/html", "") for output in outputs if output.output_type == "display_data"]
    (table,) = [page for page in pages if "valid_loss" in page]
    assert table.count("<tr") == 4 and "<progress" not in table  # the heading, and an epoch a row
    assert sum("<table" in page for page in pages) == 2
    assert not [output for output in outputs if "widget-view" in str(output.get("data"))], (
        "a bar is a picture at the end"
    )
    (bar,) = [page for page in pages if "1000/1000" in page]
    assert "100%" in bar


# ------------------------------------------------------------------------------------------------------- in a script


def test_in_a_script(tmp_path: Path) -> None:
    """No IPython there: text goes to the script's own streams, at once; displays are text."""
    script = tmp_path / "script.py"
    script.write_text(CELLS["a script"])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": ROOT},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "from 0\nraw\n[0]\nendafter\n"
    assert done.stderr == "complaint\n"


def test_a_script_is_live_in_a_pipe(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CELLS["a script in a pipe"]],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": ROOT},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "now\n"
            (tmp_path / "seen").touch()
            assert process.wait() == 0
        finally:
            process.kill()


def test_a_figure_that_is_returned_is_drawn(kernel: Kernel) -> None:
    """Also by a kernel that has not plotted before."""
    (shown,) = kernel.ok(CELLS["a figure that is returned"]).outputs
    assert shown["data"]["image/png"].startswith("iVBOR")
