"""The cell (or terminal) that a call's output goes to, and the widgets of ranks that it shows."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

from ..notebook import forget_comms, is_watched, kernel_shell, own_comm, register_comm
from ..wire.frames import CELL, STDERR, STDOUT
from .widgets import VIEW, Widgets


class Cell:
    """The cell (or terminal) that output goes to.

    That is the one that runs, from the thread that runs it. For a call in the `background` it is the cell in which
    this object was made, from any thread, whichever cell runs then; but where nobody looks, as under nbconvert and
    papermill, which hear no more of a cell once it is done, it is the one that runs then.
    """

    def __init__(self, background: bool = False) -> None:
        self._shell = kernel_shell()
        self._background = background and self._shell is not None
        parent = self._shell.kernel.get_parent() if self._background else None
        self._parent = parent if is_watched(parent) else None
        self._gap = Gap(self._shell) if self._background and self._parent is None else None
        self._comms: list[str] = []
        self._widgets = Widgets()
        self._views: dict[str, tuple[str, str]] = {}  # by display id: the widget that is shown, and its text

    @property
    def in_notebook(self) -> bool:
        """Whether it is a cell, and no terminal."""
        return self._shell is not None

    def text(self, text: str, kind: int) -> None:
        if self._background:
            self._send("stream", {"name": "stderr" if kind == STDERR else "stdout", "text": text})
            return
        stream = sys.stderr if kind == STDERR else sys.stdout
        stream.write(text)
        if self._shell is None:  # a notebook's streams flush themselves, without making this thread wait
            stream.flush()

    def notice(self, text: str) -> None:
        """Say something to the user, on standard error."""
        self.text(f"nbdist: {text}\n", STDERR)

    def message(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "display":
            self._note_view(content)
        if self._shell is None:
            if kind == "display" and not content["update"]:
                self.text(content["data"].get("text/plain", "") + "\n", STDOUT)
        elif self._background and kind == "display":
            self._send("update_display_data" if content.pop("update") else "display_data", content)
        elif self._background and kind == "clear_output":
            self._send(kind, content)
        elif kind == "display":
            self._shell.display_pub.publish(**content)
        elif kind == "clear_output":
            self._shell.display_pub.clear_output(**content)
        else:
            self._comm(kind, content)

    def _note_view(self, content: dict[str, Any]) -> None:
        """Keep in mind where a widget is shown."""
        transient, view = content["transient"], content["data"].get(VIEW)
        if view is not None:
            self._views[transient.setdefault("display_id", uuid.uuid4().hex)] = (
                view["model_id"],
                content["data"].get("text/plain", ""),
            )
        elif content["update"]:
            self._views.pop(transient.get("display_id", ""), None)

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
        self._widgets.hear(kind, content["comm_id"], content["data"])
        own = None if content["comm_id"] in self._comms else own_comm(content["comm_id"])
        if own is not None:  # a widget of the notebook's, which the rank was sent: it lives here
            if kind != "comm_msg":
                return
            own.handle_msg({"content": content, "buffers": buffers})
        if kind == "comm_open":
            self._comms.append(content["comm_id"])
            register_comm(_Deaf(content["comm_id"]))
        self._send(kind, content, metadata=metadata, ident=f"comm-{content['comm_id']}".encode(), buffers=buffers)

    @property
    def _message(self) -> Any:
        """The message of the front end that had the cell run."""
        return self._parent or self._shell.kernel.get_parent()

    def _send(self, kind: str, content: dict[str, Any], **parts: Any) -> None:
        def send() -> None:
            kernel = self._shell.kernel
            kernel.session.send(kernel.iopub_socket, kind, content, parent=self._message, **parts)

        if self._gap is None:
            send()
        else:
            self._gap.bridge(send)

    def close(self) -> None:
        """Forget the widgets of this call.

        Where they are bars or texts, their last state takes their place: a page that is loaded again finds no model
        for a view. Other views stay as they are.
        """
        views, self._views = self._views, {}
        for display_id, (model_id, text) in views.items():
            picture = self._widgets.picture(model_id)
            if picture is not None:
                data = {"text/plain": text, "text/html": picture}
                shown = {"data": data, "metadata": {}, "transient": {"display_id": display_id}, "update": True}
                self.message("display", shown)
        if self._gap is not None:
            self._gap.close()
        if self._comms:
            forget_comms(self._comms)
            self._comms = []


class Gap:
    """The time between two cells of a notebook that a program runs: what is sent then, it does not hear."""

    def __init__(self, shell: Any) -> None:
        self._events = shell.events
        self._lock = threading.Lock()
        self._open = False
        self._closed = False
        self._waiting: list[Callable[[], None]] = []
        self._events.register("pre_run_cell", self._end)
        self._events.register("post_run_cell", self._begin)

    def bridge(self, send: Callable[[], None]) -> None:
        """Send now, or when the next cell runs."""
        with self._lock:
            self._waiting.append(send)
            self._send_all()

    def close(self) -> None:
        """Nothing follows, but for what the call itself may still say in this moment."""
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


class _Deaf:
    """The kernel's stand-in for a rank's widget: hears what the view says, and does nothing."""

    def __init__(self, comm_id: str) -> None:
        self.comm_id = comm_id

    def handle_msg(self, message: dict[str, Any]) -> None: ...

    def handle_close(self, message: dict[str, Any]) -> None: ...
