"""The loop over the steps of a run, with the work that is due between steps: records, evaluations, snapshots,
display."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric

from ... import preempted
from .callbacks import Hooks
from .captured import CapturedSteps
from .display import RunDisplay
from .history import History
from .objective import Evaluation
from .recorded import RecordedRun
from .run import Run
from .snapshots import Snapshots


@dataclass(frozen=True)
class Due:
    """The steps of a run after which work other than training is due."""

    total: int
    """The number of the last step."""
    log_every: int
    eval_every: int
    save_every: int | None
    """The number of steps between two snapshots. None: no snapshots are taken."""

    @classmethod
    def of(cls, run: Run, counts: Mapping[str, int | None], snapshots: Snapshots | None) -> Due:
        """Return the due steps from the arguments of `fit`, which are in `counts` by name."""
        steps = counts["steps"]
        log_every = counts["log_every"] or run.steps_an_epoch
        eval_every = counts["eval_every"] or log_every
        save_every = None if snapshots is None else snapshots.every or eval_every
        total = steps if steps is not None else run.steps_of(counts["epochs"] or 0)
        return cls(total, log_every, eval_every, save_every)

    def evaluation(self, step: int) -> bool:
        return step % self.eval_every == 0 or step == self.total

    def record(self, step: int) -> bool:
        return self.evaluation(step) or step % self.log_every == 0

    def snapshot(self, step: int) -> bool:
        return self.save_every is not None and (step % self.save_every == 0 or step == self.total)

    def next(self, step: int) -> int:
        """Return the next step after which any work is due."""
        each = [self.log_every, self.eval_every, *([self.save_every] if self.save_every else [])]
        return min(self.total, *(step - step % every + every for every in each))


class Loop:
    """The remaining steps of a run.

    Args:
        run: The run, restored.
        due: The steps after which to record, evaluate and save.
        evaluation: The evaluations.
        hooks: The callbacks.
        snapshots: The folder of snapshots; None: no snapshots are taken.
        recorded: The recording of the run; None: none is made.
        display: The display, on the rank that shows the run.
    """

    def __init__(
        self,
        run: Run,
        due: Due,
        evaluation: Evaluation,
        hooks: Hooks,
        snapshots: Snapshots | None,
        recorded: RecordedRun | None,
        display: RunDisplay | None,
    ) -> None:
        self._run, self._due, self._first = run, due, run.step
        self._evaluation, self._hooks, self._display = evaluation, hooks, display
        self._snapshots, self._recorded = snapshots, recorded
        self._upcoming: list[tuple[int, Any]] = []  # batches whose ids have been sent ahead
        self._warned = self._saved = False  # a machine will be taken away: a snapshot is due; it has been written

    def train(self, rates: LambdaLR, capture: CapturedSteps | None) -> None:
        """Take the steps, and after each the records, evaluations and snapshots that are due.

        Args:
            rates: The schedule of the learning rates.
            capture: The steps as CUDA graphs. None: steps are taken one by one.
        """
        run, display = self._run, self._display
        self._hooks.start(run.model, run.history)
        stopped = run.step > 0 and self._record()  # the record that is due after the last step of the snapshot
        if display and run.step and run.recorded:
            display.update()
        nothing = contextlib.nullcontext()
        with run.checking(), contextlib.closing(_endless(run)) as groups, capture or nothing, self._recorded or nothing:
            while run.step < self._due.total and not stopped:
                before = run.step
                capture = self._advance(groups, capture)
                if run.step == before:  # these steps could not be captured
                    continue
                self._save(capture)
                stopped = self._record()
                if self._snapshots and stopped:
                    run.snapshot(self._snapshots)
                if display:
                    display.update() if run.recorded else display.progress(run.step, self._first)
                rates.last_epoch = run.step - self._first - 1  # some steps may have been taken at once
                _step_rates(rates)
        self._hooks.end(run.history)
        if display:
            display.close(f"{run.step:,} steps{', stopped early' if stopped else ''}")

    def _advance(
        self, groups: Generator[list[tuple[int, Any]], None, None], capture: CapturedSteps | None
    ) -> CapturedSteps | None:
        """Take one step, or several captured ones. Return None once steps cannot be captured."""
        run = self._run
        if self._recorded is not None:
            self._recorded.before_step()
        if capture is not None:
            capture.train(self._due.next(run.step))
            return None if capture.refused else capture
        self._step(groups)
        if self._recorded is not None:
            self._recorded.after_step()
        self._hooks.step(run.step)
        return None

    def _step(self, groups: Generator[list[tuple[int, Any]], None, None]) -> None:
        """Take one step. Send the ids of the next batch ahead, unless the loader's position is needed before that."""
        run, after = self._run, self._run.step + 1
        group = self._upcoming or next(groups)
        pauses = self._due.evaluation(after) or self._due.snapshot(after)
        pauses = pauses or (self._recorded is not None and self._recorded.due(after))
        alone = self._warned or run.ends_epoch(group) or pauses
        self._upcoming = next(groups) if run.pipelined and not alone else []
        run.train_on(group, self._upcoming[0] if self._upcoming else None)

    def _save(self, capture: CapturedSteps | None) -> None:
        """Take a snapshot if one is due, or if the machine will be taken away."""
        if self._snapshots is None:
            return
        self._warned = self._warned or (not self._saved and preempted())
        # Where a batch was sent ahead, it would be missing afterwards.
        if self._due.snapshot(self._run.step) or (self._warned and not self._upcoming):
            if capture is not None:
                capture.settle()
            self._run.snapshot(self._snapshots)  # first: if the evaluation fails, the run goes on from here
            self._saved, self._warned = self._saved or self._warned, False

    def _record(self) -> bool:
        """Add the record that is due after the last step to the history; return whether the run must stop."""
        run, snapshots, evaluation = self._run, self._snapshots, self._evaluation
        evaluated, ended = self._due.evaluation(run.step), False
        if not run.recorded and self._due.record(run.step):
            run.record(evaluation if evaluated else None)
            ended = self._hooks.record(run.history[-1])
        if (
            snapshots
            and snapshots.keep_best
            and evaluated
            and _improved(run.history, evaluation.metrics, snapshots.keep_best)
        ):
            run.snapshot(snapshots)
            snapshots._mark_best(run.step)
        return ended or _stale(run.history, evaluation.metrics, evaluation.patience)


