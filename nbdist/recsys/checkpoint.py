"""The state of a sharded model: to and from disk on any number of ranks, and as one plain module."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from ..devices import collective_device

if TYPE_CHECKING:
    from .sharding.sharded import Sharded


def gather(sharded: Sharded) -> nn.Module | None:
    """`Sharded.gather`."""
    on_rank_0 = dist.get_rank() == 0
    whole: dict[str, torch.Tensor] = {}
    for key, value in _weights(sharded).items():
        if not hasattr(value, "local_shards"):
            if on_rank_0:
                whole[key] = value.detach().cpu()
            continue
        with _no_warnings():
            out = torch.empty(value.size(), dtype=value.dtype, device=_device(value)) if on_rank_0 else None
            value.gather(dst=0, out=out)
        if out is not None:
            whole[key] = out.cpu()
    if not on_rank_0:
        return None
    plain = copy.deepcopy(sharded.template)
    trained = dict(sharded.model.module.named_buffers())
    module: Any
    for module in plain.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
            setattr(module, name, empty)
        if hasattr(module, "_device"):  # of a collection that was made on meta
            module._device = torch.device("cpu")
    for path, module in plain.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Those that are not in the state dict come from the trained module, too.
            value = trained.get(f"{path}.{name}".lstrip("."), buffer)
            setattr(module, name, value.detach().cpu().clone())
    plain.load_state_dict(whole)
    return plain


def save(sharded: Sharded, folder: str | os.PathLike[str]) -> None:
    """`Sharded.save`."""
    _start_lazy_state(sharded)
    with _no_warnings():
        state = {"model": _weights(sharded), "optimizer": _moments(sharded), "steps": _steps(sharded)}
        dcp.save(state, checkpoint_id=folder)


def load(sharded: Sharded, folder: str | os.PathLike[str], optimizer: bool) -> None:
    """`Sharded.load`."""
    state: dict[str, Any] = {"model": _weights(sharded)}
    if optimizer:
        _start_lazy_state(sharded)
        state["optimizer"] = _moments(sharded)
        state["steps"] = _steps(sharded)
    with _no_warnings():
        check(state, folder)
        dcp.load(state, checkpoint_id=folder)
        sharded.model.load_state_dict(state["model"])
    if optimizer:
        for lookup in _fused(sharded.optimizer):
            lookup.iter.fill_(int(state["steps"]))
            lookup.iter_cpu.fill_(int(state["steps"]))


def check(state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    """That the checkpoint has what is asked for, in the same shapes; else `ValueError`."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for part, what in state.items():
        for key, value in _flat(what, part):
            if not isinstance(value, torch.Tensor):
                continue
            shape, there = tuple(value.size()), saved.get(key)
            size = tuple(there.size) if there is not None and hasattr(there, "size") else None
            if size == shape:
                continue
            found = "has none" if size is None else f"has one of shape {size}"
            if part == "model":
                raise ValueError(f"{folder} does not fit: {key} has the shape {shape} here, and the checkpoint {found}")
            raise ValueError(
                f"the optimizer's state in {folder} does not fit: {key} has the shape {shape} here, and the "
                f"checkpoint {found}. It was saved with another optimizer, or one that keeps a number per row of each "
                "part (rowwise_adagrad) and another cut of the columns: use the same ones, or load(..., "
                "optimizer=False) for the weights alone; adagrad's state fits any"
            )


def _flat(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [item for key, inner in value.items() for item in _flat(inner, f"{path}.{key}")]
    return [(path, value)]


def _weights(sharded: Sharded) -> dict[str, Any]:
    with _no_warnings():
        return dict(sharded.model.state_dict())


def _moments(sharded: Sharded) -> dict[str, Any]:
    """The optimizers' state without their param_groups, which name other parameters on each rank."""
    with _no_warnings():
        return dict(sharded.optimizer.state_dict()["state"])


def _fused(optimizer: Any) -> Iterator[Any]:
    """FBGEMM's modules of this rank that update tables in the backward pass; the model does not list them."""
    for _, inner in getattr(optimizer, "optimizers", ()):
        yield from _fused(inner)
    if hasattr(optimizer, "_emb_module"):
        yield optimizer._emb_module


def _steps(sharded: Sharded) -> torch.Tensor:
    """What the fused Adam and its kin correct their bias by; FBGEMM keeps it out of the optimizer's state."""
    count = torch.tensor(
        max((int(lookup.iter) for lookup in _fused(sharded.optimizer)), default=0), device=collective_device()
    )
    dist.all_reduce(count, op=dist.ReduceOp.MAX)  # some ranks may hold no table
    return count.cpu()


def _start_lazy_state(sharded: Sharded) -> None:
    """Make the state that torch's optimizers make at their first step only, so that it can be saved and loaded into."""
    from torchrec.optim.keyed import KeyedOptimizerWrapper

    for _, optimizer in sharded.optimizer.optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not isinstance(optimizer, KeyedOptimizerWrapper) or all(optimizer.state.get(p) for p in parameters):
            continue
        before = [(p.detach().clone(), p.grad) for p in parameters]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        with torch.no_grad():
            for p, (value, grad) in zip(parameters, before, strict=True):
                p.copy_(value)
                p.grad = grad
                for moment in optimizer.state[p].values():
                    if isinstance(moment, torch.Tensor):
                        moment.zero_()  # the count of steps, too


def _device(value: Any) -> torch.device:
    shards = value.local_shards()
    return shards[0].tensor.device if shards else torch.device("cpu")


class _no_warnings(warnings.catch_warnings):
    """ShardedTensor is TorchRec's form of a sharded state dict; torch warns at each use that DTensor is to follow."""

    def __enter__(self) -> Any:
        log = super().__enter__()
        warnings.simplefilter("ignore", FutureWarning)
        return log
