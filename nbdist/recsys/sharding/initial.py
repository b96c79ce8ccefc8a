"""The initial values of a sharded model, for tables that no process stores as a whole and for all other parameters."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection

from .strategies import Table

_BLOCK, _GPU_BLOCK = 2**17, 2**22
"""The number of elements of a table that are initialized at a time, which is the memory of the initialization in
addition to the shards. A GPU takes as long for fewer elements, because it fills 16 MB as soon as it begins."""

_COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)


def without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of the model with its parameters on the meta device."""
    meta = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, dict(meta))


def materialise(model: nn.Module, device: torch.device) -> None:
    """Initialize the modules on the meta device that are not tables, before TorchRec draws any values."""
    for path, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        inside = any(isinstance(model.get_submodule(up), _COLLECTIONS) for up in _ancestors(path))
        if inside or isinstance(module, _COLLECTIONS) or not any(t.device.type == "meta" for t in own):
            continue
        if not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{path or type(model).__name__} is on the meta device and has no reset_parameters() to initialise "
                "it: build it on the CPU, and only the tables on meta"
            )
        module.to_empty(device=device, recurse=False)
        module.reset_parameters()


def free_tables(model: nn.Module, tables: Mapping[str, Table]) -> None:
    """Move the model's tables to the meta device. TorchRec would keep whole tables in addition to the shards."""
    for table in tables.values():
        path, _, name = table.key.rpartition(".")
        meta = nn.Parameter(torch.empty_like(table.weight, device="meta"), requires_grad=table.weight.requires_grad)
        vars(meta).update(vars(table.weight))  # attributes that TorchRec reads
        setattr(model.get_submodule(path), name, meta)
    for module in model.modules():
        if isinstance(module, _COLLECTIONS):
            module._device = torch.device("meta")


def _ancestors(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts))]


def common_seed(device: torch.device) -> int:
    """Return rank 0's next random number, on all ranks."""
    seed = torch.randint(2**31, (1,)).to(device)
    dist.broadcast(seed, src=0)
    return int(seed)


@torch.no_grad()
def fill(state: Mapping[str, Any], tables: Mapping[str, Table], seed: int) -> None:
    """Initialize the shards in a sharded model's state dict with their table's values, drawn on the shard's device.

    TorchRec ignores the initial values of a table on the CPU. On the meta device it gives every rank's shard the same
    values, because the ranks have the same seed.
    """
    for table in tables.values():
        held = state[table.key]
        split = hasattr(held, "local_shards")
        whole = [(held, (0, 0))]  # of a data_parallel table
        parts = [(s.tensor, s.metadata.shard_offsets) for s in held.local_shards()] if split else whole
        for tensor, (row, column) in parts:
            for first, values in _values(table, seed, row, row + tensor.shape[0], tensor.device):
                into = tensor[first - row : first - row + len(values)]
                into.copy_(values[:, column : column + tensor.shape[1]])
        if not split:
            dist.broadcast(held, src=0)  # the copies have to be one, even if the ranks' own tables were not


def _values(table: Table, seed: int, start: int, stop: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield rows start..stop of a table in blocks, shape (rows, columns), each with the number of its first row."""
    if table.weight.device.type != "meta":
        yield start, table.weight[start:stop]
        return
    rows, columns = table.weight.shape
    height = max(1, (_BLOCK if device.type == "cpu" else _GPU_BLOCK) // columns)
    for first in range(start - start % height, stop, height):
        torch.manual_seed(zlib.crc32(f"{seed} {table.name} {first}".encode()))
        block = torch.empty(min(height, rows - first), columns, dtype=table.weight.dtype, device=device)
        table.config.init_fn(block)
        low = max(start, first)
        yield low, block[low - first : stop - first]
