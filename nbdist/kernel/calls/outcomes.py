"""Values and exceptions of ranks, kept until all have answered, and rebuilt as objects of the notebook."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Sequence
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
    """The values of a call as they come from its ranks.

    Args:
        originals: What was sent by number, as `capture.Call.originals` has it.

    Attributes: `waited`, by rank, the seconds for which it waited for others, 0 where that was less than a moment.
    """

    def __init__(self, originals: Sequence[Any]) -> None:
        self.waited: dict[int, float] = {}
        self._originals = originals
        self._parcels: dict[int, Parcel | None] = {}
        self._copied: dict[int, list[memoryview]] = {}  # big buffers of answers that are about to come

    def __contains__(self, rank: int) -> bool:
        """Return whether a rank has answered."""
        return rank in self._parcels

    def copy(self, rank: int, pid: int, buffers: Sequence[rank_memory.RankBuffer]) -> None:
        """Copy the big buffers of an answer out of the memory of its rank, if that is possible."""
        with contextlib.suppress(OSError, MemoryError):  # the rank then raises what there is to raise
            self._copied[rank] = rank_memory.copy(pid, buffers)

    def has_copied(self, rank: int) -> bool:
        """Return whether the big buffers of a rank's answer are here."""
        return rank in self._copied

    def take(self, rank: int, message: Done, parcel: Parcel | None) -> None:
        """Keep the answer of a rank; no parcel where its value is not wanted."""
        self._parcels[rank] = parcel
        if parcel is not None:
            parcel.buffers = self._copied.pop(rank, [])
        self.waited[rank] = message.waited

    def values(self) -> list[Any]:
        """Return the values by rank, None where none was wanted. Raises `CaptureError` for what cannot be rebuilt."""
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
        """Give up the memory of the answers; objects that have been rebuilt keep theirs."""
        for parcel in self._parcels.values():
            if parcel is not None:
                parcel.close()


def load(parcel: Parcel, originals: Sequence[Any]) -> Any:
    """The object in a rank's parcel; the notebook's own functions and classes are the very ones that were sent."""
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
    error = _exception(parcel, message.spare, originals)
    error.__cause__ = remote = RemoteTraceback(rank, pid, message.text, message.rendered)
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
