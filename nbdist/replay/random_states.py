"""The states of this process's random generators: `random`, NumPy, torch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the states of this rank's random generators: `random`, NumPy, torch, and its GPU."""
    kind, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())
    state = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states that `random_state` has returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
