"""A list of what a call sends to the ranks, name by name, without making the call."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..checks import check_function
from .call import pickle_call
from .depth import with_large_stack
from .foreign import name_of
from .imports import names_given, parse_imports
from .need import Names, resolve_need
from .per_rank import all_of
from .pickler import Pickler

#: Bytes from which on a name that the function never reads is worth a warning.
LARGE = 1 << 20

_HEAD = ("name", "how it travels", "size")


@dataclass(frozen=True)
class Item:
    """A name, and how it is sent: "import" (the ranks import it), "by value" (pickled), "shared" (data in shared
    memory)."""

    name: str
    how: str
    nbytes: int
    read: bool = True
    """True if the function seems to use the name."""


@dataclass(frozen=True)
class Explanation:
    """A table of items, as text and as HTML."""

    items: list[Item]

    @property
    def warnings(self) -> list[str]:
        """Return a line for each large name that is sent but not used."""
        return [
            f"{item.name} ({size(item.nbytes)}) travels, but the function never reads it"
            for item in self.items
            if not item.read and item.nbytes >= LARGE
        ]

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(item.name, item.how, "" if item.how == "import" else size(item.nbytes)) for item in self.items]

    def __str__(self) -> str:
        rows = [_HEAD, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<p><b>warning:</b> {html.escape(text)}</p>" for text in self.warnings)
        return html_table(_HEAD, self._rows()) + notes


def explain(
    fn: Callable[..., Any], /, *args: Any, imports: str | Iterable[str] = "", need: Names = "", **kwargs: Any
) -> Explanation:
    """Return what `in_ddp(n, fn, *args, imports=imports, need=need, **kwargs)` would send to the ranks.

    Starts no process and copies no big data. Sizes are in bytes, for each name separately: data that two names share
    are counted twice here, but sent once.

    Raises:
        ValueError, TypeError, NameError, CaptureError: The call itself would raise this error.

    Examples:
        >>> import math
        >>> radius = [1.0, 2.0]
        >>> def areas():
        ...     return [math.pi * r**2 for r in radius]
        >>> sorted((item.name, item.how) for item in explain(areas).items)
        [('areas', 'by value'), ('math', 'import'), ('radius', 'by value')]
    """
    check_function(fn)
    block = parse_imports(imports)
    names = resolve_need(need, fn)
    args, kwargs = all_of(args, kwargs)
    pickler = pickle_call(fn, args, kwargs, block, names)
    used = {name for _, name in pickler.used}
    items = [Item(name, "import", 0) for name in sorted(names_given(block) & used)]
    items += [_measure(name, value, name in used) for name, value in names.items()]
    items += [_measure(name, value) for name, value in pickler.captured.items() if name not in names]
    items.append(_measure(name_of(fn), fn))
    items += [_measure(f"argument {number}", value) for number, value in enumerate(args, 1)]
    items += [_measure(f"argument {name}", value) for name, value in kwargs.items()]
    return Explanation(items)


def _measure(name: str, value: Any, read: bool = True) -> Item:
    def write() -> Pickler:
        pickler = Pickler(io.BytesIO(), skip=lambda key, name: True)
        pickler.dump(value)
        return pickler

    pickler = with_large_stack(write)
    nbytes = pickler.file.getbuffer().nbytes
    shared = sum(buffer.raw().nbytes for buffer in pickler.buffers)
    by_import = not shared and not pickler.originals and pickler.modules and nbytes < 200
    how = "import" if by_import else "shared" if shared else "by value"
    return Item(name, how, shared + nbytes, read)


def html_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of texts as HTML."""

    def row(tag: str, cells: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + "".join([row("th", head), *(row("td", cells) for cells in rows)]) + "</table>"


def size(nbytes: float) -> str:
    """Describe a number of bytes, such as "1.5 KB"."""
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"
