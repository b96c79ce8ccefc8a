"""Training steps as CUDA graphs, which are recorded once and replayed: no Python code runs, and the GPU never waits.

A graph contains one step, or several. Before it is replayed, the rows of its batches, in the epoch's order, and the
learning rates are copied to its inputs. All other data stay in place: columns, weights, state of the optimizer, sum of
the losses.
"""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...devices import collective_device
from ...replay.random_states import random_state
from ..loader.batches import Window
from ..loader.columns import split, take
from ..parallel.common_tables import CommonTables, sparse_tables
from ..parallel.device_steps import DeviceSteps, unsuitable
from ..parallel.replicated import Replicated
from .run import Run

UNROLLED = 16
"""The number of steps in the longer graph."""
WORTH = 100
"""The number of steps of a run from which on recording is worthwhile."""
_AHEAD = 3
"""The largest number of replays that the GPU has not finished, so that the run can be stopped."""


def no_gpu() -> str:
    """Return the reason why this process cannot record graphs; empty if it can."""
    return "" if collective_device().type == "cuda" else "this rank has no GPU of its own"


def hindrance(run: Run) -> str:
    """Return the reason why the steps of a run cannot be recorded, as far as it is known before the first step;
    otherwise empty."""
    train, model = run.train, run.model
    if why := no_gpu():
        return why
    if not run.objective.simple:
        return "there are several tasks, or weights of rows"
    if run.each_step:
        return "a callback has on_step"
    if run.checks:
        return "each step is checked (check=)"
    if dist.get_world_size() > 1:
        return f"there are {dist.get_world_size()} ranks"
    if not isinstance(model, Replicated) or model.model is not model.module:
        return "the model is not one of `replicate`"
    if model._raw is not None:
        return "a table of raw ids grows"
    if isinstance(model._tables, CommonTables):
        return "tables are in memory that ranks share"
    if run.gradient_accumulation_steps > 1:
        return "gradient_accumulation_steps= was given"
    if run.precision not in (None, "fp32", "bf16"):
        return f"precision is {run.precision}"
    if train.transform is not None or train.keyed:
        return "the loader has transform= or keyed="
    if any(getattr(one, "_post_accumulate_grad_hooks", None) for one in model.module.parameters()):
        return "a parameter has hooks of its gradient"
    return unsuitable(model.optimizer, sparse_tables(model.module)[0].values(), model._tables)


def capturing(run: Run, captured: bool | None, steps: int, scheduled: bool) -> CapturedSteps | None:
    """Return an object that records the steps of a run and replays them; None if steps are not to be recorded or cannot
    be.

    Args:
        run: The run.
        captured: The option of `fit`. False: never record. True: record, or raise. None: record longer runs, if
            possible.
        steps: The number of remaining steps.
        scheduled: Whether learning rates change.

    Raises:
        ValueError: `captured` is True, and recording is not possible.
    """
    if captured is False or (captured is None and steps < WORTH):
        return None
    why = hindrance(run)
    if why and captured:
        raise _refusal(why)
    return None if why else CapturedSteps(run, scheduled, bool(captured))


def _refusal(why: str) -> ValueError:
    return ValueError(f"`captured` must be None or False where steps cannot be recorded, got True: {why}")


class Recorder:
    """CUDA graphs of this process, which share their memory."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._unfinished: list[torch.cuda.Event] = []

    def rehearse(self, work: Callable[[], None]) -> str:
        """Run the work of a recording once, without recording it. Return the line where the host had to wait; empty if
        there was none.
        """
        current, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(current)
        with warnings.catch_warnings(record=True) as said, torch.cuda.stream(self._stream):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(self._stream)
        waits = [one for one in said if "synchronizing CUDA operation" in str(one.message)]
        return f"{Path(waits[0].filename).name}, line {waits[0].lineno}, waits for the GPU" if waits else ""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record work without running it. Return a function that runs it."""
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # what it frees may not be freed meanwhile
        try:
            # Of this thread alone: NCCL's asks the GPU for its events all the time.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                work()
        finally:
            if collecting:
                gc.enable()
        return lambda: self._replay(graph)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()
        done = torch.cuda.Event()
        done.record()
        self._unfinished.append(done)
        if len(self._unfinished) > _AHEAD:
            self._unfinished.pop(0).synchronize()


