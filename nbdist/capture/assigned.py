"""Attributes of modules and classes that the notebook's cells assign by name, such as `settings.RATE = 0.1`."""

from __future__ import annotations

import ast
import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from .foreign import is_a
from .modules import objects_of_own_modules, own_file
from .names import importable
from .need import main_namespace
from .new_cells import NewCells, outside_functions

#: A class or module, the name of its attribute, and what the notebook has put there.
Patch = tuple[type | types.ModuleType, str, Any]

#: Modules in which what the notebook sets is no patch. `sys` has much that is a process's own.
NO_LIBRARIES = {"__main__", "__mp_main__", "sys"}
#: What ranks have as cells have set it in `sys`.
_OF_SYS = {"argv", "dont_write_bytecode", "excepthook", "tracebacklimit", "unraisablehook"}
#: Packages whose settings have their own way, or that are nbdist's.
_NEVER = {"torch", "matplotlib", "IPython", "ipykernel", "warnings", __name__.partition(".")[0]}
#: Names, of a variable first: of what an attribute's attribute is set.
Chain = tuple[str, ...]
#: What follows the name of a variable if a cell calls a method of its value.
CALLED: Chain = ("()",)


class Gone:
    """The value, in a patch, of an attribute of the user's own module or class that the notebook has deleted."""


class Assigned:
    """Reader of assignments: it reads each cell once, a script once, and the current values of the attributes at each
    call."""

    def __init__(self) -> None:
        self._cells = NewCells()
        self._chains: dict[Chain, None] = {}
        self._called: dict[str, None] = {}
        """The variables whose methods cells call."""

    def find(self) -> Iterator[Patch]:
        """Yield the attributes that the notebook has set in modules and classes that ranks import."""
        for cell in self._cells.take():
            for chain in assigned_in(cell):
                if chain[1:] == CALLED:
                    self._called[chain[0]] = None
                else:
                    self._chains[chain] = None
        for chain in self._chains:
            with contextlib.suppress(Exception):  # what a metaclass raises, say: it is only help
                patch = _look_up(chain)
                if patch is not None:
                    yield patch
        yield from self._find_shared()

    def _find_shared(self) -> Iterator[Patch]:
        """Yield the objects of the user's own modules that a cell changes through a variable of its own, as after `from
        settings import RATES`."""
        main = main_namespace()
        changed = {chain[0]: None for chain in self._chains}
        # A method of a container changes it, most others change nothing.
        changed.update((root, None) for root in self._called if is_a(main.get(root), (dict, list, set)))
        values = [main[root] for root in changed if root in main]
        places = objects_of_own_modules() if values else {}
        for value in values:
            for module, name in places.get(id(value), ()):
                yield sys.modules[module], name, value


def assigned_in(cell: str) -> Iterator[Chain]:
    """Yield the attributes that a cell assigns, changes or fills outside functions, and the variables whose methods it
    calls."""
    if not any(mark in cell for mark in (".", "[", "setattr")):
        return
    for node in outside_functions(cell):
        target: ast.AST | None = None
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            target = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func  # settings.RATES.update(...)
        chain = chain_of(target) if target is not None else ()
        if isinstance(node, ast.Call) and chain:
            chain = (*chain[:-1], "") if len(chain) > 2 else (*chain[:-1], *CALLED)  # a method changes its object
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            name = node.args[1] if len(node.args) == 3 else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                chain = chain_of(node.args[0])
                chain = (*chain, name.value) if chain else ()
        if len(chain) > 1:
            yield chain


def chain_of(node: ast.AST) -> Chain:
    """Return the names of `a.b.c`, or of `a.b[0].c` with "" in place of the index; an empty tuple for other
    expressions."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        before = chain_of(node.value)
        return (*before, node.attr if isinstance(node, ast.Attribute) else "") if before else ()
    return ()


def _look_up(chain: Chain) -> Patch | None:
    """Return the attribute of a module or class that a chain of names leads to, with its current value."""
    owner: Any = main_namespace().get(chain[0])
    for place, name in enumerate(chain[1:], 1):
        if not (_may_be_patched(owner) or (owner is sys and name in _OF_SYS)):
            return None
        value = vars(owner).get(name, Gone)
        last = place == len(chain) - 1
        if value is Gone:
            return (owner, name, Gone) if last and name and _is_own(owner) else None
        if last or not isinstance(value, (types.ModuleType, type)):
            # An object inside a module is sent where the module is the user's own: a library's may hold anything.
            known = last or _is_own(owner)
            return (owner, name, value) if known and not _is_at_home(owner, name, value) else None
        owner = value
    return None


def _is_at_home(owner: Any, name: str, value: Any) -> bool:
    """Return whether a function or class is at the place of its definition, for example because it was put back."""
    value = getattr(value, "__func__", value) if type(value) in (classmethod, staticmethod) else value
    if not isinstance(value, (types.FunctionType, type)):
        return False
    place = owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    return f"{value.__module__}.{value.__qualname__}" == f"{place}.{name}"


def _may_be_patched(owner: Any) -> bool:
    if isinstance(owner, types.ModuleType):
        name = owner.__name__
        found = sys.modules.get(name) is owner
    elif isinstance(owner, type):
        name = owner.__module__
        found = importable(owner)
    else:
        return False
    return found and name not in NO_LIBRARIES and name.partition(".")[0] not in _NEVER


def _is_own(owner: type | types.ModuleType) -> bool:
    name = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    return own_file(sys.modules.get(name), name) is not None
