"""What ranks write, on its way to the cell. Both ends of the wire are here.

A rank's descriptors 1 and 2 are pipes to the kernel. What Python writes, to either stream, and what it displays goes
down the first as frames, so that it stays in order; C code and child processes write raw bytes between them. A frame
is at most `PIPE_BUF` bytes and written at once, so nothing can come to lie inside it. The second pipe carries raw
bytes only: what C code and child processes write to standard error.
"""

from __future__ import annotations

import codecs
import collections
import io
import json
import os
import select
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from . import transport

_MAGIC = b"\x00\x1bnbdist\x1b\x01"  # its end is not its beginning: raw bytes before it cannot make another of it
_HEADER = struct.Struct("<10sB?HI")  # magic, kind, whether more of it follows, size, process
_STDOUT, _STDERR, _MESSAGE = range(3)
_CHUNK = select.PIPE_BUF - _HEADER.size

#: Characters of output kept of each rank; older text is dropped first.
KEPT = 1 << 20

#: What a rank's widget knows the calling cell by; the kernel puts the id of its message in the place of it.
CELL = "nbdist-cell"


# ---------------------------------------------------------------------------------------------------- in the rank


class FrameWriter:
    """Writes frames to descriptor 1."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: list[io.TextIOWrapper] = []

    def _write(self, kind: int, data: bytes) -> None:
        with self._lock:
            if len(data) <= _CHUNK:  # nearly always, so without detours: a loop may print once a batch
                os.write(1, _HEADER.pack(_MAGIC, kind, False, len(data), os.getpid()) + data)
                return
            start = 0
            while start < len(data):
                end = min(start + _CHUNK, len(data))
                # Not inside a character: another process's frame may come to lie between the two halves.
                while end < len(data) and end > start + _CHUNK - 4 and data[end] & 0xC0 == 0x80:
                    end -= 1
                header = _HEADER.pack(_MAGIC, kind, end < len(data), end - start, os.getpid())
                os.write(1, header + data[start:end])
                start = end

    def attach(self) -> None:
        """Make `sys.stdout` and `sys.stderr` write frames, each write at once: a dying rank's last words count."""
        os.register_at_fork(after_in_child=self._after_fork)
        for name, fd, kind in (("stdout", 1, _STDOUT), ("stderr", 2, _STDERR)):
            raw: Any = _FrameStream(self, kind, fd)
            stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
            self._streams.append(stream)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the rank may have held it when this process was forked
        for stream in self._streams:  # several workers of a data loader print at once: a line stays whole
            stream.reconfigure(write_through=False, line_buffering=True)

    def message(self, kind: str, **content: Any) -> None:
        """Send a display message, with what is written so far before it. Its content is plain JSON."""
        self._write(_MESSAGE, json.dumps([kind, content], default=str).encode())


class _FrameStream(io.RawIOBase):
    """The binary stream below a rank's `sys.stdout` or `sys.stderr`."""

    def __init__(self, writer: FrameWriter, kind: int, fd: int) -> None:
        self._writer, self._kind, self._fd = writer, kind, fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:  # what a child process gets as its standard output
        return self._fd

    def write(self, data: Any) -> int:
        written = bytes(data)
        self._writer._write(self._kind, written)
        return len(written)


# -------------------------------------------------------------------------------------------------- in the kernel


class Log:
    """The last text that one rank wrote."""

    def __init__(self) -> None:
        self._chunks: collections.deque[str] = collections.deque()
        self._size = 0

    def write(self, text: str) -> None:
        self._chunks.append(text)
        self._size += len(text)
        while self._size > KEPT and len(self._chunks) > 1:
            self._size -= len(self._chunks.popleft())

    def text(self) -> str:
        return "".join(self._chunks)

    def tail(self, lines: int = 50) -> str:
        return "\n".join(self.text().splitlines()[-lines:])


