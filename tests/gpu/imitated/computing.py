"""Computes on the host what kernels of an imitated GPU would, and counts what a GPU would have to do and wait for.

    with Computing() as gpu:
        train()
    print(gpu.operations.total(), gpu.waits)

The memory of an imitated GPU is the host's: an operation on CUDA tensors is done by CPU tensors over the same memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

#: Left to torch: they launch no kernel, and views are made by metadata alone.
_WITHOUT_KERNEL = {
    "aten::" + name
    for name in """empty empty_like empty_strided new_empty new_empty_strided record_stream set_ resize_ is_pinned
    _pin_memory _unsafe_view
    unsafe_split unsafe_split_with_sizes _local_scalar_dense _nnz _coalesced_ is_coalesced sparse_dim dense_dim
    lift_fresh
    _sparse_coo_tensor_with_dims_and_tensors _sparse_coo_tensor_with_dims copy_sparse_to_sparse_ _resize_output_
    resize_as_ sym_size sym_stride sym_numel sym_storage_offset is_same_size""".split()
}
#: Operations after which torch's CUDA kernels wait for a number from the GPU: how large the result is.
_WAITING = {
    "aten::" + name
    for name in """nonzero masked_select _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive _coalesce
    equal repeat_interleave bincount segment_reduce sparse_mask""".split()
}
#: Operations that take index tensors of the CPU together with CUDA tensors.
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_COPIES = {"aten::copy_", "aten::_to_copy"}
_OUT_OF_BOUNDS = "out of bounds", "out of range"
_ASSERT = 710
_ASSERTION = (
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1597: indexSelectLargeIndex: block: [0,0,0], thread: [0,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed."
)
_library = ctypes.CDLL(None)


def waits() -> int:
    """Return how often this process has waited for its GPUs so far, as far as CUDA's runtime knows."""
    return int(_library.imitated_waits())


def kernels() -> int:
    """Return how many kernels this process has launched that were not computed: their results are wrong."""
    return int(_library.imitated_kernels())


def raise_on_gpu(error: int = _ASSERT, text: str = _ASSERTION) -> None:
    """Have the current GPU meet an error of CUDA's, by its number: the host finds it when it waits next.

    Args:
        error: 710: an assertion of a kernel; 700: an illegal address; 719: a failed launch; 214: an ECC error.
        text: What the driver writes to standard error then.
    """
    _library.imitated_error(error, text.encode())


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a CUDA tensor."""
    if tensor.device.type != "cuda":
        return tensor
    if tensor.is_sparse:
        indices, values = on_host(tensor._indices()), on_host(tensor._values())
        return _sparse(indices, values, tensor)
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(bytes_, tensor.storage_offset(), tensor.shape, tensor.stride())


def _sparse(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        like.sparse_dim(),
        like.dense_dim(),
        like.shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=like.is_coalesced(),
    )


def on_gpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CUDA tensor with the values of a CPU tensor, or with none of a meta tensor's."""
    if tensor.device.type == "cuda":
        return tensor
    if tensor.is_sparse:
        indices, values = on_gpu(tensor._indices(), device), on_gpu(tensor._values(), device)
        return _sparse(indices, values, tensor)
    if 0 in tensor.stride():  # expanded: several elements in one place
        tensor = tensor.contiguous()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.device.type == "cpu":
        on_host(made).copy_(tensor)
    return made


