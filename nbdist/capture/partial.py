"""A value without the parts that cannot be sent or rebuilt: `Absent` replaces each such part."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from ..errors import text_of
from .diagnosis import culprit_of
from .foreign import text
from .pickler import Pickler

#: The most parts that are replaced: where there are more, the value is of a kind that does not travel.
_MOST = 20


class Absent:
    """The replacement of a part of a value that could not be sent or rebuilt.

    Attributes: `name`, the name of the part; `why`, the reason; `state`, the content of the part, if it has arrived.
    """

    def __init__(self, name: str, why: str, state: Any = None) -> None:
        self.name, self.why, self.state = name, why, state

    def __repr__(self) -> str:
        return f"<absent: {self.name} ({self.why})>"


def absent_parts(value: Any, what: str, instead: Mapping[int, Any], **options: Any) -> dict[int, Any]:
    """Return replacements for the parts of `value` that cannot be pickled, by their ids.

    The result is empty if nothing would remain of the value without these parts. `what` is the name of the value;
    `instead` are other replacements, which the result includes; the options are options of `Pickler`.
    """
    absent = dict(instead)
    for _ in range(_MOST):
        try:
            Pickler(io.BytesIO(), instead=absent, **options).dump(value)
            return absent
        except RecursionError:
            return {}
        except Exception as exc:
            name, part = culprit_of(what, value, absent)
            if part is value or id(part) in absent:
                return {}
            absent[id(part)] = Absent(name, f"{text(type(part), '__qualname__')}: {text_of(exc)}")
    return {}


def loads(pickled: memoryview, *, buffers: Iterable[memoryview], name: Callable[[], str]) -> Any:
    """Read a pickle like `pickle.loads`, with `Absent` for each part that raises; `name` returns the name of the part
    that is being read.

    This takes some fifty times as long as `pickle.loads`.
    """
    return _Unpickler(io.BytesIO(pickled), name, buffers).load()


class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    stack: list[Any]
    memo: dict[int, Any]

    def __init__(self, file: io.BytesIO, name: Callable[[], str], buffers: Iterable[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except Exception as exc:
            return self._absent(exc, None)

    def _absent(self, exc: Exception, state: Any) -> Absent:
        return Absent(self._name(), f"{type(exc).__name__}: {text_of(exc)}", state)

    def _made(self, action: Callable[[Any], None], depth: int) -> None:
        """Run an operation that replaces the last `depth` objects of the stack by one."""
        below, used = self.stack[:-depth], self.stack[-depth:]
        try:
            action(self)
        except Exception as exc:
            first = used[0]
            made = first if isinstance(first, Absent) else self._absent(exc, None)
            made.state = used[-1] if made.state is None else made.state
            self.stack[:] = [*below, made]
            for number, known in list(self.memo.items()):
                if known is first and not isinstance(first, (type, Absent)) and not callable(first):
                    self.memo[number] = made

    def _filled(self, action: Callable[[Any], None]) -> None:
        """Run an operation that puts objects of the stack into another object, which may be absent."""
        try:
            action(self)
        except Exception:
            return


def _tolerant() -> None:
    """Replace the operations that call code of the objects."""
    original = pickle._Unpickler.dispatch

    def made(opcode: bytes, depth: int) -> None:
        action = original[opcode[0]]
        _Unpickler.dispatch[opcode[0]] = lambda self: self._made(action, depth)

    def filled(opcode: bytes) -> None:
        action = original[opcode[0]]
        _Unpickler.dispatch[opcode[0]] = lambda self: self._filled(action)

    made(pickle.REDUCE, 2)
    made(pickle.NEWOBJ, 2)
    made(pickle.NEWOBJ_EX, 3)
    made(pickle.BUILD, 2)
    for opcode in (pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS):
        filled(opcode)


_tolerant()