class CapturedSteps:
    """The steps of a run for which `hindrance` returns an empty text.

    Args:
        run: The run.
        scheduled: Whether the run's learning rates change.
        demanded: Whether to raise an error if the steps cannot be recorded.
    """

    def __init__(self, run: Run, scheduled: bool, demanded: bool) -> None:
        self._run, self._scheduled, self._demanded = run, scheduled, demanded
        self.refused = ""
        """The reason why the steps cannot be recorded, found after the first steps. Then they must be made one by
        one."""
        self._trained = [one for group in run.model.optimizer.param_groups for one in group["params"]]
        self._device_steps: DeviceSteps | None = None
        self._recorder: Recorder | None = None
        self._graphs: dict[int, Callable[[], None]] = {}
        self._window: Window | None = None
        self._columns: list[int] = []
        self._uncounted = 0

    def train(self, until: int) -> None:
        """Take some steps, none after step `until`. If `refused` holds a reason, take none; otherwise at least one."""
        run = self._run
        if self._window is None and not self._begin_epoch():
            return
        number = run.train._start
        full = min(self._full - number, until - run.step)
        if full <= 0 or self._device_steps is None:
            self._train_alone(number)
        elif self._recorder is None:
            self._rehearse(number)
        else:
            for count in [UNROLLED] if full >= UNROLLED else [1] * full:
                if not self.refused:
                    self._replay(number, count)
                    number += count
        if run.step == until:
            self.settle()

    def __enter__(self) -> CapturedSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    def settle(self) -> None:
        """Add the replayed steps to the optimizer's counts of steps."""
        if self._device_steps is not None:
            self._device_steps.count(self._uncounted)
        self._uncounted = 0

    def _refuse(self, why: str) -> None:
        self.settle()
        if self._demanded:
            raise _refusal(why)
        self.refused = why

    def _begin_epoch(self) -> bool:
        """Copy the epoch's rows to the GPU, if they fit."""
        run = self._run
        run.train.load_state_dict(run.train.state_dict())  # it goes on where it is
        window = run.train._epoch_on_device()
        if window is None:
            self._refuse("not all columns of the loader lie on the GPU as tensors, such as lists, or too large ones")
            return False
        run.note_sizes()
        columns = [column.data_ptr() for column in window.table.values() if isinstance(column, Tensor)]
        if not self._graphs or columns != self._columns:
            self._graphs.clear()
        self._window, self._columns = window, columns
        size = run.train.batch_size
        self._full = len(list(itertools.takewhile(lambda rows: rows == size, run._sizes)))
        return True

    def _rows(self, number: int, count: int) -> Tensor:
        """Return the rows of some batches, in the epoch's order."""
        assert self._window is not None
        train = self._run.train
        low, *_, high = train.partition.batch_starts(train.rank, range(number, number + count + 1))
        return self._window.order[low - self._window.start : high - self._window.start]

    def _train_alone(self, number: int) -> None:
        """Take one step without a graph, by the optimizer itself."""
        assert self._window is not None
        self.settle()
        run = self._run
        rows = self._rows(number, 1)
        batch = run.train._shape({name: take(column, rows) for name, column in self._window.table.items()})
        run.train_on([(number, batch)])
        self._advance(1)
        if self._device_steps is not None:
            self._device_steps.follow()
        else:
            sparse = sparse_tables(run.model.module)[0].values()  # type: ignore[attr-defined]
            self._device_steps = DeviceSteps(run.model.optimizer, sparse)

    def _rehearse(self, number: int) -> None:
        """Take one step in the form in which it will be recorded, and store the reason if that is not possible."""
        run, recorder = self._run, Recorder()
        rows = self._rows(number, 1)
        device = rows.device
        size = run.train.batch_size
        self._order = torch.empty(UNROLLED * size, dtype=rows.dtype, device=device)
        self._rates = torch.empty(UNROLLED, len(run.model.optimizer.param_groups), device=device)
        self._fill(number, 1, always=True)
        before = _host_random()
        try:
            why = recorder.rehearse(lambda: self._steps(1))
        except Exception as error:  # if it is not of the recording, the step that is taken otherwise has it too
            self._refuse(f"{type(error).__name__}: {error}")
            return
        self._took(1)
        if not why and _host_random() != before:
            why = "a step draws random numbers on the CPU, which a graph would not do anew"
        self._recorder = recorder
        if why:
            self._refuse(why)

    def _fill(self, number: int, count: int, always: bool = False) -> None:
        """Copy the rows and learning rates of `count` steps to the inputs of their graph."""
        run = self._run
        rows = self._rows(number, count)
        self._order[: len(rows)].copy_(rows)
        if self._scheduled or always:
            groups = run.model.optimizer.param_groups
            rates = [[group["initial_lr"] * run.schedule(run.step + i) for group in groups] for i in range(UNROLLED)]
            host = torch.tensor(rates, dtype=torch.float32)
            self._rates.copy_(host.pin_memory() if self._rates.is_cuda else host, non_blocking=True)

    def _replay(self, number: int, count: int) -> None:
        """Replay the graph of `count` steps, on the batches from `number` on."""
        assert self._recorder is not None
        self._fill(number, count)
        if count not in self._graphs:
            try:
                self._graphs[count] = self._recorder.record(lambda: self._steps(count))
            except Exception as error:
                self._refuse(f"{type(error).__name__}: {error}")
                return
        self._graphs[count]()
        self._took(count)

    def _steps(self, count: int) -> None:
        """Take `count` steps. This function is recorded."""
        assert self._window is not None and self._device_steps is not None
        run = self._run
        size = run.train.batch_size
        rows = self._order[: count * size]
        columns = {name: take(column, rows) for name, column in self._window.table.items()}
        parts = [split(column, range(0, len(rows) + 1, size)) for column in columns.values()]  # type: ignore[arg-type]
        for batch, rates in zip(zip(*parts, strict=True), self._rates, strict=False):
            shaped = run.train._shape(dict(zip(columns, batch, strict=True)))
            loss = run.loss_of(shaped)
            grads = torch.autograd.grad(loss, self._trained, allow_unused=True)
            found = {one: grad for one, grad in zip(self._trained, grads, strict=True) if grad is not None}
            if run.max_grad_norm is not None:
                found = self._device_steps.clipped(found, run.max_grad_norm)
            self._device_steps.step(found, rates.unbind())
            run._loss += loss.detach() * size

    def _took(self, count: int) -> None:
        run = self._run
        run.step += count
        run._rows += count * run.train.batch_size
        self._uncounted += count
        self._advance(count)

    def _advance(self, count: int) -> None:
        train = self._run.train
        epoch = train._epoch
        train._advance(count)
        if train._epoch != epoch:
            self._window = None


def _host_random() -> tuple[Any, ...]:
    """Return the state of the host's random generators."""
    state = random_state()
    return state["python"], state["numpy"], state["torch"].tolist()
