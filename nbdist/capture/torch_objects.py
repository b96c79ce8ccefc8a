"""Objects of torch with special reductions: TorchScript, operators of cells, wrapped models, loaders in use."""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .big_data import own_device
from .foreign import contents

Reduction = tuple[Any, ...]

#: The attributes of a module in which FSDP2 leaves hooks.
_HOOKS = {
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
}


def reduce_torch(torch: Any, obj: Any, to_cpu: bool) -> Reduction | None:
    """Return the reduction of an object of torch that needs its own; None for other objects.

    `to_cpu`: the reader is the notebook.

    Raises `TypeError` for an operator that cannot be registered again.
    """
    if isinstance(obj, torch.nn.Module):
        if isinstance(obj, torch.jit.ScriptModule):
            return _reduce_script(torch, obj, to_cpu)
        reduction = _reduce_wrapped(obj) if to_cpu else None
        return reduction or _reduce_parametrized(obj) or _reduce_graph(torch, obj)
    if type(obj) is torch.jit.ScriptFunction:
        return _reduce_script(torch, obj, to_cpu)
    if type(obj) is torch._C.ScriptMethod:  # of a scripted or traced model
        return getattr, (torch.jit._recursive.wrap_cpp_module(obj.owner), obj.name)
    if isinstance(obj, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _reduce_named(torch, obj)
    exported = sys.modules.get("torch.export.exported_program")
    if exported is not None and type(obj) is exported.ExportedProgram:
        file = io.BytesIO()
        torch.export.save(obj, file)
        return _load_exported, (pickle.PickleBuffer(file.getvalue()),)
    if isinstance(obj, torch.utils.data.DataLoader) and contents(obj).get("_iterator") is not None:
        make, args, state, *rest = obj.__reduce_ex__(2)
        if type(state) is dict:  # the workers of its last epoch stay where they are
            return make, args, {**state, "_iterator": None}, *rest
    tensorboard = sys.modules.get("torch.utils.tensorboard.writer")
    if tensorboard is not None and isinstance(obj, tensorboard.SummaryWriter):
        state = {**vars(obj), "file_writer": None, "all_writers": None}
        return _made_of, (type(obj),), state, None, None, _set_writer
    return None


def _load_exported(saved: Any) -> Any:
    return importlib.import_module("torch.export").load(io.BytesIO(saved))


def _reduce_graph(torch: Any, obj: Any) -> Reduction | None:
    """Return the reduction of a graph module whose tracer cannot be made again, such as one of `torch.export`: torch's
    own tracer reads its code. None for any other module."""
    fx = sys.modules.get("torch.fx")
    tracer = contents(obj).get("_tracer_cls")
    if fx is None or tracer is None or not isinstance(obj, fx.GraphModule) or not _needs_arguments(tracer):
        return None
    make, (body, *rest), *more = obj.__reduce__()
    own = {name for name, value in body.items() if type(value) is types.MethodType and value.__self__ is obj}
    body = {name: value for name, value in body.items() if name not in own}  # refusals of `train` and `eval`
    return make, ({**body, "_tracer_cls": None}, *rest), *more


def _needs_arguments(kind: Any) -> bool:
    parameters = inspect.signature(kind).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(one.default is one.empty and one.kind not in kinds for one in parameters)


def _set_writer(writer: Any, state: dict[str, Any]) -> None:
    """Set the state of a `SummaryWriter` without open files. It opens an own one when it writes, and closes that when
    nothing has the writer any more."""
    vars(writer).update(state)
    weakref.finalize(writer, _close_files, vars(writer))


def _close_files(attributes: dict[str, Any]) -> None:
    for file in (attributes["all_writers"] or {}).values():
        file.close()


def _reduce_wrapped(module: Any) -> Reduction | None:
    distributed = sys.modules.get("torch.nn.parallel.distributed")
    if distributed is not None and isinstance(module, distributed.DistributedDataParallel):
        return unwrapped, (module.module, type(module).__name__)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    if isinstance(module, getattr(fsdp, "FSDPModule", ())):
        bases = type(module).__mro__
        return _reduce_sharded(module, bases[bases.index(fsdp.FSDPModule) + 1])
    if any(_is_of_fsdp(hook) for name in _HOOKS for hook in contents(module).get(name, {}).values()):
        return _reduce_sharded(module, type(module))  # its parameters are sharded by a module that it is in
    return None


def unwrapped(module: Any, wrapper: str) -> Any:
    """Return a module that the ranks had wrapped in `wrapper`, with a warning that the wrapper is missing."""
    warnings.warn(
        f"the model is returned without {wrapper}, which needs the ranks' process group: you get the `model.module` of "
        "the ranks",
        stacklevel=2,
    )
    return module


def _reduce_sharded(module: Any, own: type) -> Reduction:
    """Return the reduction of a module after `fully_shard`: as its original class, without the hooks that gather
    parameters."""
    return _made_of, (own,), state_without_fsdp(module)


def state_without_fsdp(module: Any) -> dict[str, Any]:
    """Return the attributes of a module, without those that FSDP has added."""
    own = ("__composable_api", "_fsdp", "_is_fsdp")
    state = {name: value for name, value in vars(module).items() if not name.startswith(own)}
    for name in _HOOKS & state.keys():
        hooks = state[name]
        state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not _is_of_fsdp(hook))
    return state


