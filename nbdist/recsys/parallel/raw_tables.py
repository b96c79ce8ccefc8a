"""Tables of raw ids in a model on all ranks. Each row, with its optimizer's state, is on one rank.

In a step, a small dense parameter with the rows that have gradients replaces the table. So any optimizer of torch that
treats each element alike can train these rows, and rows without a gradient stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..raw_ids.counted import CountedIds, grown, lowest
from ..raw_ids.mixing import owners
from ..raw_ids.ranks import SpreadLookUps
from ..raw_ids.table import RawTable
from .common_tables import run_closure

_OPTIMIZERS = (
    *(torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
)
"""The optimizers whose state of an element begins with 0, or, for Adagrad, with one of its options."""
_MAP_BYTES = 80
"""The approximate number of bytes of a row in the map and the counts."""


def raw_tables(model: nn.Module) -> dict[str, RawTable]:
    """Return a model's tables of raw ids, by path."""
    return {path: one for path, one in model.named_modules() if isinstance(one, RawTable)}


class RawTables:
    """The tables of raw ids of a model. All ranks must call its methods at the same time.

    Args:
        tables: The tables, by path.
        group: The process group of all ranks.
    """

    def __init__(self, tables: dict[str, RawTable], group: Any = None) -> None:
        self.tables = tables
        self._group: Any = group if group is not None else dist.group.WORLD
        self.size, self.rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._look_ups = {path: SpreadLookUps(self._group) for path in tables}
        self._weights = {table.weight: path for path, table in tables.items()}
        self._standing_in: list[tuple[dict[str, Any], int, nn.Parameter, Tensor]] = []
        self.optimizer: torch.optim.Optimizer
        for path, table in tables.items():
            if self.size > 1:  # rows that it has already
                state, table.batches = table.rows_state(), 0
                table.clear()
                table.add_state(self.own(state))
            table.look_ups = self._look_ups[path]

    @property
    def parameters(self) -> list[str]:
        """The names of the tables' weights in the model."""
        return [f"{path}.weight".lstrip(".") for path in self.tables]

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return next(iter(self._weights)).device

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._weights

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make each step of the optimizer a step on the rows with gradients, and evict rows after it.

        Raises:
            ValueError: The optimizer cannot train single rows.
        """
        if type(optimizer) not in _OPTIMIZERS:
            raise ValueError(
                f"`optimizer` must make one of torch's {', '.join(one.__name__ for one in _OPTIMIZERS)} for tables of "
                f"raw ids, got {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def exchange(self) -> None:
        """Set each table's gradient to the mean over the ranks, for its rows on this rank."""
        for path, table in self.tables.items():
            self._look_ups[path].exchange(table)

    def squared_norm(self) -> Tensor:
        """Return the squared norm of all tables' gradients after `exchange`. It is equal on all ranks."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for weight in self._weights:
            if weight.grad is not None:
                total += weight.grad._values().double().square().sum()
        dist.all_reduce(total, group=self._group)
        return total[0]

    def own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of a table's `rows_state`, and of the optimizer's values for its rows."""
        mine = owners(state["ids"], self.size) == self.rank
        waiting = owners(state["waiting_ids"], self.size) == self.rank
        return {
            name: value if not value.ndim else value[waiting if name.startswith("waiting_") else mine]
            for name, value in state.items()
        }

    def row_state(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """Return the optimizer's state that has a value for each element of a table, in memory for all rows of the
        table.
        """
        state = self.optimizer.state.get(weight, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[name] = self.made_longer(weight, name, value)
        return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.ndim}

    def made_longer(self, weight: nn.Parameter, name: str, value: Tensor) -> Tensor:
        """Return the optimizer's state of some rows, resized to the number of rows of the table."""
        store, initial = self.tables[self._weights[weight]].store, self.initial(weight, name)
        return store.grown(f"optimizer.{name}", value, len(weight), initial)

    def initial(self, weight: Tensor, name: str) -> float:
        """Return the initial value of the optimizer's state of an element."""
        for group in self.optimizer.param_groups:
            if name == "sum" and any(one is weight for one in group["params"]):
                return float(group.get("initial_accumulator_value", 0))
        return 0.0

    def _begin(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._put_back()  # after a step that failed
        changed = run_closure(optimizer, args, kwargs)
        self.exchange()
        for group in optimizer.param_groups:
            for i, weight in enumerate(group["params"]):
                if weight in self and weight.grad is not None:
                    grad, weight.grad = weight.grad, None
                    rows = grad._indices()[0]
                    if len(rows):
                        self._stand_in(group, i, weight, rows, grad._values())
        return changed

    @torch.no_grad()
    def _stand_in(self, group: dict[str, Any], i: int, weight: nn.Parameter, rows: Tensor, grads: Tensor) -> None:
        """Replace a table by a parameter with the rows that have gradients."""
        small = nn.Parameter(weight.detach().index_select(0, rows))
        small.grad = grads
        kept = self.row_state(weight)
        state = self.optimizer.state.get(weight, {})
        if state:
            self.optimizer.state[small] = {
                **state,
                **{name: value.index_select(0, rows) for name, value in kept.items()},
            }
        group["params"][i] = small
        self._standing_in.append((group, i, weight, rows))

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._put_back(stepped=True)
        self._evict()

    @torch.no_grad()
    def _put_back(self, stepped: bool = False) -> None:
        """Put the tables back in place of these parameters. If a step was taken, copy the changed rows to the
        tables.
        """
        for group, i, weight, rows in self._standing_in:
            small, group["params"][i] = group["params"][i], weight
            after = self.optimizer.state.pop(small, {})
            if not stepped:
                continue
            weight.index_copy_(0, rows, small.detach())
            state = self.optimizer.state[weight]
            for name, value in after.items():
                if isinstance(value, Tensor) and value.ndim:
                    if name not in state:
                        state[name] = self.made_longer(weight, name, value[:0])
                    state[name].index_copy_(0, rows, value)
                else:
                    state[name] = value
        self._standing_in.clear()

    def capacity_of(self, table: RawTable) -> int | None:
        """Return the number of rows on all ranks that a table may have after a step."""
        options = table.options
        if options.capacity_bytes is None:
            return options.capacity
        numbers = 1 + len(self.row_state(table.weight))
        return max(1, options.capacity_bytes // (numbers * table.weight[0].nbytes + _MAP_BYTES))

    @torch.no_grad()
    def _evict(self) -> None:
        """Evict rows that are too old, and rows beyond the limit for all ranks together."""
        for table in self.tables.values():
            time = table.options.time_to_live
            every = max(1, (time or 0) // 8)
            due, table.batches_before = table.batches // every > table.batches_before // every, table.batches
            if time is not None and due:
                self._remove(table, table.rows.expired(table.batches - time))
                table.waiting.map.remove(table.waiting.expired(table.batches - time))
        limited = [(table, limit) for table in self.tables.values() if (limit := self.capacity_of(table)) is not None]
        if not limited:
            return
        sizes = [one.map.size for table, _ in limited for one in (table.rows, table.waiting)]
        totals = torch.tensor(sizes, device=self.device)
        if self.size > 1:
            dist.all_reduce(totals, group=self._group)
        for (table, limit), (rows, waiting) in zip(limited, totals.view(-1, 2).tolist(), strict=True):
            if rows > limit:
                goes = self._first_to_go(table.rows, rows - limit + limit // 32, table.options.evict, table.batches)
                self._remove(table, goes)
            if waiting > limit:
                goes = self._first_to_go(table.waiting, waiting - limit + limit // 32, "lru", table.batches)
                table.waiting.map.remove(goes)

    def _first_to_go(self, ids: CountedIds, count: int, evict: Any, batch: int) -> Tensor:
        """Return this rank's rows among the `count` rows of all ranks that must be evicted first."""
        rows, keys = ids.first_to_go(count, evict, batch)
        if self.size == 1:
            return rows
        theirs = ids.map.ids_of(rows)
        sizes = torch.tensor([len(rows)], device=rows.device)
        most = int(torch.stack(self.gather(sizes)).max())
        counts = [int(one) for one in self.gather(sizes)]
        all_keys, all_ids = (
            torch.cat([part[:n] for part, n in zip(self.gather(grown(own, most)), counts, strict=True)])
            for own in (keys, theirs)
        )
        chosen = lowest(all_keys, all_ids, count)
        before = sum(counts[: self.rank])
        mine = chosen[(chosen >= before) & (chosen < before + len(rows))] - before
        return rows[mine]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(everyone, tensor.contiguous(), group=self._group)
        return everyone

    def _remove(self, table: RawTable, rows: Tensor) -> None:
        """Remove rows of a table, and their state in the optimizer."""
        table.rows.map.remove(rows)
        table.weight[rows] = 0
        for name, value in self.row_state(table.weight).items():
            value[rows] = self.initial(table.weight, name)
