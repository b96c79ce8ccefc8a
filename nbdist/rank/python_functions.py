"""Python's own functions, which are back in their places while nbdist does its work around the user's function.

Code that runs programs of a language model takes functions away from them (`builtins.open = None`, `os.kill = None`).
nbdist and the standard library need these functions to return the value.
"""

from __future__ import annotations

import builtins
import operator
import os
import types
from typing import Any

from ..system.interrupts import undivided

#: References of this module: a builtin may be gone when the user's function has returned.
_callable, _Exception = callable, Exception
_GONE = object()


class _Functions:
    """The functions and classes of a module, as they are when this object is made."""

    def __init__(self, module: types.ModuleType) -> None:
        self._names = vars(module)
        self._own = {name: value for name, value in self._names.items() if callable(value)}
        self._look_up, self._values = operator.itemgetter(*self._own), tuple(self._own.values())
        self._taken: dict[str, Any] = {}
        """The objects that the user's function has put in their places, by name."""

    def give(self) -> None:
        """Put back what the user's function has put into the module."""
        for name, value in self._taken.items():
            if self._names.get(name) is self._own[name]:  # the notebook has set no other one
                if value is _GONE:
                    del self._names[name]
                else:
                    self._names[name] = value

    def take(self) -> None:
        """Put back the functions that are gone, or in whose places there is something that cannot be called."""
        self._taken.clear()
        try:
            if self._look_up(self._names) == self._values:
                return
        except _Exception:  # some are gone, or another object does not compare
            pass
        for name, own in self._own.items():
            found = self._names.get(name, _GONE)
            if found is not own and not _callable(found):
                self._taken[name] = found
                self._names[name] = own


class PythonFunctions:
    """The functions of `builtins` and `os`. In a `with` block, they are as the user's function has left them."""

    def __init__(self) -> None:
        self._modules = _Functions(builtins), _Functions(os)

    @undivided("replaces functions of Python")
    def __enter__(self) -> None:
        for functions in self._modules:
            functions.give()

    @undivided("puts functions of Python back")
    def __exit__(self, *raised: object) -> None:
        for functions in self._modules:
            functions.take()
