"""The parts that make a rank look like a notebook: an IPython shell, and displays.

At import, libraries check whether they are in a notebook, by the shell's class name, its configuration or
`get_ipython`. So the shell is made in the fork server, before all other imports.
"""

from __future__ import annotations

import base64
import builtins
import sys
import traceback
import types
from collections.abc import Iterator
from inspect import modulesbyfile
from typing import Any

from ..notebook.rank_widgets import connect_widgets
from ..wire.frames import CELL
from . import streams
from .streams import writer

#: The namespace of the notebook in a rank.
main = types.ModuleType("__main__")

_shell: Any = None
#: What `Output` widgets ask for: the message of the cell that runs.
_PARENT = {"header": {"msg_id": CELL}}


def make() -> None:
    """Make the shell of the ranks, in the fork server of a notebook. Starts no thread."""
    global _shell
    from ipykernel.zmqshell import ZMQInteractiveShell
    from IPython.core.autocall import ExitAutocall
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets import Type
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.IPKernelApp.connection_file = ""  # some look for this section to know a kernel
    # The name of the notebook's own shell, too, is what libraries go by.
    attributes = {
        "display_pub_class": Type(type("RankDisplayPublisher", (RankDisplayPublisher, DisplayPublisher), {})),
        "displayhook_class": Type(DisplayHook),
        # The rest of the notebook's shell talks to a front end that a rank does not have.
        "_showtraceback": InteractiveShell._showtraceback,
        "enable_gui": lambda self, gui=None: None,
        "get_parent": lambda self: _PARENT,
        "set_parent": lambda self, parent: None,
    }
    shell_class: Any = type("ZMQInteractiveShell", (ZMQInteractiveShell,), attributes)
    # The shell belongs in the rank's __main__, but must not leave it there: the server has its own.
    server_main = sys.modules["__main__"]
    _shell = shell_class.instance(config=config, user_module=main, user_ns=vars(main))
    rank_exit = type("RankExit", (RankExit, ExitAutocall), {})()
    for name in ("exit", "quit"):  # IPython's ask the front end to end the kernel
        vars(main)[name] = _shell.user_ns_hidden[name] = rank_exit
    sys.modules["__main__"] = server_main
    # A person types into a process with prompts: Lightning refuses to train there, by these names alone.
    forget_prompts()
    from IPython.display import display

    builtins.get_ipython = _shell.get_ipython  # type: ignore[attr-defined]
    builtins.display = display  # type: ignore[attr-defined]
    connect_widgets(_shell, writer.message, _PARENT)
    _shell.set_hook("show_in_pager", _page, 0)


def enter() -> None:
    """Make the notebook's namespace `__main__`, in a rank, and connect the streams with their frames."""
    sys.modules["__main__"] = main
    vars(main).setdefault("__builtins__", builtins)
    streams.attach()


def forget_prompts() -> None:
    """Remove the prompts of an interactive interpreter, by which libraries recognize one."""
    for name in ("ps1", "ps2", "ps3"):
        vars(sys).pop(name, None)


def after_call() -> None:
    """Show the open figures, as a notebook does at the end of a cell."""
    if _shell is not None:
        _shell.events.trigger("post_execute")


def _page(shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
    """Show the help of `name?` in the cell: a rank has no pager of the front end."""
    print(data["text/plain"] if isinstance(data, dict) else data)


def transform(cell: str) -> str:
    """Return the text of a cell as Python, with a notebook's replacements for `%magic` and `!command`."""
    return cell if _shell is None else str(_shell.transform_cell(cell))


def complete(line: str, cursor: int) -> list[str]:
    """Return completions at the cursor, from the names in `main`."""
    if _shell is None:
        return []
    with _shell.builtin_trap:
        # Not by Jedi, which looks into sources: variables are at hand.
        _shell.Completer.use_jedi = False
        return [str(match) for match in _shell.Completer.complete(line_buffer=line, cursor_pos=cursor)[1]]


def inspect(name: str, detail: int) -> dict[str, Any]:
    """Return the display of `name?` (0) or `name??` (1), by MIME type; an empty dict for an unknown name."""
    if _shell is None:
        return {}
    try:
        return dict(_shell.object_inspect_mime(name, detail_level=detail))
    except KeyError:
        return {}


def show(value: Any) -> None:
    """Display a value as a notebook displays the value of a cell's last expression."""
    if value is not None:
        builtins.display(value) if _shell is not None else print(repr(value))  # type: ignore[attr-defined]


def render_traceback(exc: BaseException, tb: types.TracebackType | None) -> list[str]:
    """Return the traceback as the notebook would show it, or an empty list without a notebook."""
    # IPython takes five seconds for the thousand frames of an endless recursion; Python itself says it in ten lines.
    if _shell is None or len(list(traceback.walk_tb(tb))) > 100:
        return []
    frames = [frame for one in _chain(exc) for frame, _ in traceback.walk_tb(one.__traceback__)]
    for frame in frames:  # or IPython compares each file with the files of all modules
        name = frame.f_globals.get("__name__")
        if isinstance(name, str):
            modulesbyfile.setdefault(frame.f_code.co_filename, name)
    try:
        return list(_shell.InteractiveTB.structured_traceback(type(exc), exc, tb, tb_offset=0))
    finally:
        _shell.InteractiveTB.tb = None  # or it would keep the frames, and all that they hold


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    """Yield `exc`, and the exceptions that are shown with it, because they led to it."""
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        yield exc
        seen.add(id(exc))
        exc = exc.__context__ if exc.__cause__ is None else exc.__cause__


#: IPython's class, which comes after these: IPython is imported where there is a notebook only.
_Own: Any = object


class RankExit(_Own):
    """The `exit` and `quit` of a rank's shell: they end the call like `sys.exit`."""

    def __call__(self, code: Any = None) -> None:
        raise SystemExit(code)

    def __repr__(self) -> str:
        return "exit(): ends the call, as sys.exit() does"


class RankDisplayPublisher(_Own):
    """A display publisher that sends displays to the cell."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *args: Any,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        data = {
            kind: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for kind, value in data.items()
        }
        writer.message("display", data=data, metadata=metadata or {}, transient=transient or {}, update=update)

    def clear_output(self, wait: bool = False) -> None:
        writer.message("clear_output", wait=wait)
