"""The notebook that this process is the kernel of, or looks like (a rank): its IPython shell, its cells, its widgets.

What differs between generations of IPython (7.34 on), ipykernel (6.17 on), ipywidgets (7.7 on) and `comm` (which old
ones do without) is known here and nowhere else. Nothing here imports IPython: where it is not loaded, there is no
notebook.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import linecache
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .postponing import postponed_interrupts

_HISTORY = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|In|Out")


def shell() -> Any:
    """The IPython shell of this process, in a terminal or a notebook; None if there is none."""
    module = sys.modules.get("IPython.core.getipython")  # where the name lies: IPython's own is looked up by an import
    return None if module is None else module.get_ipython()


def kernel_shell() -> Any:
    """The IPython shell of a notebook that this process is the kernel of; None in a terminal or script."""
    found = shell()
    # What the shell of a rank has for a kernel has no session.
    return found if getattr(getattr(found, "kernel", None), "session", None) is not None else None


def forget_shown_traceback() -> None:
    """Let `%debug` look at the exception that is being shown, and not at one that IPython itself has shown before."""
    shown_by = getattr(shell(), "InteractiveTB", None)
    if shown_by is not None:
        shown_by.tb = None


def debug_instead(cause: BaseException, debug: Callable[[], Callable[[Any], bool] | None]) -> None:
    """Where there is IPython: let `%debug` after an exception with this `cause` call what `debug` gives, if it gives
    something, with the cause; and do what it always does where that returns False."""
    found: Any = shell()
    if found is None:
        return
    original = type(found).debugger.__get__(found)

    def debugger(force: bool = False) -> None:
        look = debug() if force and getattr(getattr(sys, "last_value", None), "__cause__", None) is cause else None
        if look is None or not look(cause):
            original(force=force)

    found.debugger = debugger


def fails_at_cause_of_exit() -> bool:
    """Whether the notebook shows a TypeError for a SystemExit that has a cause without a traceback: IPython 7 does."""
    return shell() is not None and sys.modules["IPython"].version_info < (8,)


def reloader() -> Callable[[types.ModuleType], Any]:
    """What reloads a module: where there is IPython, by its own means, which give the new code to the functions and
    objects that there are, too."""
    if "IPython" not in sys.modules:
        return importlib.reload
    try:
        from IPython.extensions.autoreload import superreload
    except ModuleNotFoundError:  # IPython 7 takes `reload` from `imp`, which Python 3.12 does not have any more
        stand_in: Any = types.ModuleType("imp")
        stand_in.reload = importlib.reload
        sys.modules["imp"] = stand_in
        try:
            from IPython.extensions.autoreload import superreload
        finally:
            del sys.modules["imp"]
    return superreload


def autoreloaded(name: str) -> float | None:
    """When the source of this module was written that IPython's %autoreload has last seen: it changes where new code
    was put into the module. None where there is no such extension, or it has not seen the module yet."""
    magics = getattr(getattr(shell(), "magics_manager", None), "registry", {}).get("AutoreloadMagics")
    seen: dict[str, float] = getattr(getattr(magics, "_reloader", None), "modules_mtimes", {})
    return seen.get(name)


def is_watched(message: Mapping[str, Any] | None) -> bool:
    """Whether a person sees the cell that a front end's message had run, also what comes when it is done.

    Programs that run notebooks, such as nbclient for nbconvert and papermill, can have nothing typed, and say so.
    """
    return bool(message) and bool(message.get("content", {}).get("allow_stdin", True))  # type: ignore[union-attr]


def is_hidden(name: str, value: Any) -> bool:
    """Whether IPython itself has put this variable into the notebook (`get_ipython`, `exit`, `open`), or marimo its
    `input`.

    Not those of IPython's history (`_`, `_3`, `In`, `Out`): they are data.
    """
    marimo: Any = sys.modules.get("marimo._runtime.input_override")
    if name == "input" and marimo is not None and value is marimo.input_override:
        return True
    hidden = getattr(shell(), "user_ns_hidden", {})
    return name in hidden and hidden[name] is value and not _HISTORY.fullmatch(name)


def shown() -> Any:
    """What cells have shown, by their numbers: `Out`; None if there is no notebook."""
    return getattr(shell(), "user_ns", {}).get("_oh")


def cell_numbers() -> Mapping[str, int]:
    """The numbers of the notebook's cells, by the file names that IPython makes up for them."""
    found = shell()
    compiler = getattr(found, "compile", None)
    if compiler is None or hasattr(compiler, "_filename_map"):
        return dict(getattr(compiler, "_filename_map", {}))
    # IPython before 8.0 does not keep them; but it has the cells' texts as Python with the names, the same as typed in
    # its history, and what was typed with the numbers. Its history lacks cells that could not be made Python.
    typed = {text: int(name[2:]) for name, text in found.user_ns.items() if re.fullmatch(r"_i\d+", name)}
    history = zip(found.history_manager.input_hist_parsed, found.history_manager.input_hist_raw, strict=False)
    numbers = {cell: typed[text] for cell, text in history if text in typed}
    texts = {name: "".join(entry[2]).rstrip("\n") for name, entry in getattr(linecache, "_ipython_cache", {}).items()}
    return {name: numbers[text] for name, text in texts.items() if text in numbers}


