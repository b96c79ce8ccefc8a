"""Notebook objects as bytes and back: functions and classes by value, big buffers beside the pickle.

A function keeps the namespace it lives in: notebook functions find their globals in the rank's `__main__`, all of
them in the same one. The globals that they use travel too, once each, and end up in that namespace.
"""

from __future__ import annotations

import builtins
import dis
import functools
import importlib
import inspect
import io
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from . import fastai, reducers
from .reducers import OUT_OF_BAND, importable

Namespace = dict[str, Any]
#: Whether a global that travelled may enter its namespace: (key of the namespace, the namespace, name).
Keep = Callable[[str, Namespace, str], bool]


# ---------------------------------------------------------------------------------------------------- pickling


class Pickler(cloudpickle.Pickler):
    """A C-speed pickler that sends notebook functions by value, with the globals that they use.

    Args:
        file: Where the pickle goes.
        skip: Says of a global, by the key of its namespace and its name, that the reader has it already.
        known: The number, by id, of each object that came from the other side. It goes back as that number, so that
            the notebook gets its own class again and not a copy.
        to_cpu: Move CUDA tensors to the CPU. Otherwise they arrive on the reader's current CUDA device.
    """

    def __init__(
        self,
        file: io.BytesIO,
        *,
        skip: Callable[[str, str], bool] = lambda key, name: False,
        known: Mapping[int, int] | None = None,
        to_cpu: bool = False,
    ) -> None:
        self.file = file
        self.buffers: list[pickle.PickleBuffer] = []
        self.originals: list[Any] = []  # functions and classes sent by value, in the order of their numbers
        self.modules: set[str] = set()  # modules of what is sent by reference: the reader has to import them
        self._skip = skip
        self._known = known or {}
        self._to_cpu = to_cpu
        self.used: set[tuple[str, str]] = set()  # globals that functions use: key of the namespace, name
        self.captured: dict[str, Any] = {}  # those of them that travel
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, reducers.Storage] = {}
        # Not a method: with a reference to itself, a pickler and its data would wait for the garbage collector.
        super().__init__(file, protocol=5, buffer_callback=functools.partial(_keep_buffer, self.buffers))

    def reducer_override(self, obj: Any) -> Any:  # called for everything but the plain built-in types
        number = self._known.get(id(obj))
        if number is not None:
            return _original, (number,)
        if isinstance(obj, types.FunctionType):
            if importable(obj):
                self.modules.add(obj.__module__)
                return NotImplemented
            self._number(obj)
            return self._reduce_function(obj)
        if isinstance(obj, type):
            if importable(obj):
                self.modules.add(obj.__module__)
            elif obj.__module__ != "builtins":  # where NoneType and its like say they are
                self._number(obj)
                return reducers.amend_class(obj, super().reducer_override(obj))
            return super().reducer_override(obj)
        if isinstance(obj, BaseException) and reducers.has_own_init(type(obj)):
            return reducers.make_exception, (type(obj), obj.args), obj.__dict__
        if isinstance(obj, types.ModuleType):
            self.modules.add(obj.__name__)
        if isinstance(obj, types.CellType):
            return _reduce_cell(obj)
        if type(obj) in reducers.BY_TYPE:
            return reducers.BY_TYPE[type(obj)](obj)
        reduction = reducers.reduce_data(obj) or fastai.reduce(obj)
        if reduction is not None:
            return reduction
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(obj, torch.storage.TypedStorage):
                return self._reduce_storage(obj)
            if type(obj) is torch.device and obj.type == "cuda":
                # A device number means nothing elsewhere: ranks take their own device, the notebook the CPU.
                return torch.device, ("cpu",) if self._to_cpu else ("cuda",)
        return super().reducer_override(obj)

    def _number(self, obj: Any) -> None:
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.originals)
            self.originals.append(obj)

    def _reduce_function(self, fn: types.FunctionType) -> tuple[Any, ...]:
        key, captured = _namespace_of(fn.__globals__)
        names = {}
        for name in globals_used(fn.__code__):
            # pytest's rewritten asserts use names such as '@pytest_ar' that no import of the module gives.
            if (captured or name.startswith("@")) and name in fn.__globals__ and (key, name) not in self.used:
                self.used.add((key, name))  # the first function that uses it brings it for all
                if not self._skip(key, name):
                    names[name] = self.captured[name] = fn.__globals__[name]
        attributes = {name: getattr(fn, name) for name in _FUNCTION_ATTRIBUTES if hasattr(fn, name)}
        args = (fn.__code__, key, fn.__globals__.get("__name__"), fn.__name__, fn.__closure__)
        return (
            _make_function,
            args,
            (Globals(key, names), attributes, fn.__dict__),
            None,
            None,
            _set_function_state,
        )

    def _reduce_storage(self, storage: Any) -> tuple[Any, ...]:
        # Each access to a tensor's storage makes a new Python object: only its address tells that two are one.
        untyped = storage._untyped_storage
        held = self._storages.setdefault(untyped._cdata, reducers.Storage(untyped, self._to_cpu))
        return reducers.typed_storage, (held, storage.dtype)


