"""Values and exceptions from the journal of a named session, as objects of this process."""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...capture.reading import Keep, read
from ...errors import NbdistError, RemoteTraceback
from ...wire.journal import Record, mapped
from ...wire.parcel import Parcel
from ...wire.protocol import Error
from ..calls.outcomes import load, rebuild


class Originals(Sequence[Any]):
    """The notebook's objects to which a value refers by number, for a process that did not make the call. Each is this
    process's object of the same name, if there is one; otherwise it is read from the call, at its first use.

    Args:
        names: The module and the qualified name of each object.
        call: The pickle of the call and its buffers; empty if the journal lacks them.
    """

    def __init__(self, names: Sequence[tuple[str, str]], call: Sequence[Any]) -> None:
        self._names, self._call = names, call

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: Any) -> Any:
        module, name = self._names[number]
        try:
            return functools.reduce(getattr, name.split("."), sys.modules[module])
        except (KeyError, AttributeError):  # a cell that has not been run here
            return self._brought[number]

    @functools.cached_property
    def _brought(self) -> Sequence[Any]:
        if not self._call:
            raise NbdistError(
                f"the value refers to {', '.join(name for _, name in self._names)} of the notebook that made the call: "
                f"run the cells that define them here, too"
            )
        keep: Keep = lambda key, namespace, name: name not in namespace  # noqa: E731
        pickled, *buffers = [memoryview(one) for one in self._call]
        found: Sequence[Any] = read(pickled, buffers, originals=[], keep=keep)[-1]
        return found


def value_of(record: Record, folder: str, originals: Sequence[Any], held: Callable[..., Any]) -> Any:
    """Return the value of a rank.

    Args:
        record: The record of the value.
        folder: The folder of the journal.
        originals: The objects that the call sent by number.
        held: A function that asks the keeper for a value that the disk had no room for, by call and rank.
    """
    head = record.head
    if head.get("held"):
        return load(held(head["call"], head["rank"]), originals)
    if "file" in head:
        try:
            pickled, *views = mapped(os.path.join(folder, head["file"]), head["parts"])
        except FileNotFoundError:
            raise NbdistError("the value was removed to make room for the values of later calls (keep=)") from None
    else:
        pickled, *views = [memoryview(one) for one in record.buffers]
    parcel = Parcel(bytes(pickled), [], [])
    parcel.buffers = views
    return load(parcel, originals)


def error_of(record: Record, originals: Sequence[Any]) -> BaseException:
    """Return the exception that a call raised."""
    head, buffers = record.head, record.buffers
    if "rank" in head:
        return _of_rank(head, buffers, originals)
    try:
        error = pickle.loads(buffers[0])
        assert isinstance(error, BaseException)
        return error
    except Exception:  # it was too much for a pickle
        return NbdistError(f"{head['type']}: {head['text']}")


def _of_rank(head: Mapping[str, Any], buffers: Sequence[Any], originals: Sequence[Any]) -> BaseException:
    spare = [bytes(buffer) for buffer in buffers[: head["spare"]]]
    parcel = None
    if pickled := buffers[head["spare"] :]:
        parcel = Parcel(bytes(pickled[0]), [], [])
        parcel.buffers = [memoryview(view) for view in pickled[1:]]
    message = Error(head["plain"], head["rendered"], spare, "")
    error = rebuild(head["rank"], head["pid"], message, parcel, originals)
    remote = error.__cause__
    assert isinstance(remote, RemoteTraceback)
    remote.others, remote.inside = list(head["others"]), head["inside"]
    remote.hints = list(dict.fromkeys([*remote.hints, *head["hints"]]))
    return error
