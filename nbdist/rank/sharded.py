"""Values with tensors that are sharded over the ranks, such as parameters under FSDP2: the notebook gets whole
tensors."""

from __future__ import annotations

import contextlib
import io
import sys
import time
import warnings
from typing import Any

from ..capture.partial import Absent
from ..capture.pickler import Pickler
from ..capture.reading import nothing

#: Seconds to wait for the other ranks: they return the same value at about the same time, or it is not gathered.
PATIENCE = 60.0

_gathered = 0  # how often, in this process


class _Finder(Pickler):
    """Finder of the sharded tensors in a pickled value, in an order that is the same in all ranks."""

    def __init__(self, kind: type) -> None:
        super().__init__(io.BytesIO(), to_cpu=True)
        self.kind = kind
        self.found: dict[int, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, self.kind):
            self.found[id(obj)] = obj
            return nothing, ()
        return super().reducer_override(obj)


def whole(value: Any, wanted: bool) -> dict[int, Any]:
    """Return replacements for the sharded tensors in `value`, by their ids.

    All ranks of the process group must return the value, because collectives gather the tensors. If some do not, a
    warning says so, and an `Absent` replaces each tensor.

    Args:
        value: The value of the function in this rank.
        wanted: Whether the value goes to the notebook. The others only take part.
    """
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None or type(value) in (type(None), bool, int, float, str):
        return {}
    finder = _Finder(module.DTensor)
    with contextlib.suppress(Exception):  # what cannot be pickled is said when it is
        finder.dump(value)
    if not finder.found:
        return {}
    if not _all_ranks_have(len(finder.found)):
        warnings.warn(
            "the value holds tensors that are sharded over the ranks, and not all ranks have returned them: return it "
            "in each rank, or gather them in the function (tensor.full_tensor())",
            stacklevel=2,
        )
        return {number: Absent("a sharded tensor", "not all ranks have returned it") for number in finder.found}
    full = {number: _full(tensor) for number, tensor in finder.found.items()}
    return full if wanted else {}


def _full(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    full = tensor.full_tensor().detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(full, requires_grad=tensor.requires_grad)
    return full.requires_grad_(tensor.requires_grad)


def _all_ranks_have(count: int) -> bool:
    """Return whether all ranks have come here with the same number of tensors."""
    global _gathered
    dist = sys.modules["torch.distributed"]
    if not dist.is_initialized():
        return False
    store, key = dist.distributed_c10d._get_default_store(), f"nbdist/sharded/{_gathered}/{count}"
    deadline, arrived = time.monotonic() + PATIENCE, store.add(key, 1)
    while arrived < dist.get_world_size():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
        arrived = store.add(key, 0)
    _gathered += 1
    return True
