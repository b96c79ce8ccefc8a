"""The imports among the user's own modules: a module is executed again after what it imports."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping

from ..capture.modules import own_file
from ..capture.side_effects import modules_in


def imports_of(names: Iterable[str]) -> dict[str, set[str]]:
    """Return for each of these modules which of them it imports when it is executed, as its source says.

    Imports in functions do not count: they happen at each call.
    """
    known = set(names)
    imports: dict[str, set[str]] = {}
    for name in names:
        module = sys.modules.get(name)
        imports[name] = set(modules_in(_source(own_file(module, name)), _package(module))) & (known - {name})
    return imports


def imported_first(imports: Mapping[str, set[str]]) -> list[str]:
    """Return the modules in an order in which each comes after what it imports, as far as there are no circles."""
    order: list[str] = []
    entered: set[str] = set()

    def visit(name: str) -> None:
        if name not in entered:
            entered.add(name)
            for imported in sorted(imports[name]):
                visit(imported)
            order.append(name)

    for name in imports:
        visit(name)
    return order


def _package(module: object) -> str:
    return getattr(module, "__package__", None) or ""


def _source(file: str | None) -> str:
    """Return the text of a source file; empty if there is none that can be read."""
    try:
        with open(file or "", "rb") as source:
            return importlib.util.decode_source(source.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""
