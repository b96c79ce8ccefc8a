"""The code that the notebook has run: its cells, or the text of a script."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from ..notebook.shell import shell
from .need import main_namespace


class NewCells:
    """Reader of new code: the cells that were run since its last use, or at the first use the text of a script."""

    def __init__(self) -> None:
        self._read = 0  # how many cells
        self._current: Sequence[str] = []
        """The lines of the last cell, or of the script."""
        self._line = 0
        """The last of these lines from which the cell has used this object."""
        self._repeated: set[int] = set()

    def take(self) -> Sequence[str]:
        """Return the new texts."""
        cells = getattr(shell(), "user_ns", {}).get("_ih")
        if cells is None:
            cells = [] if self._read else [_script()]
        new, self._read = cells[min(self._read, len(cells)) :], max(self._read, len(cells))
        if new:
            self._current, self._line, self._repeated = new[-1].splitlines(), _line(), set()
        return new

    def passed(self, again: bool) -> str:
        """Return the lines of the current cell, or of the script, that may have run since the last use.

        These are all lines if a place is reached again, as in a loop: each time if `again`, otherwise once per place.
        A cell of a magic is one place.
        """
        lines, last, here = self._current, self._line, _line()
        self._line = max(last, here)
        if here > last:
            return "\n".join(lines[max(last - 1, 0) : here])
        if here in self._repeated and not again:
            return ""
        self._repeated.add(here)
        return "\n".join(lines)


def _script() -> str:
    """Return the text of the script that this process runs; empty if it runs none."""
    file = main_namespace().get("__file__")
    try:
        with open(file or "", encoding="utf-8") as source:
            return source.read()
    except (OSError, UnicodeDecodeError):
        return ""


def _line() -> int:
    """Return the line of the cell, or of the script, that this thread runs; 0 if it runs none."""
    main, line = main_namespace(), 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is main:
            line = frame.f_lineno  # the outermost: the others are functions
        frame = frame.f_back
    return line


def outside_functions(code: str, skip: tuple[type[ast.AST], ...] = ()) -> Iterator[ast.AST]:
    """Yield the nodes of code that are in no function. Nodes of the kinds to `skip` are left out, with their parts."""
    try:
        nodes: list[ast.AST] = list(ast.parse(code).body)
    except (SyntaxError, ValueError):
        return
    while nodes:
        node = nodes.pop(0)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *skip)):
            yield node
            nodes += ast.iter_child_nodes(node)
