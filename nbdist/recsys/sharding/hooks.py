"""Hooks around a sharded collection, for results that would otherwise differ from the unsharded collection's.

Add forward hooks in this order: `divide_means`, `restore_order`, `pad_batches`, `take_columns`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding
from torchrec.modules.embedding_configs import PoolingType

from ..loader.columns import keyed_jagged
from ..loader.jagged import LoadedJagged


def move_inputs(module: nn.Module, device: torch.device) -> None:
    """Make a module accept arguments on any device, as under DistributedDataParallel."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=True)
        if isinstance(value, KeyedJaggedTensor):  # another one would not be that which a loader has looked at
            return value if value.device() == device else value.to(device, non_blocking=True)
        if type(value) in (list, tuple):
            return type(value)(map(moved, value))
        return {key: moved(one) for key, one in value.items()} if type(value) is dict else value

    def move(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return moved(args), moved(kwargs)

    module.register_forward_pre_hook(move, with_kwargs=True)


def take_columns(module: nn.Module, columns: list[str]) -> None:
    """Make a sharded collection take a batch and return tensors, like `PooledTables` and `SequenceTables`.

    Call it after all other functions of this module, whose hooks work with TorchRec's objects.

    Args:
        module: The sharded collection.
        columns: The columns of a batch that the collection uses, in the order of its tables.
    """

    def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (keyed_jagged(args[0], columns),)

    def give(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        whole = output.wait() if hasattr(output, "wait") else output
        if isinstance(whole, KeyedTensor):
            return whole.values()
        return {name: part.values() for name, part in whole.items()}

    module.register_forward_pre_hook(take, prepend=True)
    module.register_forward_hook(give)


def sum_instead(module: EmbeddingBagCollection) -> dict[str, bool]:
    """Make the mean tables of a collection sum, before it is sharded. Returns whether each table is a mean."""
    means = {}
    for config in module.embedding_bag_configs():
        means[config.name] = config.pooling == PoolingType.MEAN
        config.pooling = PoolingType.SUM
    return means


def divide_means(module: nn.Module, means: Mapping[str, bool], features: Mapping[str, list[str]]) -> None:
    """Divide the sums of a sharded collection's mean tables by the sizes of the bags.

    TorchRec 1.8 does so itself for row_wise and table_row_wise. But then it divides twice for the mean tables of other
    strategies in the same collection, and for grid_shard it sums the means of the parts.

    Args:
        module: The sharded collection, in which all tables sum.
        means: For each table, whether it is a mean.
        features: For each table, the features whose ids are looked up in it.
    """
    # An output is called by its feature, or feature@table if several tables have the feature.
    divided = {
        name
        for table, mean in means.items()
        if mean
        for feature in features[table]
        for name in (feature, f"{feature}@{table}")
    }

    repeats: dict[torch.device, torch.Tensor] = {}  # how many columns each output has

    def divide(_: nn.Module, args: tuple[Any, ...], output: Any) -> KeyedTensor:
        bags: KeyedJaggedTensor = args[0]
        sizes = bags.lengths().view(len(bags.keys()), bags.stride())
        pooled = output.wait()
        columns = [
            sizes[bags.keys().index(name.split("@")[0])] if name in divided else torch.ones_like(sizes[0])
            for name in pooled.keys()  # noqa: SIM118 (a KeyedTensor is no mapping)
        ]
        each = torch.stack(columns, dim=1).clamp(min=1)  # (batch, outputs)
        widths = pooled.length_per_key()
        if each.device not in repeats:  # from the host to a GPU takes waiting
            repeats[each.device] = torch.tensor(widths, device=each.device)
        # (batch, columns of all outputs), as many as are said: a GPU would be waited for to count them
        divisor = each.repeat_interleave(repeats[each.device], dim=1, output_size=sum(widths))
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values() / divisor)

    module.register_forward_hook(divide)


def restore_order(module: nn.Module, names: list[str]) -> None:
    """Make a sharded collection return its outputs in the order of the unsharded one.

    TorchRec orders them by the ranks that store them. A model that uses `.values()` of the output would then see its
    columns in a different order in training than after `gather`.

    Args:
        module: The sharded collection.
        names: The names of the outputs, in the unsharded collection's order.
    """
    if list(module._embedding_names) == names:  # type: ignore[arg-type]
        return

    def restore(_: nn.Module, args: tuple[Any, ...], output: Any) -> KeyedTensor:
        pooled = output if isinstance(output, KeyedTensor) else output.wait()
        parts = [pooled[name] for name in names]  # each (batch, columns of a table)
        return KeyedTensor(names, [part.shape[1] for part in parts], torch.cat(parts, dim=1))

    module.register_forward_hook(restore)


def check_ids(module: nn.Module, tables: Mapping[str, list[tuple[str, int]]]) -> None:
    """Make a sharded collection raise for ids outside its tables, which FBGEMM would read as ids of other rows.

    On a GPU, this waits for earlier work, unless the loader has checked the ids (`keyed=`).

    Args:
        module: The sharded collection.
        tables: For each feature, the tables in which it is looked up, each with its number of rows.
    """

    def check(_: nn.Module, args: tuple[Any, ...]) -> None:
        features: KeyedJaggedTensor = args[0]
        limits = features.limits if isinstance(features, LoadedJagged) else None
        if limits is None:
            parts = zip(features.keys(), features.values().split(features.length_per_key()), strict=True)
            known = {feature: ids for feature, ids in parts if feature in tables and len(ids)}
            extremes = [torch.stack(ids.aminmax()) for ids in known.values()]
            limits = dict(zip(known, torch.stack(extremes).tolist() if extremes else [], strict=True))  # one wait
        for feature, (low, high) in limits.items():
            for table, rows in tables.get(feature, ()):
                if low < 0 or high >= rows:
                    raise ValueError(
                        f"feature {feature!r} has the id {low if low < 0 else high}, and table {table!r} has {rows} "
                        f"rows: its ids are 0 to {rows - 1}. Codes fit the table that was made for them: after "
                        "another fit of the workflow, make a table with as many rows as it has codes"
                    )

    module.register_forward_pre_hook(check)


def pad_batches(module: nn.Module, to_largest: bool) -> None:
    """Make a sharded collection accept batches without samples, which TorchRec and FBGEMM do not accept.

    Empty bags or sequences are added, up to one sample, and the output is cut to the size of the batch again. They
    change neither outputs nor gradients.

    Args:
        module: The sharded collection.
        to_largest: Whether to add samples up to the size of the largest batch of all ranks instead: gloo's
            reduce-scatter, which pools in row-wise strategies, needs equal shapes.
    """
    sizes: list[int] = []

    def pad(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        features = args[0]
        size = features.stride()
        wanted = max(size, 1)
        if to_largest:
            largest = torch.tensor(wanted)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            wanted = int(largest)
        sizes.append(size)
        if wanted == size:
            return args
        lengths = features.lengths().view(len(features.keys()), size)
        padded = KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            weights=features.weights_or_none(),
            lengths=torch.cat([lengths, lengths.new_zeros(len(lengths), wanted - size)], dim=1).flatten(),
        )
        return (padded, *args[1:])

    def trim(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        size = sizes.pop()
        if args[0].stride() == size:
            return output
        whole = output.wait() if hasattr(output, "wait") else output
        if isinstance(whole, KeyedTensor):
            return KeyedTensor(whole.keys(), whole.length_per_key(), whole.values()[:size])
        return {name: JaggedTensor(part.values(), lengths=part.lengths()[:size]) for name, part in whole.items()}

    module.register_forward_pre_hook(pad)
    module.register_forward_hook(trim)


def look_up_singly(module: nn.Module) -> None:
    """Make a sharded `EmbeddingCollection` look up ids one by one in tables that are copied on CPU ranks.

    FBGEMM always pools look-ups in such tables.
    """
    lookups: Any = module._lookups
    for lookup in lookups:
        inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
        for kernel in inner._emb_modules:
            if isinstance(kernel, BatchedDenseEmbedding) and kernel.emb_module.use_cpu:
                kernel.forward = functools.partial(_look_up, kernel)


def _look_up(kernel: BatchedDenseEmbedding, features: KeyedJaggedTensor) -> torch.Tensor:
    """Look up the embedding rows of the ids of all features; shape (ids, columns)."""
    tables, columns = kernel.emb_module, kernel._local_cols[0]  # all have as many
    first = [tables.weights_physical_offsets[table] // columns for table in kernel._feature_table_map]
    rows = torch.tensor(first).repeat_interleave(torch.tensor(features.length_per_key()))
    found = nn.functional.embedding(features.values() + rows, tables.weights.view(-1, columns))
    return found.float()  # also of tables of half precision, as FBGEMM has it
