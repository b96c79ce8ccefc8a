"""Values with tensors that are sharded over the ranks, such as parameters under FSDP: the notebook gets whole tensors.

FSDP2 (`fully_shard`) replaces each parameter by a sharded tensor. FSDP1 (`FullyShardedDataParallel`) flattens the
parameters of a module into one, and an optimizer's state in the same way. So the notebook gets a copy of the model
without FSDP1, and an optimizer of its parameters.
"""

from __future__ import annotations

import collections
import contextlib
import io
import sys
import time
import warnings
from typing import Any

from ..capture.partial import Absent
from ..capture.pickler import Pickler
from ..capture.reading import nothing
from ..capture.torch_objects import state_without_fsdp, unwrapped

#: Seconds to wait for the other ranks: they return the same value at about the same time, or it is not gathered.
PATIENCE = 60.0

_gathered = 0  # how often, in this process


class _Finder(Pickler):
    """Finder of sharded tensors, models of FSDP1 and optimizers in a pickled value, in the same order on all ranks."""

    def __init__(self, sharded: Any, wrapper: Any) -> None:
        super().__init__(io.BytesIO(), to_cpu=True)
        self._sharded = tuple(kind for kind in (sharded, wrapper) if kind is not None)
        torch: Any = sys.modules["torch"]
        self._tensor, self._optimizer = torch.Tensor, torch.optim.Optimizer
        self.found: dict[int, Any] = {}
        self.optimizers: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if issubclass(type(obj), self._sharded):
            self.found[id(obj)] = obj
            return nothing, ()
        if issubclass(type(obj), self._tensor):  # FSDP1 could not resize a storage that was pickled
            return nothing, ()
        if issubclass(type(obj), self._optimizer):
            self.optimizers.append(obj)
        return super().reducer_override(obj)


def whole(value: Any, wanted: bool) -> dict[int, Any]:
    """Return replacements for the sharded tensors in `value`, by their ids.

    All ranks of the process group must return the value, because collectives gather the tensors. If some do not, a
    warning says so, and an `Absent` replaces each tensor.

    Args:
        value: The value of the function in this rank.
        wanted: Whether the value goes to the notebook. The other ranks only take part in the collectives.
    """
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None or type(value) in (type(None), bool, int, float, str):
        return {}
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    finder = _Finder(module.DTensor, wrapper)
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
    models = {number: one for number, one in finder.found.items() if not isinstance(one, module.DTensor)}
    full = {number: _full(tensor) for number, tensor in finder.found.items() if number not in models}
    full |= {number: _without_wrapper(model, wrapper, wanted) for number, model in models.items()}
    for optimizer in finder.optimizers:
        for number, model in models.items():
            if _parameters(optimizer) <= set(model.parameters()):
                full[id(optimizer)] = _whole_optimizer(optimizer, model, wrapper, full[number])
    return {number: _Unwrapped(one) if number in models else one for number, one in full.items()} if wanted else {}


def _full(tensor: Any) -> Any:
    return _on_cpu(tensor, tensor.full_tensor().detach())


def _on_cpu(tensor: Any, full: Any) -> Any:
    """Return `full` on the CPU, as a parameter if `tensor` is one."""
    torch, full = sys.modules["torch"], full.cpu()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(full, requires_grad=tensor.requires_grad)
    return full.requires_grad_(tensor.requires_grad)


class _Unwrapped:
    """A model to send without its wrapper: the notebook unpickles the plain model, and shows a warning."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __reduce__(self) -> tuple[Any, ...]:
        return unwrapped, (self._model, "FullyShardedDataParallel")


def _without_wrapper(model: Any, wrapper: Any, wanted: bool) -> Any:
    """Return a copy of a model on the CPU, without its FSDP1 wrapper. All ranks must call it."""
    with wrapper.summon_full_params(model, writeback=False):
        return _copy(model, wrapper, {}) if wanted else None


def _copy(module: Any, wrapper: Any, made: dict[int, Any]) -> Any:
    """Return a copy of a module without wrappers. `made` holds the copies so far, by the ids of their originals,
    because a module may occur in several places.
    """
    if isinstance(module, wrapper):
        return _copy(module.module, wrapper, made)
    if module is None or id(module) in made:
        return made.get(id(module))
    made[id(module)] = copied = object.__new__(type(module))
    state = state_without_fsdp(module)
    for kind in ("_parameters", "_buffers"):
        for tensor in filter(lambda one: one is not None and id(one) not in made, state[kind].values()):
            made[id(tensor)] = _on_cpu(tensor, tensor.detach().clone())
        state[kind] = type(state[kind])((name, made.get(id(tensor))) for name, tensor in state[kind].items())
    children = [(name, _copy(child, wrapper, made)) for name, child in state["_modules"].items()]
    vars(copied).update(state, _modules=type(state["_modules"])(children))
    return copied


def _parameters(optimizer: Any) -> set[Any]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _whole_optimizer(optimizer: Any, model: Any, wrapper: Any, copied: Any) -> Any:
    """Return an optimizer for the parameters of `copied`, a copy of the model. All ranks must call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 asks for its backend by functions that torch has deprecated
        found = wrapper.optim_state_dict(model, optimizer)
    if copied is None:
        return None
    named = dict(copied.named_parameters())
    groups = [
        {**own, "params": [named[name] for name in named if name in group["params"]]}
        for own, group in zip(optimizer.param_groups, found["param_groups"], strict=True)
    ]
    state = collections.defaultdict(dict, {named[name]: values for name, values in found["state"].items()})
    whole: Any = object.__new__(type(optimizer))
    whole.__setstate__({"defaults": optimizer.defaults, "state": state, "param_groups": groups})
    return whole


def _all_ranks_have(count: int) -> bool:
    """Return whether all ranks have reached this point with the same number of tensors."""
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