def _step_rates(rates: LambdaLR) -> None:
    if rates._step_count > 1:
        rates.step()
        return
    with warnings.catch_warnings():  # the optimizer took no step where fp16 has left the first one out
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step", UserWarning)
        rates.step()


def _endless(run: Run) -> Generator[list[tuple[int, Any]], None, None]:
    """Yield the batches of each step, from the loader's position on, over all epochs. Each batch comes with its
    number in the epoch.
    """
    loader = run.train
    state = loader.state_dict()
    loader.load_state_dict(state)  # an epoch that was broken off goes on, and does not begin again
    first = state["step"]
    while True:
        run.note_sizes()
        batches = enumerate(loader, first)
        while group := list(itertools.islice(batches, run.gradient_accumulation_steps)):
            yield group
        first = 0


def _improved(history: History, metrics: Mapping[str, Metric], name: str) -> bool:
    """Return whether the last record has the best value of a metric so far."""
    values = _the_higher(history, metrics, name)
    return bool(values) and name in history[-1].metrics and values[-1] > max([-math.inf, *values[:-1]])


def _the_higher(history: History, metrics: Mapping[str, Metric], name: str) -> list[float]:
    """Return the values of a metric over the evaluations, with the sign for which larger is better."""
    values = [value if metrics[name].higher_is_better else -value for value in history.values(name)]
    return [-math.inf if math.isnan(value) else value for value in values]  # what is no number is no improvement


def _stale(history: History, metrics: Mapping[str, Metric], patience: int | None) -> bool:
    """Return whether the last of the metrics has not improved for `patience` evaluations."""
    if patience is None or not len(history):
        return False
    values = _the_higher(history, metrics, list(metrics)[-1])
    return bool(values) and len(values) - 1 - values.index(max(values)) >= patience
