"""Widgets of ranks: what is done to them in the page reaches the ranks, and a page that is loaded again finds them."""

from __future__ import annotations

import queue
import socket
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import ipywidgets
import pytest
from cells import cells
from conftest import Kernel, poll

from nbdist.kernel.cell import comms as cell_comms
from nbdist.kernel.cell.cell import Cell
from nbdist.wire import stacks

CELLS = cells("kernel/cells/widgets.py")
FIRST_CELL = CELLS["first cell"]

Message = dict[str, Any]


class Page:
    """A front end of a kernel: the messages that it has received, and the widgets that it knows by that."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.heard: list[Message] = []
        self.models: dict[str, dict[str, Any]] = {}

    def until(self, condition: Callable[[Message], Any]) -> Message:
        """The first message to come for which it holds."""
        try:
            return self._next(condition)
        except BaseException:  # the end of the test's time, too
            print("heard:", *((m["msg_type"], m["content"]) for m in self.heard[-20:]), sep="\n")
            raise

    def _next(self, condition: Callable[[Message], Any]) -> Message:
        while True:
            message = self.kernel.client.get_iopub_msg()
            self.heard.append(message)
            kind, content = message["msg_type"], message["content"]
            if kind == "comm_open":
                self.models[content["comm_id"]] = dict(content["data"].get("state", {}))
            elif kind == "comm_msg" and content["data"].get("method") == "update":
                self.models.setdefault(content["comm_id"], {}).update(content["data"]["state"])
            if condition(message):
                return message

    def model(self, name: str) -> str:
        """The id of the last widget of a kind."""
        return [model_id for model_id, state in self.models.items() if state.get("_model_name") == name][-1]

    def shown(self, message: Message) -> bool:
        return message["msg_type"] == "display_data"

    def send(self, kind: str, content: Message, **header: Any) -> str:
        message = self.kernel.client.session.msg(kind, content, **header)
        self.kernel.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def say(self, comm_id: str, **data: Any) -> str:
        """Say something to a widget, and wait until the kernel has taken it, as a page does before it says more."""
        sent = self.send("comm_msg", {"comm_id": comm_id, "data": data})
        self.until(lambda message: is_idle(message, sent))
        return sent

    def move(self, value: int) -> str:
        return self.say(self.model("IntSliderModel"), method="update", state={"value": value}, buffer_paths=[])

    def click(self) -> str:
        return self.say(self.model("ButtonModel"), method="custom", content={"event": "click"})

    def label(self) -> Any:
        return self.models[self.model("LabelModel")]["value"]

    def done(self, cell: str) -> None:
        self.until(lambda message: is_idle(message, cell))
        self.kernel._await_reply(cell)

    def text(self, cell: str) -> str:
        mine = [m for m in self.heard if m["parent_header"].get("msg_id") == cell]
        assert not [m["content"] for m in mine if m["msg_type"] == "error"]
        return "".join(m["content"]["text"] for m in mine if m["msg_type"] == "stream")


def is_idle(message: Message, of: str) -> bool:
    idle = message["content"].get("execution_state") == "idle"
    return bool(idle and message["parent_header"].get("msg_id") == of)


@pytest.fixture
def page(notebook: Kernel) -> Page:
    return Page(notebook)


def test_a_widget_gets_changes_of_the_page_during_a_call(notebook: Kernel, page: Page) -> None:
    cell = notebook.start("print(in_ddp(1, use, 3))")
    page.until(page.shown)
    later = notebook.start("print('later')")  # it waits for its turn, and is not lost
    moved = page.move(7)
    page.click()
    page.move(9)
    page.done(cell)
    assert page.text(cell) == "clicked\n[7, 'click', 9]\n"
    page.done(later)
    assert page.text(later) == "later\n"
    assert page.models[page.model("LabelModel")]["value"] == "at 9", "what handlers change is seen"
    echoes = [m for m in page.heard if m["content"].get("data", {}).get("method") == "echo_update"]
    if not ipywidgets.__version__.startswith("7."):  # which has no echoes
        assert echoes[0]["parent_header"]["msg_id"] == moved, "by which a page knows that it is no news"
    last = [m for m in page.heard if m["msg_type"] == "update_display_data"][-1]["content"]["data"]["text/html"]
    assert "at 9" in last and "have ended" in last, "a picture of the last state, and a click says so"
    assert notebook.ok("print(len(get_ipython().kernel.comm_manager.comms))").text == "0\n"


def test_a_widget_gets_changes_of_the_page_between_calls(notebook: Kernel, page: Page) -> None:
    cell = notebook.start(CELLS["a widget between calls"], watched=True)
    page.until(page.shown)
    page.done(cell)
    page.move(5)
    page.click()
    assert page.label() == "at 5"
    assert page.text(cell) == "clicked\n", "in the cell that shows the widget"
    (notebook.cwd / "moved").unlink(missing_ok=True)
    during = notebook.start(CELLS["until the widget has moved"])
    page.until(lambda message: message["msg_type"] == "execute_input")
    page.move(6)
    (notebook.cwd / "moved").touch()
    page.done(during)
    assert page.text(during) == "moved\n" and page.label() == "at 6"
    again = notebook.start("print(session.run(lambda: noted)); session.restart()")
    page.done(again)
    assert page.text(again) == "[5, 'click', 6]\n"
    update = [m for m in page.heard if m["msg_type"] == "update_display_data"][-1]["content"]["data"]["text/html"]
    assert "at 6" in update and "have ended" in update
    notebook.ok("session.close()")


@pytest.mark.parametrize("widget", ["bar", "slider where nobody looks"])
def test_a_widget_without_input_becomes_a_picture_after_the_call(notebook: Kernel, widget: str) -> None:
    """nbclient raises where what an earlier cell has shown is changed later."""
    show = "list(tqdm(range(3)))" if widget == "bar" else "display(ipywidgets.IntSlider(7))"
    code = f"""
        import ipywidgets
        from tqdm.auto import tqdm
        session = Session(2)
        session.run(lambda: {show})
    """
    shown = notebook.finish(notebook.start(textwrap.dedent(code), watched=widget == "bar"))
    pictures = [output["data"]["text/html"] for output in shown.outputs if "text/html" in output.get("data", {})]
    assert len(pictures) == 1 and ("3/3" if widget == "bar" else "7") in pictures[0], shown
    assert not notebook.ok("session.close()").outputs


def test_a_widget_of_another_package_says_that_its_ranks_have_ended(notebook: Kernel, page: Page) -> None:
    cell = notebook.start(CELLS["a widget of another package"])
    page.done(cell)
    for _ in range(2):
        page.say(page.model("OtherModel"), method="custom", content={"event": "click"})
    assert page.text(cell).count("have ended") == 1, "once is enough"
    asked = page.say(page.model("OtherModel"), method="request_state")
    (answer,) = [m for m in page.heard if m["msg_type"] == "comm_msg" and m["parent_header"]["msg_id"] == asked]
    assert answer["content"]["data"]["state"]["_model_name"] == "OtherModel"
    assert answer["content"]["data"]["buffer_paths"] == [["data"]] and bytes(answer["buffers"][0]) == b"binary"


def test_a_widget_of_the_notebook_gets_changes_in_all_ranks(notebook: Kernel, page: Page) -> None:
    cell = notebook.start(CELLS["a widget of the notebook"])
    page.until(page.shown)
    state = {"method": "update", "state": {"value": True}, "buffer_paths": []}
    page.send("comm_msg", {"comm_id": page.model("CheckboxModel"), "data": state})
    page.done(cell)
    assert page.text(cell) == "['stopped', 'stopped']\n"
    assert notebook.ok("print(stop.value, pressed); session.close()").text == "True [True]\n", (
        "and once in the notebook"
    )


def test_a_rank_that_begins_later_gets_the_changes_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranks:
        pids = (1, 2)

        def __init__(self) -> None:
            self.received: list[tuple[int, Any]] = []

        def deliver_widget_event(self, rank: int, event: Message, buffers: Any) -> bool:
            self.received.append((rank, event["data"]["value"]))
            return True

    class Checkbox:
        _msg_callback = None

        def on_msg(self, callback: Any) -> None: ...

    def begin(rank: int) -> None:
        content = {"comm_id": "box", "data": {"state": {}}, "buffers": [], "metadata": {}}
        comms.pass_on(rank, "comm_open", content, Cell(), rank == 0)

    def move(value: int) -> None:
        comms.take({"msg_type": "comm_msg", "content": {"comm_id": "box", "data": {"value": value}}})

    monkeypatch.setattr(cell_comms, "own_comm", lambda comm_id: Checkbox())
    monkeypatch.setattr(Cell, "in_notebook", True)
    ranks: Any = Ranks()
    comms = cell_comms.Comms(ranks)
    begin(0)
    move(1)
    begin(1)
    move(2)
    assert ranks.received == [(0, 1), (1, 1), (0, 2), (1, 2)]


def asked_again(page: Page) -> dict[str, Any]:
    """Ask as a page that is loaded again does, and return the answer: the states of all widgets by their ids."""
    info = page.send("kernel_info_request", {})
    known = page.send("comm_info_request", {"target_name": "jupyter.widget"})
    replies: dict[str, Any] = {}

    def replied() -> bool:
        try:
            message = page.kernel.client.get_shell_msg(timeout=0.1)
        except queue.Empty:
            return False
        replies[message["parent_header"]["msg_id"]] = message["content"]
        return {info, known} <= replies.keys()

    assert poll(replied), "no answer"
    comm_id = f"control-{info}"
    opens = {"comm_id": comm_id, "target_name": "jupyter.widget.control", "data": {}}
    page.send("comm_open", opens, metadata={"version": "1.0.0"})
    page.send("comm_msg", {"comm_id": comm_id, "data": {"method": "request_states"}})
    answer = page.until(lambda message: message["content"].get("data", {}).get("method") == "update_states")
    states = answer["content"]["data"]["states"]
    assert replies[known]["status"] == "ok" and replies[known]["comms"].keys() == states.keys()
    return dict(states)


@pytest.mark.parametrize("call", ["in_ddp(2, train)", "future = session.submit(train)"])
def test_a_page_that_is_loaded_again_during_a_call(call: str, notebook: Kernel, page: Page) -> None:
    for step in (1, 2):
        (notebook.cwd / f"step{step}").unlink(missing_ok=True)
    notebook.ok("import os\nsession = Session(2)\n" + CELLS["a bar"])
    cell = notebook.start(call, watched=True)
    page.until(lambda message: message["content"].get("data", {}).get("state", {}).get("value") == 1)
    states = asked_again(page)
    bar = states[page.model("FloatProgressModel")]
    assert bar["state"]["value"] == 1 and bar["model_module"] == "@jupyter-widgets/controls"
    (notebook.cwd / "step1").touch()
    page.until(lambda message: message["content"].get("data", {}).get("state", {}).get("value") == 2)
    (notebook.cwd / "step2").touch()
    page.done(cell if "in_ddp" in call else notebook.start("future.result()"))
    bar = asked_again(page)[page.model("FloatProgressModel")]
    assert bar["state"]["value"] == 3 and bar["state"]["bar_style"] == "success", "it was away when the picture came"
    notebook.ok("session.close()")


def test_orders_of_any_size_arrive_whole_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for patience in ("PATIENCE", "_PATIENCE_TO_ORDER"):
        monkeypatch.setattr(stacks, patience, 10_000.0)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    got: queue.Queue[Any] = queue.Queue()
    with ours, theirs:
        thread = threading.Thread(
            target=stacks.serve, args=(theirs.fileno(), threading.get_ident(), {"take": lambda *what: got.put(what)})
        )
        thread.start()
        big = bytes(range(256)) * 5_000
        assert stacks.order(ours, "take", 1) and stacks.order(ours, "take", big) and stacks.order(ours, "take")
        assert [got.get() for _ in range(3)] == [(1,), (big,), ()]
        assert "test_orders" in stacks.ask(ours, 7, lambda: None), "it tells stacks between them"
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_request_that_was_not_read_does_not_block_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_PATIENCE_TO_ORDER", 0.05)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    got: queue.Queue[Any] = queue.Queue()
    with ours, theirs:
        assert not stacks.order(ours, "take", bytes(10_000_000)), "nobody reads"
        thread = threading.Thread(
            target=stacks.serve, args=(theirs.fileno(), threading.get_ident(), {"take": lambda *what: got.put(what)})
        )
        thread.start()
        assert poll(lambda: stacks.order(ours, "take", 2)) and got.get() == (2,)
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
