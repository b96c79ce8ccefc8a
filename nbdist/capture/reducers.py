"""Reductions of further values: exceptions, streams, locks, widgets, some objects of fastai."""

from __future__ import annotations

import builtins
import codecs
import contextlib
import contextvars
import copyreg
import functools
import getpass
import importlib
import inspect
import io
import os
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from ..notebook.shell import kernel_shell, shell
from .need import main_namespace

Reduction = tuple[Any, ...]


# ------------------------------------------------------------------------------------------ exceptions and streams


def has_own_init(cls: type[BaseException]) -> bool:
    """Return whether Python would rebuild an exception by `__init__(*args)`, although it may need other arguments."""
    return isinstance(cls.__init__, types.FunctionType) and cls.__reduce__ is BaseException.__reduce__


def make_exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    exc = cls.__new__(cls, *args)
    exc.args = args
    return exc


def reduce_own(obj: Any) -> Reduction | None:
    """Return the reduction of an object that each process has for itself; None for any other object.

    A standard stream, `input`, `getpass` and a notebook's shell become the reader's. A file that was opened to append
    is opened again.

    Raises `TypeError` for a thread and for the end of a pipe.
    """
    for name in ("stdout", "stderr"):
        if obj is getattr(sys, name):
            return getattr, (sys, name)
        if obj is getattr(sys, f"__{name}__"):
            return getattr, (sys, f"__{name}__")
    if type(obj) is types.MethodType:  # as a notebook and a rank have in the place of Python's functions
        for module, name in ((builtins, "input"), (getpass, "getpass")):
            if obj == getattr(module, name):
                return getattr, (module, name)
    shells = sys.modules.get("IPython.core.interactiveshell")
    if shells is not None and isinstance(obj, shells.InteractiveShell) and obj is shell() and hasattr(obj, "kernel"):
        return shell, ()  # a terminal's has no kernel, and its ranks have no shell
    connection = sys.modules.get("multiprocessing.connection")
    own: Any = threading.Thread if connection is None else (threading.Thread, connection._ConnectionBase)
    if isinstance(obj, own):  # all that it consists of could be sent
        raise TypeError(f"a {type(obj).__name__} belongs to the process that made it")
    if isinstance(obj, threading.local):
        return _reduce_local(obj)
    if isinstance(obj, (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
        return _reduce_appended(obj)
    iostream = sys.modules.get("ipykernel.iostream")
    if iostream is not None and isinstance(obj, iostream.OutStream):  # while something else is in its place
        return getattr, (sys, obj.name)
    return None


def _reduce_appended(file: Any) -> Reduction | None:
    """Return the reduction of a file that was opened to append (`open(path, "a")`): what several processes write to its
    end stays. None for another file."""
    text = isinstance(file, io.TextIOWrapper)
    binary = file.buffer if text else file
    if file.closed or not isinstance(binary, (io.BufferedWriter, io.BufferedRandom)):
        return None
    raw: Any = binary.raw
    if type(raw) is not io.FileIO or "a" not in raw.mode or not isinstance(raw.name, str):
        return None
    file.flush()
    mode = raw.mode.replace("b", "")
    path = os.path.abspath(raw.name)
    if not text:
        return open, (path, f"{mode}b")
    return open, (path, mode, 1 if file.line_buffering else -1, file.encoding, file.errors)


# ------------------------------------------------------------------------------------------------ locks and caches


def _reduce_local(local: threading.local) -> tuple[Any, ...] | None:
    """Return the reduction of an instance of a subclass of `threading.local`: a call of the class with the attributes
    that its `__init__` takes as parameters. None if a required parameter is not an attribute.
    """
    kind, attributes = type(local), local.__dict__
    own = next(cls.__init__ for cls in kind.__mro__ if "__init__" in vars(cls))  # type: ignore[misc]
    parameters = [*inspect.signature(own).parameters.values()][1:]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if any(one.default is one.empty and one.name not in attributes for one in named):
        return None
    return functools.partial(kind, **{one.name: attributes[one.name] for one in named if one.name in attributes}), ()


def _make_lru_cache(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


class _Gone:
    """A target for a weak reference whose real target has been deleted."""


def _make_weakref(target: Any) -> Any:
    return weakref.ref(_Gone() if target is None else target)


def _reduce_context_manager(manager: Any) -> Any:
    """Return the reduction of what a function under `contextlib.contextmanager` has returned, as its decorator
    (`@timed()`) keeps it. Once entered, it is a generator's and cannot be sent."""
    if "func" not in vars(manager):
        return manager.__reduce_ex__(4)
    return type(manager), (manager.func, manager.args, manager.kwds)


def _reduce_view(view: memoryview) -> Reduction:
    return _make_view, (view.tobytes() if view.readonly else bytearray(view.tobytes()), view.format, view.shape)


def _make_view(data: Any, kind: str, shape: tuple[int, ...]) -> memoryview:
    view = memoryview(data)
    return view if (kind, len(shape)) == ("B", 1) else view.cast(kind, shape)  # type: ignore[call-overload]


#: Context variables of notebooks, by numbers that all processes know.
_variables: dict[str, contextvars.ContextVar[Any]] = {}
_received: set[str] = set()


def _reduce_context_variable(variable: contextvars.ContextVar[Any]) -> Reduction:
    for module in list(sys.modules.values()):
        if type(module) is types.ModuleType and module.__name__ != "__main__":
            for name, value in list(vars(module).items()):
                if value is variable:
                    return getattr, (module, name)
    number = next((key for key, known in _variables.items() if known is variable), None)
    if number is None:
        _variables[number := uuid.uuid4().hex] = variable
    default = _values(contextvars.Context(), variable)
    return _make_context_variable, (number, variable.name, default, _values(contextvars.copy_context(), variable))


def _values(context: contextvars.Context, variable: contextvars.ContextVar[Any]) -> list[Any]:
    try:
        return [context.run(variable.get)]
    except LookupError:
        return []


def _make_context_variable(number: str, name: str, default: list[Any], value: list[Any]) -> Any:
    """Return the context variable of this number. A variable that another process has made gets the value that it had
    there."""
    if number not in _variables:
        options = {"default": default[0]} if default else {}
        _variables[number] = contextvars.ContextVar(name, **options)
        _received.add(number)
    if value and number in _received:
        _variables[number].set(value[0])
    return _variables[number]


#: Everyday values that cloudpickle refuses or takes apart wrongly. A lock arrives unlocked, a cache and a thread's own
#: values empty. A context variable has its value.
BY_TYPE: dict[type, Callable[[Any], Reduction]] = {
    type(threading.Lock()): lambda lock: (threading.Lock, ()),
    type(threading.RLock()): lambda lock: (threading.RLock, ()),
    threading.local: lambda local: (threading.local, ()),
    functools._lru_cache_wrapper: lambda cached: (_make_lru_cache, (cached.__wrapped__, cached.cache_parameters())),
    memoryview: _reduce_view,
    contextvars.ContextVar: _reduce_context_variable,
    contextlib._GeneratorContextManager: _reduce_context_manager,
    contextlib._AsyncGeneratorContextManager: _reduce_context_manager,
    codecs.CodecInfo: lambda info: (codecs.lookup, (info.name,)),
    weakref.ref: lambda ref: (_make_weakref, (ref(),)),
    weakref.WeakKeyDictionary: lambda d: (weakref.WeakKeyDictionary, (dict(d),)),
    weakref.WeakValueDictionary: lambda d: (weakref.WeakValueDictionary, (dict(d),)),
}


# ------------------------------------------------------------------------------------------ objects that delegate


def reduce_wrapt(obj: Any) -> Reduction | None:
    """Return the reduction of a function that a decorator of wrapt has wrapped; None for any other object."""
    wrapt: Any = sys.modules.get("wrapt")
    if wrapt is None or type(obj) is not wrapt.FunctionWrapper:
        return None
    return _wrap, (obj.__wrapped__, obj._self_wrapper, obj._self_enabled)


def _wrap(wrapped: Any, wrapper: Any, enabled: Any) -> Any:
    return importlib.import_module("wrapt").FunctionWrapper(wrapped, wrapper, enabled)


def reduce_namespaces(obj: Any) -> Reduction | None:
    """Return the reduction of the namespaces that a function under pydantic's `validate_call` keeps to read type hints:
    the reader's own, and not all variables of the notebook. None for any other object."""
    module = sys.modules.get("pydantic._internal._namespace_utils")
    if module is None or type(obj) is not getattr(module, "NsResolver", None):
        return None
    return _make_resolver, (type(obj),)


def _make_resolver(kind: Any) -> Any:
    namespaces = importlib.import_module(kind.__module__).NamespacesTuple(main_namespace(), {})
    return kind(namespaces_tuple=namespaces)


def reduce_delegating(obj: Any) -> Reduction | None:
    """Return the reduction of an object that passes attributes on to another object; None for any other object.

    While such an object is rebuilt it has no attributes yet, and pickle reads its `__setstate__`: its `__getattr__`,
    which needs the other object, would call itself forever.
    """
    cls: Any = type(obj)
    if (
        not hasattr(cls, "__getattr__")
        or hasattr(cls, "__setstate__")
        or cls.__reduce_ex__ is not object.__reduce_ex__
        or cls.__reduce__ is not object.__reduce__
        or cls in copyreg.dispatch_table
    ):
        return None
    made = object.__reduce_ex__(obj, 4)
    if not isinstance(made, tuple) or len(made) < 3 or made[2] is None:
        return None
    make, args, state, *items = made
    return make, args, state, *items, *[None] * (2 - len(items)), set_state


def set_state(obj: Any, state: Any) -> None:
    """Set the state from `object.__reduce_ex__`: the attributes, also in slots."""
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        object.__getattribute__(obj, "__dict__").update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(obj, name, value)


# ----------------------------------------------------------------------------------------------------- fastai


def reduce_fastai(obj: Any) -> tuple[Any, ...] | None:
    """Return the reduction of objects of fastai that do not pickle or keep all of their state; None for any other
    object.

    A `DataLoader` keeps the generator of its last epoch, which cannot be pickled and is not needed any more. A
    `Recorder` passes on everything except its records.
    """
    data, learner = sys.modules.get("fastai.data.load"), sys.modules.get("fastai.learner")
    if data is not None and isinstance(obj, data.DataLoader):
        make, args, state, *rest = obj.__reduce_ex__(2)
        return make, args, {**state, "it": None} if "it" in state else state, *rest
    if learner is not None and isinstance(obj, learner.Recorder):
        return copyreg.__newobj__, (type(obj),), vars(obj), None, None, set_state  # type: ignore[attr-defined]
    return None


# --------------------------------------------------------------------------------------------------- ipywidgets


def reduce_widget(obj: Any) -> Reduction | None:
    """Return the reduction of a widget, by its displayed state. None for other objects, and for widgets with a
    reduction of their own.

    A widget of the notebook is the same widget in a rank: its views show its changes. A rank's widget becomes a new
    widget of the notebook, which receives the rank's changes.
    """
    module = sys.modules.get("ipywidgets.widgets.widget")
    if module is None or not isinstance(obj, module.Widget):
        return None
    cls: Any = type(obj)
    if cls.__reduce__ is not object.__reduce__:  # such as plotly's, whose data are in no trait that it shows
        return None
    shown = {name: getattr(obj, name) for name in obj.keys if not name.startswith("_")}
    if kernel_shell() is not None:
        shown["model_id"] = obj.model_id
    return functools.partial(cls, **shown), ()
