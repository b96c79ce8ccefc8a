"""Values and exceptions of ranks, rebuilt as objects of the notebook."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...capture import partial
from ...capture.diagnosis import explain_unreadable
from ...capture.reading import Keep, Unreadable, being_read, read
from ...capture.side_effects import missing_import
from ...errors import NbdistError, RemoteTraceback, let_notebook_render
from ...notebook.shell import show_figures
from ...wire.parcel import Parcel
from ...wire.protocol import Error


class Unread(list[Any]):
    """Stands for what was sent by number in a process that passes outcomes on, and executes nothing of them."""


@dataclass(frozen=True)
class UnreadOutcome:
    """The pickle of a value or an exception, and its buffers."""

    pickled: memoryview | None
    """None: the exception could not be pickled."""
    views: Sequence[memoryview]
    spare: Sequence[bytes] = ()
    """As `Error` has it."""


def load(parcel: Parcel, originals: Sequence[Any]) -> Any:
    """The object in a rank's parcel; the notebook's own functions and classes are the very ones that were sent."""
    if isinstance(originals, Unread):
        return UnreadOutcome(*parcel.open())
    value, error = _read(parcel, originals)
    if error is not None:  # raised here: the frame of `_read` would keep the memory of all that has arrived
        raise error from error.__cause__
    show_figures()
    return value


def _read(parcel: Parcel, originals: Sequence[Any]) -> tuple[Any, BaseException | None]:
    """Return the object, or the error that says why there is none, with what could be read as its `value`."""
    pickled, buffers = parcel.open(own=True)

    def read_by(loads: Callable[..., Any]) -> Any:
        # What a returned function uses is added to the notebook, but nothing there is overwritten.
        keep: Keep = lambda key, namespace, name: name not in namespace  # noqa: E731
        return read(pickled, buffers, originals=originals, keep=keep, loads=loads)

    try:
        return read_by(pickle.loads), None
    except Unreadable as exc:
        error = explain_unreadable(exc, "the notebook")
        error.__cause__ = exc.__cause__
        with contextlib.suppress(Exception):
            error.value = read_by(functools.partial(partial.loads, name=being_read))
        return None, error


def rebuild(
    rank: int, pid: int | None, message: Error, parcel: Parcel | None, originals: Sequence[Any]
) -> BaseException:
    """The exception that a rank raised, with its traceback there as the cause.

    Args:
        rank, pid: Which rank, and its process.
        message: What the rank says of it.
        parcel: The exception.
        originals: What was sent by number.
    """
    unread = isinstance(originals, Unread)
    error = _stand_in(message.spare) if unread else _exception(parcel, message.spare, originals)
    error.__cause__ = remote = RemoteTraceback(rank, pid, message.text, message.rendered)
    if unread:
        pickled, views = (None, []) if parcel is None else parcel.open()
        remote.unread = UnreadOutcome(pickled, views, message.spare)
    if isinstance(error, AttributeError) and (hint := missing_import(error)):
        remote.hints.append(hint)
    let_notebook_render(error)
    return error


def _exception(parcel: Parcel | None, spare: Sequence[bytes], originals: Sequence[Any]) -> BaseException:
    """The exception, or the nearest that this process can make."""
    candidates = [] if parcel is None else [functools.partial(load, parcel, originals)]
    for make in [*candidates, *(functools.partial(pickle.loads, pickled) for pickled in spare)]:
        try:
            error = make()
        except Exception:  # its class or its content makes sense in the rank only
            continue
        if isinstance(error, BaseException):
            return error
    return NbdistError("a rank raised an exception that cannot be rebuilt here")


class _Builtins(pickle.Unpickler):
    """Reads what consists of Python's own exceptions and nbdist's."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in ("builtins", "nbdist.errors"):
            raise pickle.UnpicklingError(f"{module}.{name} is not imported here")
        return super().find_class(module, name)


def _stand_in(spare: Sequence[bytes]) -> BaseException:
    """The nearest exception that needs no import."""
    for pickled in spare:
        with contextlib.suppress(Exception):
            error = _Builtins(io.BytesIO(pickled)).load()
            if isinstance(error, BaseException):
                return error
    return NbdistError("a rank raised an exception that cannot be rebuilt here")
