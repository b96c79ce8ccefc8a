"""The connections (comms) between widgets of ranks and the page, in both directions.

The kernel has a model of each such widget. A page that is reloaded, even during a call, gets the state from it.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...engines.contract import Ranks
from ...errors import summary
from ...notebook.kernel_widgets import (
    Requests,
    embedded,
    forget_comm,
    in_main_thread,
    own_comm,
    register_comm,
    send_state,
)
from ...wire.frames import CELL
from .cell import Cell
from .widgets import VIEW, Widgets

#: Seconds from one look at what the page asks to the next, while a call has the kernel's main thread wait.
_LOOK = 0.1

#: Lets a rank handle what was done to one of its widgets between calls, with a cell for what it prints; False while a
#: call runs.
Between = Callable[[int, dict[str, Any], Sequence[bytes], Cell], bool]


class _View(NamedTuple):
    cell: Cell
    model_id: str
    text: str


#: A change of a widget in the page, and its buffers.
_Said = tuple[dict[str, Any], Sequence[bytes]]


class Comms:
    """The comms of the ranks of a session, while the ranks live.

    Args:
        ranks: The ranks of the session.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._widgets = Widgets()
        self._owners: dict[str, list[int]] = {}  # by comm id
        self._models: dict[str, Model] = {}  # those that the page knows
        self._shared: dict[str, _Shared] = {}
        self._said: dict[str, list[_Said]] = {}  # to shared widgets in this call, for ranks that begin it later
        self._views: dict[str, _View] = {}  # by display id
        self._new: list[str] = []  # models that have come with this call
        self._before: set[str] = set()  # display ids of earlier calls
        self._moved: dict[str, list[Mapping[str, Any]]] = {}  # by comm id: what the page has said, not echoed yet
        self._cell: Cell | None = None  # of the last widget: it shows what handlers print
        self._over = self._kept = self._notified = False
        self.between: Callable[[], Between | None] = lambda: None

    def live(self) -> bool:
        """Return whether the page may send messages to these ranks."""
        return bool(self._models or self._shared)

    def take_input(self) -> bool:
        """Return whether a user's input into a widget of these ranks may reach code of theirs."""
        return not self._owners.keys() <= self._models.keys() or self._widgets.take_input(list(self._owners))

    # ----------------------------------------------------------------------------------------- from ranks to the page

    def pass_on(self, rank: int, kind: str, content: dict[str, Any], cell: Cell, shown: bool) -> None:
        """Receive a message of a rank's widget, and send it to the page if the rank's output is shown."""
        comm_id, data = content["comm_id"], content["data"]
        if kind == "comm_open" and rank not in self._owners.setdefault(comm_id, []):
            self._owners[comm_id].append(rank)
            for change in self._said.get(comm_id, ()):
                self._deliver(rank, *change)
        if not shown or not cell.in_notebook:
            return
        if kind == "comm_open":
            self._cell = cell
        buffers = [bytes.fromhex(buffer) for buffer in content.pop("buffers")]
        parts = {"metadata": content.pop("metadata"), "buffers": buffers, "ident": f"comm-{comm_id}".encode()}
        state = data.get("state") or {}
        if "msg_id" in state:  # an Output widget: from now on it takes what this cell shows, or no longer does
            sys.stdout.flush()
            sys.stderr.flush()
            if state["msg_id"] == CELL:
                state["msg_id"] = cell.parent["header"]["msg_id"]
        own = None if comm_id in self._models else own_comm(comm_id)
        own = None if isinstance(own, Model) else own  # of a session that has been shown before
        if own is not None:  # a widget of the notebook's, which the rank was sent: it lives here
            if kind == "comm_open":
                self._share(comm_id, own)
            elif kind == "comm_msg" and data.get("method") != "echo_update":
                callback = own._msg_callback
                (callback.callback if isinstance(callback, _Shared) else callback)(
                    {"content": content, "buffers": buffers}
                )
                cell.send(kind, content, **parts)
            return
        self._widgets.handle(kind, comm_id, data, buffers)
        if kind == "comm_open":
            self._new.append(comm_id)
            self._models[comm_id] = Model(self, comm_id, content["target_name"])
            register_comm(self._models[comm_id])
        elif kind == "comm_close" and comm_id in self._models:
            self._forget(comm_id)
        cell.send(kind, content, self._echoed(comm_id, state) if data.get("method") == "echo_update" else None, **parts)

    def _echoed(self, comm_id: str, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the message of the page that a rank echoes. The page needs it to ignore its own change."""
        moved = self._moved.get(comm_id, [])
        while moved:
            message = moved.pop(0)
            if state.items() <= message["content"]["data"].get("state", {}).items():
                return message
        return None

    def note_view(self, content: dict[str, Any], cell: Cell) -> None:
        """Store where a widget is shown."""
        transient, view = content["transient"], content["data"].get(VIEW)
        if view is not None:
            shown = _View(cell, view["model_id"], content["data"].get("text/plain", ""))
            self._views[transient.setdefault("display_id", uuid.uuid4().hex)] = shown
        elif content["update"]:
            self._views.pop(transient.get("display_id", ""), None)

    def _share(self, comm_id: str, own: Any) -> None:
        """Send the page's messages to a widget of the notebook and also to these ranks."""
        callback = own._msg_callback
        if not isinstance(callback, _Shared):
            callback = _Shared(callback)
            own.on_msg(callback)
        if comm_id not in self._shared:
            self._shared[comm_id] = callback
            callback.comms.append(self)

    # ----------------------------------------------------------------------------------------- from the page to ranks

    def take(self, message: Mapping[str, Any]) -> bool:
        """Send a message of the page to its ranks during a call. Returns False if the notebook must handle it, too,
        after its cell."""
        comm_id = message["content"].get("comm_id")
        if comm_id in self._models:
            if message["msg_type"] == "comm_msg":
                self.say(message)
            return True
        if comm_id in self._shared and message["msg_type"] == "comm_msg":
            self.say(message)
        return False

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a change of a widget in the page to its ranks. Works in any thread."""
        content, buffers = message["content"], [bytes(buffer) for buffer in message.get("buffers") or ()]
        comm_id, data = content["comm_id"], content["data"]
        if comm_id in self._models:
            if data.get("method") == "request_state":  # of a page that is loaded again
                send_state(comm_id, self.state(comm_id), message)
                return
            self._widgets.handle("comm_msg", comm_id, data, buffers)
            if data.get("method") == "update":
                self._moved.setdefault(comm_id, []).append(message)
        if self._over:
            self._notify_of_the_end()
            return
        event = {"comm_id": comm_id, "data": data}
        owners = self._owners.get(comm_id, ())
        if comm_id in self._shared and len(owners) < len(self._ranks.pids):
            self._said.setdefault(comm_id, []).append((event, buffers))
        for rank in owners:
            self._deliver(rank, event, buffers)

    def _deliver(self, rank: int, event: dict[str, Any], buffers: Sequence[bytes]) -> None:
        assert self._cell is not None
        between = self.between()
        try:
            if between is not None and between(rank, event, buffers, self._cell.later()):
                return
            sent = self._ranks.deliver_widget_event(rank, event, buffers)
            why = "" if sent else "the rank reads no messages now"
        except Exception as exc:  # the rank's end; there is no cell that could raise it
            why = summary(exc)
        if why:
            self._cell.later().notice(f"a change of rank {rank}'s widget did not reach the rank: {why}")

    def state(self, comm_id: str) -> dict[str, Any]:
        """Return the state of a widget for a page that asks. Its pictures stay interactive from then on, as the page
        may ask again."""
        self._kept = True
        return self._widgets.state(comm_id)

    def _notify_of_the_end(self) -> None:
        if not self._notified and self._cell is not None:
            self._notified = True
            self._cell.later().notice("the ranks of this widget have ended: changes of it have no effect any more")

    # ------------------------------------------------------------------------------------------------------ the end

    def end_call(self) -> None:
        """End a call. Widgets that take input live as long as their ranks; other widgets become pictures."""
        for shared in self._shared.values():
            shared.comms.remove(self)
        self._shared, self._said = {}, {}
        models, self._new = self._new, []
        # Where no page shows the notebook, as under nbconvert and papermill, what earlier cells show must not change:
        # nbclient does not find it any more once it has put texts together.
        if self._cell is None or not self._cell.watched or not self._widgets.take_input(models):
            self._freeze([display_id for display_id in self._views if display_id not in self._before], models)
        self._before = set(self._views)
        self._owners = {comm_id: ranks for comm_id, ranks in self._owners.items() if comm_id in self._models}

    def close(self) -> None:
        """End the ranks' widgets: all become pictures of their last state."""
        if not self._over:
            self._over = True
            self._freeze(list(self._views), list(self._models), Cell())

    def _freeze(self, displays: Sequence[str], models: Sequence[str], cell: Cell | None = None) -> None:
        """Replace views by pictures, and drop the models that are no longer needed.

        `cell` shows the pictures. None: each picture is shown in the cell of its view.
        """
        for display_id in displays:
            shown_in, model_id, text = self._views.pop(display_id)
            picture = self._widgets.picture(model_id)
            if picture is None:  # a widget of another package's stays as it is, and says that it is over
                self._kept = self._kept or model_id in self._models
                continue
            data = {"text/plain": text, "text/html": picture}
            shown = {"data": data, "metadata": {}, "transient": {"display_id": display_id}, "update": True}
            (cell or shown_in).message("display", shown)
        if not self._kept:
            for comm_id in models:
                if comm_id in self._models:
                    self._forget(comm_id)
                self._widgets.forget(comm_id)
                self._owners.pop(comm_id, None)
                self._moved.pop(comm_id, None)

    def _forget(self, comm_id: str) -> None:
        del self._models[comm_id]
        forget_comm(comm_id)


class Model:
    """The kernel's substitute for a widget of a rank: a comm for the comm manager, a widget for ipywidgets."""

    def __init__(self, comms: Comms, comm_id: str, target_name: str) -> None:
        self._comms, self.comm_id, self.model_id, self.target_name = comms, comm_id, comm_id, target_name

    def handle_msg(self, message: Mapping[str, Any]) -> None:
        self._comms.say(message)

    def handle_close(self, message: Mapping[str, Any]) -> None: ...

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        return self._comms.state(self.comm_id)

    def _get_embed_state(self, drop_defaults: bool = False) -> Any:
        return embedded(self)

    def close(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name in ("_model_name", "_model_module", "_model_module_version"):
            return self._comms.state(self.comm_id).get(name)
        raise AttributeError(name)


class _Shared:
    """The receiver of the page's messages to a widget of the notebook that was also sent to ranks."""

    def __init__(self, callback: Callable[[Mapping[str, Any]], None]) -> None:
        self.callback = callback
        self.comms: list[Comms] = []

    def __call__(self, message: Mapping[str, Any]) -> None:
        for comms in list(self.comms):
            comms.say(message)
        self.callback(message)


class Page:
    """Reader of the page's messages while a call blocks the kernel's main thread.

    Args:
        comms: The comms of the call's ranks.
        foreground: Whether the cell waits for the call.
    """

    def __init__(self, comms: Comms, foreground: bool) -> None:
        self._comms, self._listens = comms, foreground and in_main_thread()
        self._requests: Requests | None = None

    def soon(self, seconds: float) -> float:
        """Return the longest time to wait for ranks."""
        return min(_LOOK, seconds) if self._listens and self._comms.live() else seconds

    def look(self) -> None:
        """Handle the page's messages to ranks, and requests of a page that is reloaded. Leave all other messages."""
        if self._listens and self._comms.live():
            if self._requests is None:
                self._requests = Requests(self._comms.take)
            self._requests.look()

    def close(self) -> None:
        """Leave all further messages to the notebook."""
        if self._requests is not None:
            self._requests.close()
