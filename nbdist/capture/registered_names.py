"""The names under which cells register objects of libraries: a colormap of matplotlib, an attribute of spaCy.

Such an entry holds nothing of the notebook. It is recognized by its name, a text of a cell, and by its place, a
container of the package whose function the cell has called.
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any

from .foreign import PLAIN, is_a, text

#: Functions that put something into a registry.
_REGISTERS = re.compile(r"regist|set_extension|^(component|factory|define)$")
#: Packages whose registries have their own way.
_NEVER = ("torch", "numpy", "builtins", "__main__")


class RegisteredNames:
    """Reader of cells: the texts in them, and the packages in whose registries they put something."""

    def __init__(self) -> None:
        self._texts: set[str] = set()
        self._roots: set[str] = set()
        """The variables whose functions cells call to register something."""
        self._packages: set[str] = set()

    def read(self, cells: Sequence[str]) -> None:
        """Read new cells."""
        for cell in cells:
            try:
                tree = ast.parse(cell)
            except (SyntaxError, ValueError):  # a magic, say
                continue
            nodes = ast.walk(tree)
            self._texts.update(
                node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str
            )
            self._roots.update(_registering(tree))

    def find_packages(self, main: dict[str, Any]) -> None:
        """Find the packages in whose registries cells put something. `main` has the notebook's variables."""
        self._packages.update(_package_of(main[root]) for root in self._roots if root in main)
        self._packages.difference_update(_NEVER)

    def in_package(self, package: str) -> set[str]:
        """Return the names that a registry of this package may have from the notebook."""
        return self._texts if package in self._packages else set()


def may_be(key: Any, value: Any, names: set[str]) -> bool:
    """Return whether an entry may be the notebook's: one of these names in a list or a set, or under one of them a name
    or an object. Functions, classes and containers are the library's own."""
    kind = type(value)
    if kind is str and value in names:
        return key is None or (type(key) is str and key in names)
    return type(key) is str and key in names and kind not in PLAIN and not issubclass(kind, _OF_CODE)


#: Kinds of values that are the library's own.
_OF_CODE = (type, types.FunctionType, types.ModuleType, dict, list)


def _package_of(obj: Any) -> str:
    name = text(obj, "__name__") if is_a(obj, types.ModuleType) else text(obj, "__module__")
    return (name or text(type(obj), "__module__")).partition(".")[0]


def _registering(tree: ast.Module) -> Iterator[str]:
    """Yield the variables whose functions are called to register something, outside of functions."""
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            nodes += node.decorator_list
        elif not isinstance(node, ast.Lambda):
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Call):
            called: ast.AST = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            while isinstance(called, ast.Attribute):
                called = called.value
            if isinstance(called, ast.Name) and _REGISTERS.search(name):
                yield called.id