class Computing(TorchDispatchMode):
    """Makes results on imitated GPUs real, in this thread, its backward passes, and threads that start meanwhile.

    Attributes:
        operations: How often each operation was given to a GPU, by its name in torch. One may be several kernels.
        waits: How often the host waited for a GPU, by the operation; `waits.total()` counts them. Waits of CUDA's own
            functions (`synchronize`, `item`, copies to pageable memory) go by the name `cuda`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self._waits: Counter[str] = Counter()
        self._begin = waits()
        self._settings = contextlib.ExitStack()
        self._recorded: list[Callable[[], Any]] = []
        self._replay = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: self._recorded[number]())

    @property
    def waits(self) -> Counter[str]:
        return self._waits + Counter({"cuda": waits() - self._begin})

    def clear(self) -> None:
        """Count from here."""
        self.operations.clear()
        self._waits.clear()
        self._begin = waits()

    def __enter__(self) -> Computing:
        # cuDNN and the fused kernels of attention exist on GPUs only.
        self._settings.enter_context(torch.backends.cudnn.flags(enabled=False))
        self._settings.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        _library.imitated_replays_by(self._replay)
        self._settings.enter_context(mock.patch.object(threading.Thread, "run", self._run_thread(threading.Thread.run)))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._settings.close()

    def _run_thread(self, run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def run_computing(thread: threading.Thread) -> None:
            with _InThread(self):
                run(thread)

        return run_computing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, FakeTensor) for one in types):
            return func(*args, **(kwargs or {}))  # which have shapes alone
        if any(one not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for one in types):
            return NotImplemented  # DTensor and others: what they are made of comes here after them
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = _device_of(tensors, kwargs)
        if device is None or name in _WITHOUT_KERNEL or _is_view(func):
            return func(*args, **kwargs)
        if name in _COPIES:
            return self._copy(func, args, kwargs)
        if name not in _INDEXING and _mixed(tensors):
            return func(*args, **kwargs)  # which torch refuses
        if _library.imitated_is_lost(device.index):
            torch.cuda.synchronize(device)  # raises what the launch of a kernel would
        self.operations[name] += 1
        if name in _WAITING or (name in _INDEXING and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])):
            self._wait(name, device)
        with _random_numbers(func, kwargs, device):
            if _is_recording(device):
                return self._record(func, args, kwargs, device)
            return self._compute(func, args, kwargs, device)

    def _wait(self, name: str, device: torch.device) -> None:
        if _is_recording(device) or torch.cuda.get_sync_debug_mode():
            torch.cuda.current_stream(device).synchronize()  # raises, or warns
        else:
            self._waits[name] += 1

    def _compute(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        host_args, host_kwargs = _hosted(args, kwargs)
        try:
            computed = func(*host_args, **host_kwargs)
        except (IndexError, RuntimeError) as exc:
            if func._schema.name == "aten::_assert_async":
                with torch.cuda.device(device):
                    raise_on_gpu()
                return None
            made = func(*args, **kwargs)  # in the right shape, unless the arguments do not go together
            if not any(words in str(exc) for words in _OUT_OF_BOUNDS):
                raise
            with torch.cuda.device(device):
                raise_on_gpu()
            return made
        if func.namespace == "_c10d_functional":  # it goes on in the background
            tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, computed)
        return _results(func, args, kwargs, host_args, host_kwargs, computed, device)

    def _record(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """Keep an operation for each launch of the graph that is recorded; its results have no values until then."""
        host_args, host_kwargs = _hosted(args, kwargs)
        if all(one.alias_info is not None and one.alias_info.is_write for one in func._schema.returns):
            made = _results(func, args, kwargs, host_args, host_kwargs, [None] * len(func._schema.returns), device)
        else:
            meta = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (host_args, host_kwargs))
            if host_kwargs.get("device") is not None:
                meta[1]["device"] = torch.device("meta")
            made = _results(func, args, kwargs, *meta, func(*meta[0], **meta[1]), device)
        targets = [on_host(leaf) for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]

        def compute() -> None:
            try:
                computed = func(*host_args, **host_kwargs)
            except (IndexError, RuntimeError):
                with torch.cuda.device(device):
                    raise_on_gpu()
                return
            for target, leaf in zip(targets, tree_leaves(computed), strict=False):
                if target.data_ptr() != leaf.data_ptr():
                    target.copy_(leaf)

        self._keep(compute)
        return made

    def _keep(self, compute: Callable[[], Any]) -> None:
        _library.imitated_record(len(self._recorded))
        self._recorded.append(compute)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copies of memory are CUDA's; what takes a kernel (another type, another layout) is computed."""
        if func._schema.name == "aten::copy_":
            to, source = args[0], args[1]
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source, to = args[0], None
            blocking = not kwargs.get("non_blocking", False)
            if source.is_sparse:
                return self._copy_sparse(source, kwargs)
        self.operations[func._schema.name] += 1
        if to is None:
            options = {name: kwargs.get(name) for name in ("dtype", "device", "memory_format")}
            to = torch.empty_like(source, pin_memory=bool(kwargs.get("pin_memory")), **options)
        if to.is_sparse or source.is_sparse:
            return func(*args, **kwargs)
        plain = to.dtype == source.dtype and to.shape == source.shape
        if plain and to.is_contiguous() and source.is_contiguous():
            return torch.ops.aten.copy_.default(to, source, not blocking)

        host_to, host_source = on_host(to), on_host(source)
        if _is_recording(to.device if to.is_cuda else source.device):
            self._keep(lambda: host_to.copy_(host_source))
        else:
            host_to.copy_(host_source)
        if blocking and to.device.type != source.device.type:
            torch.cuda.current_stream(to.device if to.is_cuda else source.device).synchronize()
        return to

    def _copy_sparse(self, source: torch.Tensor, kwargs: Any) -> torch.Tensor:
        indices, values = source._indices(), source._values()
        options = {name: kwargs.get(name) for name in ("device", "non_blocking") if kwargs.get(name) is not None}
        copy = torch.ops.aten._to_copy.default
        indices = self._copy(copy, (indices,), options)
        values = self._copy(copy, (values,), {**options, "dtype": kwargs.get("dtype")})
        return _sparse(indices, values, source)


