"""State of the user's own modules that their functions have set when cells called them: ranks do not have it."""

from __future__ import annotations

import ast
import dis
import sys
import types
import warnings
from collections.abc import Collection, Iterator

from .assigned import Chain, Patch, chain_of
from .foreign import contents, is_a
from .modules import own_file
from .need import main_namespace
from .new_cells import NewCells, outside_functions

#: Values that a call of a function sets as options. Other values may be caches, or belong to one process.
_OPTIONS = (bool, int, float, complex, str, bytes, tuple)


class ModuleState:
    """Finder of calls in cells, such as `settings.configure(0.1)`, that set global variables of the user's own modules.
    It reads each cell once, a script once."""

    def __init__(self) -> None:
        self._cells = NewCells()
        self._setters: dict[types.FunctionType, list[str]] = {}
        """The functions that cells have called, with the variables that each sets."""

    def warn(self, modules: Collection[str], called: Collection[str], patches: Collection[Patch]) -> None:
        """Warn once for each function that has set a variable in one of these `modules`, unless its name is among the
        `called` ones or the variable is among the `patches` that are sent."""
        for cell in self._cells.take():
            for chain in _calls_in(cell):
                fn = _look_up(chain)
                if fn is not None and own_file(sys.modules.get(fn.__module__), fn.__module__) is not None:
                    stored = (one.argval for one in dis.get_instructions(fn) if one.opname == "STORE_GLOBAL")
                    self._setters[fn] = list(dict.fromkeys(stored))
        for fn, names in list(self._setters.items()):
            module = fn.__module__
            if module not in modules or fn.__name__ in called:
                continue
            del self._setters[fn]
            sent = {name for owner, name, _ in patches if owner is sys.modules.get(module)}
            values = contents(sys.modules.get(module))
            names = [name for name in names if name not in sent and type(values.get(name)) in _OPTIONS]
            if names:
                warnings.warn(
                    f"{module}.{fn.__qualname__}, which a cell has called, has set {', '.join(names)} of the module "
                    f"{module!r}, and ranks do not have these values: they import the module anew. Call "
                    f"{fn.__name__} in the function, too, or set {module}.{names[0]} in a cell.",
                    stacklevel=2,
                )


def _calls_in(cell: str) -> Iterator[Chain]:
    """Yield the names by which a cell calls functions, outside of functions of its own."""
    for node in outside_functions(cell):
        if isinstance(node, ast.Call) and (chain := chain_of(node.func)):
            yield chain


def _look_up(chain: Chain) -> types.FunctionType | None:
    """Return the function of a module that a variable of the notebook leads to."""
    found = main_namespace().get(chain[0])
    for name in chain[1:]:
        found = contents(found).get(name) if is_a(found, types.ModuleType) else None
    return found if isinstance(found, types.FunctionType) else None
