"""The base class of loaders: iteration, epochs, seeds, position and rank."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...system.annotations import annotated
from .. import ranks
from ..io.partition import Partition
from ..io.remaining_epoch import RemainingEpoch
from .adapter import Adapter, known_to_accelerate
from .batches import Block, Window, blocks
from .columns import Columns
from .order import drawn
from .prefetch import on_device
from .resident import Resident


class Loader(Adapter):
    """The base of `MemoryLoader` and `ParquetLoader`.

    A batch is a dict from column name to tensor, shape (batch_size, ...), or `Ragged` for a column of lists; or the
    result of `transform`. Batches may be views of shared memory: do not resize them.

    With a process group, make and use the loader on all ranks: the constructor compares their arguments, so that they
    cannot have different numbers of steps and wait for one another forever.

    Each complete iteration is an epoch, and the next epoch has a new order. After an interrupted iteration, the next
    one starts the epoch again, in the same order, unless `load_state_dict` or `set_epoch` was called.

    The arguments are listed, with their defaults, in the signatures of `MemoryLoader` and `ParquetLoader`.

    Args:
        batch_size: The number of rows of a step on each rank.
        shuffle: Whether each epoch has a new random order; otherwise rows come in the order of the input.
        seed: The seed, which together with the epoch determines the order. None: rank 0 draws it from torch's
            generator.
        remainder: The treatment of rows that do not divide evenly: "keep", "pad" or "drop"; see `Partition`.
        keyed: The columns with which the model or `predict` calls `keyed_jagged`, in that order: ids, or lists of ids,
            of at most 31 bits. The loader then makes the keyed tensors ahead, in int32, so that half the bytes are sent
            to the ranks that hold the rows. `transform` must not change these columns.
        transform: A function that is called with each batch. The loader yields its result instead of the batch.
        device: The device of batches. None: the device of the rank; without ranks, the CPU. If there are no columns of
            lists, and the columns take at most a quarter of a GPU's free memory, they are copied to the GPU once, and
            batches are gathered there. Later changes of the columns then have no effect, unless torch makes them.
            Otherwise batches are gathered on the CPU, and copied asynchronously through pinned memory.
        prefetch: The number of blocks (a few MB each) that a thread makes in advance. None: 2 if there is a disk or a
            GPU to wait for, otherwise 0, which uses no thread.
        pin_memory: Whether batches that stay on the CPU are in page-locked memory.
        rank: The rank whose share of the rows the loader yields. None: this process's rank when the loader is used;
            without a process group, all rows.
        world_size: The number of ranks that share the rows. None: the number of ranks of the process group.

    Raises:
        ValueError: An argument is invalid, or differs between ranks.
    """

    _waits = True  # whether making a block takes waiting
    _group: Any = None  # through which ranks agree, if not the default process group
    table: Columns | None = None  # all rows, where they are in memory from epoch to epoch
    whole = True
    """True if all rows are held in memory."""

    def __init__(
        self,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int | None,
        remainder: str,
        keyed: Sequence[str],
        transform: Callable[[Any], Any] | None,
        device: torch.device | str | int | None,
        prefetch: int | None,
        pin_memory: bool,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError("rank and world_size belong together: give both or neither")
        if prefetch is not None and prefetch < 0:
            raise ValueError(f"`prefetch` must be at least 0, got {prefetch}")
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory=True needs a GPU, and this process has none")
        self.batch_size, self.shuffle, self.remainder = batch_size, shuffle, remainder
        self.transform, self.prefetch, self.pin_memory = transform, prefetch, pin_memory
        self.keyed = [keyed] if isinstance(keyed, str) else list(keyed)
        for name in self.keyed:
            if name not in self._names():
                raise ValueError(
                    f"`keyed` must name columns, got {name!r}; there are {', '.join(self._names()) or 'none'}"
                )
        self.to(device)
        self._resident = Resident()
        self._shard = None if rank is None or world_size is None else (rank, world_size)
        self._epoch = self._step = self._start = 0
        self._rest = None  # of an epoch that other ranks have begun, as long as it lasts
        self.seed = int(torch.randint(2**62, ()).item()) if seed is None else seed
        self._agree(seed is None)
        self.partition.span(self.rank)

    def _windows(self, partition: Partition, rank: int, epoch: int, position: int) -> Iterator[Window]:
        """Yield the rows of `rank` in `epoch`, in consecutive windows, from the window of `position` on."""
        raise NotImplementedError

    def _everything(self, table: Columns, partition: Partition, rank: int, epoch: int) -> Window:
        """Yield the share of `rank` of a table that contains all rows."""
        start, stop = partition.span(rank)
        share = self._order(partition.rows, epoch, start, min(stop, partition.rows))
        if stop > partition.rows:  # padded: a row of another rank comes again
            share = torch.cat([share, self._order(partition.rows, epoch, 0, 1)])
        return Window(start, table, share)

    def _order(self, rows: int, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Return positions ``start .. stop - 1`` of the order of all rows, on a GPU if batches are made there."""
        if self.shuffle:
            return drawn(rows, self._seed_of(epoch), start, stop, self.device)
        return torch.arange(start, stop, dtype=torch.int32 if rows < 2**31 else torch.int64, device=self.device)

    def _windows_of_rest(self, rest: RemainingEpoch, epoch: int, start: int, stop: int) -> Iterator[Window]:
        """Yield rows ``start .. stop - 1`` of the remaining epoch."""
        for place, (rank, low, high) in rest.spans(start, stop):
            for window in self._windows(rest.begun, rank, epoch, low):
                first, last = max(low, window.start), min(high, window.start + len(window.order))
                if first < last:
                    part = window.order[first - window.start : last - window.start]
                    yield Window(place + first - low, window.table, part)
                del window
                if last == high:  # nothing more is read
                    break

    def _epoch_on_device(self) -> Window | None:
        """Return the remaining epoch as one window of dense columns on the device; None if it does not fit or has
        lists.

        A caller that takes batches from the window must call `_advance` for them.
        """
        if not self.whole or self._rest is not None:
            return None
        partition = self.partition
        windows = self._windows(partition, self.rank, self._epoch, partition.batch_start(self.rank, self._start))
        if self.device.type == "cuda":
            windows = self._resident.windows(windows, self.device, self.table)
        window = next(windows)
        parts = [window.order, *window.table.values()]
        there = all(isinstance(part, torch.Tensor) and part.device == self.device for part in parts)
        return window if there else None

    def _advance(self, steps: int) -> None:
        """Advance the position, as if `steps` more batches of the epoch had been yielded."""
        self._start = self._step = self._step + steps
        if self._step == len(self):
            self.set_epoch(self._epoch + 1)

    def _names(self) -> list[str]:
        """Return the columns by their names; None if they have none."""
        raise NotImplementedError

    def _fingerprint(self) -> str:
        """Return a fingerprint of the input: equal if the columns are equal and the rows are divided into the same
        pieces.
        """
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """The rank whose rows the loader yields."""
        return self._shard[0] if self._shard else ranks.rank()

    @property
    def world_size(self) -> int:
        """The number of ranks among which the rows are divided."""
        return self._shard[1] if self._shard else ranks.world_size()

    @property
    def partition(self) -> Partition:
        """The assignment of rows to ranks and steps. In an epoch that other ranks began, it covers the remaining
        rows."""
        whole = super().partition
        return whole if self._rest is None else dataclasses.replace(whole, rows=self._rest.rows)

    @property
    def begun_elsewhere(self) -> bool:
        """True if the epoch was begun by other ranks, or with a different batch size. Then the epoch has fewer
        steps.
        """
        return self._rest is not None

    @property
    def repeats(self) -> int:
        """The number of rows at the end of the last batch that ``"pad"`` has repeated from another rank."""
        partition, step = self.partition, max(self._step - 1, 0)
        return partition.size(self.rank, step) - partition.size_without_repeats(self.rank, step)

    def __len__(self) -> int:
        """Return the number of steps in an epoch, equal on all ranks."""
        return self.partition.steps

    def __iter__(self) -> Iterator[Any]:
        return _noted(self._batches())

    def _batches(self) -> Generator[Any]:
        partition, epoch, rest, rank = self.partition, self._epoch, self._rest, self.rank
        steps = partition.steps
        start, self._start = self._start, 0
        self._step = step = start
        device = self.device
        busy = self._waits or device.type == "cuda"
        depth = self.prefetch if self.prefetch is not None else 2 if busy else 0
        position, stop = partition.batch_start(rank, start), partition.span(rank)[1]
        if rest is None:
            rows = self._windows(partition, rank, epoch, position)
        else:
            rows = self._windows_of_rest(rest, epoch, position, stop)
        if device.type == "cuda":
            rows = self._resident.windows(rows, device, self.table)
        pinned = self.pin_memory or device.type == "cuda"
        made = self._keyed_blocks(blocks(rows, partition, rank, start, pinned), pinned)
        placed = on_device(made, device, depth, self.pin_memory)
        with contextlib.closing(placed), known_to_accelerate() as progress:
            for block in placed:
                for columns in block.batches():
                    batch = self._shape(columns)
                    step += 1
                    self._epoch, self._step = epoch, step
                    progress.end_of_dataloader = step == steps
                    yield batch if self.transform is None else self.transform(batch)
        self._epoch, self._step, self._rest = epoch + 1, 0, None

    def _keyed_blocks(self, blocks: Generator[Block, None, None], pinned: bool) -> Generator[Block, None, None]:
        """Yield the given blocks, with keyed jagged tensors added."""
        with contextlib.closing(blocks):
            for block in blocks:
                yield block.key(self.keyed, pinned) if self.keyed else block
                del block  # not kept while the next one is made

    def _shape(self, batch: Columns) -> Any:
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Set the `epoch` (from 0) of the next iteration, for loops over epochs as with DataLoader."""
        self._epoch, self._step, self._start, self._rest = epoch, 0, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch: plain values, for `torch.save` or JSON, the same on all ranks."""
        if self._step == len(self):
            return {"epoch": self._epoch + 1, "step": 0, **self._identity()}
        rest = {} if self._rest is None else {"rest": self._rest.to_json()}
        return {"epoch": self._epoch, "step": self._step, **rest, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the next iteration at the position of `state`: with the rest of its epoch, in the same order.

        On a different number of ranks, or with a different batch size, the remaining rows of the epoch are divided
        again, so that each is still used once. If they are too few for a step of all ranks, they are left out.

        Raises:
            ValueError: The state belongs to other data, or to a loader that divides rows differently.
        """
        for name, value in self._identity().items():
            if name not in ("seed", "world_size", "batch_size") and state[name] != value:
                raise ValueError(f"the state is of a loader with {name}={state[name]!r}, this one has {value!r}")
        self.seed = state["seed"]
        self.set_epoch(state["epoch"])
        rest = RemainingEpoch.from_json(state["rest"], self.rows, self.remainder) if "rest" in state else None
        if (state["world_size"], state["batch_size"]) == (self.world_size, self.batch_size):
            self._rest, self._start, self._step = rest, state["step"], state["step"]
        elif state["step"] or rest is not None:
            rows = self.rows if rest is None else rest.rows
            divided = Partition(rows, state["world_size"], state["batch_size"], self.remainder)
            left = (
                RemainingEpoch.after(divided, state["step"])
                if rest is None
                else rest.after_steps(divided, state["step"])
            )
            try:
                Partition(left.rows, self.world_size, self.batch_size, self.remainder)
                self._rest = left
            except ValueError:
                self.set_epoch(state["epoch"] + 1)

    def _identity(self) -> dict[str, Any]:
        """Return all values that determine the order of the rows, except the epoch."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": self.rows,
            "batch_size": self.batch_size,
            "remainder": self.remainder,
            "world_size": self.world_size,
            "input": self._fingerprint(),
        }

    def _agree(self, any_seed: bool) -> None:
        if self._shard is not None or ranks.world_size() == 1:
            return
        everyone = ranks.all_gather(self._identity(), self._group)
        if any_seed:
            self.seed = everyone[0]["seed"]
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs[name] != value and not (name == "seed" and any_seed):
                    raise ValueError(
                        f"ranks do not agree about this loader: {name} is {value!r} on rank 0 and {theirs[name]!r} on "
                        f"rank {rank}. Make it with equal arguments on all ranks, or give rank= and world_size="
                    )

    def _seed_of(self, *key: int) -> int:
        """Return a seed for one purpose, such as the order of the rows. It depends only on the loader's seed and the
        key."""
        state = np.random.SeedSequence([abs(self.seed), int(self.seed < 0), *key]).generate_state(1, np.uint64)
        return int(state[0]) >> 1

    def _generator(self, *key: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed_of(*key))


def _noted(batches: Generator[Any]) -> Iterator[Any]:
    """Yield the same batches; if a profiler runs, it records the time of each, as for torch's loaders."""
    with contextlib.closing(batches):
        while True:
            with annotated("enumerate(DataLoader)#nbdist.__next__"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch
