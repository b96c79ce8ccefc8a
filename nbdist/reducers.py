"""Values that need their own way to be pickled: big data, torch storages, classes, exceptions, locks and caches."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

#: Buffers of at least this many bytes travel beside the pickle; smaller ones are cheaper inside it.
OUT_OF_BAND = 16 * 1024

Reduction = tuple[Any, ...]


def importable(obj: Any) -> bool:
    """Whether a reader finds this very function or class by importing its module."""
    if obj.__module__ in ("__main__", None) or obj.__module__ not in sys.modules:
        return False
    found: Any = sys.modules[obj.__module__]
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


# --------------------------------------------------------------------------------------------------------- data


def reduce_data(obj: Any) -> Reduction | None:
    """How those data are pickled whose own way would copy them into the pickle; None for any other object."""
    numpy, polars = sys.modules.get("numpy"), sys.modules.get("polars")
    if numpy is not None and type(obj) in (numpy.ndarray, numpy.memmap):
        return _reduce_array(obj, obj.view(numpy.ndarray))
    if polars is not None and isinstance(obj, (polars.DataFrame, polars.Series)):
        with contextlib.suppress(ImportError, TypeError, ValueError, polars.exceptions.PolarsError):
            schema = dict(obj.schema) if isinstance(obj, polars.DataFrame) else obj.dtype
            return _polars, (getattr(obj, "name", None), obj.to_arrow(), schema)
    return None


def _reduce_array(array: Any, plain: Any) -> Reduction | None:
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    dates = array.dtype.kind in "mM"  # they give no buffers
    if array.dtype.hasobject or (contiguous and not dates and type(array) is type(plain)):
        return None  # NumPy's own way is as good
    if not contiguous:
        plain = plain.copy(order="C")
    return _array, (plain.view("i8") if dates else plain, array.dtype, type(array), array.flags.writeable)


def _array(plain: Any, dtype: Any, cls: type, writeable: bool) -> Any:
    array = plain.view(dtype).view(cls)
    if not writeable:
        array.flags.writeable = False
    return array


def _polars(name: str | None, arrow: Any, schema: Any) -> Any:
    import polars

    read = polars.from_arrow(arrow)
    return (read if name is None else polars.Series(name, read)).cast(schema)  # Arrow has no Enum, for one


class Storage:
    """A torch storage on its way: its bytes travel once, however many tensors are views of it."""

    def __init__(self, untyped: Any, to_cpu: bool) -> None:
        self.untyped, self.to_cpu = untyped, to_cpu

    def __reduce__(self) -> tuple[Any, ...]:
        import torch

        on_cuda = self.untyped.device.type == "cuda"
        untyped = self.untyped if self.untyped.device.type == "cpu" else self.untyped.cpu()
        # Of the array itself, never of a memoryview: one that is freed in a cycle of garbage while it has a
        # PickleBuffer crashes CPython 3.11.
        data: Any = torch.empty(0, dtype=torch.uint8).set_(untyped).numpy()
        return _untyped_storage, (pickle.PickleBuffer(data), on_cuda and not self.to_cpu)


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


def typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


# ------------------------------------------------------------------------------------------ classes and exceptions


def amend_class(cls: type, reduction: Any) -> Any:
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
    maker = functools.partial(_make_class, metaclass, next(filter(importable, metaclass.__mro__)))
    return make, (maker, name, bases, namespace, *more), (attributes, slots_state), *rest


def _make_class(metaclass: type, imported: Any, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    hooks = [
        (base, vars(base)["__init_subclass__"])
        for base in dict.fromkeys(b for base in bases for b in base.__mro__)
        if "__init_subclass__" in vars(base) and not importable(base)
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


def has_own_init(cls: type[BaseException]) -> bool:
    """Whether Python would rebuild such an exception by `__init__(*args)`, though its `__init__` may want others."""
    return isinstance(cls.__init__, types.FunctionType) and cls.__reduce__ is BaseException.__reduce__


def make_exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    exc = cls.__new__(cls, *args)
    exc.args = args
    return exc


# ------------------------------------------------------------------------------------------------ locks and caches


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
BY_TYPE: dict[type, Callable[[Any], Reduction]] = {
    type(threading.Lock()): lambda lock: (threading.Lock, ()),
    type(threading.RLock()): lambda lock: (threading.RLock, ()),
    functools._lru_cache_wrapper: _reduce_lru_cache,
    weakref.ref: _reduce_weakref,
    weakref.WeakKeyDictionary: lambda d: (weakref.WeakKeyDictionary, (dict(d),)),
    weakref.WeakValueDictionary: lambda d: (weakref.WeakValueDictionary, (dict(d),)),
}