def label_cells(numbers: Mapping[str, int]) -> None:
    """Let tracebacks of this process say `Cell In[3]` instead of such a file name, where this IPython does that."""
    compiler: Any = getattr(shell(), "compile", None)
    if hasattr(compiler, "_filename_map"):
        compiler._filename_map.update(numbers)


def complete_alone(shell: Any, word: str, complete: Callable[[str, str], list[str]]) -> Callable[[], None]:
    """In a kernel: for lines that begin with `word`, complete by `complete` and by nothing else; the way to undo it.

    IPython before 8.6 adds what it finds itself.

    Args:
        shell: The kernel's.
        word: Such as "%ddp".
        complete: Given the line up to the cursor, and the part of it that is to be completed.
    """

    def matches(line: str, token: str) -> list[str]:
        return [text for text in complete(line, token) if text.startswith(token)]

    module: Any = importlib.import_module("IPython.core.completer")
    if not hasattr(module, "context_matcher"):

        def hook(shell: Any, event: Any) -> list[str]:
            return matches(event.line, event.symbol)

        shell.set_hook("complete_command", hook, str_key=word)
        return lambda: None

    @module.context_matcher(priority=1000, identifier=f"nbdist {word}")  # type: ignore[untyped-decorator]
    def matcher(context: Any) -> Any:
        line = context.text_until_cursor
        ours = line.split(None, 1)[:1] == [word] and line != word
        found = matches(line, context.token) if ours else []
        return {"completions": [module.SimpleCompletion(text) for text in found], "suppress": ours}

    shell.Completer.custom_matchers.append(matcher)
    return lambda: shell.Completer.custom_matchers.remove(matcher)


def complete_also(shell: Any, complete: Callable[[str, str, int], list[str]]) -> Callable[[], None]:
    """In a kernel: offer what `complete` finds beside what IPython (8.6 on) does; the way to undo it.

    Args:
        shell: The kernel's.
        complete: Given the cell's text, the line with the cursor, and the cursor's place in the line.
    """
    module: Any = importlib.import_module("IPython.core.completer")
    if not hasattr(module, "context_matcher"):
        return lambda: None

    @module.context_matcher(priority=10, identifier="nbdist")  # type: ignore[untyped-decorator]
    def matcher(context: Any) -> Any:
        found = complete(context.full_text, context.line_with_cursor, context.cursor_position)
        return {"completions": [module.SimpleCompletion(text) for text in found], "suppress": False}

    shell.Completer.custom_matchers.append(matcher)
    return lambda: shell.Completer.custom_matchers.remove(matcher)


def inspect_also(shell: Any, inspect: Callable[[str, int, int], dict[str, Any]]) -> Callable[[], None]:
    """In a kernel: where a front end asks about a name (Shift-Tab), show what `inspect` finds; the way to undo it.

    Args:
        shell: The kernel's.
        inspect: Given the cell's text, the cursor's place in it, and 0 or 1 for how much is wanted. Returns texts by
            their MIME types; none: IPython looks in the notebook.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return lambda: None
    original = kernel.do_inspect

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, *args: Any, **options: Any) -> Any:
        found = inspect(code, cursor_pos, detail_level)
        if not found:
            return original(code, cursor_pos, detail_level, *args, **options)
        if not shell.enable_html_pager:
            found.pop("text/html", None)
        return {"status": "ok", "found": True, "data": found, "metadata": {}}

    kernel.do_inspect = do_inspect
    return lambda: delattr(kernel, "do_inspect")


def show_figures() -> None:
    """In a kernel that has not plotted yet: let it show figures that were made elsewhere as it shows its own."""
    backend = "matplotlib_inline.backend_inline"
    if "matplotlib.figure" in sys.modules and backend not in sys.modules and kernel_shell() is not None:
        with contextlib.suppress(ImportError):
            importlib.import_module(backend)  # which registers them, if it is the backend


def in_main_thread() -> bool:
    """Whether this is the thread of a kernel that runs its cells."""
    return kernel_shell() is not None and threading.current_thread() is threading.main_thread()


def register_comm(comm: Any) -> None:
    """In a kernel: have what a front end says to `comm.comm_id` handed to `comm`, which may stand for a widget."""
    kernel_shell().kernel.comm_manager.register_comm(comm)
    if comm.target_name == "jupyter.widget":
        with contextlib.suppress(ImportError):  # it answers front ends that ask for all widgets
            importlib.import_module("ipywidgets")
            _widgets()[comm.comm_id] = comm


def own_comm(comm_id: str) -> Any:
    """In a kernel: the line of one of its own widgets to its views; None if there is none of that id."""
    return kernel_shell().kernel.comm_manager.comms.get(comm_id)


def forget_comm(comm_id: str) -> None:
    """In a kernel: no longer hand over what is said to it."""
    kernel_shell().kernel.comm_manager.comms.pop(comm_id, None)
    _widgets().pop(comm_id, None)


def _widgets() -> dict[str, Any]:
    """The widgets that ipywidgets knows of, by their ids."""
    module: Any = sys.modules.get("ipywidgets.widgets.widget")
    if module is None:
        return {}
    found: dict[str, Any] = module._instances if hasattr(module, "_instances") else module.Widget.widgets  # before 8.0
    return found


def embedded(widget: Any) -> Any:
    """What ipywidgets saves of what stands for a widget."""
    module: Any = sys.modules["ipywidgets.widgets.widget"]
    return module.Widget._get_embed_state(widget)


def send_state(comm_id: str, state: dict[str, Any], request: Mapping[str, Any]) -> None:
    """In a kernel: answer a front end that asks for the state of a widget."""
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
    """What front ends ask a kernel whose main thread is in a cell: that thread can look at it, and take some.

    A page that is loaded again gets the answers that it needs for its widgets. All else is left for after the cell.

    Args:
        take: Takes what is said to a comm; False leaves it, too.
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
        self._stream.on_recv(self._hear, copy=False)

    def look(self) -> None:
        """Take what there is."""
        with postponed_interrupts():  # or one could lose a message
            self._stream.flush()

    def close(self) -> None:
        """Take no more."""
        self._stream.on_recv(self._leave, copy=False)

    def _hear(self, frames: list[Any]) -> Any:
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


