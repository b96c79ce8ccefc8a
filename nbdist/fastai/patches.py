"""The changes that ranks make in fastai so that it trains on gloo as on NCCL, and waits less."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..system.after_import import AfterImport
from .distributed import patch_distributed
from .replacing import Originals, replace
from .tabular import patch_tabular

#: Says "0" to ranks, and to `in_ddp(0, ...)`, that are to leave fastai as it is.
VARIABLE = "NBDIST_FASTAI_PATCHES"


def patch_ranks(on: bool) -> None:
    """Switch the changes that ranks make in fastai on or off, for all ranks that start from now on.

    They are on by default. False sets the environment variable NBDIST_FASTAI_PATCHES to "0";
    `Session(env={"NBDIST_FASTAI_PATCHES": "0"})` does the same for one session. Without these patches fastai 2.8 cannot
    train under `distrib_ctx` on CPU ranks. The page "fastai" of the documentation lists them all.

    Args:
        on: Whether ranks patch fastai.

    Examples:
        >>> from fastai.distributed import DistributedDL
        >>> from nbdist import in_ddp
        >>> in_ddp(1, lambda: DistributedDL._broadcast.__module__)
        'nbdist.fastai.distributed'
        >>> patch_ranks(False)
        >>> in_ddp(1, lambda: DistributedDL._broadcast.__module__)
        'fastai.distributed'
        >>> patch_ranks(True)
    """
    if on:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = "0"


@contextmanager
def patched() -> Iterator[Originals]:
    """Patch fastai's modules while the context is open, including modules that are imported meanwhile.

    Yields the replaced attributes: class or module, name, earlier value; an empty list if the patches are switched off.
    The page "fastai" of the documentation gives the reason for each.
    """
    originals: Originals = []
    if os.environ.get(VARIABLE) == "0":
        yield originals
        return

    def patch(module: types.ModuleType) -> None:
        originals.extend(_PATCHES[module.__name__](module))

    hook = AfterImport(dict.fromkeys(_PATCHES, patch))
    sys.meta_path.insert(0, hook)
    try:
        yield originals
    finally:
        sys.meta_path.remove(hook)
        replace(originals)


def _patch_tensors(module: types.ModuleType) -> Originals:
    """Copy read-only arrays before tensors are made of them: with pandas 3, torch warns of each such array in every
    rank.

    On a Mac, have CPU ranks use the CPU: fastai would choose its GPU by itself.
    """
    import numpy as np

    as_tensor, array2tensor = module.as_tensor, module._array2tensor

    def writable(array: Any) -> Any:
        return array.copy() if isinstance(array, np.ndarray) and not array.flags.writeable else array

    def _as_tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        return as_tensor(writable(data), *args, **kwargs)

    def _array2tensor(x: Any, *args: Any, **kwargs: Any) -> Any:
        return array2tensor(writable(x), *args, **kwargs)

    originals = replace([(module, "as_tensor", _as_tensor), (module, "_array2tensor", _array2tensor)])
    if os.environ.get("ACCELERATE_USE_CPU") == "true" and module._has_mps() and module.defaults.use_cuda is None:
        originals += replace([(module.defaults, "use_cuda", False)])
    return originals


def _patch_schedule(module: types.ModuleType) -> Originals:
    """Make each rank write and read the weights of `lr_find` in a folder of its own."""
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


_PATCHES = {
    "fastai.torch_core": _patch_tensors,
    "fastai.callback.schedule": _patch_schedule,
    "fastai.tabular.core": patch_tabular,
    "fastai.distributed": patch_distributed,
}
