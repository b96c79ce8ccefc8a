"""The cell (or terminal) that a call's output goes to, and the widgets of ranks that it shows."""

from __future__ import annotations

import sys
from typing import Any

from ..notebook import forget_comms, kernel_shell, register_comm
from ..wire.frames import CELL, STDERR, STDOUT


class Cell:
    """The cell (or terminal) that output goes to.

    That is the one that runs, from the thread that runs it. For a call in the `background` it is the cell in which
    this object was made, from any thread, whichever cell runs then.
    """

    def __init__(self, background: bool = False) -> None:
        self._shell = kernel_shell()
        self._parent = self._shell.kernel.get_parent() if background and self._shell is not None else None
        self._comms: list[str] = []

    def text(self, text: str, kind: int) -> None:
        if self._parent is not None:
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
        if self._shell is None:
            if kind == "display" and not content["update"]:
                self.text(content["data"].get("text/plain", "") + "\n", STDOUT)
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
            self._comms.append(content["comm_id"])
            register_comm(_Deaf(content["comm_id"]))
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
            forget_comms(self._comms)
            self._comms = []


class _Deaf:
    """The kernel's stand-in for a rank's widget: hears what the view says, and does nothing."""

    def __init__(self, comm_id: str) -> None:
        self.comm_id = comm_id

    def handle_msg(self, message: dict[str, Any]) -> None: ...

    def handle_close(self, message: dict[str, Any]) -> None: ...
