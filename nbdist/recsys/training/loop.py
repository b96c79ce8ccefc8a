"""A training loop for click models on ranks: evaluation, learning rates, a live table, snapshots, early stop.

Inside a rank::

    from nbdist.recsys.training import Snapshots, fit, warmup_decay

    def predict(model, batch):
        return model(keyed_jagged(batch, ["user", "movie"])), batch["liked"]

    def train():
        sharded = shard(Model(), batch_size=2048, dense_optimizer=torch.optim.Adam)  # or replicate(Model(), ...)
        rows, valid = ParquetLoader("train/*.parquet", 2048, shuffle=True), ParquetLoader("valid/*.parquet", 8192)
        history = fit(sharded, predict, rows, valid, steps=2000, log_every=200, schedule=warmup_decay(2000, warmup=200))
        return history, sharded.gather()

`fit` is optional: its parts (`evaluate`, loaders, metrics, `shard`) work in your own loop, too.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric

from ... import preempted
from ...devices import collective_device
from ...numerics import nan
from ...replay.target import is_replay
from .. import ranks
from ..loader.base import Loader
from ..metrics import AUC, LogLoss
from ..parallel.protocol import Parallel
from ..parallel.replicated import Replicated
from .captured import capturing
from .display import RunDisplay
from .evaluation import Precision, Predict, check_metrics, check_precision
from .history import History
from .recorded import RecordedRun
from .run import Run
from .schedule import Schedule, factor_of, scheduled
from .snapshots import Snapshots


def log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean negative log likelihood of labels (0 or 1), of any dtype."""
    return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


