"""Objects of accelerate and transformers that store which processes train together: each rank sets them up again.

An `Accelerator` or `TrainingArguments` of an earlier cell was made for one process, the notebook. Unchanged, it would
make each rank train by itself.
"""

from __future__ import annotations

import os
import sys
from typing import Any

Reduction = tuple[Any, ...]

#: Attributes of an `AcceleratorState`, and the arguments that they are made from.
_SETTINGS = {
    "_mixed_precision": "mixed_precision",
    "dynamo_plugin": "dynamo_plugin",
    "deepspeed_plugins": "deepspeed_plugin",
    "fsdp_plugin": "fsdp_plugin",
    "megatron_lm_plugin": "megatron_lm_plugin",
    "torch_tp_plugin": "torch_tp_plugin",
    "parallelism_config": "parallelism_config",
}
_OF_GRADIENTS = ("sync_gradients", "plugin_kwargs")
#: What `TrainingArguments` has found out about its process, with or without a prefix of transformers 4.
_FOUND_OUT = ("_setup_devices", "distributed_state")
#: An `Accelerator` keeps what it has prepared in these.
_KEPT = ("_models", "_optimizers", "_schedulers", "_dataloaders")
_PREPARED = ("AcceleratedOptimizer", "AcceleratedScheduler", "DataLoaderShard", "DataLoaderDispatcher")


def reduce_training_state(obj: Any) -> Reduction | None:
    """Return the reduction of an object of accelerate or transformers that stores the processes; otherwise None."""
    state = sys.modules.get("accelerate.state")
    if state is None:
        return None
    kind = type(obj)
    if kind is state.PartialState:
        return _partial_state, (bool(vars(obj).get("_cpu")),)
    if kind is state.AcceleratorState:
        settings = {name: vars(obj)[attribute] for attribute, name in _SETTINGS.items() if attribute in vars(obj)}
        return _accelerator_state, (settings, bool(vars(obj).get("_cpu")))
    if kind is state.GradientState:
        return _gradient_state, ({name: vars(obj)[name] for name in _OF_GRADIENTS if name in vars(obj)},)
    arguments = sys.modules.get("transformers.training_args")
    if arguments is not None and issubclass(kind, arguments.TrainingArguments):
        own = {name: value for name, value in vars(obj).items() if not name.endswith(_FOUND_OUT)}
        return _training_arguments, (kind, {**own, "_n_gpu": -1})
    if prepared := _prepared(obj):
        make, args, *rest = obj.__reduce_ex__(2)
        processes = state.PartialState._shared_state.get("num_processes", 1)
        return _after_check, (prepared, processes, make, *args), *rest
    return None


def _prepared(obj: Any) -> str:
    """Describe `obj` if accelerate has prepared it or contains it; otherwise return an empty string."""
    kind = type(obj)
    if not kind.__module__.startswith("accelerate."):
        return ""
    if kind.__name__ in _PREPARED:
        return f"`prepare` has made this {kind.__name__}"
    if kind.__name__ == "Accelerator" and any(vars(obj).get(name) for name in _KEPT):
        return "this Accelerator has prepared a model or a loader"
    return ""


# ------------------------------------------------------------------------------------------- what pickles call


def _partial_state(cpu: bool) -> Any:
    from accelerate.state import PartialState

    return PartialState(cpu or os.environ.get("ACCELERATE_USE_CPU") == "true")


def _accelerator_state(settings: dict[str, Any], cpu: bool) -> Any:
    from accelerate.state import AcceleratorState

    made = AcceleratorState._shared_state
    if made and _world_size() > 1 and made.get("_mixed_precision") != settings.get("mixed_precision"):
        AcceleratorState._reset_state()  # of an earlier call
    if not AcceleratorState._shared_state:
        AcceleratorState(cpu=cpu, _from_accelerator=True, **settings)
    return AcceleratorState()


def _gradient_state(settings: dict[str, Any]) -> Any:
    from accelerate.state import GradientState

    state = GradientState()
    vars(state).update(settings)
    return state


def _training_arguments(cls: Any, own: dict[str, Any]) -> Any:
    made = cls.__new__(cls)
    vars(made).update(own)
    made._setup_devices  # noqa: B018 (a property that finds out)
    return made


def _after_check(prepared: str, processes: int, make: Any, *args: Any) -> Any:
    """Make an object; raise `TypeError` if it was prepared for `processes` and the number of ranks differs."""
    if _world_size() not in (1, processes):
        raise TypeError(
            f"{prepared} where there was one process, and each rank would train by itself: call `prepare` inside "
            f"the function"
        )
    return make(*args)


def _world_size() -> int:
    dist = sys.modules.get("torch.distributed")
    return dist.get_world_size() if dist is not None and dist.is_initialized() else 1
