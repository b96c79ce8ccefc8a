"""The notebook that this process is the kernel of, or looks like (a rank): its IPython shell, its cells, its widgets.

What differs between generations of IPython (7.34 on), ipykernel (6.17 on), ipywidgets (7.7 on) and `comm` (which old
ones do without) is known here and nowhere else. Nothing here imports IPython: where it is not loaded, there is no
notebook.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

_HISTORY = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|In|Out")


def shell() -> Any:
    """The IPython shell of this process, in a terminal or a notebook; None if there is none."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


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


def is_watched(message: Mapping[str, Any] | None) -> bool:
    """Whether a person sees the cell that a front end's message had run, also what comes when it is done.

    Programs that run notebooks, such as nbclient for nbconvert and papermill, can have nothing typed, and say so.
    """
    return bool(message) and bool(message.get("content", {}).get("allow_stdin", True))  # type: ignore[union-attr]


def is_hidden(name: str, value: Any) -> bool:
    """Whether IPython itself has put this variable into the notebook (`get_ipython`, `exit`, `open`).

    Not those of its history (`_`, `_3`, `In`, `Out`): they are data.
    """
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
    # IPython before 8.0 does not keep them; but it has the cells' texts with the names and, in its history, with the
    # numbers.
    numbers = {cell: number for number, cell in enumerate(found.history_manager.input_hist_parsed)}
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


def register_comm(comm: Any) -> None:
    """In a kernel: have what a front end says to the widget of `comm.comm_id` handed to `comm`."""
    kernel_shell().kernel.comm_manager.register_comm(comm)


def own_comm(comm_id: str) -> Any:
    """In a kernel: the line of one of its own widgets to its views; None if there is none of that id."""
    return kernel_shell().kernel.comm_manager.comms.get(comm_id)


def forget_comms(ids: list[str]) -> None:
    """In a kernel: no longer do so."""
    for comm_id in ids:
        kernel_shell().kernel.comm_manager.comms.pop(comm_id, None)


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

    # A property, since the old class has a trait of that name that takes nothing but a real kernel.
    own_kernel = property(lambda self: kernel, lambda self, value: None)
    names = {"kernel": own_kernel, "publish_msg": publish_msg, "_publish_msg": publish_msg}  # _: before ipykernel 6.18
    return type("RankComm", (base,), names)


class _Comms:
    """What comms register at where there is no package `comm`. Nothing that a view says gets to a rank."""

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