def fit(
    model: Parallel,
    predict: Predict,
    train: Loader,
    valid: Loader | None = None,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    log_every: int | None = None,
    eval_every: int | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = log_loss,
    metrics: Mapping[str, Metric] | None = None,
    schedule: Schedule | None = None,
    max_grad_norm: float | None = None,
    gradient_accumulation_steps: int = 1,
    precision: Precision | None = None,
    snapshots: Snapshots | None = None,
    patience: int | None = None,
    pipelined: bool | None = None,
    captured: bool | None = None,
    check: Literal["nan"] | None = None,
    record: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> History:
    """Train a sharded or replicated model. All ranks must call it, with the same arguments.

    The gradient of a step is the gradient of the mean loss over the rows of all ranks. Rank 0 shows a table and a plot
    that grow during the run; in a terminal, lines. The loaders are moved to the rank's device.

    A resumed run ends with the same weights and history as one without interruption, except for `rows_per_second`: a
    snapshot contains the model, the optimizer, the position in the epoch, and the random generators of each rank. The
    learning rates depend on the step. Build the model and the loaders as for the first time, and pass the same
    arguments.

    A run can also resume on another number of ranks: the remaining rows of the epoch are divided among them, so that
    each row still comes once. Use the batch size `batch_size // dist.get_world_size()` in the loader, so that a step
    has as many rows as before: then the loss follows the same curve, within the noise of another order. On a cluster a
    snapshot is also taken when a node is about to be taken away (`nbdist.preempted`).

    A snapshot is taken before the evaluation of its step, which a resumed run makes up for: an evaluation that fails
    costs no training. A metric that cannot be computed, such as the AUC of rows with one label, is NaN in the history,
    which says why.

    Args:
        model: The result of `shard` or `replicate`.
        predict: Called with the model and a batch; returns predictions and targets; see `evaluate` for users and
            weights, which metrics take, and the loss does not.
        train: Goes on where it is. One that divides its rows among the ranks, or of each rank's own rows (`rank=0,
            world_size=1`), which may be more on some ranks than on others, in equally many steps.
        valid: Evaluated as a whole, each row once: its remainder may not be "drop".
        steps: The length of the training in steps,
        epochs: or in epochs. One of the two.
        log_every: Steps from one record to the next. None: an epoch. The last step has one too.
        eval_every: Steps from one evaluation to the next, which is part of a record. None: each record has one.
            Otherwise those between have the training loss alone.
        loss: A function of predictions (float32) and targets: the mean over the rows of a batch.
        metrics: Name → metric to evaluate. None: "valid_loss" and "auc", for logits and labels.
        schedule: The factor of the learning rates of tables and dense layers; see `warmup_decay`. Asked for
            the steps of the run alone. After the run, the optimizer has its full learning rates again.
        max_grad_norm: The norm of all gradients together, over ranks and tables, that a step's gradients are scaled
            down to if they have a larger one. None: gradients are not scaled.
        gradient_accumulation_steps: Batches of each rank that make a step: its gradient belongs to the mean loss over
            the rows of all these batches. The last step of an epoch has what is left. Counts of steps, such as
            `log_every`, count these steps.
        precision: "bf16" or "fp16": run `predict` under autocast to bfloat16 or float16; what stays in float32 is
            torch's choice. "fp16" is for GPUs without bfloat16 (T4, V100, RTX 20) and for `replicate`: the loss is
            scaled, so that small gradients do not vanish, and a step whose gradients overflow on some rank is left out
            on all, with half the scale afterwards. "fp32" or None: without autocast.
        snapshots: The folder and times of snapshots, and whether to resume.
        patience: Stop when this number of evaluations in a row have not improved the last of the metrics.
        pipelined: Whether ids of the next batch are sent to the ranks that hold their rows during the backward pass of
            this one; for sharded models, and loaders with `keyed=` and without `transform=`. None: on GPUs.
        captured: Whether steps are recorded as a CUDA graph and replayed, which takes a small model a tenth of the
            time. For one rank with a GPU and what `replicate` gave; a loader whose columns are dense and fit on the
            GPU, without `transform=` and `keyed=`; torch's SGD, Adagrad, Adam or AdamW (for tables that say
            `sparse=True`, the first two); without `gradient_accumulation_steps`. `predict` and `loss` are called for
            some of the steps alone: they may not wait for the GPU, as `.item()` and indexing by a mask do, nor do
            anything but compute tensors. None: where that can be, in runs of 100 steps or more. True: where it cannot
            be, that is an error.
        check: "nan": the first loss, gradient or parameter that is NaN or infinite ends the training before the step is
            taken, with a `nbdist.NotFinite` that names step, rank, module, parameter, and the rows of the batch with
            all their columns. None: as the call (`in_ddp.options(check="nan")`); otherwise losses alone are checked.
        record: A folder for what each step depends on, so that `nbdist.replay_step` can run any step again in the
            notebook: a snapshot each 25 steps at first, and more rarely in a longer run, 20 at most; and a mark of each
            step's result. For CPU ranks. None: nothing is kept.
        progress: Whether rank 0 shows anything.

    Returns:
        The records of the run, on every rank.

    Raises:
        ValueError: Before anything is trained, for arguments that make no sense, loaders that do not suit, ranks with
            different numbers of steps, tables that are fused and so cannot be clipped or accumulated (see `shard`),
            snapshots that do not fit, and a folder `record` with a recording. For `captured=True` where steps cannot be
            recorded, some of it after two steps.
        NotFinite: With `check="nan"`.
        RuntimeError: Outside a process group.

    Examples:
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.loader import MemoryLoader
        >>> from nbdist.recsys.sharding import replicate
        >>> from nbdist.recsys.training import fit
        >>> def predict(model, batch):
        ...     return model(batch["x"]).squeeze(1), batch["liked"]
        >>> def train():
        ...     torch.manual_seed(1)
        ...     x = torch.randn(400, 2)
        ...     rows = {"x": x, "liked": x[:, 0] > torch.randn(400)}
        ...     model = replicate(torch.nn.Linear(2, 1), lambda parameters: torch.optim.Adam(parameters, lr=0.1))
        ...     batches, valid = MemoryLoader(rows, 20, shuffle=True), MemoryLoader(rows, 200)
        ...     return fit(model, predict, batches, valid, epochs=2, progress=False)
        >>> in_ddp(2, train)
        step    epoch    loss    valid_loss    auc    learning rate    rows/s
          10     1.00  0...          0...    0...              0.1       ...
          20     2.00  0...          0...    0...              0.1       ...
    """
    if not dist.is_initialized():
        raise RuntimeError("fit() works in a rank: call it in a function that in_ddp or a Session runs")
    if isinstance(model, nn.Module):
        raise TypeError(f"`model` must be what shard() or replicate() returns, got {type(model).__name__}")
    metrics = _default_metrics(loss, valid) if metrics is None else metrics
    counts = {"steps": steps, "epochs": epochs, "log_every": log_every, "eval_every": eval_every, "patience": patience}
    _check(train, valid, counts | {"gradient_accumulation_steps": gradient_accumulation_steps}, metrics, snapshots)
    check_precision(precision)
    if check not in (None, "nan"):
        raise ValueError(f'`check` must be "nan" or None, got {check!r}')
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"`max_grad_norm` must be above 0, got {max_grad_norm}")
    if model._fused and (max_grad_norm is not None or gradient_accumulation_steps > 1):
        what = "max_grad_norm=" if max_grad_norm is not None else "gradient_accumulation_steps="
        raise ValueError(
            f"{what} needs gradients that wait for the step, and tables of this model are updated in the backward pass "
            "already: use shard(..., fused=False)"
        )
    if precision == "fp16" and not isinstance(model, Replicated):
        raise ValueError(
            '`precision` must be "bf16" or "fp32" for a model that is sharded, got "fp16": its tables would be updated '
            "by scaled gradients. GPUs that TorchRec works on have bfloat16"
        )
    for loader in (train, valid):
        if loader is not None:
            loader.to(collective_device())
            _same_steps(loader)

    def factor(step: int) -> float:
        return 1.0 if schedule is None else factor_of(schedule, min(step, total - 1))

    if pipelined is None:
        pipelined = collective_device().type == "cuda"
    pipelined = pipelined and model._ahead is not None and bool(train.keyed) and train.transform is None
    run = Run(model, predict, train, loss, factor, precision, max_grad_norm, gradient_accumulation_steps, pipelined)
    log_every = log_every or run.steps_an_epoch
    eval_every = eval_every or log_every
    if is_replay():
        snapshots = None  # of the training that was recorded
    resumed = run.restore(snapshots) if snapshots is not None else ""
    recorded = RecordedRun(record, run) if record is not None else None
    first = run.step
    total = steps if steps is not None else run.steps_of(epochs or 0)
    # Before `Run.train_on` first calls zero_grad, which hands the learning rates of the tables to FBGEMM.
    schedules = contextlib.ExitStack()
    rates = schedules.enter_context(scheduled(model.optimizer, factor, first))
    shows = progress and dist.get_rank() == 0 and not is_replay()
    display = RunDisplay(run.history, total, list(metrics) if valid else []) if shows else None
    if display and resumed:
        display.note(resumed)

    def keep_records() -> bool:
        """Add the records that are due after the last step to the history; return whether training is to stop."""
        evaluated = run.step % eval_every == 0 or run.step == total
        if not run.recorded and (evaluated or run.step % log_every == 0):
            run.record(valid if evaluated else None, metrics)
        if snapshots and snapshots.keep_best and evaluated and _improved(run.history, metrics, snapshots.keep_best):
            run.snapshot(snapshots)
            snapshots._mark_best(run.step)
        return _stale(run.history, metrics, patience)

    def next_stop(step: int) -> int:
        """Return the next step after which other work than training is due."""
        each = [log_every, eval_every, *([snapshots.every or eval_every] if snapshots else [])]
        return min(total, *(step - step % every + every for every in each))

    def pauses(step: int) -> bool:
        """Return whether work after a step needs the loader at the position of the training."""
        each = [eval_every, *([snapshots.every or eval_every] if snapshots else [])]
        due = recorded is not None and recorded.due(step)
        return due or step == total or any(step % every == 0 for every in each)

    upcoming: list[tuple[int, Any]] = []
    stopped = keep_records() if run.step else False
    if display and run.step and run.recorded:
        display.update()
    warned = saved = False  # a machine will be taken away: a snapshot is due; the snapshot has been written
    run.checks = check is not None or nan.active() is not None
    capture = capturing(run, captured, total - run.step, schedule is not None)
    batches = contextlib.closing(_endless(run))
    nothing = contextlib.nullcontext()
    with schedules, run.checking(), batches as groups, capture or nothing, recorded or nothing:
        while run.step < total and not stopped:
            if recorded is not None:
                recorded.before_step()
            if capture is not None:
                before = run.step
                capture.train(next_stop(run.step))
                if capture.refused:
                    capture = None
                if run.step == before:
                    continue
            else:
                group = upcoming or next(groups)
                alone = warned or run.ends_epoch(group) or pauses(run.step + 1)
                upcoming = next(groups) if pipelined and not alone else []
                run.train_on(group, upcoming[0] if upcoming else None)
            if recorded is not None:
                recorded.after_step()
            if snapshots:
                due = run.step == total or run.step % (snapshots.every or eval_every) == 0
                warned = warned or (not saved and preempted())
                if due or (warned and not upcoming):  # that batch would be missing afterwards
                    if capture is not None:
                        capture.settle()
                    run.snapshot(snapshots)  # first: if the evaluation fails, the run goes on from here
                    saved, warned = saved or warned, False
            stopped = keep_records()
            if snapshots and stopped:
                run.snapshot(snapshots)
            if display:
                display.update() if run.recorded else display.progress(run.step, first)
            rates.last_epoch = run.step - first - 1  # some steps may have been taken at once
            _step_rates(rates)
    if display:
        display.close(f"{run.step:,} steps{', stopped early' if stopped else ''}")
    return run.history


