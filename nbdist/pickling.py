"""Notebook objects as bytes and back: functions and classes by value, big buffers beside the pickle.

A function keeps the namespace it lives in: notebook functions find their globals in the rank's `__main__`, all of
them in the same one. The globals that they use travel too, once each, and end up in that namespace.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import importlib
import inspect
import io
import pickle
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from . import fastai

#: Buffers of at least this many bytes travel beside the pickle; smaller ones are cheaper inside it.
OUT_OF_BAND = 16 * 1024

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
        self._storages: dict[int, _Storage] = {}
        super().__init__(file, protocol=5, buffer_callback=self._keep_buffer)

    def _keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < OUT_OF_BAND:
            return True
        self.buffers.append(buffer)
        return False

    def reducer_override(self, obj: Any) -> Any:  # called for everything but the plain built-in types
        number = self._known.get(id(obj))
        if number is not None:
            return _original, (number,)
        if isinstance(obj, types.FunctionType):
            if _importable(obj):
                self.modules.add(obj.__module__)
                return NotImplemented
            self._number(obj)
            return self._reduce_function(obj)
        if isinstance(obj, type):
            if _importable(obj):
                self.modules.add(obj.__module__)
            elif obj.__module__ != "builtins":  # where NoneType and its like say they are
                self._number(obj)
                return _amend_class(obj, super().reducer_override(obj))
            return super().reducer_override(obj)
        if isinstance(obj, BaseException) and _has_own_init(type(obj)):
            return _make_exception, (type(obj), obj.args), obj.__dict__
        if isinstance(obj, types.ModuleType):
            self.modules.add(obj.__name__)
        reduce = _REDUCERS.get(type(obj))
        if reduce is not None:
            return reduce(obj)
        reduction = _reduce_data(obj)
        if reduction is not None:
            return reduction
        reduction = fastai.reduce(obj)
        if reduction is not None:
            return reduction
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and type(obj) is numpy.ndarray and obj.dtype.kind in "mM":
            return _view, (obj.view("i8"), obj.dtype)  # dates give no buffers, and would be copied into the pickle
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
        held = self._storages.setdefault(untyped._cdata, _Storage(untyped, self._to_cpu))
        return _typed_storage, (held, storage.dtype)


def _view(array: Any, dtype: Any) -> Any:
    return array.view(dtype)


def _reduce_data(obj: Any) -> tuple[Any, ...] | None:
    """How those data are pickled whose own way would copy them into the pickle; None for any other object."""
    numpy, polars = sys.modules.get("numpy"), sys.modules.get("polars")
    if numpy is not None and type(obj) in (numpy.ndarray, numpy.memmap):
        plain = type(obj) is numpy.ndarray and (obj.flags.c_contiguous or obj.flags.f_contiguous)
        if obj.nbytes >= OUT_OF_BAND and not obj.dtype.hasobject and not plain:
            whole = obj.view(numpy.ndarray)
            if not (obj.flags.c_contiguous or obj.flags.f_contiguous):
                whole = whole.copy(order="K")
            return _array, (whole, type(obj), obj.flags.writeable)
    if polars is not None and isinstance(obj, (polars.DataFrame, polars.Series)):
        with contextlib.suppress(ImportError, TypeError, ValueError, polars.exceptions.PolarsError):
            return _polars, (type(obj), obj.to_arrow(), getattr(obj, "name", None), _schema(obj))
    return None


def _array(whole: Any, cls: type, writeable: bool) -> Any:
    array = whole.view(cls)
    if not writeable:
        array.flags.writeable = False
    return array


def _schema(obj: Any) -> Any:
    return dict(obj.schema) if hasattr(obj, "schema") else obj.dtype


def _polars(cls: type, arrow: Any, name: str | None, schema: Any) -> Any:
    import polars

    if cls is polars.Series:
        return polars.Series(name, polars.from_arrow(arrow)).cast(schema)
    frame = polars.from_arrow(arrow)
    return frame.cast(schema)


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


class _Storage:
    """A torch storage on its way: its bytes travel once, however many tensors are views of it."""

    def __init__(self, untyped: Any, to_cpu: bool) -> None:
        self.untyped, self.to_cpu = untyped, to_cpu

    def __reduce__(self) -> tuple[Any, ...]:
        import torch

        on_cuda = self.untyped.device.type == "cuda"
        untyped = self.untyped if self.untyped.device.type == "cpu" else self.untyped.cpu()
        data = torch.empty(0, dtype=torch.uint8).set_(untyped).numpy()
        return _untyped_storage, (pickle.PickleBuffer(data.data), on_cuda and not self.to_cpu)


def _untyped_storage(data: Any, cuda: bool) -> Any:
    import torch

    view = memoryview(data)
    if view.nbytes == 0:
        return torch.UntypedStorage(0)
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    if view.nbytes < OUT_OF_BAND:  # own memory for small ones: they can be resized, and do not pin the pickle
        tensor = tensor.clone()
    storage = tensor.untyped_storage()
    return storage.cuda() if cuda else storage


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


# ------------------------------------------------------------------------------------------------------ classes


def _amend_class(cls: type, reduction: Any) -> Any:
    """cloudpickle's way to make a class again, put right: `__slots__` hold, and code that ran when the class was
    defined in the notebook (its metaclass's, and `__init_subclass__`) does not run again, on an empty class."""
    if reduction is NotImplemented or reduction[0].__name__ != "_make_skeleton_class":
        return reduction
    make, (metaclass, name, bases, namespace, *more), (attributes, slots_state), *rest = reduction
    if "__slots__" in attributes and typing.NamedTuple not in bases:  # that one makes its own
        namespace = {**namespace, "__slots__": attributes["__slots__"]}
        attributes = {
            key: value
            for key, value in attributes.items()
            if key != "__slots__" and not isinstance(value, types.MemberDescriptorType)
        }
    maker = functools.partial(_make_class, metaclass, next(filter(_importable, metaclass.__mro__)))
    return make, (maker, name, bases, namespace, *more), (attributes, slots_state), *rest


def _make_class(metaclass: type, imported: Any, name: str, bases: tuple[type, ...], namespace: Namespace) -> type:
    hooks = [
        (base, vars(base)["__init_subclass__"])
        for base in dict.fromkeys(b for base in bases for b in base.__mro__)
        if "__init_subclass__" in vars(base) and not _importable(base)
    ]
    for base, _ in hooks:
        type.__delattr__(base, "__init_subclass__")
    try:
        cls: type = imported.__new__(metaclass, name, bases, namespace)
        imported.__init__(cls, name, bases, namespace)
        return cls
    finally:
        for base, hook in hooks:
            type.__setattr__(base, "__init_subclass__", hook)


# ------------------------------------------------------------------------- functions, their cells and their globals

_FUNCTION_ATTRIBUTES = (
    "__defaults__ __kwdefaults__ __annotations__ __doc__ __module__ __qualname__ __type_params__".split()
)


def _importable(obj: Any) -> bool:
    """Whether a reader finds this very function or class by importing its module."""
    if obj.__module__ in ("__main__", None) or obj.__module__ not in sys.modules:
        return False
    found: Any = sys.modules[obj.__module__]
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


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


def _has_own_init(cls: type[BaseException]) -> bool:
    """Whether Python would rebuild such an exception by `__init__(*args)`, though its `__init__` may want others."""
    return isinstance(cls.__init__, types.FunctionType) and cls.__reduce__ is BaseException.__reduce__


def _make_exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    exc = cls.__new__(cls, *args)
    exc.args = args
    return exc


def _reduce_lru_cache(cached: Any) -> tuple[Any, ...]:
    return _make_lru_cache, (cached.__wrapped__, cached.cache_parameters())


def _make_lru_cache(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def _reduce_weakref(ref: weakref.ref[Any]) -> tuple[Any, ...]:
    return _make_weakref, (ref(),)


def _make_weakref(target: Any) -> Any:
    class Gone:
        pass

    return weakref.ref(Gone() if target is None else target)


#: Everyday values that cloudpickle refuses or takes apart wrongly. A lock arrives unlocked, a cache empty.
_REDUCERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    types.CellType: _reduce_cell,
    type(threading.Lock()): lambda lock: (threading.Lock, ()),
    type(threading.RLock()): lambda lock: (threading.RLock, ()),
    functools._lru_cache_wrapper: _reduce_lru_cache,
    weakref.ref: _reduce_weakref,
    weakref.WeakKeyDictionary: lambda d: (weakref.WeakKeyDictionary, (dict(d),)),
    weakref.WeakValueDictionary: lambda d: (weakref.WeakValueDictionary, (dict(d),)),
}


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
