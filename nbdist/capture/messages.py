"""Messages of `multiprocessing` and `multiprocess`, pickled like a call: definitions of cells by value.

Both libraries pickle the messages of their queues and pipes with `ForkingPickler.dumps`. No other place could be
replaced for one context only: `concurrent.futures` makes its queue itself.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .depth import with_large_stack
from .diagnosis import explain_failure, explain_unreadable
from .pickler import Pickler
from .reading import Keep, Unreadable, read

_NONE: Mapping[type, Any] = types.MappingProxyType({})
#: The descriptors that came with this process, by the numbers that `Inherited` has.
inherited: list[int] = []
#: Whether a global that came with a message may enter its namespace. In the notebook, nothing is overwritten.
keep: Keep = lambda key, namespace, name: name not in namespace  # noqa: E731
#: Says of a global that the readers of what this process sends have it already.
skip: Callable[[str, str], bool] = lambda key, name: False  # noqa: E731
#: What the reader of a message is called in errors.
where = "the notebook"


class Inherited:
    """A descriptor that is sent to a process at its start."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """Return the descriptor in the process that was started."""
        return inherited[self._number]


class MessagePickler(Pickler):
    """Pickler for the processes of a library's context, with the reductions that are registered there.

    Args:
        library: "multiprocessing" or "multiprocess".
        reducers: The functions that pickle further types.
        file, options: As for `Pickler`.
    """

    def __init__(self, library: str, file: io.BytesIO, reducers: Mapping[type, Any] = _NONE, **options: Any) -> None:
        own = importlib.import_module(f"{library}.reduction").ForkingPickler._extra_reducers
        self._reducers = {**own, **reducers}
        self._registered = registered(library)
        super().__init__(file, **options)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in self._reducers:  # connections, sockets; torch's tensors, which go to shared memory
            return self._reducers[kind](obj)
        if kind in self._registered:
            call = _Reduction()
            self._registered[kind](call, obj)
            return call.reduction
        if isinstance(obj, type) and "in_processes" in vars(obj):
            return _itself, (vars(obj)["in_processes"],)
        return super().reducer_override(obj)


class _Reduction:
    """The pickler that a function registered with dill receives: it keeps the reduction."""

    def save_reduce(self, *reduction: Any, obj: Any = None) -> None:
        self.reduction = reduction


def _itself(obj: Any) -> Any:
    return obj


def registered(library: str) -> dict[type, Any]:
    """Return the reductions that the user has registered with dill (`dill.register`, `dill.pickle`), by type."""
    if library != "multiprocess":
        return {}
    dispatch = importlib.import_module("dill").Pickler.dispatch
    own = ("dill", "pickle", "_pickle")
    return {
        kind: save
        for kind, save in dispatch.items()
        if isinstance(save, types.FunctionType) and save.__module__.partition(".")[0] not in own
    }


def register(library: str, types: dict[type, Any]) -> None:
    """Set, in a process, the registered reductions of the notebook, given by `registered`."""
    if types:
        importlib.import_module("dill").Pickler.dispatch.update(types)


class _Packed:
    """A wrapper for a pickle. Unpickling the wrapper reads the pickle in it with nbdist's own functions."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self._pickled,)


def _read(pickled: bytes) -> Any:
    try:
        return read(memoryview(pickled), [], originals=[], keep=keep)
    except Unreadable as exc:
        raise explain_unreadable(exc, where) from exc.__cause__


def dumps(library: str, obj: Any, reducers: Mapping[type, Any] = _NONE) -> bytes:
    """Return the pickle of a message for plain `pickle.loads`; `reducers` pickle further types. Raises
    `CaptureError`."""

    def write() -> Pickler:
        pickler = MessagePickler(library, io.BytesIO(), reducers, in_band=True, skip=lambda key, name: skip(key, name))
        pickler.dump(obj)
        return pickler

    try:
        pickler = with_large_stack(write)
    except RuntimeError as exc:
        if isinstance(exc, RecursionError):
            raise explain_failure(exc, {"the message": obj}) from None
        raise  # the library's own: a lock or queue may only be given to a process when that is started
    except Exception as exc:
        raise explain_failure(exc, {"the message": obj}) from None
    pickled = pickler.file.getvalue()
    return pickle.dumps(_Packed(pickled)) if pickler.defines else pickled


def install(library: str) -> None:
    """Pickle here, from now on, what this process sends through a library's queues and pipes."""

    def dump_message(cls: type, obj: Any, protocol: int | None = None, *args: Any, **options: Any) -> bytes:
        return dumps(library, obj)

    importlib.import_module(f"{library}.reduction").ForkingPickler.dumps = classmethod(dump_message)


def install_for_joblib() -> None:
    """Pickle here, from now on, what joblib's pools send to processes, too: they have a pickler of their own."""
    pools: Any = sys.modules.get("joblib.pool")
    if pools is not None:
        pools.CustomizablePickler = _JoblibPickler


class _JoblibPickler:
    """A pickler for joblib's pools."""

    def __init__(self, file: io.BytesIO, reducers: Mapping[type, Any] | None = None, protocol: int = 5) -> None:
        self._file, self._reducers = file, dict(reducers or {})

    def register(self, kind: type, reduce: Callable[[Any], Any]) -> None:
        """Register a function that pickles the objects of a type."""
        self._reducers[kind] = reduce

    def dump(self, obj: Any) -> None:
        """Write the pickle of `obj`. Raises `CaptureError`."""
        self._file.write(dumps("multiprocessing", obj, self._reducers))


def use_in_process(library: str, received: Keep, where_: str, has: Callable[[str, str], bool]) -> None:
    """Pickle messages here, in a process. Names that arrive with a message are set if `received` allows it."""
    global keep, skip, where
    keep, skip, where = received, has, where_
    install(library)


def fits(descriptors: Sequence[int], most: int = 32) -> list[Sequence[int]]:
    """Split descriptors into as many parts as messages can carry."""
    return [descriptors[start : start + most] for start in range(0, len(descriptors), most)]