def _step_rates(rates: LambdaLR) -> None:
    if rates._step_count > 1:
        rates.step()
        return
    with warnings.catch_warnings():  # the optimizer took no step where fp16 has left the first one out
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step", UserWarning)
        rates.step()


def _endless(run: Run) -> Generator[list[tuple[int, Any]], None, None]:
    """The batches of each step from where the loader is, epoch after epoch, each with its number in the epoch."""
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
    """Return a metric over the evaluations, with the sign such that more is better."""
    values = [value if metrics[name].higher_is_better else -value for value in history.values(name)]
    return [-math.inf if math.isnan(value) else value for value in values]  # what is no number is no improvement


def _stale(history: History, metrics: Mapping[str, Metric], patience: int | None) -> bool:
    """Return whether the last of the metrics has not improved for `patience` evaluations."""
    if patience is None or not len(history):
        return False
    values = _the_higher(history, metrics, list(metrics)[-1])
    return bool(values) and len(values) - 1 - values.index(max(values)) >= patience


def _default_metrics(loss: Callable[[Tensor, Tensor], Tensor], valid: Loader | None) -> Mapping[str, Metric]:
    if loss is not log_loss and valid is not None:
        raise ValueError('with a loss of your own, say what to evaluate: metrics={"rmse": RMSE()}')
    return {"valid_loss": LogLoss(logits=True), "auc": AUC()}


