"""Modules that the server imports for its ranks, and modules that it must not import."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback

import psutil

from ..system.search_path import standard_first
from . import cuda_driver as driver
from .importing import BrokenOff

#: What modules import only when they are used, which each rank would do for itself, in every launch: a second or two.
#: `DistributedDataParallel` asks torch._dynamo how it is compiled, torch's optimizers ask it not to be, accelerate's
#: `prepare` looks for DTensors. NumPy (2.4 or so) loads its `random` to be seeded, as each rank's is. pyarrow asks
#: pandas about the types of what it converts.
_IMPORTED_AT_USE = {
    "numpy": ("numpy.random",),
    "torch": ("numpy.random",),
    "torch.optim": ("torch._dynamo",),
    "torch.nn.parallel": ("torch._dynamo",),
    "accelerate": ("torch._dynamo", "torch.distributed.tensor"),
    "fastai.distributed": ("torch._dynamo", "torch.distributed.tensor"),
    "nbdist.recsys": ("pyarrow", "pandas"),
    "nbdist.recsys.parallel": ("torch._dynamo",),
    "nbdist.recsys.sharding": ("torch._dynamo", "torchrec.distributed"),
    # Modules in `_START_THREADS` import these packages, too, which would take each rank four seconds.
    "nbdist.recsys.days": (_TRAINING := ("torchmetrics", "torch._dynamo", "torch.distributed.checkpoint")),
    "nbdist.recsys.recommenders": ("torchmetrics",),
    "nbdist.recsys.training": _TRAINING,
}
#: Modules that start threads when they are imported: to find that out, a server would import all others twice. The
#: modules of nbdist in this list import polars.
_START_THREADS = (
    "polars",
    *(f"nbdist.recsys.{room}" for room in ("datasets", "days", "etl", "io.frames", "io.remote", "recommenders")),
    *(f"nbdist.recsys.{room}" for room in ("retrieval", "training", "triton")),
)


class Preloaded:
    """The modules that ranks find imported."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.refused: list[str] = list(_START_THREADS)
        """Modules, with their submodules, that cannot be imported, or must not be imported before a fork."""

    def load(self, modules: list[str], path: list[str]) -> bool:
        """Import modules, found by `path`, and return whether this process can still be forked afterwards."""
        sys.path[:] = standard_first(path)  # what a project has of the same name must not run here
        importlib.invalidate_caches()
        before = len(sys.modules)
        for name in [*modules, *_imported_at_use(modules)]:
            package = name.partition(".")[0]
            if name in self.loaded or any(name == other or name.startswith(other + ".") for other in self.refused):
                continue
            fresh = package not in sys.modules
            try:
                importlib.import_module(name)
            except (Exception, SystemExit):  # it fails again, and visibly, in the rank that imports it
                if name in modules:
                    log(traceback.format_exc())
                self.refused.append(name)
                continue
            except BrokenOff:  # half of it may be there: a fresh process goes on
                print(f"nbdist: {name} takes long to import, so each rank imports it", file=sys.stderr)
                self.refused.append(name)
                return False
            if why := _spoilt():
                # Of a package that was there before, the rest does no harm; of any other, nothing is tried again.
                refused = package if fresh else name
                log(f"nbdist: {refused} {why} when imported, so each rank imports it\n")
                self.refused.append(refused)
                return False
            self.loaded.append(name)
        if len(sys.modules) != before:
            importlib.invalidate_caches()  # once for all ranks: they may look for files that are made later
        return True


def log(text: str) -> None:
    """Write to the kernel's standard error. Ignore a failure, because standard error may be a file on a full disk."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _imported_at_use(modules: list[str]) -> list[str]:
    """Return the installed modules that these modules import later, when they are used."""
    return [
        later
        for user, others in _IMPORTED_AT_USE.items()
        if any(name == user or name.startswith(user + ".") for name in modules)
        for later in others
        if importlib.util.find_spec(later.partition(".")[0])
    ]


def _spoilt() -> str:
    """Return the reason why this process cannot be forked; an empty string if it can."""
    if psutil.Process().num_threads() > 1:
        return "starts threads"
    return "initialises CUDA" if driver.initialised() else ""