class Cell:
    """The cell (or terminal) that output goes to.

    That is the one that runs, from the thread that runs it. For a call in the `background` it is the cell in which
    this object was made, from any thread, whichever cell runs then.
    """

    def __init__(self, background: bool = False) -> None:
        self._shell = notebook_shell()
        self._parent = self._shell.kernel.get_parent() if background and self._shell is not None else None
        self._comms: list[str] = []

    def text(self, text: str, kind: int) -> None:
        if self._parent is not None:
            self._send("stream", {"name": "stderr" if kind == _STDERR else "stdout", "text": text})
            return
        stream = sys.stderr if kind == _STDERR else sys.stdout
        stream.write(text)
        if self._shell is None:  # a notebook's streams flush themselves, without making this thread wait
            stream.flush()

    def notice(self, text: str) -> None:
        """Say something to the user, on standard error."""
        self.text(f"nbdist: {text}\n", _STDERR)

    def message(self, kind: str, content: dict[str, Any]) -> None:
        if self._shell is None:
            if kind == "display" and not content["update"]:
                self.text(content["data"].get("text/plain", "") + "\n", _STDOUT)
        elif self._parent is not None and kind == "display":
            self._send("update_display_data" if content.pop("update") else "display_data", content)
        elif self._parent is not None and kind == "clear_output":
            self._send(kind, content)
        elif kind == "display":
            self._shell.display_pub.publish(**content)
        elif kind == "clear_output":
            self._shell.display_pub.clear_output(**content)
        else:
            self._comm(kind, content)

    def _comm(self, kind: str, content: dict[str, Any]) -> None:
        """Pass on what a rank's widget says to its view. What the view says ends here: a progress bar only shows."""
        buffers = [bytes.fromhex(data) for data in content.pop("buffers")]
        metadata = content.pop("metadata")
        state = content["data"].get("state") or {}
        if "msg_id" in state:  # an Output widget: from now on it takes what this cell shows, or no longer does
            sys.stdout.flush()
            sys.stderr.flush()
            if state["msg_id"] == CELL:
                state["msg_id"] = self._message["header"]["msg_id"]
        if kind == "comm_open":
            import comm

            self._comms.append(content["comm_id"])
            comm.get_comm_manager().register_comm(_Deaf(content["comm_id"]))  # type: ignore[arg-type]
        self._send(kind, content, metadata=metadata, ident=f"comm-{content['comm_id']}".encode(), buffers=buffers)

    @property
    def _message(self) -> Any:
        """The message of the front end that had the cell run."""
        return self._parent or self._shell.kernel.get_parent()

    def _send(self, kind: str, content: dict[str, Any], **parts: Any) -> None:
        kernel = self._shell.kernel
        kernel.session.send(kernel.iopub_socket, kind, content, parent=self._message, **parts)

    def close(self) -> None:
        """Forget the widgets of this call; their views stay as they are."""
        if self._comms:
            import comm

            for comm_id in self._comms:
                comm.get_comm_manager().comms.pop(comm_id, None)
            self._comms = []


class _Deaf:
    """The kernel's stand-in for a rank's widget: hears what the view says, and does nothing."""

    def __init__(self, comm_id: str) -> None:
        self.comm_id = comm_id

    def handle_msg(self, message: dict[str, Any]) -> None: ...

    def handle_close(self, message: dict[str, Any]) -> None: ...


