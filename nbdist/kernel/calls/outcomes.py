"""Values and exceptions of ranks, kept until all have answered, and rebuilt as objects of the notebook."""

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
from ...errors import CaptureError, NbdistError, RemoteTraceback, let_notebook_render, text_of
from ...notebook.shell import show_figures
from ...wire import rank_memory
from ...wire.parcel import Parcel
from ...wire.protocol import Done, Error


class Answers:
    """The answers to a call, in the order in which they arrive.

    Args:
        originals: The objects that were sent by number, as in `capture.Call.originals`.

    Attributes:
        waited: By rank, the seconds that the rank waited for others.
    """

    def __init__(self, originals: Sequence[Any]) -> None:
        self.waited: dict[int, float] = {}
        self._originals = originals
        self._parcels: dict[int, Parcel | None] = {}
        self._copied: dict[int, list[memoryview]] = {}  # big buffers, copied before their answer arrives

    def __contains__(self, rank: int) -> bool:
        """Return whether a rank has answered."""
        return rank in self._parcels

    def copy(self, rank: int, pid: int, buffers: Sequence[rank_memory.RankBuffer]) -> None:
        """Copy the big buffers of an answer out of the memory of its rank, if that is possible."""
        with contextlib.suppress(OSError, MemoryError):  # the rank then sends them, or an error
            self._copied[rank] = rank_memory.copy(pid, buffers)

    def has_copied(self, rank: int) -> bool:
        """Return whether the big buffers of a rank's answer are here."""
        return rank in self._copied

    def take(self, rank: int, message: Done, parcel: Parcel | None) -> None:
        """Keep the answer of a rank. The parcel is None if its value is not wanted."""
        self._parcels[rank] = parcel
        if parcel is not None:
            parcel.buffers = self._copied.pop(rank, [])
        self.waited[rank] = message.waited

    def values(self) -> list[Any]:
        """Return the values by rank; None for a rank whose value is not wanted. Raises `CaptureError` for a value that
        cannot be rebuilt."""
        parcels = [self._parcels[rank] for rank in sorted(self._parcels)]
        try:
            return [None if parcel is None else load(parcel, self._originals) for parcel in parcels]
        except MemoryError:
            raise
        except Exception as exc:
            why = f"{type(exc).__name__}: {text_of(exc)}"
            error = CaptureError(f"the function returned, but its value cannot be rebuilt here ({why})")
            raise error.with_value(getattr(exc, "value", None)) from exc

    def close(self) -> None:
        """Release the memory of the answers. Objects that were rebuilt from them keep theirs."""
        for parcel in self._parcels.values():
            if parcel is not None:
                parcel.close()


class Unread(list[Any]):
    """Stand-ins for the objects that were sent by number, in a process that passes outcomes on and runs none of their
    code."""


@dataclass(frozen=True)
class UnreadOutcome:
    """The pickle of a value or an exception, and its buffers."""

    pickled: memoryview | None
    """None: the exception could not be pickled."""
    views: Sequence[memoryview]
    spare: Sequence[bytes] = ()
    """The field `spare` of `Error`."""


def load(parcel: Parcel, originals: Sequence[Any]) -> Any:
    """Rebuild the object in a rank's parcel. Functions and classes that were sent come back as the same objects."""
    if isinstance(originals, Unread):
        return UnreadOutcome(*parcel.open())
    value, error = _read(parcel, originals)
    if error is not None:  # raised here, because the frame of `_read` would keep the whole parcel in memory
        raise error from error.__cause__
    show_figures()
    return value


def _read(parcel: Parcel, originals: Sequence[Any]) -> tuple[Any, BaseException | None]:
    """Return the object, or an error with the reason why it cannot be read. The `value` of the error holds the readable
    parts."""
    pickled, buffers = parcel.open(own=True)

    def read_by(loads: Callable[..., Any]) -> Any:
        # Globals that a returned function uses are added to the notebook. Existing ones are not overwritten.
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
    """Rebuild the exception that a rank raised. Its cause is the `RemoteTraceback` of the rank.

    Args:
        rank, pid: The number of the rank, and its process.
        message: The rank's message: the traceback as text, and substitutes in case `parcel` cannot be read.
        parcel: The pickled exception.
        originals: The objects that were sent by number.
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
    """Return the exception, or the most similar one that this process can rebuild."""
    candidates = [] if parcel is None else [functools.partial(load, parcel, originals)]
    for make in [*candidates, *(functools.partial(pickle.loads, pickled) for pickled in spare)]:
        try:
            error = make()
        except Exception:  # the class or the content exists only in the rank
            continue
        if isinstance(error, BaseException):
            return error
    return NbdistError("a rank raised an exception that cannot be rebuilt here")


class _Builtins(pickle.Unpickler):
    """An unpickler that reads only classes of Python's builtins and of nbdist's exceptions."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in ("builtins", "nbdist.errors"):
            raise pickle.UnpicklingError(f"{module}.{name} is not imported here")
        return super().find_class(module, name)


def _stand_in(spare: Sequence[bytes]) -> BaseException:
    """Return the most similar exception that needs no import."""
    for pickled in spare:
        with contextlib.suppress(Exception):
            error = _Builtins(io.BytesIO(pickled)).load()
            if isinstance(error, BaseException):
                return error
    return NbdistError("a rank raised an exception that cannot be rebuilt here")