def _made_of(cls: Any) -> Any:
    return cls.__new__(cls)


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


# ---------------------------------------------------------------------------------------------- parametrizations


def _reduce_parametrized(module: Any) -> Reduction | None:
    """Return the reduction of a module with parametrized tensors (`weight_norm`, `spectral_norm`), for which torch has
    derived a class that refuses to be pickled. None for another module."""
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    if parametrize is None or not parametrize.is_parametrized(module):
        return None
    return _make_parametrized, (type(module).__base__, tuple(module.parametrizations)), vars(module)


def _make_parametrized(cls: Any, names: Iterable[str]) -> Any:
    parametrize: Any = importlib.import_module("torch.nn.utils.parametrize")
    module = cls.__new__(cls)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


# ---------------------------------------------------------------------------------------------------- TorchScript


def _reduce_script(torch: Any, obj: Any, to_cpu: bool) -> Reduction:
    """Return the reduction by `torch.jit.save`. Parameters and buffers are also sent as tensors: an optimizer may share
    them."""
    file = io.BytesIO()
    torch.jit.save(obj, file)
    tensors = {}
    if isinstance(obj, torch.jit.ScriptModule):
        tensors = {**dict(obj.named_parameters()), **dict(obj.named_buffers())}
    cuda = any(tensor.is_cuda for tensor in tensors.values()) and not to_cpu
    return _load_script, (pickle.PickleBuffer(file.getvalue()), cuda), tensors, None, None, _set_tensors


def _load_script(saved: Any, cuda: bool) -> Any:
    import torch

    return torch.jit.load(io.BytesIO(saved), map_location=own_device() if cuda else "cpu")


def _set_tensors(module: Any, tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        *path, own = name.split(".")
        functools.reduce(getattr, path, module)._c.setattr(own, tensor)


# ------------------------------------------------------------------------------------------- operators of cells


def operators_named(names: Iterable[str]) -> list[Any]:
    """Return the operators of cells (`torch.library.custom_op`) whose namespace and name are among these attributes."""
    named = frozenset(names)
    if len(named) < 2:  # a namespace and a name: most functions have none, and there are about a hundred operators
        return []
    module = sys.modules.get("torch._library.custom_ops")
    return [
        operator
        for operator in list(getattr(module, "OPDEFS", {}).values())
        if {operator._namespace, operator._name} <= named and operator._init_fn.__module__ == "__main__"
    ]


def is_operator(obj: Any) -> bool:
    """Return whether `obj` is an operator that was made by `torch.library.custom_op`."""
    module = sys.modules.get("torch._library.custom_ops")
    return module is not None and type(obj) is getattr(module, "CustomOpDef", None)


def reduce_operator(operator: Any) -> Reduction:
    """Return the reduction of an operator, with its kernels, gradients and transforms."""
    kernels = {device: _kernel(operator, fn) for device, fn in operator._backend_fns.items()}
    gradient = operator._backward_fn, operator._setup_context_fn
    state = kernels, operator._abstract_fn, gradient, operator._torch_dispatch_fns, operator._vmap_fn
    casts = dict(getattr(operator, "_autocast_dtype", {}))  # torch 2.6 and newer
    args = operator._namespace, operator._name, operator._schema, operator._init_fn, getattr(operator, "_tags", ())
    return _make_operator, args, (*state, casts), None, None, _register


def _kernel(operator: Any, wrapped: Any) -> Callable[..., Any]:
    """Return the user's function inside torch's wrapper."""
    fn = inspect.unwrap(wrapped)
    inner = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)).get("fn")
    if inner is None:
        raise TypeError(f"the operator {operator._namespace}::{operator._name} cannot be registered again")
    return inner.cell_contents  # type: ignore[no-any-return]


def _make_operator(namespace: str, name: str, schema: str, fn: types.FunctionType, tags: Any) -> Any:
    from torch._library.custom_ops import CustomOpDef

    return CustomOpDef(namespace, name, schema, fn, tags)


def _register(operator: Any, state: tuple[Any, ...]) -> None:
    kernels, fake, (backward, setup_context), by_class, vmap, casts = state
    for device, fn in kernels.items():
        operator.register_kernel(device)(fn)
    if fake is not None:
        operator.register_fake(fake)
    if backward is not None:
        operator.register_autograd(backward, setup_context=setup_context)
    for cls, fn in by_class.items():
        operator.register_torch_dispatch(cls, fn)
    if vmap is not None:
        operator.register_vmap(vmap)
    for device, dtype in casts.items():
        operator.register_autocast(device, dtype)


def _reduce_named(torch: Any, obj: Any) -> Reduction:
    """Return the reduction of an operator of `torch.ops` (`torch.ops.aten.add`, or `.Tensor` of it), which is found by
    its name."""
    overload = obj._overloadname if isinstance(obj, torch._ops.OpOverload) else ""
    name = obj._schema.name if overload else obj._qualified_op_name
    own = operators_named(name.split("::"))  # of a cell: it has to be there first
    return _named, (own, name, overload)


def _named(operators: list[Any], name: str, overload: str) -> Any:
    import torch

    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator)
    return getattr(packet, overload) if overload else packet
