"""The state of a loader from which the order of its next epoch follows: counters and random generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler


def loader_state(loader: Any) -> list[dict[str, Any]]:
    """Return the integers and the states of torch's generators that a loader and its samplers have as attributes."""
    return [
        {
            name: value.get_state() if isinstance(value, torch.Generator) else value
            for name, value in _attributes(part).items()
            if type(value) is int or isinstance(value, torch.Generator)
        }
        for part in _parts(loader)
    ]


def set_loader_state(loader: Any, state: Sequence[dict[str, Any]]) -> None:
    """Restore a state from `loader_state` in a loader that was made in the same way."""
    for part, own in zip(_parts(loader), state, strict=True):
        attributes = _attributes(part)
        for name, value in own.items():
            if isinstance(attributes.get(name), torch.Generator):
                attributes[name].set_state(value)
            else:
                attributes[name] = value


def _parts(loader: Any) -> list[Any]:
    """Return a loader, the loader that it wraps, and their samplers."""
    found = [loader]
    for part in found:  # which grows meanwhile
        for value in _attributes(part).values():
            if isinstance(value, (DataLoader, Sampler)) and all(value is not one for one in found):
                found.append(value)
    return found


def _attributes(part: Any) -> dict[str, Any]:
    return getattr(part, "__dict__", {})
