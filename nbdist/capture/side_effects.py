"""Modules that are imported for their effect on other modules: `fastai.distributed` gives fastai's learners a
`distrib_ctx`.

No name in a call leads to them, so the notebook's import statements are read: ranks import the notebook's modules of
each package that a call uses. torch is left out: it is imported as a whole, and further modules, such as
`torch.utils.tensorboard`, take long to import.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import text_of
from .foreign import contents, text
from .need import main_namespace
from .new_cells import NewCells, outside_functions
from .patches import classes

_NEVER = frozenset(["torch", __name__.partition(".")[0], *sys.stdlib_module_names])
_MISSING = re.compile(r"has no attribute '(\w+)'")
#: What pickle says of a class of the notebook that a file names.
_UNKNOWN = re.compile(r"Can't get attribute '(\w+)' on <module '__main__'")


class ImportStatements:
    """The modules in import statements of the cells that were run, or of the script."""

    def __init__(self) -> None:
        self._cells = NewCells()
        self._named: dict[str, None] = {}

    def named(self) -> list[str]:
        """Return the modules that are loaded, in the order of their first import."""
        for cell in self._cells.take():
            self._named.update(dict.fromkeys(modules_in(cell)))
        return [name for name in self._named if name in sys.modules]


#: Of this process.
statements = ImportStatements()


def imported_alongside(modules: Iterable[str]) -> list[str]:
    """Return the modules that the notebook has imported from the packages that a call uses, except the `modules`
    that the call itself uses.
    """
    used = set(modules)
    packages = {name.partition(".")[0] for name in used} - _NEVER
    if not packages:
        return []
    return [name for name in statements.named() if name not in used and name.partition(".")[0] in packages]


def missing_import(error: AttributeError) -> str:
    """Return the import that would add a missing attribute to a class of another module; empty if none would."""
    unknown = _UNKNOWN.search(text_of(error))
    if unknown is not None and unknown[1] in main_namespace():
        return f"The notebook has {unknown[1]}, and the rank had not been given it: need={unknown[1]!r}"
    missing = _MISSING.search(text_of(error))
    if missing is None:
        return ""
    for cls in classes():
        value: Any = contents(cls).get(missing[1])
        if type(value) in (property, classmethod, staticmethod):
            value = value.fget if type(value) is property else value.__func__
        giver = value.__globals__.get("__name__") if type(value) is types.FunctionType else None
        if giver not in (None, "__main__", text(cls, "__module__")) and text(value, "__module__") == giver:
            return (
                f"In the notebook, {giver} has given {text(cls, '__name__')} its {missing[1]!r}; the rank had not "
                f"imported it: imports='import {giver}'"
            )
    return _missing_of_fastai(missing[1])


def _missing_of_fastai(name: str) -> str:
    """Return advice about an attribute that learners lack, from fastai's index of the modules that add attributes."""
    if "fastai.learner" not in sys.modules:
        return ""
    with contextlib.suppress(ImportError, AttributeError, KeyError):
        modules = importlib.import_module("fastai._modidx").d["syms"]
        for giver, symbols in modules.items():
            if giver not in sys.modules and f"{giver}.Learner.{name}" in symbols:
                return (
                    f"fastai's learners have {name!r} from {giver}: `from {giver} import *` in a cell, or in imports="
                )
    return ""


def modules_in(text: str, package: str = "") -> Iterator[str]:
    """Return the modules in the import statements of a cell or module outside functions.

    Relative imports count if the module's `package` is given.
    """
    if "import" not in text:
        return
    for node in outside_functions(text, skip=(ast.expr,)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # it is relative, and has more dots than the package
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)  # it may be a module: those that are
