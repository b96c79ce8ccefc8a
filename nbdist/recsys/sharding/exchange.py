"""Shared-memory replacements for TorchRec's all-to-alls. Ids are sent in one exchange. Pooled rows, and gradients of
whole or column-wise tables, are written once and read in place.

In TorchRec, ranks meet three times for the ids (to exchange the sizes, the lengths of the lists, and the ids), and rows
and gradients are copied four times.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import (
    KJTAllToAll,
    KJTAllToAllTensorsAwaitable,
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsAwaitable,
)
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import NoWait, ShardedModule

from ...shm.collectives import as_bytes
from ...shm.gather import SharedGather, rows_as_bytes
from ...shm.process_group import SharedGroup
from ...system.annotations import annotated


def exchange_at_once(collection: ShardedModule[Any, Any, Any, Any]) -> None:
    """Make a sharded collection exchange ids and pooled rows in this way, if its ranks share memory."""
    # TorchRec makes what sends in the first step, when it knows in which order the features come.
    sharded: Any = collection
    make = sharded._create_input_dist

    def make_and_replace(*args: Any, **options: Any) -> None:
        make(*args, **options)
        for module in itertools.chain.from_iterable(one.modules() for one in sharded._input_dists):
            for name, part in module.named_children():
                if isinstance(part, KJTAllToAll) and isinstance(part._pg, SharedGroup):
                    setattr(module, name, _AtOnce(part._pg, part._splits, part._stagger))

    sharded._create_input_dist = make_and_replace
    for one in sharded._output_dists:
        if isinstance(one, TwPooledEmbeddingDist) and isinstance(one._pg, SharedGroup):
            _replace_output(one)


def _replace_output(output: TwPooledEmbeddingDist) -> None:
    make = output._create_output_dist_module

    def make_and_replace(*args: Any) -> None:
        make(*args)
        made: Any = output._dist
        if made._codecs is None:
            output._dist = _PooledAtOnce(made._pg, made._dim_sum_per_rank, callbacks=made.callbacks)

    output._create_output_dist_module = make_and_replace


class _AtOnce(KJTAllToAll):
    """TorchRec's `KJTAllToAll`, in one exchange."""

    def __init__(self, group: SharedGroup, splits: list[int], stagger: int) -> None:
        super().__init__(group, splits, stagger)
        self._gathers: dict[int, SharedGather] = {}  # by the number of arrays

    def forward(self, input: KeyedJaggedTensor) -> Any:
        """Exchange like TorchRec's module. The result is complete at once."""
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


class _PooledAtOnce(PooledEmbeddingsAllToAll):
    """TorchRec's `PooledEmbeddingsAllToAll`, with its tensors written for all ranks at once."""

    def __init__(self, group: SharedGroup, widths: list[int], callbacks: Any) -> None:
        super().__init__(group, widths, callbacks=callbacks)
        self._gather = SharedGather(group.collectives, 1)

    def forward(self, local_embs: torch.Tensor, batch_size_per_rank: list[int] | None = None) -> Any:
        """Exchange like TorchRec's module; the result is complete at once."""
        size = self._pg.size()
        samples = batch_size_per_rank or [len(local_embs) // size] * size
        pooled = _Pooled.apply(  # type: ignore[no-untyped-call]
            local_embs, self._gather, self._pg.rank(), samples, self._dim_sum_per_rank
        )
        there = PooledEmbeddingsAwaitable(NoWait(pooled))
        there.callbacks.extend(self.callbacks)
        return there


class _Pooled(torch.autograd.Function):
    """Exchange values for the samples of all ranks, shape (samples of all ranks, own columns), for values of this
    rank's samples, shape (own samples, columns of all ranks)."""

    @staticmethod
    def forward(
        ctx: Any, pooled: torch.Tensor, gather: SharedGather, me: int, samples: list[int], widths: list[int]
    ) -> torch.Tensor:
        ctx.sent = gather, me, samples, widths
        mine = slice(sum(samples[:me]), sum(samples[: me + 1]))
        with annotated("## All2All_Pooled_fwd ##"):  # as TorchRec names it
            there = _laid_out(gather, pooled, [width for width in widths if width])
            return torch.cat([one[mine] for one in there], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gather, me, samples, widths = ctx.sent
        mine = slice(sum(widths[:me]), sum(widths[: me + 1]))
        found = gradient.new_empty(sum(samples), widths[me])
        divisor = len(samples) if get_gradient_division() else 1
        with annotated("## All2All_Pooled_bwd ##"):
            there = _laid_out(gather, gradient, [sum(widths)] * len(samples))
            for one, part in zip(there, found.split(samples), strict=True):
                torch.div(one[:, mine], divisor, out=part)
        return found, None, None, None, None


def _laid_out(gather: SharedGather, tensor: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """Return the `tensor` of each rank that has columns. `widths` are the numbers of columns.

    The result is valid until the next collective.
    """
    each = [torch.from_numpy(one) for (one,) in gather([as_bytes(tensor.contiguous())]) if len(one)]
    return [one.view(tensor.dtype).view(-1, width) for one, width in zip(each, widths, strict=True)]
