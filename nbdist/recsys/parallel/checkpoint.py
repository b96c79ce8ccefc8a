"""Checkpoints, which can be loaded on any number of ranks."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from .checkpoint_reader import Planner, Reader
from .optimizer_state import misfit


def save(folder: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a state, nested dicts of tensors and sharded tensors, with `torch.distributed.checkpoint`.

    All ranks must call it.
    """
    with no_future_warnings():
        dcp.save(state, checkpoint_id=folder)


def load(folder: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Read the tensors of a state from a checkpoint of `save`. Runs no code from the files.

    All ranks must call it.

    Args:
        folder: The folder that `save` has written.
        state: The state to fill: the part "model" has the weights, all other parts are of optimizers. Other tensors of
            the checkpoint are not read.

    Raises:
        ValueError: The checkpoint lacks a tensor, or has it in a different shape; or the files are no checkpoint.
    """
    with no_future_warnings():
        _check(state, folder)
        dcp.load(state, storage_reader=Reader(folder), planner=Planner())


def contents(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a checkpoint: a mapping from keys, whose parts are joined by dots, to torch's metadata of
    the values."""
    return dict(Reader(folder).read_metadata().state_dict_metadata)


def _check(state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    """Raise `ValueError` if the checkpoint lacks a requested key, or has it in a different shape."""
    saved = contents(folder)
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
                grown = size is not None and size[1:] == shape[1:] and size[0] < shape[0]
                hint = ". A table that has grown since is loaded with grow=" if grown else ""
                raise ValueError(
                    f"{folder} does not fit: {key} has the shape {shape} here, and the checkpoint {found}{hint}"
                )
            raise ValueError(misfit(folder, f"{key} has the shape {shape} here, and the checkpoint {found}"))


def _flat(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [item for key, inner in value.items() for item in _flat(inner, f"{path}.{key}")]
    return [(path, value)]


class no_future_warnings(warnings.catch_warnings):
    """Silence torch's warning, at each use of ShardedTensor, that DTensor will replace it: TorchRec's sharded state
    dicts have this form."""

    def __enter__(self) -> Any:
        log = super().__enter__()
        warnings.simplefilter("ignore", FutureWarning)
        return log
