"""The order in which definitions and data are pickled, so that everything that a value needs is rebuilt before it.

The code of a function or class is written first, with other definitions that it names, constants and modules. Its other
references (global data, closures, defaults, class attributes) may contain instances of the classes that are being
defined, and may run their methods when they are read. They are written when the outermost definition is complete.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import reading

Reduction = tuple[Any, ...]

_CONSTANTS = frozenset([type(None), bool, int, float, complex, str, bytes, type(...)])
_DEFINITIONS = (
    *(types.FunctionType, type, classmethod, staticmethod, property, types.BuiltinFunctionType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType),
)


def is_constant(value: Any) -> bool:
    """Return whether reading `value` runs no code and needs only importable objects."""
    return type(value) in _CONSTANTS or isinstance(value, types.ModuleType)


def is_definition(value: Any) -> bool:
    """Return whether `value` is code."""
    return isinstance(value, _DEFINITIONS)


class Progress:
    """The progress of writing a pickle."""

    def __init__(self) -> None:
        self.entered: dict[tuple[str, str], bool] = {}
        """The variables that are being written or are written, by the key of their namespace and their name. The value
        is True once a variable is complete."""
        self.depth = 0
        """The number of nested definitions that are being written."""
        self.waiting: list[UnpickleStep] = []
        """Steps that the nested definitions refer to, and that are written after them."""


class UnpickleStep:
    """An operation to run when the pickle is read; it is determined when the pickler reaches it."""

    __slots__ = ()

    def reduce(self, progress: Progress) -> Reduction:
        """Return the reduction to pickle for this step."""
        raise NotImplementedError


_NOTHING: Reduction = (reading.nothing, ())


class CallStep(UnpickleStep):
    """A call of a function of this package, which runs when the pickle is read."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def reduce(self, progress: Progress) -> Reduction:
        return self.function, self.args


class Named(UnpickleStep):
    """A value that has a name for errors."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def reduce(self, progress: Progress) -> Reduction:
        return reading.named, (CallStep(reading.begin, self.name), self.value)


class Enter(UnpickleStep):
    """A step that sets a variable in a namespace, the first time that it is read."""

    __slots__ = ("key", "name", "value")

    def __init__(self, key: str, name: str, value: Any) -> None:
        self.key, self.name, self.value = key, name, value

    def reduce(self, progress: Progress) -> Reduction:
        done = progress.entered.get((self.key, self.name))
        if done:
            return _NOTHING
        if done is False:  # It is on its way, and leads here: as much of it as there is, is better than no such name.
            return reading.enter, (None, self.key, self.name, self.value)
        progress.entered[self.key, self.name] = False
        begun, end = CallStep(reading.begin, self.name), _Entered(self.key, self.name)
        return reading.enter, (begun, self.key, self.name, self.value, end)


class EnterOwn(Enter):
    """A new function or class that is set in a namespace."""

    __slots__ = ()

    def reduce(self, progress: Progress) -> Reduction:
        if progress.entered.get((self.key, self.name)):
            return _NOTHING
        progress.entered[self.key, self.name] = True
        return reading.enter, (None, self.key, self.name, self.value)


class EnterConstants(UnpickleStep):
    """Variables without dependencies that are set in a namespace."""

    __slots__ = ("key", "names")

    def __init__(self, key: str, names: Mapping[str, Any]) -> None:
        self.key, self.names = key, names

    def reduce(self, progress: Progress) -> Reduction:
        progress.entered.update(((self.key, name), True) for name in self.names)
        return reading.enter_all, (self.key, dict(self.names))


class _Entered(UnpickleStep):
    __slots__ = ("key", "name")

    def __init__(self, key: str, name: str) -> None:
        self.key, self.name = key, name

    def reduce(self, progress: Progress) -> Reduction:
        progress.entered[self.key, self.name] = True
        return _NOTHING


class Open(UnpickleStep):
    """The step at the beginning of a definition."""

    __slots__ = ()

    def reduce(self, progress: Progress) -> Reduction:
        progress.depth += 1
        return _NOTHING


class Close(UnpickleStep):
    """The step at the end of a definition. The data that the definition refers to are written later, when the outermost
    definition ends.
    """

    __slots__ = ("data",)

    def __init__(self, data: Sequence[UnpickleStep]) -> None:
        self.data = data

    def reduce(self, progress: Progress) -> Reduction:
        progress.depth -= 1
        progress.waiting += self.data
        if progress.depth:
            return _NOTHING
        steps, progress.waiting = progress.waiting, []
        return reading.nothing, tuple(steps)
