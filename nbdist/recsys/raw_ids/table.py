"""An embedding table with a row for each raw id."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .counted import CountedIds
from .mixing import initial_rows, mixed, uniform
from .options import RawIds
from .row_store import RowStore

_STATE = ("ids", "weight", "counts", "last", "waiting_ids", "waiting_counts", "waiting_last", "batches")
"""The tensors of `rows_state`."""


class LookUps(Protocol):
    """The interface of a class that looks up rows on all ranks."""

    def vectors(self, table: RawTable, ids: Tensor, training: bool) -> tuple[Tensor, Tensor | None]:
        """Return the vectors of ids, and whether each id has a row. The second value is None unless unknown ids share a
        trained vector.
        """


class Records(NamedTuple):
    """Ids with their numbers of occurrences, and the batch of the last occurrence of each."""

    ids: Tensor
    counts: Tensor
    last: Tensor


class RawTable(nn.Module):
    """An embedding table that is looked up by raw ids. Collections such as `PooledTables` make it.

    After `replicate`, each row is stored on one of the ranks. In such a model, new ids get rows in training mode while
    gradients are on. Otherwise, the table is only read.

    Args:
        width: The number of elements of a row.
        options: The rules by which ids get rows and lose them.
        device: The device of the rows.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.raw_ids import RawIds, RawTable
        >>> RawTable(2, RawIds())(torch.tensor([2**60]))  # an id without a row
        tensor([[0., 0.]], grad_fn=<WhereBackward0>)
    """

    recorded_by: ClassVar[str] = "nbdist.recsys.training.fit(..., record=folder)"
    """The way to record a training of this table: a row and its optimizer's state have another number after a load."""

    def __init__(self, width: int, options: RawIds, device: torch.device | str = "cpu") -> None:
        super().__init__()
        if torch.device(device).type == "meta":
            raise ValueError("a table of raw ids must have memory, got device='meta': it starts without rows anyway")
        self.options = options
        self.rows = CountedIds(device)
        self.waiting = CountedIds(device)
        """Ids that did not occur often enough to have a row."""
        self.batches = 0
        """The number of look-ups in training."""
        self.batches_before = 0
        """The same number after the last step."""
        self.store = RowStore(options.folder)
        """The memory of the rows, and of their state in an optimizer."""
        self.weight = nn.Parameter(
            self.store.grown("weight", torch.zeros(0, width, device=device), self.rows.map.allocated)
        )
        self.default_row = nn.Parameter(torch.zeros(width, device=device)) if options.unknown == "learned" else None
        self.look_ups: LookUps | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors of ids, shape (ids, width).

        Args:
            ids: Integers, shape (ids,). The bits of unsigned 64-bit integers are read as signed integers.

        Raises:
            TypeError: The ids are no integers.
        """
        if ids.is_floating_point() or ids.is_complex():
            raise TypeError(f"raw ids must be integers, got {ids.dtype}: a float cannot hold all 64-bit ids")
        ids = ids.view(torch.int64) if ids.dtype == torch.uint64 else ids.long()
        if self.look_ups is not None:
            found, known = self.look_ups.vectors(self, ids, self.training and torch.is_grad_enabled())
            return found if known is None or self.default_row is None else torch.where(known, found, self.default_row)
        rows = self.rows.map.find(ids)
        default = self.default_row if self.default_row is not None else self.weight.new_zeros(())
        return torch.where((rows >= 0)[:, None], nn.functional.embedding(rows.clamp(min=0), self.weight), default)

    def ids(self) -> Tensor:
        """Return the ids that have a row on this rank, in ascending order, int64."""
        return self.rows.map.ids_of(self.rows.map.rows()).sort().values

    def rows_for(self, ids: Tensor, training: bool) -> Tensor:
        """Return the row of each id on this rank, or -1. In training, admit new ids first, and count all."""
        rows = self.rows.map.find(ids)
        if not training:
            return rows
        self.batches += 1
        missing = (rows < 0).nonzero()[:, 0]
        if len(missing):
            new, places, counts = ids[missing].unique(return_inverse=True, return_counts=True)
            rows[missing] = self._admit(new, counts)[places]
        known = rows if not len(missing) else rows[rows >= 0]
        self.rows.note(known, self.batches)
        return rows

    def vectors(self, rows: Tensor) -> Tensor:
        """Return the vectors of rows, shape (rows, width), without a gradient. Row -1 gives zeros."""
        missing = (rows < 0).nonzero()[:, 0]
        found = self.weight.detach().index_select(0, rows.clamp(min=0) if len(missing) else rows)
        return found.index_fill_(0, missing, 0)

    def _admit(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Return a row for each new id, or -1 if it is not admitted yet. `counts` is how often each is in the batch."""
        waited = None
        if self.options.admit_after > 1:
            waited = self.waiting.map.find(ids)
            before = torch.where(waited >= 0, self.waiting.counts(waited.clamp(min=0)), 0)
        else:
            before = torch.zeros_like(counts)
        chances = (before + counts - self.options.admit_after + 1).clamp(min=0).minimum(counts)
        admitted = chances > 0
        if self.options.admit_probability < 1:
            luck = uniform(mixed(mixed(ids, 3) + self.batches, 4))
            admitted &= luck.double() < 1 - (1 - self.options.admit_probability) ** chances.double()
        if waited is not None:
            self._wait(ids, counts, waited, admitted)
        chosen = admitted.nonzero()[:, 0]
        found = torch.full_like(ids, -1)
        found[chosen] = self.put(Records(ids[chosen], before[chosen], torch.full_like(chosen, self.batches)))
        return found

    def _wait(self, ids: Tensor, counts: Tensor, waited: Tensor, admitted: Tensor) -> None:
        """Count the occurrences of ids that are not admitted yet, and remove the ids that are admitted now."""
        self.waiting.map.remove(waited[admitted & (waited >= 0)])
        new, old = ~admitted & (waited < 0), ~admitted & (waited >= 0)
        self.waiting.add(ids[new], counts[new], self.batches)
        self.waiting.note(waited[old].repeat_interleave(counts[old]), self.batches)

    @torch.no_grad()
    def put(self, records: Records, weight: Tensor | None = None) -> Tensor:
        """Add new ids, and return their rows. Without `weight`, the rows get their initial vectors."""
        rows = self.rows.add(records.ids, records.counts, records.last)
        self.weight.data = self.store.grown("weight", self.weight.data, self.rows.map.allocated)
        if weight is None:
            weight = initial_rows(records.ids, self.weight.shape[1], self.options.bound)
        self.weight[rows] = weight.to(self.weight)
        return rows

    def rows_state(self) -> dict[str, Tensor]:
        """Return the rows on this rank with their ids, counts and batches, in the order of the ids."""
        rows = self.rows.map.rows()
        rows = rows[self.rows.map.ids_of(rows).argsort()]
        waiting = self.waiting.map.rows()
        waiting = waiting[self.waiting.map.ids_of(waiting).argsort()]
        found = (
            *(self.rows.map.ids_of(rows), self.store.taken(self.weight.detach(), rows)),
            *(self.rows.counts(rows), self.rows.last(rows)),
            *(self.waiting.map.ids_of(waiting), self.waiting.counts(waiting), self.waiting.last(waiting)),
            torch.tensor(self.batches),
        )
        return dict(zip(_STATE, found, strict=True))

    def clear(self) -> None:
        """Remove all rows."""
        device, self.batches, self.batches_before = self.weight.device, 0, 0
        self.rows, self.waiting = CountedIds(device), CountedIds(device)
        self.weight.data = self.store.grown(
            "weight", self.weight.data.new_zeros(0, self.weight.shape[1]), self.rows.map.allocated
        )

    def add_state(self, state: dict[str, Tensor]) -> Tensor:
        """Add the rows that `rows_state` has returned, and return their row numbers on this rank."""
        ids, weight, counts, last, *waiting, batches = (state[name].to(self.weight.device) for name in _STATE)
        self.batches = self.batches_before = max(self.batches, int(batches))
        self.waiting.add(*waiting)
        return self.put(Records(ids, counts, last), weight)

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the part of `state_dict` for the rows: only rows that have an id, not the spare memory in `weight`."""
        return self.rows_state()

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Replace all rows by the rows of a `state_dict`."""
        self.clear()
        self.add_state(state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}weight"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        own = {f"{prefix}weight": self.weight.detach()}  # the rows come with the extra state
        super()._load_from_state_dict({**state_dict, **own}, prefix, *rest)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.rows.to(self.weight.device)
        self.waiting.to(self.weight.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "look_ups": None}  # a copy is a plain table

    def extra_repr(self) -> str:
        """Return the size and the options."""
        return f"{self.rows.map.size} rows of {self.weight.shape[1]}, {self.options}"
