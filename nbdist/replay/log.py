"""The log of a rank's steps in a folder: a snapshot after some steps, and a mark of each step's result.

The folder holds `rank-R.json`, which says how the ranks were started; `rank-R.marks`, four bytes for each step; and
`step-N/rank-R.pt`, the state after N steps.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..devices import rank_device
from . import target as targets
from .target import Reached, Target

#: The number of steps between two snapshots at the beginning, which doubles whenever there are more than `MOST`
#: snapshots.
EVERY, MOST = 25, 20
_MARK = 4  # bytes
#: The number of parameters that a mark is computed from, and the number of elements of each.
_PARAMETERS, _ELEMENTS = 8, 16


class StepLog:
    """The log of one training on this rank. All ranks must make one.

    Args:
        folder: A folder that all ranks can reach, for this recording alone.
        resumed: True if the folder may already hold the recording, which is then continued.

    Raises:
        RuntimeError: The process is in no process group.
        ValueError: The folder already holds a recording, or this rank has a GPU.
    """

    def __init__(self, folder: str | os.PathLike[str], resumed: bool = False) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "a recording is made by ranks: call the training in a function that in_ddp or a Session runs"
            )
        if rank_device().type != "cpu":
            raise ValueError(
                f"a recording must be made by CPU ranks, got a rank on {rank_device()}: kernels of a GPU do not repeat "
                'a step bit for bit. Train with devices="cpu"'
            )
        self.folder, self.rank = Path(os.path.abspath(folder)), dist.get_rank()
        self.target: Target | None = targets.target_in(folder)
        self.off = targets.is_replay() and self.target is None
        """True while a step of another recording is run again: nothing is written then."""
        self._every, self._taken, self._marks = EVERY, [-1], -1
        self._chosen: list[nn.Parameter] | None = None
        if not targets.is_replay():
            self._open(resumed)

    def _open(self, resumed: bool) -> None:
        refused = [self._refusal(resumed) if self.rank == 0 else ""]
        dist.broadcast_object_list(refused, src=0)
        if refused[0]:
            raise ValueError(refused[0])
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {"world_size": dist.get_world_size(), "threads": torch.get_num_threads(), "seeds": targets.seeds}
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps({**about, "torch": torch.__version__}))
        self._marks = os.open(self.folder / f"rank-{self.rank}.marks", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _refusal(self, resumed: bool) -> str:
        if resumed or not (self.folder / "rank-0.json").exists():
            return ""
        return (
            f"the folder of a recording must not hold one already, got {str(self.folder)!r}: remove that folder, or "
            "name another one"
        )

    def due(self, step: int) -> bool:
        """Return whether the state after `step` steps must be kept."""
        if self.off or self.target is not None:
            return self.target is not None and bool(self.target.end) and step == self.target.step - 1
        return self._taken[-1] != step and (self._taken == [-1] or step % self._every == 0)

    def place(self) -> Path:
        """Return the folder for the next snapshot."""
        return self.folder if self.target is None else Path(self.target.end)

    def kept(self, step: int) -> None:
        """Record that the snapshot after `step` steps is written, and remove older snapshots where there are too many.

        While a step is run again, raise `Reached` instead: the other ranks go no further.
        """
        if self.target is not None:
            raise Reached()
        self._taken = [*(one for one in self._taken if one >= 0), step]
        if len(self._taken) > MOST:
            self._every *= 2
            gone = [one for one in self._taken[1:-1] if one % self._every]
            self._taken = [one for one in self._taken if one not in gone]
            if self.rank == 0:
                for one in gone:
                    shutil.rmtree(self.folder / f"step-{one}", ignore_errors=True)

    def write(self, step: int, state: Callable[[], Any]) -> None:
        """Write a snapshot if one is due after `step` steps. Its content is what `state` returns."""
        if not self.due(step):
            return
        final = self.place() / f"step-{step}" / f"rank-{self.rank}.pt"
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch = final.with_suffix(".tmp")
        torch.save(state(), scratch)
        scratch.rename(final)
        self.kept(step)

    def read(self) -> Any:
        """Read the snapshot from which the run to the target step starts."""
        assert self.target is not None
        (folder,) = Path(self.target.start).iterdir()
        return torch.load(folder / f"rank-{self.rank}.pt", weights_only=False)  # of the user's own ranks

    def begin(self, step: int) -> None:
        """Record that a step begins. If it is the target step, the loop may end in it."""
        if self.target is not None and step == self.target.step:
            targets.begun = True

    def done(self, step: int, modules: Iterable[nn.Module], loss: float = 0.0) -> None:
        """Write the mark of a step's result, with the step's loss if it is known.

        While a step is run again, raise `Reached` after the target step instead.
        """
        if self.off or (self.target is not None and step < self.target.step):
            return
        mark = self._mark(modules, loss)
        if self.target is not None:
            known = marks_of(self.folder, self.rank)[_MARK * (step - 1) : _MARK * step]
            raise Reached(known == mark if known else None)
        os.pwrite(self._marks, mark, _MARK * (step - 1))

    def _mark(self, modules: Iterable[nn.Module], loss: float) -> bytes:
        """Return a checksum of the loss, and of some elements of the parameters and of their gradients, if they have
        any."""
        if self._chosen is None:
            # The rows of a table of raw ids have another order after a snapshot.
            parts = [part for module in modules for part in module.modules() if not hasattr(part, "recorded_by")]
            found = dict.fromkeys(one for part in parts for one in part.parameters(recurse=False))
            plain = [one for one in found if one.requires_grad and _readable(one)]
            self._chosen = plain[:: max(1, len(plain) // _PARAMETERS)]
        mark = zlib.crc32(struct.pack("d", loss))
        for one in self._chosen:
            for tensor in (one, one.grad):
                if tensor is not None and _readable(tensor):
                    mark = zlib.crc32(tensor.detach().view(-1)[:_ELEMENTS].view(torch.uint8).numpy().tobytes(), mark)
        return mark.to_bytes(_MARK, "little")

    def close(self) -> None:
        """Close the file of the marks."""
        if self._marks >= 0:
            os.close(self._marks)
            self._marks = -1


def _readable(one: torch.Tensor) -> bool:
    plain = type(one) in (nn.Parameter, torch.Tensor) and one.layout is torch.strided and one.device.type == "cpu"
    return plain and one.numel() > 0 and one.is_contiguous()


def marks_of(folder: Path, rank: int) -> bytes:
    """Return the marks of all recorded steps."""
    return (folder / f"rank-{rank}.marks").read_bytes()


def steps_of(folder: Path, rank: int) -> int:
    """Return the number of recorded steps."""
    return len(marks_of(folder, rank)) // _MARK


def about(folder: Path, rank: int) -> dict[str, Any]:
    """Return how a rank of the recording was started: `world_size`, `threads`, `seeds`, `torch`."""
    found: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    return found


def snapshots_of(folder: Path, ranks: Sequence[int]) -> list[int]:
    """Return the numbers of steps after which all of these ranks wrote a snapshot, in ascending order."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return sorted(int(path.name[5:]) for path in found if all((path / f"rank-{one}.pt").exists() for one in ranks))
