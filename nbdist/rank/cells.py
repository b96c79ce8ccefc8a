"""Functions that the magics run in a rank: run a cell, return variables."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
import types
from collections.abc import Sequence
from typing import Any

from ..capture.imports import keep_source
from ..errors import text_of
from ..notebook.shell import is_hidden, label_cells
from . import shell
from .debugger import Debugger

#: Of this rank.
debugger: Debugger | None = None
#: What a cell may contain and a module may not.
FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def file_of(number: int) -> str:
    """Return the file name by which tracebacks know a cell."""
    return f"<ddp cell {number}>"


def as_counted(text: str, whole: bool) -> str:
    """Return the text of a cell, padded so that its lines have the same numbers as in the notebook.

    In the notebook, the first line is `%%ddp`. A `whole` cell has no such line.
    """
    return text if whole else "\n" + text


def nothing() -> None:
    """Do nothing. A call of this function only starts the ranks and sends the captured names."""


def variables(names: Sequence[str]) -> dict[str, Any]:
    """Return variables of the rank's `__main__`. Raises `NameError` for a missing one."""
    for name in names:
        if name not in vars(shell.main):
            raise NameError(f"the rank has no variable {name!r}", name=name)
    return {name: vars(shell.main)[name] for name in names}


def who() -> dict[str, str]:
    """Return the variables that cells and calls have left in the rank, with their types."""
    found = {name: value for name, value in vars(shell.main).items() if not name.startswith("_")}
    return {name: type(value).__name__ for name, value in found.items() if not is_hidden(name, value)}


def complete(line: str, cursor: int) -> list[str]:
    """Return completions at the cursor in a line, from the rank's variables and their attributes."""
    return shell.complete(line, cursor)


def describe(name: str, detail: int) -> dict[str, Any]:
    """Return the help for one of the rank's variables, or an attribute: see `shell.inspect`."""
    return shell.inspect(name, detail)


def run(cell: str, number: int, whole: bool, pdb: bool) -> None:
    """Run the text below `%%ddp` as a notebook runs a cell: with magics, top-level await, and display of the last
    expression.

    Args:
        cell, number: The text, and the cell's number, for tracebacks.
        whole: Whether the text is the whole cell.
        pdb: Whether the debugger opens if the cell raises.
    """
    try:
        _run(cell, number, whole)
    except Exception as exc:
        tb = exc.__traceback__ if pdb else None
        while tb is not None and tb.tb_frame.f_code.co_filename != file_of(number):
            tb = tb.tb_next
        if tb is not None and debugger is not None:
            print(f"{type(exc).__name__}: {text_of(exc)}", file=sys.stderr)
            debugger.post_mortem(tb)
        raise


def _run(cell: str, number: int, whole: bool) -> None:
    file = file_of(number)
    text = as_counted(shell.transform(cell), whole)
    keep_source(file, text)
    label_cells({file: number})
    body = ast.parse(text, file).body
    last = body[-1] if body else None
    if isinstance(last, ast.Expr):
        body.pop()
    _evaluate(compile(ast.Module(body, []), file, "exec", FLAGS))
    if isinstance(last, ast.Expr):
        value = _evaluate(compile(ast.Expression(last.value), file, "eval", FLAGS))
        if not text.rstrip().endswith(";"):
            shell.show(value)


def _evaluate(code: types.CodeType) -> Any:
    value = eval(code, vars(shell.main))
    return asyncio.run(value) if code.co_flags & inspect.CO_COROUTINE else value
