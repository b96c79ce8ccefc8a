"""How a step's ids go to the ranks that hold their rows, where ranks share memory: all at once.

TorchRec has ranks meet three times for that: for how much comes, for the lengths of the lists, and for the ids.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable
from torchrec.distributed.types import NoWait, ShardedModule

from ...wire.shared_gather import SharedGather, rows_as_bytes
from ...wire.shared_group import SharedGroup


def exchange_at_once(collection: ShardedModule[Any, Any, Any, Any]) -> None:
    """Have a sharded collection send its ids in one exchange, where its ranks share memory."""
    # TorchRec makes what sends them in the first step, when it knows in which order the features come.
    sharded: Any = collection
    make = sharded._create_input_dist

    def make_and_replace(*args: Any, **options: Any) -> None:
        make(*args, **options)
        for module in itertools.chain.from_iterable(one.modules() for one in sharded._input_dists):
            for name, part in module.named_children():
                if isinstance(part, KJTAllToAll) and isinstance(part._pg, SharedGroup):
                    setattr(module, name, _AtOnce(part._pg, part._splits, part._stagger))

    sharded._create_input_dist = make_and_replace


class _AtOnce(KJTAllToAll):
    """TorchRec's `KJTAllToAll`, in one exchange."""

    def __init__(self, group: SharedGroup, splits: list[int], stagger: int) -> None:
        super().__init__(group, splits, stagger)
        self._gathers: dict[int, SharedGather] = {}  # by the number of arrays

    def forward(self, input: KeyedJaggedTensor) -> Any:
        """As TorchRec's; there is nothing left to wait for."""
        if input.variable_stride_per_key():  # on all ranks, if on one: it follows from how the model is called
            return super().forward(input)
        group: Any = self._pg
        me, size = group.rank(), group.size()
        with torch.no_grad():
            tensors, counts = input.dist_tensors(), input.dist_splits(self._splits)
            mine = [np.array([[input.stride()] * size, *counts]), *map(rows_as_bytes, tensors)]
            if len(mine) not in self._gathers:
                self._gathers[len(mine)] = SharedGather(group.collectives, len(mine))
            heads, *everyone = zip(*self._gathers[len(mine)](mine), strict=True)
            sizes = np.stack(heads)  # of samples and each tensor, shape (from, 1 + tensors, to)
            stops = sizes[:, 1:].cumsum(2)[..., me].T.tolist()
            strides, *came = sizes[..., me].T.tolist()
            parts = [
                [one[stop - count : stop] for one, stop, count in zip(*each, strict=True)]
                for each in zip(everyone, stops, came, strict=True)
            ]
            first, end = self._splits_cumsum[me : me + 2]
            there = KJTAllToAllTensorsAwaitable(
                group,
                input,
                self._splits,
                counts,
                came,
                [],  # nothing more to send
                input.dist_labels(),
                input.keys()[first:end],
                input.device(),
                self._stagger,
                strides,
            )
            there._output_tensors = [
                torch.from_numpy(np.concatenate(some).ravel()).view(tensor.dtype).view(-1, *tensor.shape[1:])
                for some, tensor in zip(parts, tensors, strict=True)
            ]
            return NoWait(there)
