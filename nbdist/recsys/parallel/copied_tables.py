"""Embedding tables with sparse gradients, copied on each rank: for GPUs, and for several machines.

NCCL cannot sum sparse tensors, and gloo cannot do so reliably: as of torch 2.13 its sums corrupt a rank's memory once
in thousands of steps. So DistributedDataParallel ignores such tables, and ranks gather each other's rows here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .common_tables import dense_gradient, run_closure
from .row_steps import step_rows


class CopiedTables:
    """The tables of a model. All ranks must call its methods at the same time.

    Args:
        tables: The weights of the tables, by name; all ranks get the weights of the group's first rank.
        group: The group of the ranks with copies. None: the default process group.
    """

    def __init__(self, tables: dict[str, nn.Parameter], group: Any = None) -> None:
        self._names = {table: name for name, table in tables.items()}
        self._group: Any = group if group is not None else dist.group.WORLD
        self._means: list[tuple[nn.Parameter, torch.Tensor | None]] = []  # gradients of tables that were stepped here
        first = dist.get_process_group_ranks(self._group)[0]
        for table in self._names:
            dist.broadcast(table.data, first, group=self._group)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on, make each step of the optimizer of these tables use the mean of the ranks' gradients."""
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the optimizer's state of the tables' rows is copied on each rank, too."""

    @torch.no_grad()
    def exchange(self) -> None:
        """Set each table's gradient to the mean over the ranks. A gradient that is the mean already does not change."""
        size = dist.get_world_size(self._group)
        if size == 1:  # a mean already; to look at its rows, the host would wait for the GPU
            for table in self._names:
                self._check(table)
            return
        mine = [self._gradient(table) for table in self._names]
        sizes = torch.tensor([len(ids) for ids, _ in mine], device=mine[0][0].device)
        counts = torch.stack(self._gather(sizes)).T.tolist()  # of each table, of each rank
        for (table, (ids, rows)), some in zip(zip(self._names, mine, strict=True), counts, strict=True):
            if not max(some):
                continue
            all_ids, all_rows = (
                torch.cat(
                    [part[:count] for part, count in zip(self._gather(_padded(own, max(some))), some, strict=True)]
                )
                for own in (ids, rows)
            )
            table.grad = torch.sparse_coo_tensor(all_ids[None], all_rows / size, table.shape, check_invariants=False)

    def squared_norm(self) -> torch.Tensor:
        """Return the squared norm of all tables' gradients after `exchange`. It is equal on all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=next(iter(self._names)).device)
        for table in self._names:
            if table.grad is not None:
                total += table.grad.coalesce().values().double().square().sum()
        return total

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._names

    def _begin(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = run_closure(optimizer, args, kwargs)
        self.exchange()
        if type(optimizer) is torch.optim.SGD:  # for Adagrad, GPUs have kernels of their own
            means = {table: table.grad for table in self._names}
            self._means = [(table, means[table]) for table in step_rows(optimizer, self)]
            for table, _ in self._means:
                table.grad = None  # so that the optimizer passes over it
        return changed

    def _end(self, *_: Any) -> None:
        for table, mean in self._means:
            table.grad = mean
        self._means = []

    def _gradient(self, table: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows that this rank's batch has used, distinct, shape (rows,), and their gradients."""
        if table.grad is None:
            return torch.empty(0, dtype=torch.int64, device=table.device), table.new_empty(0, *table.shape[1:])
        self._check(table)
        grad = table.grad.coalesce()
        return grad.indices()[0], grad.values()

    def _check(self, table: nn.Parameter) -> None:
        if table.grad is not None and not table.grad.is_sparse:
            raise dense_gradient(self._names[table])

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, tensor, group=self._group)
        return everyone


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])
