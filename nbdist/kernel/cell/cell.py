"""The cell, or the terminal, that shows the output of a call."""

from __future__ import annotations

import contextlib
import getpass
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ...notebook.shell import is_watched, kernel_shell
from ...wire.frames import STDERR, STDOUT


class Cell:
    """The cell, or the terminal, that shows output.

    By default it is the running cell, used from the thread that runs it. For a call in the `background` it is the cell
    in which this object was made, used from any thread, whichever cell runs. If no page shows the notebook, as under
    nbconvert and papermill, messages of a finished cell are ignored: then output goes to the running cell.
    """

    def __init__(self, background: bool = False) -> None:
        self._shell = kernel_shell()
        self._background = background and self._shell is not None
        self._made_in = None if self._shell is None else self._shell.kernel.get_parent()
        self._parent = self._made_in if self._background and is_watched(self._made_in) else None
        self._gap = Gap(self._shell) if self._background and self._parent is None else None

    takes_input = False
    """True if lines can be typed for a call in the background, too."""

    def ask(self, prompt: str, hidden: bool) -> str:
        """Return the line that the user types. Raises `EOFError` at the end of the input."""
        return getpass.getpass(prompt) if hidden else input(prompt)

    def later(self) -> Cell:
        """Return the same cell for use from any thread, even when the cell is done."""
        if self._background or self._shell is None:
            return self
        cell = Cell()
        cell._background, cell._parent = True, self._made_in
        return cell

    @property
    def in_notebook(self) -> bool:
        """Return whether output goes to a notebook's cell; otherwise it goes to a terminal."""
        return self._shell is not None

    def text(self, text: str, kind: int) -> None:
        if self._background:
            self.send("stream", {"name": "stderr" if kind == STDERR else "stdout", "text": text})
            return
        stream = sys.stderr if kind == STDERR else sys.stdout
        with contextlib.suppress(Exception):  # there is none, it is closed, or its disk is full: output ends no call
            _write(stream, text)
            if self._shell is None:  # a notebook's streams flush themselves, without making this thread wait
                stream.flush()

    def notice(self, text: str) -> None:
        """Print a line for the user on standard error."""
        self.text(f"nbdist: {text}\n", STDERR)

    def message(self, kind: str, content: dict[str, Any]) -> None:
        """Send a display, or a request to clear the output."""
        if self._shell is None:
            if kind == "display" and not content["update"]:
                self.text(content["data"].get("text/plain", "") + "\n", STDOUT)
        elif self._background and kind == "display":
            self.send("update_display_data" if content.pop("update") else "display_data", content)
        elif self._background:
            self.send(kind, content)
        elif kind == "display":
            self._shell.display_pub.publish(**content)
        else:
            self._shell.display_pub.clear_output(**content)

    @property
    def watched(self) -> bool:
        """Return whether a person sees the output."""
        return self._shell is not None and is_watched(self.parent)

    @property
    def parent(self) -> Any:
        """Return the message of the front end that started the cell."""
        return self._parent or self._shell.kernel.get_parent()

    def send(self, kind: str, content: dict[str, Any], parent: Mapping[str, Any] | None = None, **parts: Any) -> None:
        """Send a message to the front ends of a notebook, as coming from this cell, or as an answer to `parent`."""

        def send() -> None:
            kernel = self._shell.kernel
            kernel.session.send(kernel.iopub_socket, kind, content, parent=parent or self.parent, **parts)

        if self._gap is None:
            send()
        else:
            self._gap.bridge(send)

    def close(self) -> None:
        """Mark the end of the output."""
        if self._gap is not None:
            self._gap.close()


def _write(stream: Any, text: str) -> None:
    """Write to a stream, with substitutes for characters that its encoding lacks."""
    try:
        stream.write(text)
    except UnicodeEncodeError as exc:
        stream.write(text.encode(exc.encoding, "backslashreplace").decode(exc.encoding))


class Gap:
    """The time between two cells of a notebook that is run by a program, which ignores messages sent in this time."""

    def __init__(self, shell: Any) -> None:
        self._events = shell.events
        self._lock = threading.Lock()
        self._open = False
        self._closed = False
        self._waiting: list[Callable[[], None]] = []
        self._events.register("pre_run_cell", self._end)
        self._events.register("post_run_cell", self._begin)

    def bridge(self, send: Callable[[], None]) -> None:
        """Send a message now, or when the next cell runs."""
        with self._lock:
            self._waiting.append(send)
            self._send_all()

    def close(self) -> None:
        """Mark the end of the output, except for messages that the call itself sends until it returns."""
        self._closed = True

    def _begin(self, *args: Any) -> None:
        with self._lock:
            self._open = True

    def _end(self, *args: Any) -> None:
        with self._lock:
            self._open = False
            self._send_all()
            if self._closed:
                self._events.unregister("pre_run_cell", self._end)
                self._events.unregister("post_run_cell", self._begin)

    def _send_all(self) -> None:
        while self._waiting and not self._open:
            self._waiting.pop(0)()
