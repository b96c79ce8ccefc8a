"""The step that this process is to run again, if any."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..system.interrupts import undivided_context


class Target(NamedTuple):
    """A step of a recording that is to be run again, and the folders that the run reads from and writes to."""

    folder: str
    """The absolute path of the recording."""
    step: int
    """The number of the step, from 1."""
    start: str
    """A folder that holds one snapshot, from which the run starts."""
    end: str
    """The folder for a snapshot of the state before the step. If it is given, the run ends there, before the step.
    Empty: the step is run."""


class Reached(BaseException):
    """The end of a run to a step, raised in the user's function.

    Args:
        same: True if the step's result equals the recorded one. None: no result was recorded, or the step was not run.
    """

    def __init__(self, same: bool | None = None) -> None:
        super().__init__("the step has been run again")
        self.same = same


seeds: Sequence[int] | None = None
"""The seeds of this rank for the current call. None: the rank was not seeded."""
_target: Target | None = None
begun = False
"""True if the step that is run again has begun. From then on, the loop may end."""


def is_replay() -> bool:
    """Return whether this process runs a recorded step again, and so records nothing."""
    return _target is not None


def target_in(folder: str | os.PathLike[str]) -> Target | None:
    """Return the step of the recording in `folder` that is to be run again, or None."""
    return _target if _target is not None and os.path.abspath(folder) == _target.folder else None


@undivided_context
def aiming_at(target: Target) -> Iterator[None]:
    """Make a recorded training inside the `with` block run from a snapshot to the target step."""
    global _target, begun
    before, _target, begun = _target, target, False
    try:
        yield
    finally:
        _target = before