def _check(
    train: Loader,
    valid: Loader | None,
    counts: Mapping[str, int | None],
    metrics: Mapping[str, Metric],
    snapshots: Snapshots | None,
) -> None:
    if (counts["steps"] is None) == (counts["epochs"] is None):
        raise ValueError("give steps= or epochs=, one of the two")
    for name, value in counts.items():
        if value is not None and (not hasattr(value, "__index__") or value < 1):
            raise ValueError(f"`{name}` must be an integer, at least 1, got {value!r}")
    check_metrics(metrics)
    for name, loader in (("train", train), ("valid", valid)):
        if loader is not None and not isinstance(loader, Loader):
            raise TypeError(
                f"{name} is a {type(loader).__name__}: a ParquetLoader or MemoryLoader is needed, which divides the "
                "rows among the ranks and can be resumed. For others, write the loop yourself; evaluate() helps"
            )
    if valid is not None and valid.remainder == "drop":
        raise ValueError("valid has remainder='drop', so that rows are left out: make it with 'keep' or 'pad'")
    for name in ("patience", "eval_every"):
        if counts[name] is not None and (valid is None or not metrics):
            raise ValueError(f"`{name}` needs `valid` and a metric to go by")
    if snapshots and snapshots.keep_best and (valid is None or snapshots.keep_best not in metrics):
        raise ValueError(
            f"keep_best must be one of the metrics, {', '.join(metrics)}, and valid= must be given, "
            f"got {snapshots.keep_best!r}"
        )
    by_patience = list(metrics)[-1] if counts["patience"] is not None else None
    for option, chosen in (("keep_best", snapshots and snapshots.keep_best), ("patience", by_patience)):
        if chosen and metrics[chosen].higher_is_better is None:
            raise ValueError(
                f"{option}= goes by {chosen!r}, and {type(metrics[chosen]).__name__} does not say whether more of it "
                "is better: set higher_is_better of its class to True or False"
            )


def _same_steps(loader: Loader) -> None:
    """Raise `ValueError` if ranks have loaders of their own with different numbers of steps: they would wait for
    ever."""
    lengths = ranks.all_gather(len(loader))
    for rank, length in enumerate(lengths):
        if length != lengths[0]:
            raise ValueError(
                f"the loader of rank 0 has {lengths[0]} steps and that of rank {rank} has {length}: with unequal parts "
                "ranks would wait for one another for ever. Let one loader divide all rows, or make the parts equal"
            )
