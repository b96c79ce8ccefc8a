"""The state of torch's optimizers by the names of their parameters, for saving and loading.

Saving does not change the training. A parameter that was never updated has no state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_RATES = ("lr", "initial_lr")
"""The options of a group that are not saved, because the code that sets them does so again."""

_PREFIX = "dense."

Named = tuple[torch.optim.Optimizer, Mapping[torch.Tensor, str]]
"""An optimizer, and the names of its parameters, except the parameters whose state is saved elsewhere."""


def state_of(optimizers: Sequence[Named]) -> dict[str, Any]:
    """Return the state of some optimizers for a checkpoint.

    Returns:
        Each tensor is saved under ``dense.<parameter>.<its name>``. ``dense.<parameter>`` has the optimizer's class,
        the values that are not tensors, and the options of the group that have changed since the optimizer was made:
        some optimizers keep a count of steps there.
    """
    found: dict[str, Any] = {}
    for optimizer, group, parameter, name in _parameters(optimizers):
        state = optimizer.state.get(parameter, {})
        options = {key: value for key, value in group.items() if _is_state(key, value, optimizer.defaults)}
        values = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        found[_PREFIX + name] = (type(optimizer).__name__, values, options)  # a checkpoint takes dicts apart, no tuples
        found |= {f"{_PREFIX}{name}.{key}": value for key, value in state.items() if key not in values}
    return found


def empty_state(
    optimizers: Sequence[Named], saved: Mapping[str, Any], folder: str | os.PathLike[str]
) -> dict[str, Any]:
    """Make tensors into which a checkpoint's state of some optimizers can be read.

    Args:
        optimizers: The optimizers to which the state belongs.
        saved: The content of the checkpoint, by key.
        folder: The folder of the checkpoint, for the message.

    Raises:
        ValueError: The checkpoint has no state of a parameter.
    """
    empty: dict[str, Any] = {}
    for _, _, _, name in _parameters(optimizers):
        if _PREFIX + name not in saved:
            raise ValueError(misfit(folder, f"the checkpoint has none of {name} that torch's optimizers keep"))
        empty[_PREFIX + name] = ()
        for key, value in saved.items():
            if key.startswith(f"{_PREFIX}{name}."):
                empty[key] = torch.empty(value.size, dtype=value.properties.dtype)
    return empty


def set_state(optimizers: Sequence[Named], state: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """Set optimizers to a state that was read from a checkpoint.

    Raises:
        ValueError: The state belongs to another class of optimizers.
    """
    for optimizer, _, _, name in _parameters(optimizers):
        kind, here = state[_PREFIX + name][0], type(optimizer).__name__
        if kind != here:
            raise ValueError(misfit(folder, f"that of {name} is {kind}'s, and it is trained by {here} here"))
    for optimizer, group, parameter, name in _parameters(optimizers):
        _, values, options = state[_PREFIX + name]
        group.update(options)
        # torch's own optimizers count steps on the CPU, unless the count is part of what runs on the GPU.
        counts_there = group.get("capturable") or group.get("fused")
        prefix = f"{_PREFIX}{name}."
        tensors = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        for key, value in tensors.items():
            if key != "step" or counts_there:
                tensors[key] = value.to(parameter.device)
        optimizer.state.pop(parameter, None)
        if values or tensors:
            optimizer.state[parameter] = {**values, **tensors}


def _parameters(optimizers: Sequence[Named]) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], Any, str]]:
    """Yield each parameter that has a name, with its optimizer, its group, and its name."""
    for optimizer, names in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in names:
                    yield optimizer, group, parameter, names[parameter]


def misfit(folder: str | os.PathLike[str], what: str) -> str:
    """Return the message for a checkpoint whose optimizer state cannot be used."""
    return (
        f"the optimizer's state in {folder} does not fit: {what}. It was saved with another optimizer, or one that "
        "keeps a number per row of each part (rowwise_adagrad) and another split of the columns: use the same ones, or "
        "load(..., optimizer=False) for the weights alone; adagrad's state fits any"
    )


def _is_state(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    if name == "params" or name in _RATES:
        return False
    return name not in defaults or not (value is defaults[name] or bool(value == defaults[name]))
