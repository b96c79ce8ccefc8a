"""A process group of CPU ranks on one machine whose collectives use shared memory, for libraries that take a process
group.

It has the operations that TorchRec and DistributedDataParallel use. Other operations raise, as with any backend that
lacks them.
"""

# mypy: disable-error-code="override, assignment"
# (torch overloads these methods for callers, and calls them in one way each)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from .collectives import SharedCollectives, add_up, as_bytes, open_shared_collectives

_NAME = "nbdist"

_REDUCE: dict[Any, Callable[..., object]] = {
    ReduceOp.SUM: add_up,
    ReduceOp.AVG: torch.mean,
    ReduceOp.MAX: torch.amax,
    ReduceOp.MIN: torch.amin,
}


class SharedGroup(dist.ProcessGroup):
    """A process group of all ranks of the default process group; made by `shared_group`.

    Each collective is complete when its call returns.
    """

    def __init__(self, rank: int, size: int, collectives: SharedCollectives) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.collectives = collectives

    @property
    def usable(self) -> bool:
        """Return True if no collective has failed and the default process group is still the same."""
        return self.collectives.usable

    def getBackendName(self) -> str:
        """Return the name of the backend, which `DistributedDataParallel` logs."""
        return _NAME

    def _get_backend_name(self) -> str:
        """Return the name by which `ShardedTensor` recognizes that a rank without a shard has no GPU."""
        return "gloo"

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the device types of a group, which TorchRec before 1.7 reads."""
        return [torch.device("cpu")]

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Run `torch.distributed.all_reduce`."""
        for tensor in tensors:
            flat = tensor.contiguous()
            self.collectives.reduce_(flat, _reduction(opts))
            if flat is not tensor:
                tensor.copy_(flat)
        return _done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Run `torch.distributed.broadcast`."""
        for tensor in tensors:
            root = self.rank() == opts.rootRank
            nothing = tensor.new_empty(0)
            outputs = [tensor if rank == opts.rootRank else nothing for rank in range(self.size())]
            self._exchange(outputs, [tensor if root else nothing] * self.size())
        return _done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """Run `torch.distributed.all_gather`. The ranks' tensors may differ in shape."""
        for gathered, one in zip(outputs, inputs, strict=True):
            self._exchange(gathered, [one] * self.size())
        return _done(outputs)

    def all_gather_single(self, output: torch.Tensor, one: torch.Tensor, opts: Any = None) -> Any:
        """Run `torch.distributed.all_gather_into_tensor`."""
        self._exchange(output.view(self.size(), -1).unbind(), [one] * self.size())
        return _done(output)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        """Run `torch.distributed.reduce_scatter`. The results of the ranks may differ in shape."""
        for output, parts in zip(outputs, inputs, strict=True):
            received = output.new_empty(self.size(), *output.shape)
            self._exchange(received.unbind(), parts)
            _reduction(opts)(received, 0, out=output.detach())
        return _done(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, parts: torch.Tensor, opts: Any = None) -> Any:
        """Run `torch.distributed.reduce_scatter_tensor`."""
        return self.reduce_scatter([output], [list(parts.view(self.size(), *output.shape))], opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        one: torch.Tensor,
        output_sizes: list[int] | None,
        input_sizes: list[int] | None,
        opts: Any = None,
    ) -> Any:
        """Run `torch.distributed.all_to_all_single`."""
        each = [
            tensor.split(sizes or [len(tensor) // self.size()] * self.size())
            for tensor, sizes in ((output, output_sizes), (one, input_sizes))
        ]
        self._exchange(*each)
        return _done(output)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """Run `torch.distributed.all_to_all`."""
        self._exchange(outputs, inputs)
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        """Run `torch.distributed.barrier`."""
        return self.allreduce([torch.zeros(1, device="cpu")])

    # As torch called them before 2.12 or so.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def abort(self) -> None:
        """Abort, from any thread, a collective that waits in this group."""
        self.collectives.abort()

    def shutdown(self) -> None:
        """Leave the group."""
        self.collectives.close()

    def _exchange(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        into = [one if one.is_contiguous() else torch.empty_like(one).contiguous() for one in outputs]
        self.collectives.all_to_all(list(map(as_bytes, into)), [as_bytes(one.contiguous()) for one in inputs])
        for output, one in zip(outputs, into, strict=True):
            if one is not output:
                output.copy_(one)


def shared_group() -> SharedGroup | None:
    """Return the shared group of this process group; None if its ranks cannot share memory. All ranks must call it."""
    known = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, SharedGroup) and group.usable]
    all_know = torch.tensor(len(known), device="cpu")
    dist.all_reduce(all_know, ReduceOp.MIN)
    if all_know:
        return known[-1]
    collectives = open_shared_collectives()
    if collectives is None:
        return None
    if _NAME.upper() not in dist.Backend._plugins:  # set last: a rank may have been interrupted in it
        if hasattr(dist.Backend, _NAME.upper()):  # set first: some versions of torch refuse then
            delattr(dist.Backend, _NAME.upper())
        dist.Backend.register_backend(_NAME, _create, devices=["cpu"])
    _opened[:] = [collectives]
    try:
        made: SharedGroup = dist.new_group(backend=_NAME)
    except BaseException:  # another rank has failed meanwhile, or the user has interrupted it
        collectives.close()
        raise
    return made


_opened: list[SharedCollectives] = []
"""The collectives of all groups that are made: all of these have the same ranks and one order of collectives."""


def _create(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
    if size == dist.get_world_size() and _opened[0].usable:
        return SharedGroup(rank, size, _opened[0])
    return dist.ProcessGroupGloo(store, rank, size, timeout)  # of some of the ranks, such as TorchRec makes


def _reduction(opts: Any) -> Callable[..., object]:
    op = ReduceOp.SUM if opts is None else opts.reduceOp
    for known, reduce in _REDUCE.items():
        if op == known:
            return reduce
    raise RuntimeError(f"{op} is not supported by collectives in shared memory")


def _done(result: Any) -> Any:
    """Return the work object of a collective that is complete, with its `result`."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
