"""What fastai needs to train on gloo as well as on NCCL, and to say nothing that the user has not said."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import operator
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_Originals = list[tuple[Any, str, Any]]
"""Class or module, attribute, and the value that it had."""


@contextmanager
def mended() -> Iterator[None]:
    """Mend what keeps fastai from ranks; also in modules of it that are imported later.

    As of fastai 2.8.12:
    - `DistributedDL` moves the shuffled indices to CUDA before it broadcasts them.
    - `DistributedTrainer` makes every batch norm one over all ranks, which torch has for GPUs only: CPU ranks keep
      batch norm over their own part of the batch, and say so.
    - A parameter without elements (`TabularModel` makes one where there are no continuous columns) never gets the
      gradient that `DistributedDataParallel` waits for.
    - Every data loader is divided among the ranks, also one that has done so itself: such a one says `sharded = True`;
      or that can do it better: such a one has a method `divide`.
    - A group of one leaves `DistributedTrainer` in the learner, which then wants a group for ever.
    - A learner asks each callback for each event of a step, and those that have no such method look for it in the
      learner and in the model: half of a small model's step. Here they are passed over.
    - Each step waits for gloo twice, for the gradients and for the mean of a loss that the bar shows: CPU ranks on one
      machine exchange both through shared memory.
    - `lr_find` has rank 0 alone write the weights to which all want to return, each in a folder of its own: rank 0 then
      waits for ever for the others, which find no file. Here each rank writes its own.
    - Tensors are made of the arrays of pandas' frames, which are read-only as of pandas 3: torch warns of it in every
      rank, though nothing writes to them.
    """
    originals: _Originals = []
    hook = _AfterImport(lambda module: originals.extend(_MENDS[module.__name__](module)))
    for name in _MENDS:
        if name in sys.modules:
            originals += _MENDS[name](sys.modules[name])
        else:
            hook.awaited.add(name)
    sys.meta_path.insert(0, hook)
    try:
        yield
    finally:
        sys.meta_path.remove(hook)
        for owner, name, value in originals:
            setattr(owner, name, value)


def _mend_distributed(module: types.ModuleType) -> _Originals:
    import torch
    import torch.distributed as dist

    from ..devices import collective_device, rank_device
    from ..wire.shared_collectives import SharedCollectives, open_shared_collectives

    core = sys.modules["fastai.torch_core"]
    loader, trainer, learner = module.DistributedDL, module.DistributedTrainer, module.Learner
    prepare, detach, wrap, gather = trainer.before_fit, learner.detach_distributed, trainer._wrap_dl, core.maybe_gather
    shared: SharedCollectives | None = None

    def _broadcast(self: Any, t: Any, rank: int) -> list[int]:
        "Broadcast `t` from `rank` to all other ranks; every rank returns the same list."
        indices = torch.as_tensor(t, dtype=torch.long, device=collective_device())
        dist.broadcast(indices, rank)
        return list(indices.tolist())

    def before_fit(self: Any) -> None:
        if self.sync_bn and collective_device().type == "cpu":
            self.sync_bn = False
            norms = [m for m in self.model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
            if norms and dist.get_rank() == 0:
                print("nbdist: CPU ranks have no SyncBatchNorm; each normalises over its own part of the batch")
        for parameter in self.model.parameters():
            if parameter.numel() == 0:
                parameter.requires_grad_(False)
        prepare(self)
        nonlocal shared
        shared = open_shared_collectives() if rank_device().type == "cpu" else None
        if shared is not None and not getattr(self.learn.model, "_comm_hooks", True):  # nobody else's
            self.learn.model.register_comm_hook(shared, _mean_of_gradients)

    def maybe_gather(x: Any, axis: int = 0) -> Any:
        "Gather copies of `x` on `axis` (if training is distributed)"
        if shared is None or not shared.usable or x.device.type != "cpu" or x.is_sparse:
            return gather(x, axis)
        gathered = shared.gather(x)
        return torch.cat(gathered, dim=axis) if x.ndim else torch.stack(gathered).mean()

    def _wrap_dl(self: Any, dl: Any) -> Any:
        if getattr(dl, "sharded", False) is True:
            return dl
        return dl.divide() if hasattr(type(dl), "divide") else wrap(self, dl)

    def call(self: Any, event_name: Any) -> None:
        for name in [event_name] if isinstance(event_name, str) else event_name:
            self._call_one(name)

    def _call_one(self: Any, event_name: str) -> None:
        if not hasattr(module.event, event_name):
            raise Exception(f"missing {event_name}")
        for cb in sorted(self.cbs, key=_order):
            # At the end of a training each makes itself ready for the next.
            if event_name == "after_fit" or hasattr(type(cb), event_name) or event_name in vars(cb):
                cb(event_name)

    def detach_distributed(self: Any) -> Any:
        "Remove `DistributedTrainer` from a learner"
        detach(self)
        return self.remove_cb(trainer)

    patched = [
        (loader, "_broadcast", _broadcast),
        (trainer, "before_fit", before_fit),
        (trainer, "_wrap_dl", _wrap_dl),
        (learner, "detach_distributed", detach_distributed),
        (learner, "__call__", call),
        (learner, "_call_one", _call_one),
        (core, "maybe_gather", maybe_gather),
    ]
    return _replace(patched)


def _mend_tensors(module: types.ModuleType) -> _Originals:
    import numpy as np

    as_tensor, array2tensor = module.as_tensor, module._array2tensor

    def writable(array: Any) -> Any:
        return array.copy() if isinstance(array, np.ndarray) and not array.flags.writeable else array

    def _as_tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        return as_tensor(writable(data), *args, **kwargs)

    def _array2tensor(x: Any, *args: Any, **kwargs: Any) -> Any:
        return array2tensor(writable(x), *args, **kwargs)

    return _replace([(module, "as_tensor", _as_tensor), (module, "_array2tensor", _array2tensor)])


def _mend_schedule(module: types.ModuleType) -> _Originals:
    learner, finder = sys.modules["fastai.learner"], module.LRFinder

    def by_itself(method: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(method)
        def of_one_rank(self: Any) -> None:
            originals = _replace([(learner, "rank_distrib", lambda: 0), (learner, "distrib_barrier", lambda: None)])
            try:
                method(self)
            finally:
                _replace(originals)

        return of_one_rank

    return _replace([(finder, name, by_itself(getattr(finder, name))) for name in ("before_fit", "after_fit")])


def _replace(patched: _Originals) -> _Originals:
    """Set these attributes; returns what was there before."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    for owner, name, value in patched:
        setattr(owner, name, value)
    return originals


_order = operator.attrgetter("order")


def _mean_of_gradients(shared: Any, bucket: Any) -> Any:
    """The communication hook of `DistributedDataParallel`."""
    import torch

    future: Any = torch.futures.Future()
    future.set_result(shared.mean_(bucket.buffer()))
    return future


_mean_of_gradients.__annotations__.clear()  # torch compares them with its own types, and these are strings


_MENDS = {
    "fastai.torch_core": _mend_tensors,
    "fastai.callback.schedule": _mend_schedule,
    "fastai.distributed": _mend_distributed,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `action` with each module that is `awaited` as soon as it has been imported."""

    def __init__(self, action: Callable[[types.ModuleType], None]) -> None:
        self.awaited: set[str] = set()
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.awaited:
            return None
        self.awaited.remove(name)
        spec = importlib.util.find_spec(name)  # of the finders after this one
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                self._action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
