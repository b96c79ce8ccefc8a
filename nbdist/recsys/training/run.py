"""A training run between its steps: what a step does, what a record says, what a snapshot has to hold."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from ...devices import collective_device
from ..loader.base import Loader
from .evaluation import Predict, evaluate, forward
from .history import History, Record
from .snapshots import Snapshots, random_state, set_random_state


class Parallel(Protocol):
    """A model on all ranks: what `shard` and `replicate` give."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def save(self, folder: str | os.PathLike[str]) -> None: ...

    def load(self, folder: str | os.PathLike[str], *, optimizer: bool = True) -> None: ...


class Run:
    """A run between its steps: all that a snapshot has to hold beside the model."""

    def __init__(
        self, model: Parallel, predict: Predict, train: Loader, loss: Callable[[Tensor, Tensor], Tensor], bf16: bool
    ) -> None:
        self.model, self.predict, self.train, self.loss, self.bf16 = model, predict, train, loss, bf16
        self.step = 0
        self.history = History()
        plan, rank = train.plan, train.rank
        ranks = range(plan.world_size)
        self._sizes = [plan.size(rank, i) for i in range(plan.steps)]
        # This rank's part of a step's rows, in parts of the mean rank's: DDP takes all ranks for equal.
        self._parts = [
            self._sizes[i] * plan.world_size / sum(plan.size(other, i) for other in ranks) for i in range(plan.steps)
        ]
        # Since the last record:
        self._loss = torch.zeros((), dtype=torch.float64, device=collective_device())
        self._rows, self._seconds = 0, 0.0
        self._since = time.perf_counter()

    def train_on(self, number: int, batch: Any) -> None:
        """One step, on batch `number` of the epoch."""
        module, optimizer = self.model.model, self.model.optimizer
        optimizer.zero_grad()
        loss = self.loss(*forward(module, self.predict, batch, self.bf16))
        (loss * self._parts[number]).backward()
        optimizer.step()
        self._loss += loss.detach() * self._sizes[number]
        self._rows += self._sizes[number]
        self.step += 1

    def record(self, valid: Loader | None, metrics: Mapping[str, Metric]) -> None:
        """Add to the history what was trained since the last record, and an evaluation."""
        self._stop_clock()
        sums = torch.stack([self._loss, torch.tensor(self._rows).to(self._loss)])
        slowest = torch.tensor(self._seconds, dtype=torch.float64, device=sums.device)
        dist.all_reduce(sums)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        loss, rows = sums.tolist()
        found = {} if valid is None else evaluate(self.model.model, self.predict, valid, metrics, bf16=self.bf16)
        # FBGEMM's are single precision: 0.1 is not quite what it was.
        rates = {float(f"{group['initial_lr']:.6g}"): group["lr"] for group in self.model.optimizer.param_groups}
        self.history.records.append(
            Record(
                step=self.step,
                epoch=self.step / len(self.train),
                loss=loss / rows,
                metrics=found,
                rates=[rates[full] for full in sorted(rates, reverse=True)],
                rows_per_second=rows / float(slowest),
            )
        )
        self._loss.zero_()
        self._rows, self._seconds = 0, 0.0
        self._since = time.perf_counter()

    def snapshot(self, snapshots: Snapshots) -> None:
        """Take a snapshot."""
        self._stop_clock()
        own = {
            "loader": self.train.state_dict(),
            "random": random_state(),
            "since": (float(self._loss), self._rows, self._seconds),
        }
        snapshots.save(self.model, self.step, {"history": self.history.to_json()}, own)
        self._since = time.perf_counter()

    def restore(self, snapshots: Snapshots) -> bool:
        """Go on from the newest snapshot, if there is one and that is wanted; whether it did."""
        found = snapshots.load(self.model)
        if found is None:
            return False
        common, own = found
        self.step = common["step"]
        self.history = History.from_json(common["history"])
        self.train.load_state_dict(own["loader"])
        set_random_state(own["random"])
        loss, self._rows, self._seconds = own["since"]
        self._loss.fill_(loss)
        self._since = time.perf_counter()
        return True

    def _stop_clock(self) -> None:
        if self._loss.device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds += time.perf_counter() - self._since
