"""Snapshots of a run: complete or absent, even if the process is killed while it writes one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import ranks
from ..io.disk import sync
from ..parallel.protocol import Parallel

_STATE, _BEST = "state.json", "best.json"


@dataclass(frozen=True)
class Snapshots:
    """A folder for `fit`'s snapshots of a run, and the times to take them.

    Each snapshot is a folder `step-N` with the files of the model's `save` and the further state of the run. It is
    written under another name and renamed at the end: a run that is killed while it writes keeps the previous snapshot.

    Examples:
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.loader import MemoryLoader
        >>> from nbdist.recsys.sharding import replicate
        >>> from nbdist.recsys.training import Snapshots, fit
        >>> def predict(model, batch):
        ...     return model(batch["x"]).squeeze(1), batch["liked"]
        >>> def train(steps):
        ...     x = torch.linspace(-1, 1, 100)[:, None]
        ...     rows = MemoryLoader({"x": x, "liked": x[:, 0] > 0}, 5, shuffle=True, seed=1)
        ...     model = replicate(torch.nn.Linear(1, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        ...     snapshots = Snapshots("run", every=5, resume=True)
        ...     return fit(model, predict, rows, steps=steps, log_every=5, snapshots=snapshots, progress=False)
        >>> history = in_ddp(2, train, 10)
        >>> [folder.name for folder in Snapshots("run").all()]
        ['step-5', 'step-10']
        >>> history = in_ddp(2, train, 15)  # goes on after step 10
        >>> [record.step for record in history]
        [5, 10, 15]
    """

    folder: str | os.PathLike[str]
    """A folder that all ranks can reach, for this run alone. It is made if it does not exist."""
    every: int | None = None
    """The number of steps between two snapshots. None: a snapshot before each evaluation. There is always a snapshot at
    the end of the run."""
    keep: int = 2
    """The number of snapshots to keep. Older ones are removed."""
    keep_best: str | None = None
    """The name of a metric. The snapshot with the best value of it is also kept, in addition to `keep`, and `best`
    returns it."""
    resume: bool = False
    """True: continue from the newest snapshot in the folder, if there is one. False: the folder must have no
    snapshots."""

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")

    def all(self) -> list[Path]:
        """Return the folders of the existing snapshots, the newest last."""
        found = [path for path in Path(self.folder).glob("step-*") if path.name[5:].isdigit()]
        return sorted(found, key=lambda path: int(path.name[5:]))

    def best(self) -> Path:
        """Return the folder of the snapshot with the best value of `keep_best`, for the method `load` of a model.

        Raises:
            FileNotFoundError: There is no snapshot, or none has been evaluated yet.
        """
        found = self._best()
        if found is None:
            raise FileNotFoundError(
                f"{self.folder} has no best snapshot: call fit with snapshots=Snapshots(folder, keep_best='auc')"
            )
        return found

    def _mark_best(self, step: int) -> None:
        """Mark the snapshot of a step as the best so far. All ranks must call it."""
        if dist.get_rank() == 0:
            scratch = Path(self.folder) / f".{_BEST}.tmp"
            with open(scratch, "w") as text:
                json.dump({"step": step, "metric": self.keep_best}, text)
                text.flush()
                os.fsync(text.fileno())
            scratch.rename(scratch.with_name(_BEST))
            sync(scratch.parent)
        dist.barrier()

    def _best(self) -> Path | None:
        try:
            marked = json.loads((Path(self.folder) / _BEST).read_text())
        except FileNotFoundError:
            return None
        if not isinstance(marked, dict) or type(marked.get("step")) is not int:
            raise ValueError(f"{Path(self.folder) / _BEST}: `step` must be an integer, got {marked!r}")
        path = Path(self.folder) / f"step-{marked['step']}"
        return path if path.exists() else None

    def _save(self, model: Parallel, step: int, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Take a snapshot. All ranks must call it.

        Args:
            model: The model, whose `save` is called.
            step: The number of the step, which is part of the snapshot's name.
            common: The state that all ranks share, as JSON. Rank 0's is written.
            own: The state of this rank: tensors and plain values.
        """
        final = Path(self.folder) / f"step-{step}"
        scratch = final.with_name(f".{final.name}.tmp")
        rank = dist.get_rank()
        if rank == 0:
            final.parent.mkdir(parents=True, exist_ok=True)
            self._clear()
            scratch.mkdir()
        dist.barrier()
        model.save(scratch)  # on disk when it returns
        with open(scratch / _of(rank), "wb") as file:
            torch.save(dict(own), file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()
        if rank == 0:
            with open(scratch / _STATE, "w") as text:
                json.dump({**common, "step": step, "world_size": dist.get_world_size()}, text)
                text.flush()
                os.fsync(text.fileno())
            sync(scratch)
            scratch.rename(final)
            sync(final.parent)
            best = self._best() if self.keep_best else None
            for old in self.all()[: -self.keep]:
                if old == best:
                    continue
                gone = old.rename(old.with_name(f".{old.name}.tmp"))  # never half of one under its name
                shutil.rmtree(gone)
        dist.barrier()  # it is there when any rank goes on

    def _load(self, model: Parallel) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Load the newest snapshot, if there is one and the run resumes. All ranks must call it.

        Returns:
            The states `common` (with `step` and `world_size`) and `own` of `_save`. On a different number of ranks,
            `own` is the state of the rank whose number is this rank's number modulo the earlier number of ranks.

        Raises:
            ValueError: There are snapshots, but the run does not resume; or the newest is of another model or
                optimizer.
        """
        if dist.get_rank() == 0 and self.resume:
            self._clear()
        there = ranks.on_rank_0(self.all)
        if not there:
            return None
        newest = there[-1]
        if not self.resume:
            raise ValueError(
                f"{self.folder} has snapshots of a run, the newest {newest.name}: give resume=True to continue from "
                "it, or another folder"
            )
        common: dict[str, Any] = json.loads((newest / _STATE).read_text())
        for name in ("step", "world_size"):
            if type(common[name]) is not int or common[name] < name.startswith("w"):
                raise ValueError(f"{newest / _STATE}: `{name}` must be a count, got {common[name]!r}")
        model.load(newest)
        own: dict[str, Any] = torch.load(newest / _of(dist.get_rank() % common["world_size"]), weights_only=True)
        return common, own

    def _own_of_all(self, common: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Load the state `own` of each rank that took a snapshot; `common` is the state that `_load` has returned."""
        folder = Path(self.folder) / f"step-{common['step']}"
        return [torch.load(folder / _of(rank), weights_only=True) for rank in range(common["world_size"])]

    def _clear(self) -> None:
        """Remove the unfinished folders of a killed run."""
        for left in Path(self.folder).glob(".step-*.tmp"):
            shutil.rmtree(left)


def _of(rank: int) -> str:
    return f"rank-{rank}.pt"
