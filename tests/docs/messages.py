"""The tables of messages in the documentation, made from the classes of the protocol.

`python tests/docs/messages.py` writes them into docs/how-it-works/connections.md.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_args

from nbdist.wire import protocol

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works" / "connections.md"
_BEGIN = "| to the rank |"


def page() -> str:
    """The page as it should be: the tables are at its end."""
    return PAGE.read_text(encoding="utf-8").partition(_BEGIN)[0] + tables()


def tables() -> str:
    """A table for each direction: the messages, their fields, and the sentence about each."""
    return f"{_table('to the rank', protocol.ToRank)}\n{_table('from the rank', protocol.FromRank)}"


def _table(title: str, kinds: Any) -> str:
    rows = [f"| {title} | fields | |", "|---|---|---|"]
    for kind in get_args(kinds):
        fields = ", ".join(f"`{field}`" for field in kind._fields)
        rows.append(f"| `{kind.__name__}` | {fields} | {' '.join((inspect.getdoc(kind) or '').split())} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