def hear_comm(content: dict[str, Any], buffers: Sequence[bytes]) -> bool:
    """In a rank: let a widget hear what was done to it in the page; whether the widget is there."""
    if "comm" not in sys.modules and shell() is None:
        return True  # here will be none
    manager = sys.modules["comm"].get_comm_manager() if "comm" in sys.modules else shell().kernel.comm_manager
    comm = manager.comms.get(content["comm_id"])
    if comm is not None:
        comm.handle_msg({"content": content, "buffers": buffers})
    return comm is not None


def connect_widgets(rank_shell: Any, send: Callable[..., None], parent: Mapping[str, Any]) -> None:
    """In a rank: let its widgets talk by `send`, whatever generation they are of.

    A widget's line to its view is a comm. From ipykernel 6.18 on `comm.create_comm` makes it; before that, and for
    ipywidgets 7 with any ipykernel, it is an `ipykernel.comm.Comm`, and `kernel.comm_manager` must be there.

    Args:
        rank_shell: The rank's IPython shell.
        send: Takes the kind of a message and, by name, its content with `metadata` and `buffers` (as hex).
        parent: What stands for the front end's message that had the cell run.
    """
    kernel = types.SimpleNamespace(get_parent=lambda channel=None: parent, _parent_header=parent)
    if importlib.util.find_spec("comm") is None:
        kernel.comm_manager = _Comms()
    else:
        comm: Any = importlib.import_module("comm")
        kernel.comm_manager = comm.get_comm_manager()
        comm.create_comm = _comm_class(comm.base_comm.BaseComm, kernel, send)
    rank_shell.kernel = kernel
    if _is_old("ipykernel", (6, 18)) or _is_old("ipywidgets", (8,)):
        module = importlib.import_module("ipykernel.comm")
        module.Comm = module.comm.Comm = _comm_class(module.Comm, kernel, send)  # type: ignore[attr-defined]


def _is_old(package: str, least: tuple[int, ...]) -> bool:
    """Whether a package is there in a version below `least`. A look at its metadata: importing it would take longer."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        parts = version(package).split(".")[: len(least)]
    except PackageNotFoundError:
        return False
    return tuple(int(part) for part in parts) < least


def _comm_class(base: Any, kernel: Any, send: Callable[..., None]) -> Any:
    """A widget's line to its view, which is in the notebook's front end; `base` says what else it can do."""

    def publish_msg(
        self: Any, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        send(
            msg_type,
            data=data or {},
            comm_id=self.comm_id,
            metadata=metadata or {},
            buffers=[bytes(buffer).hex() for buffer in buffers or []],
            **keys,
        )

    def handle_msg(self: Any, msg: dict[str, Any]) -> None:
        # Without the events of a cell, which show figures: the function may just be drawing one.
        if self._msg_callback is not None:
            self._msg_callback(msg)

    # A property, since the old class has a trait of that name that takes nothing but a real kernel.
    own_kernel = property(lambda self: kernel, lambda self, value: None)
    names = {"kernel": own_kernel, "publish_msg": publish_msg, "handle_msg": handle_msg}
    return type("RankComm", (base,), {**names, "_publish_msg": publish_msg})  # as it is called before ipykernel 6.18


class _Comms:
    """What comms register at where there is no package `comm`."""

    def __init__(self) -> None:
        self.comms: dict[str, Any] = {}
        self.targets: dict[str, Any] = {}

    def register_target(self, name: str, handler: Any) -> None:
        self.targets[name] = handler

    def unregister_target(self, name: str, handler: Any) -> Any:
        return self.targets.pop(name)

    def register_comm(self, comm: Any) -> str:
        self.comms[comm.comm_id] = comm
        return str(comm.comm_id)

    def unregister_comm(self, comm: Any) -> None:
        self.comms.pop(comm.comm_id)

    def get_comm(self, comm_id: str) -> Any:
        return self.comms.get(comm_id)
