"""A training run between its steps: the work of a step, the content of a record and of a snapshot."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from ...devices import collective_device
from ...numerics.nan import NanCheck, nan_check
from ...numerics.search import Batch as NumberedBatch
from ...replay.random_states import random_state, set_random_state
from ...system.annotations import annotated
from .. import ranks
from ..io.partition import Partition
from ..loader.base import Loader
from ..loader.columns import Batch
from ..parallel.protocol import Ahead, Parallel
from .batch_loss import batch_loss, not_finite, not_finite_since
from .evaluation import Precision, Predict, forward, measure, predicted
from .history import History, Record
from .objective import ONLY, Evaluation, Objective
from .schedule import Schedule
from .snapshots import Snapshots


class Run:
    """The state of a run between its steps: the content of a snapshot in addition to the model."""

    def __init__(
        self,
        model: Parallel,
        predict: Predict,
        train: Loader,
        objective: Objective,
        schedule: Schedule,
        precision: Precision | None,
        max_grad_norm: float | None = None,
        gradient_accumulation_steps: int = 1,
        pipelined: bool = False,
    ) -> None:
        self.model, self.predict, self.train, self.objective = model, predict, train, objective
        self.schedule, self.precision, self.max_grad_norm = schedule, precision, max_grad_norm
        self.gradient_accumulation_steps, self.pipelined = gradient_accumulation_steps, pipelined
        self.checks = False
        """True if each loss and gradient is checked."""
        self.each_step = False
        """True if callbacks are called after each step."""
        self._check: NanCheck | None = None
        self.steps_an_epoch = math.ceil(len(train) / gradient_accumulation_steps)
        self._origin = (0, 0, 0.0)
        """A step, with the number of epochs that were over after it, and the part of an epoch that each step before it
        is. This part differs in an epoch that was begun by other ranks."""
        self._scaler = _scaler(precision, model.optimizer)
        self.step = 0
        self._saved: dict[str, int] = {}
        """The step of the last snapshot, by its folder."""
        self.history = History()
        self._divided: Partition | None = None
        self.note_sizes()
        # Since the last record:
        self._loss = torch.zeros((), dtype=torch.float64, device=collective_device())
        self._rows, self._without_loss, self._seconds = 0, 0, 0.0
        self._empty = False  # whether the last batch had no predictions
        self._since = time.perf_counter()

    def note_sizes(self) -> None:
        """Record the numbers of rows in the batches of an epoch. All ranks must call it at the beginning of the
        epoch."""
        train = self.train
        if self._divided == train.partition:
            return
        self._divided = train.partition
        # Of all ranks, as each of them may have a loader of rows of its own.
        everyone = ranks.all_gather((train.partition, train.rank))
        self._ranks = len(everyone)
        self._totals = [sum(partition.size(rank, i) for partition, rank in everyone) for i in range(len(train))]
        self._sizes = [train.partition.size(train.rank, i) for i in range(len(train))]
        self._alike = [len({partition.size(rank, i) for partition, rank in everyone}) == 1 for i in range(len(train))]

    def ends_epoch(self, batches: Sequence[tuple[int, Any]]) -> bool:
        """Return whether these are the last batches of an epoch, because the next epoch may be divided differently
        among the ranks.
        """
        return batches[-1][0] == len(self._sizes) - 1

    @property
    def epoch(self) -> float:
        """The number of finished epochs."""
        step, epochs, before = self._origin
        done = self.step - step
        return epochs + (done * before if done < 0 else done / self.steps_an_epoch)

    def steps_of(self, epochs: int) -> int:
        """Return the step at which `epochs` epochs are finished."""
        step, before, _ = self._origin
        return step + (epochs - before) * self.steps_an_epoch

    def train_on(self, batches: Sequence[tuple[int, Any]], following: tuple[int, Any] | None = None) -> None:
        """Take a step on some batches, each given with its number in the epoch. The ids of the next batch, `following`,
        are sent ahead.
        """
        module, optimizer = self.model.model, self.model.optimizer
        optimizer.zero_grad()
        total = sum(self._totals[number] for number, _ in batches)
        weights = self.objective.weights(batches, self._sizes, self._loss.device)
        for (number, batch), then in zip(batches, [*batches[1:], following], strict=True):
            # Copies on all ranks need to know one another's gradients once, and add them up till then.
            alone = isinstance(module, DistributedDataParallel) and number != batches[-1][0]
            with module.no_sync() if alone else contextlib.nullcontext():  # type: ignore[operator]
                if self._check is not None:
                    again = functools.partial(self._loss_of, batch)
                    self._check.begin(NumberedBatch(self.step + 1, again, batch, self._sizes[number]))
                with annotated("nbdist:forward"):
                    if weights is None:
                        loss, part = self.loss_of(batch), self._sizes[number] / total
                    else:
                        loss, part = self._part_of(batch, self._sizes[number], weights), 1.0
                ahead = self._send_ahead(then) if self.pipelined else None
                # Its part of the step's rows, in parts of the mean rank's: DDP takes all ranks for equal.
                with annotated("nbdist:backward"):
                    self._scaler.scale(loss * (part * self._ranks)).backward()
                if ahead:
                    ahead.proceed()
            self._loss += loss.detach() * (self._sizes[number] if weights is None else total)
            self._rows += self._sizes[number]
            self._without_loss += self._sizes[number] * self._empty
        self._scaler.unscale_(optimizer)  # where they overflow on one rank, all ranks leave the step out
        if self.max_grad_norm is not None:
            self.model.clip_gradients(self.max_grad_norm)
        with annotated("nbdist:optimizer"):
            self._scaler.step(optimizer)
            self._scaler.update()
        self.step += 1

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Check each loss and gradient in the `with` block, if checks are asked for."""
        if not self.checks:
            yield
            return
        with nan_check() as self._check:
            try:
                yield
            finally:
                self._check.end_of_batches()

    def loss_of(self, batch: Any) -> Tensor:
        """Return the loss of a batch. On CPUs, raise `ValueError` if it is not finite, unless each step is checked
        anyway."""
        found = forward(self.model.model, self.predict, batch, self.precision)
        loss = batch_loss(self.objective.losses[ONLY], found[0], found[1])
        self._empty = not len(found[0])
        if self.checks and self.precision != "fp16":
            return loss
        # In fp16 a step that overflows is left out.
        if loss.device.type == "cpu" and not loss.isfinite() and not (self.precision == "fp16" and _finite(found[1])):
            raise not_finite(self.step + 1, dist.get_rank(), found[0], found[1])
        return loss

    def _loss_of(self, batch: Any) -> Tensor:
        found = predicted(self.model.model, self.predict, batch, self.precision)
        return torch.stack([loss for loss, _ in self.objective.of(found, batch)]).sum()

    def _part_of(self, batch: Any, size: int, weights: Tensor) -> Tensor:
        """Return the contribution of a batch of this rank to the loss of a step: each task's weighted mean over all
        ranks."""
        found = predicted(self.model.model, self.predict, batch, self.precision)
        self._empty = False
        checked = not self.checks and self.precision != "fp16"
        return self.objective.part(found, batch, size, weights, self.step + 1 if checked else None)

    def _send_ahead(self, numbered: tuple[int, Any] | None) -> Ahead | None:
        """Start sending the ids of a batch to the ranks that store their rows, if the batches of all ranks have the
        same number of rows."""
        if numbered is None or not self._alike[numbered[0]] or not isinstance(numbered[1], Batch):
            return None
        features, ahead = numbered[1].prepared, self.model._ahead
        if features is None or ahead is None:
            return None
        ahead.start(features)
        return ahead

    @property
    def recorded(self) -> bool:
        """True if the history contains the last step."""
        return bool(len(self.history)) and self.history[-1].step == self.step

    def record(self, evaluation: Evaluation | None) -> None:
        """Add a record to the history: the training since the last record, and an evaluation.

        Args:
            evaluation: The evaluation. None: there is none.
        """
        self._stop_clock()
        sums = torch.stack([self._loss, *torch.tensor([self._rows, self._without_loss]).to(self._loss)])
        slowest = torch.tensor(self._seconds, dtype=torch.float64, device=sums.device)
        dist.all_reduce(sums)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        loss, rows, without = sums.tolist()
        self._check_sum(loss)
        found: dict[str, float] = {}
        failed: dict[str, str] = {}
        if evaluation is not None and evaluation.valid is not None:
            module, columns = self.model.model, self.objective.columns
            found, failed = measure(module, self.predict, evaluation.valid, evaluation, self.precision, columns)
        factor = self.schedule(self.step - 1)  # of the last step, also where the run was resumed after it
        # FBGEMM's are single precision: 0.1 is not quite what it was.
        rates = {
            float(f"{group['initial_lr']:.6g}"): group["initial_lr"] * factor
            for group in self.model.optimizer.param_groups
        }
        self.history.records.append(
            Record(
                step=self.step,
                epoch=self.epoch,
                loss=loss / max(rows - without, 1),
                metrics=found,
                rates=[rates[full] for full in sorted(rates, reverse=True)],
                rows_per_second=rows / float(slowest),
                failed=failed,
            )
        )
        self._loss.zero_()
        self._rows, self._without_loss, self._seconds = 0, 0, 0.0
        self._since = time.perf_counter()

    def check_finite(self) -> None:
        """Raise `ValueError` if the losses of this rank since the last record are not finite."""
        self._check_sum(float(self._loss))

    def _check_sum(self, loss: float) -> None:
        if self.precision != "fp16" and not math.isfinite(loss):
            raise not_finite_since(self.step)

    def snapshot(self, snapshots: Snapshots) -> None:
        """Take a snapshot."""
        folder = os.fspath(snapshots.folder)
        if self._saved.get(folder) == self.step:
            return
        self.check_finite()  # or it would take the place of one that is right
        self._saved[folder] = self.step
        self._stop_clock()
        own = {
            "loader": self.train.state_dict(),
            "random": random_state(),
            "since": (float(self._loss), self._rows, self._without_loss, self._seconds),
        }
        common = {"history": self.history._to_json(), "epoch": self.epoch, "origin": self._origin}
        common["loss_scale"] = self._scaler.state_dict()
        snapshots._save(self.model, self.step, common, own)
        self._since = time.perf_counter()

    def restore(self, snapshots: Snapshots) -> str:
        """Restore the newest snapshot, if there is one and the run resumes. Return a note about it, or an empty
        text."""
        found = snapshots._load(self.model)
        if found is None:
            return ""
        common, own = found
        there, here, rank = common["world_size"], dist.get_world_size(), dist.get_rank()
        if there != here and (own["loader"]["world_size"], self.train.world_size) != (there, here):
            raise ValueError(
                f"the snapshot after step {common['step']} was taken on {there} ranks with a loader of its own for "
                f"each, and here are {here} ranks: the remaining rows cannot be divided. Resume on {there} ranks, or "
                f"train with one loader that divides all rows"
            )
        self.step = self._saved[os.fspath(snapshots.folder)] = common["step"]
        self.history = History._from_json(common["history"])
        self.train.load_state_dict(own["loader"])
        if common["loss_scale"]:
            self._scaler.load_state_dict(common["loss_scale"])
        since = [own["since"]]
        if rank < there:
            set_random_state(own["random"])
        if there != here:  # one has what all had
            since = [one["since"] for one in snapshots._own_of_all(common)] if rank == 0 else []
        self._loss.fill_(sum(loss for loss, *_ in since))
        self._rows = sum(rows for _, rows, *_ in since)
        self._without_loss = sum(without for *_, without, _ in since)
        self._seconds = max([seconds for *_, seconds in since], default=0.0)
        step, epochs, before = common["origin"]
        self._origin = step, epochs, before
        begun = own["loader"]
        if (begun["world_size"], begun["batch_size"]) != (self.train.world_size, self.train.batch_size):
            self._begin_again(common["epoch"])
        self._since = time.perf_counter()
        text = f"resumed after step {self.step:,}"
        if there != here:
            text += f" of {there} rank{'s' * (there > 1)}; the rest of the epoch is divided among {here}"
        return text

    def _begin_again(self, epoch: float) -> None:
        """Store the number of finished epochs: the number of steps in an epoch may change from here on."""
        over = math.ceil(round(epoch, 9))  # when what is left of this one is over
        left = math.ceil(len(self.train) / self.gradient_accumulation_steps) if self.train.begun_elsewhere else 0
        self._origin = (self.step + left, over, (over - epoch) / left if left else 0.0)

    def _stop_clock(self) -> None:
        if self._loss.device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds += time.perf_counter() - self._since


def _finite(targets: Tensor) -> bool:
    return bool(targets.isfinite().all())


def _scaler(precision: Precision | None, optimizer: torch.optim.Optimizer) -> ShardedGradScaler:
    """Make the scaler of the loss in fp16, which skips a step on all ranks if it overflows on one; without fp16 it does
    nothing.

    A fused optimizer would skip the step by itself, but in torch 2.13 it fails at this scaler's shapes.
    """
    half = precision == "fp16"
    if half and getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return ShardedGradScaler(collective_device().type, process_group=dist.group.WORLD, enabled=half)