def notebook_shell() -> Any:
    """The IPython shell of a notebook that this process is the kernel of; None in a terminal or script."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell if getattr(shell, "kernel", None) is not None else None


class Relay:
    """Reads the output descriptors of all ranks and passes on what belongs in the cell."""

    def __init__(self, outputs: Sequence[tuple[int, int]]) -> None:
        self.logs = [Log() for _ in outputs]
        self.begin(Cell(), "none", 0)
        self._pipes: dict[int, _Pipe] = {}
        for rank, (out, err) in enumerate(outputs):
            self._pipes[out], self._pipes[err] = _Pipe(rank, _STDOUT), _Pipe(rank, _STDERR)
        self._partial: dict[tuple[int, int], str] = {}

    def begin(self, cell: Cell, show: str, first: int) -> None:
        """From now on, output goes to `cell`.

        `show` says whose: "rank0" (that of the rank `first`, which stands for all), "all" (each line with its rank
        before it) or "none".
        """
        self.cell, self._show, self._first = cell, show, first

    def descriptors(self) -> Iterator[int]:
        """The descriptors to wait for."""
        yield from self._pipes

    def read(self, fd: int) -> bool:
        """Pass on what there is to read at `fd`, as much as keeps nobody else waiting; False at its end."""
        pipe = self._pipes[fd]
        for _ in range(16):
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return True
            for kind, what in _without_overtaken(list(pipe.feed(data))):
                self._pass_on(pipe.rank, kind, what)
            if not data:
                self._end_line(pipe.rank)
                return False
        return True

    def drain(self, rank: int | None = None) -> None:
        """Pass on all that a rank, or every rank, has written so far."""
        for fd, pipe in self._pipes.items():
            if rank in (pipe.rank, None):
                while transport.readable(fd) and self.read(fd):
                    pass

    def _pass_on(self, rank: int, kind: int, what: Any) -> None:
        if kind == _MESSAGE:
            name, content = what
            if name == "display":
                self.logs[rank].write(content["data"].get("text/plain", "") + "\n")
            if self._show == "all" and name == "display" and not content["update"]:
                self._end_line(rank)
                self.cell.text(f"[rank {rank}]\n", _STDOUT)
            if self._show == "all" or (self._show == "rank0" and rank == self._first):
                self.cell.message(name, content)
            return
        self.logs[rank].write(what)
        if self._show == "rank0" and rank == self._first:
            self.cell.text(what, kind)
        elif self._show == "all":
            *lines, rest = (self._partial.get((rank, kind), "") + what).split("\n")
            self._partial[rank, kind] = rest
            if lines:
                self.cell.text("".join(f"[rank {rank}] {line}\n" for line in lines), kind)

    def _end_line(self, rank: int) -> None:
        """Show what a rank has written of a line that it has not finished."""
        for kind in (_STDOUT, _STDERR):
            rest = self._partial.pop((rank, kind), "")
            if rest:
                self.cell.text(f"[rank {rank}] {rest}\n", kind)

    def flush(self) -> None:
        """At the end of a call: what is half written is written."""
        for rank in range(len(self.logs)):
            self._end_line(rank)


def _without_overtaken(frames: list[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """The frames but for updates of a display that is updated again after them: nobody would see those."""
    updates = {}
    for number, (kind, what) in enumerate(frames):
        if kind == _MESSAGE and what[0] == "display" and what[1]["update"]:
            updates[number] = what[1]["transient"].get("display_id")
    last = {display_id: number for number, display_id in updates.items()}
    for number, frame in enumerate(frames):
        if last.get(updates.get(number), number) == number:
            yield frame


class _Pipe:
    """One pipe from a rank: takes bytes, gives (kind, text or message) in order."""

    def __init__(self, rank: int, kind: int) -> None:
        self.rank = rank
        self._raw = kind, 0  # what is between frames: its kind, and no process
        self._rest = b""
        # By kind and process, since a process may write between two frames of another's character or message.
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}
        self._unfinished: dict[int, bytearray] = {}

    def feed(self, data: bytes) -> Iterator[tuple[int, Any]]:
        text: list[bytes] = []
        source = self._raw
        for part_source, payload in self._split(self._rest + data, last=not data):
            if text and part_source != source:
                yield from self._decode(source, b"".join(text))
                text = []
            if part_source[0] == _MESSAGE:
                yield _MESSAGE, json.loads(payload)
            else:
                source = part_source
                text.append(payload)
        if text:
            yield from self._decode(source, b"".join(text))
        if not data:
            for source in self._decoders:
                yield from self._decode(source, b"", final=True)

    def _decode(self, source: tuple[int, int], data: bytes, final: bool = False) -> Iterator[tuple[int, str]]:
        if source not in self._decoders:
            self._decoders[source] = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        text = self._decoders[source].decode(data, final)
        if text:
            yield source[0], text

    def _split(self, data: bytes, last: bool) -> Iterator[tuple[tuple[int, int], bytes]]:
        position = 0
        while True:
            start = data.find(_MAGIC, position)
            if start < 0:
                # The beginning of a frame may be here already.
                keep = 0 if last else _overlap(data, position)
                end = len(data) - keep
                if end > position:
                    yield self._raw, data[position:end]
                self._rest = data[end:]
                return
            if start > position:
                yield self._raw, data[position:start]
            begin = start + _HEADER.size
            if len(data) >= begin:
                _, kind, more, size, process = _HEADER.unpack_from(data, start)
            if len(data) < begin or len(data) < begin + size:
                self._rest = b"" if last else data[start:]
                return
            position = begin + size
            payload = data[begin:position]
            if kind == _MESSAGE:
                whole = self._unfinished.setdefault(process, bytearray())
                whole += payload
                if more:
                    continue
                payload = bytes(self._unfinished.pop(process))
            yield (kind, process), payload


def _overlap(data: bytes, position: int) -> int:
    """How many bytes at the end of `data` could be the beginning of `_MAGIC`."""
    for size in range(min(len(_MAGIC) - 1, len(data) - position), 0, -1):
        if data.endswith(_MAGIC[:size]):
            return size
    return 0
