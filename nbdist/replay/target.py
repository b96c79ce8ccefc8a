"""The step that this process is to run again, if any."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Target(NamedTuple):
    """A step of a recording, and where the way to it begins and ends."""

    folder: str
    """The recording: an absolute path."""
    step: int
    """The number of the step, from 1."""
    start: str
    """A folder with the snapshot to start from, the only one in it."""
    end: str
    """The folder for a snapshot of the state before the step, which is not run then; empty: the step is run."""


class Reached(BaseException):
    """The end of what is to be run again, raised in the user's function.

    Args:
        same: Whether the step had the result that was recorded; None: none was recorded, or the step was not run.
    """

    def __init__(self, same: bool | None = None) -> None:
        super().__init__("the step has been run again")
        self.same = same


seeds: Sequence[int] | None = None
"""The numbers with which this rank was seeded for the call that runs; None: with none."""
_target: Target | None = None
begun = False
"""True if the step that is run again has begun: a loop may end in it."""


def is_replay() -> bool:
    """Return whether this process runs a step again: then nothing is recorded."""
    return _target is not None


def target_in(folder: str | os.PathLike[str]) -> Target | None:
    """Return the step of this recording that is to be run again; None if none is."""
    return _target if _target is not None and os.path.abspath(folder) == _target.folder else None


@contextlib.contextmanager
def aiming_at(target: Target) -> Iterator[None]:
    """Make trainings inside `with` go from a snapshot to a step of its recording."""
    global _target, begun
    before, _target, begun = _target, target, False
    try:
        yield
    finally:
        _target = before