def _keep_buffer(kept: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    """Whether `buffer` belongs into the pickle; it is kept beside it otherwise."""
    if buffer.raw().nbytes < OUT_OF_BAND:
        return True
    kept.append(buffer)
    return False


class Globals:
    """Variables that enter the namespace `key` when they are read."""

    def __init__(self, key: str, names: Mapping[str, Any]) -> None:
        self.key, self.names = key, names

    def __reduce__(self) -> tuple[Any, ...]:
        return _enter_globals, (self.key, dict(self.names))


def _enter_globals(key: str, names: dict[str, Any]) -> None:
    if names:
        namespace = _reading.namespace(key, key.partition("#")[0])
        namespace.update((name, value) for name, value in names.items() if _reading.keep(key, namespace, name))


# ------------------------------------------------------------------------- functions, their cells and their globals

_FUNCTION_ATTRIBUTES = (
    "__defaults__ __kwdefaults__ __annotations__ __doc__ __module__ __qualname__ __type_params__".split()
)


def namespace_key(fn: Callable[..., Any]) -> str:
    """The namespace in which `fn`, whatever it is wrapped in, finds its globals."""
    inner = inspect.unwrap(fn)
    while isinstance(inner, (functools.partial, types.MethodType)):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
    return _namespace_of(inner.__globals__)[0] if hasattr(inner, "__globals__") else "__main__"


def _namespace_of(namespace: Namespace) -> tuple[str, bool]:
    """A key for a function's globals, and whether they have to travel (they do unless a module import gives them)."""
    name = namespace.get("__name__", "__main__")
    module = sys.modules.get(name)
    if module is not None and module.__dict__ is namespace:
        return name, name == "__main__"
    return f"{name}#{id(namespace)}", True  # such as a script run by IPython's %run, or exec with an own dict


@functools.lru_cache(maxsize=4096)
def globals_used(code: types.CodeType) -> tuple[str, ...]:
    """The global names that `code`, or a function or class inside it, reads or writes."""
    names = {
        i.argval: None
        for i in dis.get_instructions(code)
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
        or i.opname == "LOAD_FROM_DICT_OR_GLOBALS"
    }
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.update(dict.fromkeys(globals_used(const)))
    return tuple(names)


def _make_function(
    code: types.CodeType, key: str, module: str | None, name: str, closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    return types.FunctionType(code, _reading.namespace(key, module), name, None, closure)


def _set_function_state(fn: types.FunctionType, state: tuple[None, dict[str, Any], dict[str, Any]]) -> None:
    _, attributes, fn_dict = state
    for name, value in attributes.items():
        setattr(fn, name, value)
    fn.__dict__.update(fn_dict)


def _reduce_cell(cell: types.CellType) -> tuple[Any, ...]:
    # First the empty cell, then its content: two functions that share a cell still do, and recursion ends.
    try:
        return types.CellType, (), (cell.cell_contents,), None, None, _set_cell
    except ValueError:  # empty
        return types.CellType, ()


def _set_cell(cell: types.CellType, state: tuple[Any]) -> None:
    cell.cell_contents = state[0]


# --------------------------------------------------------------------------------------------------- unpickling


class _Reading(threading.local):
    """What the functions named in a pickle need to know of the load that they are part of."""

    originals: Sequence[Any] = ()
    keep: Keep
    anonymous: dict[str, Namespace]

    def namespace(self, key: str, module: str | None) -> Namespace:
        if "#" in key:
            return self.anonymous.setdefault(key, {"__name__": module, "__builtins__": builtins})
        return importlib.import_module(key).__dict__


_reading = _Reading()


def _original(number: int) -> Any:
    return _reading.originals[number]


def read(pickled: memoryview, buffers: Iterable[memoryview], *, originals: Sequence[Any], keep: Keep) -> Any:
    """Read what a `Pickler` wrote.

    A global that travelled is put into its namespace where `keep(key, namespace, name)` allows it. `originals` is
    what this side once sent by value, in the order of the numbers.
    """
    saved = vars(_reading).copy()  # reading may lead to reading
    _reading.originals, _reading.keep, _reading.anonymous = originals, keep, {}
    try:
        return pickle.loads(pickled, buffers=buffers)
    finally:
        vars(_reading).clear()
        vars(_reading).update(saved)
