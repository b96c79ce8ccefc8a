"""Functions that pickles of the notebook's objects call when they are read."""

from __future__ import annotations

import builtins
import importlib
import pickle
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .names import Namespace, Outputs

#: Whether a global that travelled may enter its namespace: (key of the namespace, the namespace, name).
Keep = Callable[[str, Namespace, str], bool]


class Unreadable(Exception):
    """The failure to read a pickle. Its argument is the name of the object that was being read; its cause is the
    exception."""


class _Reading(threading.local):
    """State of reading in this thread, for the functions that the pickle calls."""

    originals: Sequence[Any] = ()
    keep: Keep
    modules: dict[str, types.ModuleType]
    """Modules that are made, by the keys of their namespaces."""
    names: list[str]
    """Names of the variables and arguments that are being read, the innermost last."""


_reading = _Reading()


def read(
    pickled: memoryview,
    buffers: Iterable[memoryview],
    *,
    originals: Sequence[Any],
    keep: Keep,
    loads: Callable[..., Any] = pickle.loads,
) -> Any:
    """Read the pickle of a `Pickler`.

    A global that was sent is set in its namespace if `keep(key, namespace, name)` returns True. `originals` are the
    objects that this side once sent by value, by number; `loads` takes the arguments of `pickle.loads`.

    Raises:
        Unreadable: Something that has a name could not be read.
    """
    saved = vars(_reading).copy()  # reading may lead to reading
    _reading.originals, _reading.keep, _reading.modules, _reading.names = originals, keep, {}, []
    try:
        return loads(pickled, buffers=buffers)
    except Exception as exc:
        if not _reading.names:
            raise
        raise Unreadable(_reading.names[-1]) from exc
    finally:
        vars(_reading).clear()
        vars(_reading).update(saved)


def being_read() -> str:
    """Return the name of the variable, argument or value that is being read."""
    return _reading.names[-1] if _reading.names else "a part"


def original(number: int) -> Any:
    """Return an object that this side has sent by value."""
    return _reading.originals[number]


def itself(value: Any) -> Any:
    """Return the argument. A pickle uses this function to put an object in the place of another one."""
    return value


def nothing(*args: Any) -> None:
    """Return None. A pickle calls this function to make its reader read the arguments in order."""


# -------------------------------------------------------------------------------------------------------- names


def begin(name: str) -> bool:
    """Record the name of the object that is read now."""
    _reading.names.append(name)
    return True


def named(begun: bool, value: Any, done: None = None) -> Any:
    """Record that the object with the latest name has been read."""
    _reading.names.pop()
    return value


def enter(begun: bool | None, key: str, name: str, value: Any, done: None = None) -> None:
    """Set a variable in the namespace `key`."""
    if begun:
        _reading.names.pop()
    enter_all(key, {name: value})


def enter_all(key: str, names: Mapping[str, Any]) -> None:
    """Set variables in the namespace `key`."""
    namespace = namespace_for(key)
    namespace.update((name, value) for name, value in names.items() if _reading.keep(key, namespace, name))


def enter_outputs(key: str, outputs: Mapping[int, Any]) -> None:
    """Set values that the notebook has shown."""
    namespace = namespace_for(key)
    if not isinstance(namespace.get("Out"), Outputs):
        namespace["Out"] = Outputs()
    namespace["Out"].update(outputs)


def namespace_for(key: str) -> Namespace:
    """Return the namespace for a key of `names.namespace_of`."""
    return module_for(key).__dict__ if "#" in key else importlib.import_module(key).__dict__


def module_for(key: str, doc: str | None = None) -> types.ModuleType:
    """Return a module that no import gives."""
    if key not in _reading.modules:
        module = _reading.modules[key] = types.ModuleType(key.rpartition("#")[0], doc)
        vars(module)["__builtins__"] = builtins
    return _reading.modules[key]


# ------------------------------------------------------------------------------------------- functions and cells


def make_function(
    code: types.CodeType,
    key: str,
    name: str,
    module: str | None,
    qualname: str,
    doc: str | None,
    closure: tuple[types.CellType, ...] | None,
) -> types.FunctionType:
    fn = types.FunctionType(code, namespace_for(key), name, None, closure)
    fn.__module__, fn.__qualname__, fn.__doc__ = module, qualname, doc  # type: ignore[assignment]
    return fn


def set_function(fn: types.FunctionType, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(fn, name, value)


def set_cell(cell: types.CellType, content: Any) -> None:
    cell.cell_contents = content


def set_cell_state(cell: types.CellType, state: tuple[Any]) -> None:
    cell.cell_contents = state[0]
