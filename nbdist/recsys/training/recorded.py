"""The recording of `fit(record=...)`, so that `replay_step` can run a step of it again."""

from __future__ import annotations

import os
from types import TracebackType

from ...replay.log import StepLog
from .run import Run
from .snapshots import Snapshots


class RecordedRun:
    """The recording of a run: its snapshots, and a mark of each step's result. All ranks must make one.

    Args:
        folder: The folder of the recording.
        run: The run. If it resumes, its snapshot is loaded already.

    Raises:
        ValueError: The error of `StepLog`.
    """

    def __init__(self, folder: str | os.PathLike[str], run: Run) -> None:
        self._log, self._run = StepLog(folder, resumed=run.step > 0), run
        if self._log.target is not None:
            run.restore(Snapshots(self._log.target.start, resume=True))

    @property
    def replays(self) -> bool:
        """True while a recorded step is run again."""
        return self._log.target is not None

    def due(self, step: int) -> bool:
        """Return whether a snapshot must be taken after a step."""
        return self._log.due(step)

    def before_step(self) -> None:
        """Take a snapshot, if it is due. While a step is run again, end the run before that step."""
        if self._log.due(self._run.step):
            self._run.snapshot(Snapshots(self._log.place(), keep=1 << 60))
            self._log.kept(self._run.step)

    def after_step(self) -> None:
        """Write the mark of a step's result. While a step is run again, end the run after that step."""
        self._log.done(self._run.step, [self._run.model.model])

    def __enter__(self) -> RecordedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._log.close()
