"""Ranks whose batches differ in size or number: what keeps their collectives in step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

T = TypeVar("T")


def equal_steps(batches: Iterable[T]) -> Iterator[T]:
    """The batches of this rank, as many as the rank with the fewest has; the rest is dropped.

    A rank with a batch more than the others would wait for ever in its collectives. Before each batch the ranks
    agree whether all have one. All ranks have to go through it to the end, and may not leave the loop early on their
    own. Batches may differ in size over the ranks: nothing of the last one is lost as long as each rank has one.

    Args:
        batches: This rank's loader, of any length; it need not know its length.

    Yields:
        The batches, unchanged.
    """
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    iterator = iter(batches)
    while True:
        batch, there = None, torch.ones(1, dtype=torch.int32, device=device)
        try:
            batch = next(iterator)
        except StopIteration:
            there.zero_()
        dist.all_reduce(there, op=dist.ReduceOp.MIN)
        if not there.item():
            return
        yield batch  # type: ignore[misc]


def pad_to_largest(module: nn.Module) -> None:
    """Let a sharded `EmbeddingBagCollection` take batches that differ in size over the ranks, on gloo.

    Gloo's reduce-scatter, which row-wise kinds pool with, wants equal shapes. So each batch gets empty bags up to the
    size of the largest, and the output is cut to the batch again: they add nothing, to outputs or gradients.
    """
    from torchrec import KeyedJaggedTensor, KeyedTensor

    sizes: list[int] = []

    def pad(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        features = args[0]
        size = features.stride()
        largest = torch.tensor(size)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        sizes.append(size)
        if int(largest) == size:
            return args
        lengths = features.lengths().view(len(features.keys()), size)
        padded = KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            weights=features.weights_or_none(),
            lengths=nn.functional.pad(lengths, (0, int(largest) - size)).flatten(),
        )
        return (padded, *args[1:])

    def cut(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        size = sizes.pop()
        if args[0].stride() == size:
            return output
        pooled = output.wait()
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values()[:size])

    module.register_forward_pre_hook(pad)
    module.register_forward_hook(cut)
