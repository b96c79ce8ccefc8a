"""Tables with more rows than in the checkpoint: old rows are loaded, new rows start like unknown values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharding_spec import ShardMetadata

from ...devices import collective_device

Growth = Mapping[str, torch.Tensor]
"""A mapping from the name of a weight, or of its table, to the weight of each of its rows in the checkpoint in the mean
for the new rows."""


Renewed = Mapping[str, torch.Tensor]
"""A mapping from such a name to rows of the weight that begin as new ones do."""


class Grown(NamedTuple):
    """A table that grows."""

    old: int
    """Its rows in the checkpoint."""
    new: int
    """Its rows here."""
    parts: torch.Tensor
    """The weight of each row in the mean for the new ones."""
    renewed: torch.Tensor
    """Rows that are in the checkpoint, and begin as new ones do: int64."""


Growing = Mapping[str, Grown]
"""Tables that grow, by the key of their weights."""

_FROM_ZERO = {
    *("sum", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"),  # Adagrad and its row-wise kin; Adam and its kin
    *("momentum_buffer", "square_avg", "grad_avg", "acc_delta"),  # SGD, RMSprop, Adadelta
}
"""The state that optimizers keep for each element of a weight, and that begins with 0."""


def resolve(
    grow: Growth, renew: Renewed, weights: Mapping[str, Any], saved: Mapping[str, Any], folder: str | os.PathLike[str]
) -> dict[str, Grown]:
    """Find the tables that grow, by the keys of their weights.

    Args:
        grow, renew: The arguments of `load`.
        weights: The weights of the model, by their keys.
        saved: The content of the checkpoint, by key.
        folder: The folder of the checkpoint, for the message.

    Returns:
        The tables that grow, by the keys of their weights.

    Raises:
        ValueError: A name in `grow` is not the name of one weight; a weight is missing in the checkpoint, or has more
            rows there than in the model; or the number of weights of the mean is not the number of rows in the
            checkpoint.
    """
    found = {}
    if foreign := renew.keys() - grow.keys():
        raise ValueError(
            f"renew: {min(foreign)!r} must be in `grow`, too, which sets the initial values of its new rows"
        )
    for name, parts in grow.items():
        keys = [key for key in weights if f".{key}".endswith((f".{name}", f".{name}.weight"))]
        if len(keys) != 1:
            raise ValueError(
                f"grow: {name!r} is {'none' if not keys else 'more than one'} of {', '.join(sorted(weights))}"
            )
        (key,) = keys
        there = saved.get(f"model.{key}")
        if there is None:
            raise ValueError(f"grow: {folder} has no {key}")
        old, new = int(there.size[0]), int(weights[key].size()[0])
        if old > new:
            raise ValueError(f"grow: {key} has {new} rows here, and {old} in {folder}: a table cannot lose rows")
        if len(parts) > old:
            raise ValueError(
                f"grow: {name!r} must have a weight for each of its {old} rows in {folder}, got {len(parts)}: give "
                "`unknown_weights` of the workflow that the checkpoint was trained with"
            )
        renewed = renew.get(name, torch.empty(0, dtype=torch.int64))
        if len(renewed) and not (int(renewed.min()) >= 0 and int(renewed.max()) < len(parts)):
            raise ValueError(f"renew: rows of {name!r} must be below {len(parts)}, got {int(renewed.max())}")
        found[key] = Grown(old, new, parts, renewed)
    return found


def pad_states(
    states: dict[str, Any],
    growing: Growing,
    folder: str | os.PathLike[str],
) -> None:
    """Set the state that torch's optimizers keep of a weight's new rows to zeros, the initial value.

    Args:
        states: A loaded state, with the entries of `optimizers.empty_state`. It is changed.
        growing: The result of `resolve`.
        folder: The folder of the checkpoint, for the message.

    Raises:
        ValueError: An optimizer's state may not begin with zeros.
    """
    for key, (old, new, _, renewed) in growing.items():
        for name, value in states.items():
            if (
                (new == old and not len(renewed))
                or not name.startswith(f"dense.{key}.")
                or not isinstance(value, torch.Tensor)
            ):
                continue
            if not value.ndim:  # a count of steps
                continue
            kind = name.rpartition(".")[2]
            if kind not in _FROM_ZERO or value.shape[0] != old:
                raise ValueError(
                    f"the optimizer's state in {folder} cannot grow: no initial value of {kind!r} is known for new "
                    f"rows of {key}. Use load(..., optimizer=False) to load only the weights"
                )
            states[name] = torch.cat([value, value.new_zeros(new - old, *value.shape[1:])])
            states[name][renewed] = 0


@torch.no_grad()
def renew_states(states: Any, growing: Growing) -> None:
    """Set the state of sharded tables' optimizers to zeros for the rows that start like new rows.

    Args:
        states: A loaded state as `clipped` has returned it, without the weights. It is changed.
        growing: The result of `resolve`.
    """

    def renew(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                renew(inner, f"{path}.{key}")
            return
        for key, (old, _, _, renewed) in growing.items():
            if f".{key}." not in f"{path}." or not len(renewed) or not _grows(value, old):
                continue
            split = hasattr(value, "local_shards")
            shards = [(s.tensor, s.metadata.shard_offsets[0]) for s in value.local_shards()] if split else [(value, 0)]
            for tensor, first in shards:
                rows = renewed - first % old
                tensor[rows[(rows >= 0) & (rows < len(tensor))]] = 0

    renew(states, "")


def clipped(state: Any, growing: Growing) -> Any:
    """Return a state with the shapes of the checkpoint: tensors that grow are views of the old rows.

    Args:
        state: Nested dicts of tensors and sharded tensors.
        growing: The result of `resolve`.
    """

    def clip(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: clip(inner, f"{path}.{key}") for key, inner in value.items()}
        for key, (old, new, _, _) in growing.items():
            if old < new and f".{key}." in f"{path}." and _grows(value, new):
                return _sharded(value, old, new) if hasattr(value, "local_shards") else value[:old]
        return value

    return {part: clip(value, f".{part}") for part, value in state.items()}


def _grows(value: Any, rows: int) -> bool:
    """Return whether a value has an entry for each row of a table. Some optimizers have several: one for each part of
    the columns.
    """
    if not (isinstance(value, torch.Tensor) or hasattr(value, "local_shards")) or not len(value.size()):
        return False
    return int(value.size()[0]) % rows == 0


def _sharded(value: Any, old: int, new: int) -> Any:
    """Return views of the first `old` of each `new` rows of a sharded tensor.

    It uses only local knowledge: the state of a table is on the ranks that store some of it, and only these ranks call
    this function.
    """

    def clip(one: Any) -> Any:
        """Return the range of a shard's rows in the checkpoint; None if the checkpoint has none of them."""
        first, *others = one.shard_offsets
        part, row = divmod(first, new)
        rows = min(old - row, one.shard_sizes[0])
        sizes = [rows, *one.shard_sizes[1:]]
        return ShardMetadata([part * old + row, *others], sizes, one.placement) if rows > 0 else None

    metadata = value.metadata()
    shards = [(shard.tensor, clip(shard.metadata)) for shard in value.local_shards()]
    everywhere = [there for one in metadata.shards_metadata if (there := clip(one))]
    height, *others = value.size()
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(tensor[: there.shard_sizes[0]], there) for tensor, there in shards if there],
        ShardedTensorMetadata(everywhere, torch.Size([height // new * old, *others]), metadata.tensor_properties),
    )


@torch.no_grad()
def fill_new(weights: Mapping[str, Any], growing: Growing) -> None:
    """Set the new rows of weights to the weighted mean of the old rows. All ranks must call it.

    Rows of the checkpoint whose code had no value count as new rows, too.
    """
    for key, (_, _, parts, renewed) in growing.items():
        weight = weights[key]
        split = hasattr(weight, "local_shards")
        shards = [(s.tensor, s.metadata.shard_offsets) for s in weight.local_shards()] if split else [(weight, (0, 0))]
        mean = torch.zeros(weight.size()[1], device=collective_device())
        for tensor, (row, column) in shards:
            mine = parts[row : row + tensor.shape[0]].to(tensor)
            mean[column : column + tensor.shape[1]] += mine @ tensor[: len(mine)]
        if split:
            dist.all_reduce(mean)
        for tensor, (row, column) in shards:
            own = mean[column : column + tensor.shape[1]].to(tensor)
            tensor[max(0, len(parts) - row) :] = own
            rows = renewed - row
            tensor[rows[(rows >= 0) & (rows < len(tensor))]] = own
