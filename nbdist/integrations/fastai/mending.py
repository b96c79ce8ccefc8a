"""What fastai needs to train on gloo as well as on NCCL, and to say nothing that the user has not said."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .distributed import mend_distributed
from .replacing import Originals, replace
from .tabular import mend_tabular


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
    - Each step waits for gloo twice, for the gradients and for the mean of a loss that the bar shows, and a training
      some ten times before its first one: CPU ranks on one machine exchange all of that through shared memory, those
      two at once.
    - A tabular loader selects a frame's rows for each batch, and makes a table of them: half of a small model's step.
      The same batches are gathered from the frame's columns.
    - `lr_find` has rank 0 alone write the weights to which all want to return, each in a folder of its own: rank 0 then
      waits for ever for the others, which find no file. Here each rank writes its own.
    - Tensors are made of the arrays of pandas' frames, which are read-only as of pandas 3: torch warns of it in every
      rank, though nothing writes to them.
    """
    originals: Originals = []
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
        replace(originals)


def _mend_tensors(module: types.ModuleType) -> Originals:
    import numpy as np

    as_tensor, array2tensor = module.as_tensor, module._array2tensor

    def writable(array: Any) -> Any:
        return array.copy() if isinstance(array, np.ndarray) and not array.flags.writeable else array

    def _as_tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        return as_tensor(writable(data), *args, **kwargs)

    def _array2tensor(x: Any, *args: Any, **kwargs: Any) -> Any:
        return array2tensor(writable(x), *args, **kwargs)

    return replace([(module, "as_tensor", _as_tensor), (module, "_array2tensor", _array2tensor)])


def _mend_schedule(module: types.ModuleType) -> Originals:
    learner, finder = sys.modules["fastai.learner"], module.LRFinder

    def by_itself(method: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(method)
        def of_one_rank(self: Any) -> None:
            originals = replace([(learner, "rank_distrib", lambda: 0), (learner, "distrib_barrier", lambda: None)])
            try:
                method(self)
            finally:
                replace(originals)

        return of_one_rank

    return replace([(finder, name, by_itself(getattr(finder, name))) for name in ("before_fit", "after_fit")])


_MENDS = {
    "fastai.torch_core": _mend_tensors,
    "fastai.callback.schedule": _mend_schedule,
    "fastai.tabular.core": mend_tabular,
    "fastai.distributed": mend_distributed,
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
