"""Big data: arrays, tensors and data frames are pickled without their memory, which is sent separately."""

from __future__ import annotations

import contextlib
import pickle
import sys
from typing import Any

from ..system.free_memory import check_fits
from . import mapped
from .mapped import MappedFiles

#: Buffers of at least this many bytes travel outside the pickle; smaller ones are cheaper inside it.
OUT_OF_BAND = 16 * 1024

Reduction = tuple[Any, ...]


def reduce_data(obj: Any, files: MappedFiles | None) -> Reduction | None:
    """Return the reduction of data whose own reduction copies them into the pickle, or loses a part; None for other
    objects.

    Data that are mapped from a file of `files` are not copied: the reader maps the file again.
    """
    numpy, polars, arrow = (sys.modules.get(name) for name in ("numpy", "polars", "pyarrow"))
    if numpy is not None and isinstance(obj, numpy.ndarray):
        found = None
        if files is not None and type(obj) in (numpy.ndarray, numpy.memmap):
            found = mapped.reduce_array(obj, files)
        return found or _reduce_array(obj, numpy)
    if arrow is not None and files is not None and type(obj) is getattr(arrow, "Buffer", None):
        return mapped.reduce_buffer(obj, files)
    if numpy is not None and type(obj) is numpy.finfo:
        return numpy.finfo, (obj.dtype,)
    if polars is not None and isinstance(obj, (polars.DataFrame, polars.Series)):
        return _reduce_polars(obj, polars)
    return None


def _reduce_array(array: Any, numpy: Any) -> Reduction | None:
    cls, attributes = type(array), None
    if cls is not numpy.ndarray and cls is not numpy.memmap:
        if cls.__reduce__ is not numpy.ndarray.__reduce__ or cls.__reduce_ex__ is not numpy.ndarray.__reduce_ex__:
            return None  # it has a way of its own
        attributes = getattr(array, "__dict__", None) or None
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    dates = array.dtype.kind in "mM"  # they give no buffers
    if array.dtype.hasobject:
        if attributes is None:
            return None  # NumPy's own way is as good
        return _array, (array.view(numpy.ndarray), None, cls, array.flags.writeable), attributes, None, None, _set_dict
    if contiguous and not dates and cls is numpy.ndarray:
        return None
    plain = array.view(numpy.ndarray)
    if not contiguous:
        check_fits(plain.nbytes, "a copy of an array that does not lie in one piece")
        plain = plain.copy(order="C")
    args = plain.view("i8") if dates else plain, array.dtype, cls, array.flags.writeable
    return (_array, args) if attributes is None else (_array, args, attributes, None, None, _set_dict)


def _array(plain: Any, dtype: Any, cls: type, writeable: bool) -> Any:
    array = (plain if dtype is None else plain.view(dtype)).view(cls)
    if not writeable:
        array.flags.writeable = False
    return array


def _set_dict(obj: Any, attributes: dict[str, Any]) -> None:
    vars(obj).update(attributes)


def _reduce_polars(obj: Any, polars: Any) -> Reduction | None:
    if type(obj) not in (polars.DataFrame, polars.Series):
        return None  # a class of the user's has its own way
    # An Arrow table has no place for Python objects: what it holds in their stead are addresses in this process.
    objects = _columns_of_objects(obj, polars)
    if objects and isinstance(obj, polars.Series):
        return _polars_objects, (obj.name, obj.to_list())
    rest = obj.drop([column.name for _, column in objects]) if objects else obj
    with contextlib.suppress(ImportError, TypeError, ValueError, polars.exceptions.PolarsError):
        schema = dict(rest.schema) if isinstance(rest, polars.DataFrame) else rest.dtype
        arrow = getattr(rest, "name", None), rest.to_arrow(), schema
        if not objects:
            return _polars, arrow
        return _polars_with_objects, (arrow, [(place, column.name, column.to_list()) for place, column in objects])
    return None


def _columns_of_objects(obj: Any, polars: Any) -> list[tuple[int, Any]]:
    columns = obj.get_columns() if isinstance(obj, polars.DataFrame) else [obj]
    return [(place, column) for place, column in enumerate(columns) if column.dtype == polars.Object]


def _polars(name: str | None, arrow: Any, schema: Any) -> Any:
    import polars

    read = polars.from_arrow(arrow)
    return (read if name is None else polars.Series(name, read)).cast(schema)  # Arrow has no Enum, for one


def _polars_objects(name: str, values: list[Any]) -> Any:
    import polars

    return polars.Series(name, values, dtype=polars.Object)


def _polars_with_objects(arrow: tuple[Any, ...], columns: list[tuple[int, str, list[Any]]]) -> Any:
    import polars

    all_columns = _polars(*arrow).get_columns()
    for place, name, values in columns:
        all_columns.insert(place, _polars_objects(name, values))
    return polars.DataFrame(all_columns)


def reduce_tensor(tensor: Any) -> Any:
    """Return the reduction of a tensor of a newer dtype (float8, uint16), which torch itself can read only by
    `torch.load`."""
    import torch

    if tensor.dtype in torch.storage._dtype_to_storage_type_map():
        return NotImplemented
    make, args, *rest = tensor.__reduce_ex__(5)
    if make is not torch._utils._rebuild_tensor_v3:
        return NotImplemented
    storage = torch.storage.TypedStorage(wrap_storage=args[0], dtype=torch.uint8, _internal=True)
    return make, (storage, *args[1:]), *rest


class Storage:
    """A torch storage in a pickle: its bytes are sent once, for any number of tensors that are views of it."""

    def __init__(self, untyped: Any, to_cpu: bool, files: MappedFiles | None) -> None:
        self.untyped, self.to_cpu, self._files = untyped, to_cpu, files

    def __reduce__(self) -> tuple[Any, ...]:
        import torch

        found = None if self._files is None else mapped.reduce_storage(self.untyped, self._files)
        if found is not None:
            return found
        on_cuda = self.untyped.device.type == "cuda"
        untyped = self.untyped
        if untyped.device.type != "cpu":
            check_fits(untyped.nbytes(), "a copy of a tensor in the memory of the CPU")
            untyped = untyped.cpu()
        # Of the array itself, never of a memoryview: one that is freed in a cycle of garbage while it has a
        # PickleBuffer crashes CPython 3.11.
        data: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(untyped).numpy()
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
    return storage.cuda() if cuda and torch.cuda.is_available() else storage


def own_device() -> Any:
    """Return, in a rank, the device for a GPU of the notebook: the rank's own GPU, or the CPU in a CPU rank."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def own_generator(seed: int, state: Any) -> Any:
    """Make a rank's generator for one of the notebook's GPUs. On a CPU, where the state of a GPU's generator means
    nothing, the generator starts from the seed."""
    import torch

    generator = torch.Generator(own_device())
    generator.manual_seed(seed)
    if generator.device.type == "cuda":
        generator.set_state(state)
    return generator


def typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    if dtype is None:
        return untyped
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
