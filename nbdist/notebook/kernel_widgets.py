"""ipywidgets in the kernel: the comms of widgets, and requests of front ends about them during a cell."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..system.interrupts import deferred_interrupts
from .shell import kernel_shell


def in_main_thread() -> bool:
    """Return whether this thread is the one that runs a kernel's cells."""
    return kernel_shell() is not None and threading.current_thread() is threading.main_thread()


def register_comm(comm: Any) -> None:
    """Register a comm in a kernel, so that it receives the messages of front ends. The comm may belong to a widget."""
    kernel_shell().kernel.comm_manager.register_comm(comm)
    if comm.target_name == "jupyter.widget":
        with contextlib.suppress(ImportError):  # it answers front ends that ask for all widgets
            importlib.import_module("ipywidgets")
            _widgets()[comm.comm_id] = comm


def own_comm(comm_id: str) -> Any:
    """Return the comm of one of the kernel's own widgets; None if there is none of this id."""
    return kernel_shell().kernel.comm_manager.comms.get(comm_id)


def forget_comm(comm_id: str) -> None:
    """Unregister a comm in a kernel: it receives no more messages."""
    kernel_shell().kernel.comm_manager.comms.pop(comm_id, None)
    _widgets().pop(comm_id, None)


def _widgets() -> dict[str, Any]:
    """Return the widgets that ipywidgets has registered, by id."""
    module: Any = sys.modules.get("ipywidgets.widgets.widget")
    if module is None:
        return {}
    found: dict[str, Any] = module._instances if hasattr(module, "_instances") else module.Widget.widgets  # before 8.0
    return found


def embedded(widget: Any) -> Any:
    """Return the state that ipywidgets saves for an object that represents a widget."""
    module: Any = sys.modules["ipywidgets.widgets.widget"]
    return module.Widget._get_embed_state(widget)


def send_state(comm_id: str, state: dict[str, Any], request: Mapping[str, Any]) -> None:
    """Answer a front end that asks for the state of a widget, in a kernel."""
    module: Any = sys.modules.get("ipywidgets.widgets.widget")
    paths, buffers = [], []
    if module is not None:
        state, paths, buffers = module._remove_buffers(state)
    data = {"method": "update", "state": state, "buffer_paths": paths}
    kernel = kernel_shell().kernel
    kernel.session.send(
        kernel.iopub_socket, "comm_msg", {"comm_id": comm_id, "data": data}, parent=request, buffers=buffers
    )


class Requests:
    """Reader of front ends' requests while the kernel's main thread runs a cell.

    A page that is reloaded gets the answers for its widgets. All other requests wait for the end of the cell.

    Args:
        take: Called with each message to a comm; if it returns False, the kernel handles the message.
    """

    #: What is answered at once, as it changes nothing.
    _ANSWERED = ("kernel_info_request", "comm_info_request")
    _CONTROL = "jupyter.widget.control"

    def __init__(self, take: Callable[[Mapping[str, Any]], bool]) -> None:
        self._kernel, self._take = kernel_shell().kernel, take
        # From ipykernel 7 on a thread reads what front ends send, and passes it on to the main one.
        reader = getattr(self._kernel, "shell_channel_thread", None)
        manager = None if reader is None else reader.manager
        self._stream = self._kernel.shell_stream if manager is None else manager._shell_channel_to_main.to_stream
        self._answers = self._stream if manager is None else manager.get_subshell_to_shell_channel_socket(None)
        self._leave = self._stream._recv_callback
        self._stream.on_recv(self._receive, copy=False)

    def look(self) -> None:
        """Handle the requests that have arrived."""
        with deferred_interrupts():  # or one could lose a message
            self._stream.flush()

    def close(self) -> None:
        """Stop reading."""
        self._stream.on_recv(self._leave, copy=False)

    def _receive(self, frames: list[Any]) -> Any:
        session = self._kernel.session
        try:
            idents, parts = session.feed_identities(frames, copy=False)
            message = session.deserialize(parts, content=False, copy=False)
            message["content"] = session.unpack(message["content"])
        except Exception:  # the kernel says what is wrong with it
            return self._leave(frames)
        if self._is_answered(message):
            with self._status(message):
                self._answer(idents, message)
            return None
        if message["msg_type"] not in ("comm_msg", "comm_close") or not self._take(message):
            return self._leave(frames)
        with self._status(message):  # a front end waits for that before it says more to the same widget
            return None

    def _is_answered(self, message: Mapping[str, Any]) -> bool:
        kind, content = message["msg_type"], message["content"]
        if kind == "comm_open":
            return bool(content.get("target_name") == self._CONTROL)
        comm = self._kernel.comm_manager.comms.get(content.get("comm_id"))
        return kind in self._ANSWERED or (comm is not None and comm.target_name == self._CONTROL)

    def _answer(self, idents: Any, message: Mapping[str, Any]) -> None:
        answer = self._kernel.shell_handlers[message["msg_type"]](self._answers, idents, message)
        if inspect.iscoroutine(answer):
            with contextlib.suppress(StopIteration):
                answer.send(None)  # to its end: it waits for nothing
            answer.close()

    @contextlib.contextmanager
    def _status(self, message: Mapping[str, Any]) -> Iterator[None]:
        self._send_status("busy", message)
        try:
            yield
        finally:
            self._send_status("idle", message)
            self._send_status("busy", self._kernel.get_parent())  # or front ends take the cell for done

    def _send_status(self, state: str, parent: Mapping[str, Any]) -> None:
        kernel, content = self._kernel, {"execution_state": state}
        kernel.session.send(kernel.iopub_socket, "status", content, parent=parent, ident=kernel._topic("status"))