class _InThread(TorchDispatchMode):
    """The mode in another thread."""

    def __init__(self, computing: Computing) -> None:
        super().__init__()
        self._computing = computing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._computing.__torch_dispatch__(func, types, args, kwargs)


def _device_of(tensors: list[torch.Tensor], kwargs: Any) -> torch.device | None:
    """The GPU of an operation; None for one on the CPU."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            return tensor.device
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "cuda":
        return None
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _is_recording(device: torch.device) -> bool:
    stream = torch.cuda.current_stream(device).cuda_stream
    return bool(_library.imitated_is_recording(ctypes.c_void_p(stream)))


def _is_view(func: Any) -> bool:
    infos = [returned.alias_info for returned in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _mixed(tensors: list[torch.Tensor]) -> bool:
    """Return whether an operation has tensors of several devices. Numbers of the CPU go with all."""
    return len({tensor.device for tensor in tensors if tensor.dim() or tensor.device.type == "cuda"}) > 1


def _hosted(args: Any, kwargs: Any) -> tuple[Any, Any]:
    args, kwargs = tree_map_only(torch.Tensor, on_host, (args, kwargs))
    host = {
        name: torch.device("cpu") if name == "device" and value is not None else value for name, value in kwargs.items()
    }
    if host.get("generator") is not None:
        host["generator"] = None
    return args, host


def _results(
    func: Any, args: Any, kwargs: Any, host_args: Any, host_kwargs: Any, computed: Any, device: torch.device
) -> Any:
    """Return the operation's results on the GPU: tensors that it has written to, or new ones."""
    written = {}
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        by_position = number < len(args)
        own = args[number] if by_position else kwargs.get(argument.name)
        host = host_args[number] if by_position else host_kwargs.get(argument.name)
        written[frozenset(argument.alias_info.before_set)] = own
        if isinstance(own, torch.Tensor):
            _write_back(own, host)
    returns = func._schema.returns
    values = [computed] if len(returns) == 1 else list(computed or ())
    found = []
    for returned, value in zip(returns, values, strict=False):
        key = frozenset(returned.alias_info.before_set) if returned.alias_info is not None else None
        if key is not None and key in written:
            found.append(written[key])
        else:
            found.append(tree_map_only(torch.Tensor, lambda tensor: on_gpu(tensor, device), value))
    return None if not returns else found[0] if len(returns) == 1 else tuple(found)


def _write_back(own: torch.Tensor, host: torch.Tensor) -> None:
    """Bring what has a size of its own since it was written to; all else lies in the same memory."""
    if own.is_sparse:
        torch.ops.aten.copy_sparse_to_sparse_.default(own, on_gpu(host, own.device), False)
    elif own.shape != host.shape and own.device.type == "cuda":
        own.resize_(host.shape)
        if host.device.type == "cpu":
            on_host(own).copy_(host)


@contextlib.contextmanager
def _random_numbers(func: Any, kwargs: Any, device: torch.device) -> Iterator[None]:
    """Draw the host's random numbers as the state of the GPU's generator has it, and advance that."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    if _is_recording(device):
        raise NotImplementedError(f"{func}: random numbers in a graph are not imitated")
    generator = kwargs.get("generator")
    if generator is None:
        generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    host = torch.default_generator
    state = host.get_state()
    host.manual_seed((generator.initial_seed() + 0x9E3779B97F4A7C15 * offset) % (1 << 63))
    try:
        yield
    finally:
        host.set_state(state)


__all__ = ["Computing", "kernels", "on_gpu", "on_host", "raise_on_gpu", "waits"]
