"""Pickles of notebook objects: functions and classes by value, big buffers outside the pickle. `reading` reads them."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cloudpickle import cloudpickle

from . import big_data, c_libraries, classes, reading, reducers, shared, torch_objects
from .big_data import OUT_OF_BAND, Storage, own_device, own_generator, reduce_data, reduce_tensor, typed_storage
from .definitions import DefinitionPickler
from .foreign import text
from .mapped import MappedFiles
from .names import importable
from .ray_references import reduce_of_ray
from .steps import UnpickleStep
from .training_state import reduce_training_state

#: Types that any reader knows, and that refer to nothing.
_PLAIN = frozenset([type(None), bool, int, float, complex, str, bytes])


class Pickler(DefinitionPickler):
    """A pickler of notebook objects: definitions by value, big buffers outside the pickle, data in their own ways.

    Args:
        file, skip, need, need_in: As for `DefinitionPickler`.
        known: The number, by id, of each object that came from the other side. The object is sent back as this number,
            so that the notebook gets its own class again and not a copy.
        instead: Replacements of objects, by their ids.
        says_copies: Warn if the notebook shares an object with other processes and the reader gets a copy.
        to_cpu: Move CUDA tensors to the CPU. Otherwise they arrive on the reader's current CUDA device.
        in_band: Put big buffers into the pickle too.
        least: The size in bytes from which a buffer counts as big.
    """

    def __init__(
        self,
        file: io.BytesIO,
        *,
        skip: Callable[[str, str], bool] = lambda key, name: False,
        need: Mapping[str, Any] | None = None,
        need_in: Iterable[str] = (),
        known: Mapping[int, int] | None = None,
        instead: Mapping[int, Any] | None = None,
        says_copies: bool = False,
        to_cpu: bool = False,
        in_band: bool = False,
        least: int = OUT_OF_BAND,
    ) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self._known, self._instead = known or {}, instead or {}
        self._to_cpu, self._says_copies = to_cpu, says_copies
        # What comes back is copied: files of ranks may be short-lived.
        self._files = None if to_cpu or in_band else MappedFiles()
        self._storages: dict[int, Storage] = {}
        self._array = getattr(sys.modules.get("numpy"), "ndarray", None)
        # Not a method: with a reference to itself, a pickler and its data would wait for the garbage collector.
        out_of_band = None if in_band else functools.partial(_keep_buffer, self.buffers, least)
        super().__init__(file, skip=skip, need=need, need_in=need_in, out_of_band=out_of_band)

    def dump(self, obj: Any) -> None:
        """Write the pickle of `obj`. Raises the exceptions of its objects, and `RecursionError` for one that is too
        deep."""
        pickle.Pickler.dump(self, obj)

    def reducer_override(self, obj: Any) -> Any:  # called for everything but the plain built-in types
        if isinstance(obj, UnpickleStep):
            return obj.reduce(self._progress)
        if type(obj) is types.FunctionType and obj in _READERS:
            return NotImplemented
        number = self._known.get(id(obj))
        if number is not None:
            return reading.original, (number,)
        if self._instead and id(obj) in self._instead:
            return reading.itself, (self._instead[id(obj)],)
        if type(obj) is self._array:  # there may be very many
            reduction = reduce_data(obj, self._files)
            if reduction is None and self._says_copies and obj.base is not None:
                shared.warn_of_shared_array(obj)
            return reduction or NotImplemented
        if (definition := self.reduce_definition(obj)) is not None:
            return definition
        if isinstance(obj, BaseException) and reducers.has_own_init(type(obj)):
            return reducers.make_exception, (type(obj), obj.args), obj.__dict__
        if type(obj) in reducers.BY_TYPE:
            return reducers.BY_TYPE[type(obj)](obj)
        reduction = (
            reduce_data(obj, self._files)
            or reducers.reduce_fastai(obj)
            or reducers.reduce_wrapt(obj)
            or reducers.reduce_namespaces(obj)
            or reducers.reduce_own(obj)
            or reducers.reduce_widget(obj)
            or shared.reduce_managed(obj)
            or c_libraries.reduce_library(obj)
            or reduce_training_state(obj)
            or reduce_of_ray(obj)
        )
        if reduction is not None:
            return reduction
        torch = sys.modules.get("torch")
        if torch is not None and (reduction := self._reduce_torch(torch, obj)) is not None:
            return reduction
        if self._says_copies:
            shared.warn_of_study(obj)
        if callable(obj) and (module := text(obj, "__module__")) in sys.modules and module != "__main__":
            self.modules.add(module)  # such as a compiled function's, which is found by its name
        return reducers.reduce_delegating(obj) or super().reducer_override(obj)

    def _reduce_torch(self, torch: Any, obj: Any) -> Any:
        """Return the reduction of an object of torch; None for objects that torch's own reduction is right for."""
        if isinstance(obj, torch.Tensor):
            return reduce_tensor(obj)
        if torch_objects.is_operator(obj):
            self.number(obj)
            return torch_objects.reduce_operator(obj)
        if (reduction := torch_objects.reduce_torch(torch, obj, self._to_cpu)) is not None:
            return reduction
        if isinstance(obj, torch.storage.TypedStorage):
            return typed_storage, (self._storage(obj._untyped_storage), obj.dtype)
        if isinstance(obj, torch.UntypedStorage):
            return typed_storage, (self._storage(obj), None)
        if type(obj) is torch.Generator and obj.device.type == "cuda":
            return own_generator, (obj.initial_seed(), obj.get_state())
        if type(obj) is torch.device and obj.type == "cuda":
            # A device number means nothing elsewhere: ranks take their own device, the notebook the CPU.
            return (torch.device, ("cpu",)) if self._to_cpu else (own_device, ())
        return None

    def _storage(self, untyped: Any) -> Storage:
        # Each access to a tensor's storage makes a new Python object: only its address shows that two are one.
        if untyped._cdata not in self._storages:
            if self._says_copies:
                shared.warn_of_shared_tensor(untyped)
            self._storages[untyped._cdata] = Storage(untyped, self._to_cpu, self._files)
        return self._storages[untyped._cdata]


def dumps_plain(value: Any) -> memoryview | None:
    """Return the pickle of a number, a text, or a list of these, which needs no `Pickler`; None for other values."""
    plain = _PLAIN.issuperset(map(type, value)) if type(value) is list else type(value) in _PLAIN
    return memoryview(pickle.dumps(value, protocol=5)) if plain else None


#: What pickles call when they are read: there wherever a reader is.
_READERS = frozenset(
    value
    for module in (reading, classes, big_data, c_libraries, reducers, shared, torch_objects, cloudpickle)
    for value in vars(module).values()
    if isinstance(value, types.FunctionType) and importable(value)
)


def _keep_buffer(kept: list[pickle.PickleBuffer], least: int, buffer: pickle.PickleBuffer) -> bool:
    """Return whether `buffer` belongs into the pickle; otherwise add it to `kept`."""
    if buffer.raw().nbytes < least:
        return True
    kept.append(buffer)
    return False
