"""The values that callbacks of a learner have collected, such as counts, moving averages and the best loss so far."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fastai.basics import L, Metric
from fastai.callback.core import Callback

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray, torch.Tensor)
_LISTS = (list, tuple, set, L)


def states(callbacks: Sequence[Callback]) -> list[dict[str, Any]]:
    """Return the state of each callback: its attributes of plain values, or of objects with a `state_dict`.

    Arguments of the callback's class are left out: the same code passes them again.
    """
    return [_state(one, {"learn", *inspect.signature(type(one)).parameters}) for one in callbacks]


def restore(callbacks: Sequence[Callback], saved: Sequence[dict[str, Any]]) -> None:
    """Set the states that `states` has returned for the same callbacks."""
    for callback, state in zip(callbacks, saved, strict=True):
        _restore(callback, state)


def _state(owner: Any, but: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in vars(owner).items():
        if name in but:
            continue
        if _is_plain(value):
            found[name] = "value", value
        elif isinstance(value, Metric):
            found[name] = "metric", _state(value, set())
        elif hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict"):
            found[name] = "state_dict", value.state_dict()
    return found


def _restore(owner: Any, state: dict[str, Any]) -> None:
    for name, (kind, value) in state.items():
        if kind == "value":
            vars(owner)[name] = value  # `setattr` of a callback warns of names that the learner has
        elif kind == "metric":
            _restore(vars(owner)[name], value)
        else:
            vars(owner)[name].load_state_dict(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, _LISTS) else isinstance(value, _PLAIN)
