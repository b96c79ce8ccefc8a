"""The IPython shell of this process, its cells and its tracebacks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import re
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

_labeled: dict[str, int] = {}  # numbers of cells, in a process without a shell
_HISTORY = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|In|Out")


def shell() -> Any:
    """Return the IPython shell of this process, in a terminal or a notebook; None if there is none."""
    module = sys.modules.get("IPython.core.getipython")  # where the name lies: IPython's own is looked up by an import
    return None if module is None else module.get_ipython()


def kernel_shell() -> Any:
    """Return the IPython shell of the notebook whose kernel this process is; None in a terminal or script."""
    found = shell()
    # What the shell of a rank has for a kernel has no session.
    return found if getattr(getattr(found, "kernel", None), "session", None) is not None else None


def is_asked_to_end(seconds: float) -> bool:
    """Return whether this process is a kernel that a front end asks to end, within a number of seconds.

    Jupyter interrupts a kernel that it restarts or shuts down, and sends the request right after the interrupt.
    """
    found = kernel_shell()
    deadline = time.monotonic() + seconds
    while found is not None and not getattr(found, "exit_now", False):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return found is not None


def forget_shown_traceback() -> None:
    """Make `%debug` open the exception that is being shown instead of an earlier one."""
    shown_by = getattr(shell(), "InteractiveTB", None)
    if shown_by is not None:
        shown_by.tb = None


def debug_instead(cause: BaseException, debug: Callable[[], Callable[[Any], bool] | None]) -> None:
    """Replace `%debug` after an exception with this `cause`, if IPython is loaded.

    `debug` gets the cause and returns a function, which `%debug` calls. If `debug` returns None, or the function
    returns False, `%debug` works as usual.
    """
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
    """Return whether the notebook shows a TypeError for a SystemExit whose cause has no traceback, as IPython 7
    does."""
    return shell() is not None and sys.modules["IPython"].version_info < (8,)


def reloader() -> Callable[[types.ModuleType], Any]:
    """Return the function that reloads a module: IPython's own if IPython is loaded.

    IPython's function also updates existing functions and objects.
    """
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
    """Return the modification time of a module's source when IPython's %autoreload last read it.

    None without this extension, or before it has read the module.
    """
    magics = getattr(getattr(shell(), "magics_manager", None), "registry", {}).get("AutoreloadMagics")
    seen: dict[str, float] = getattr(getattr(magics, "_reloader", None), "modules_mtimes", {})
    return seen.get(name)


def after_each_cell(action: Callable[[], Any]) -> bool:
    """Make a notebook call `action` at the end of each cell from now on; return False without a notebook."""

    def call(*result: Any) -> None:
        with contextlib.suppress(Exception):  # it is only help
            action()

    events = getattr(shell(), "events", None)
    if events is not None:
        events.register("post_run_cell", call)
    return events is not None


def is_watched(message: Mapping[str, Any] | None) -> bool:
    """Return whether a person sees the cell that a front end's message started, including messages after its end.

    Programs that run notebooks, such as nbclient for nbconvert and papermill, say in the message that input is
    impossible.
    """
    return bool(message) and bool(message.get("content", {}).get("allow_stdin", True))  # type: ignore[union-attr]


def is_hidden(name: str, value: Any) -> bool:
    """Return whether IPython itself (`get_ipython`, `exit`) or marimo (`input`) has put this variable into the
    notebook.

    Variables of IPython's history do not count (`_`, `_3`, `In`, `Out`): they are data.
    """
    marimo: Any = sys.modules.get("marimo._runtime.input_override")
    if name == "input" and marimo is not None and value is marimo.input_override:
        return True
    hidden = getattr(shell(), "user_ns_hidden", {})
    return name in hidden and hidden[name] is value and not _HISTORY.fullmatch(name)


def shown() -> Any:
    """Return the values that cells have shown, by cell number (`Out`); None without a notebook."""
    return getattr(shell(), "user_ns", {}).get("_oh")


def cell_numbers() -> Mapping[str, int]:
    """Return the numbers of the notebook's cells, by the file names that IPython makes up for them."""
    found = shell()
    compiler = getattr(found, "compile", None)
    if found is None:
        return dict(_labeled)
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
    """Make tracebacks of this process say `Cell In[3]` instead of a cell's file name, if this version of IPython does
    so."""
    compiler: Any = getattr(shell(), "compile", None)
    if shell() is None:
        _labeled.update(numbers)
    elif hasattr(compiler, "_filename_map"):
        compiler._filename_map.update(numbers)


def show_figures() -> None:
    """Make a kernel that has not set up plots show figures of ranks as it would show its own."""
    backend = "matplotlib_inline.backend_inline"
    if "matplotlib.figure" in sys.modules and backend not in sys.modules and kernel_shell() is not None:
        with contextlib.suppress(ImportError):
            importlib.import_module(backend)  # which registers them, if it is the backend
