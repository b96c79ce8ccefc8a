"""A training loop for click models on ranks: evaluation, learning rates, a live table, snapshots, early stop.

In a function that runs on all ranks::

    from nbdist.recsys.training import Snapshots, fit, warmup_decay

    def predict(model, batch):
        return model(keyed_jagged(batch, ["user", "movie"])), batch["liked"]

    def train():
        sharded = shard(Model(), batch_size=2048, dense_optimizer=torch.optim.Adam)  # or replicate(Model(), ...)
        rows, valid = ParquetLoader("train/*.parquet", 2048, shuffle=True), ParquetLoader("valid/*.parquet", 8192)
        history = fit(sharded, predict, rows, valid, steps=2000, log_every=200, schedule=warmup_decay(2000, warmup=200))
        return history, sharded.gather()

`fit` is optional: its parts (`evaluate`, loaders, metrics, `shard`) can be used in your own loop, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Literal

from torchmetrics import Metric

from ...devices import collective_device
from ...numerics import nan
from ...replay.target import is_replay
from ..loader.base import Loader
from ..parallel.protocol import Parallel
from .arguments import check_model, check_options, check_run, check_steps, evaluation_of, sends_ahead
from .callbacks import Callback, Hooks
from .captured import capturing
from .display import shown
from .evaluation import Precision, Predict
from .history import History
from .logs import Logs, logging_of
from .loop import Due, Loop
from .objective import Loss, log_loss, objective
from .recorded import RecordedRun
from .run import Run
from .schedule import Schedule, factor_of, scheduled
from .snapshots import Snapshots


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
    eval_batches: int | None = None,
    loss: Loss | Mapping[str, Loss] = log_loss,
    metrics: Mapping[str, Metric] | Mapping[str, Mapping[str, Metric]] | None = None,
    sample_weight: str | Mapping[str, str] | None = None,
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
    log: Logs | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
) -> History:
    """Train a sharded or replicated model. All ranks must call it, with the same arguments.

    The gradient of a step is the gradient of the mean loss over the rows of all ranks. Rank 0 shows a table and a plot
    that grow during the run; in a terminal, lines. The loaders are moved to the rank's device.

    A resumed run ends with the same weights and history as a run without interruption, except for `rows_per_second`: a
    snapshot contains the model, the optimizer, the position in the epoch, and the random generators of each rank. The
    learning rates depend on the step. Build the model and the loaders as for the first run, and pass the same
    arguments.

    A run can also resume on a different number of ranks. The remaining rows of the epoch are then divided among these
    ranks, so that each row is still used once. Use the batch size `batch_size // dist.get_world_size()` in the loader,
    so that a step has the same number of rows as before: then the loss follows the same curve, within the noise of
    a different order. On a cluster, a snapshot is also taken when a node is about to be taken away
    (`nbdist.preempted`).

    A snapshot is taken before the evaluation of its step, and a resumed run makes this evaluation: an evaluation that
    fails costs no training. A metric that cannot be computed, such as the AUC of rows with one label, is NaN in the
    history, which also has the reason.

    Args:
        model: The result of `shard` or `replicate`.
        predict: A function of the model and a batch. It returns predictions and targets. `evaluate` describes further
            results, users and weights, which metrics use; the loss does not use them (see `sample_weight`).
        train: The loader of training rows, which is used from its current position on. It divides its rows among the
            ranks; or it has each rank's own rows (`rank=0, world_size=1`), with the same number of steps on all ranks.
        valid: The loader of rows for evaluation. Each row must be used once, so its `remainder` may not be "drop".
        steps: The number of steps of the run. Give either `steps` or `epochs`.
        epochs: The number of epochs of the run.
        log_every: The number of steps between two records. None: an epoch. There is also a record after the last step.
        eval_every: The number of steps between two evaluations. None: each record has an evaluation. Records without an
            evaluation only have the training loss.
        eval_batches: The number of batches of each rank in an evaluation, always the first ones of `valid`: for a
            cheaper curve of a long run. None: all. `evaluate` takes all rows, too.
        loss: A function of predictions (float32) and targets that returns the mean loss over the rows of a batch. For
            several tasks: a dict from task to function. Then the sum of the losses is minimized, and `predict` returns
            a dict from task to predictions and targets.
        metrics: The metrics to evaluate, by name. None: "valid_loss" and "auc", for logits and labels. For several
            tasks: a dict from task to metrics by name; in the history, their names are "task/name".
        sample_weight: The name of a column with the weight of each row, or with booleans that select rows. For labels
            that only some rows have: a dict from task to column. The loss is the weighted mean over the rows of all
            ranks, and metrics use the weights, too. If weights are numbers, `loss` gets them as a third argument. None:
            each row counts once.
        schedule: A function from a step of the run to the factor of the learning rates of tables and dense layers; see
            `warmup_decay`. After the run, the optimizer has its full learning rates again.
        max_grad_norm: The largest norm of all gradients of a step together, over ranks and tables; gradients with a
            larger norm are scaled down. None: gradients are not scaled.
        gradient_accumulation_steps: The number of batches of each rank for one step, whose gradient is the gradient of
            the mean loss over the rows of all these batches. The last step of an epoch has the remaining batches.
            `log_every` and other numbers of steps count such steps.
        precision: "bf16" or "fp16": `predict` runs under autocast to bfloat16 or float16; torch chooses the operations
            that stay in float32. "fp16" is for GPUs without bfloat16 (T4, V100, RTX 20) and for `replicate`: the loss
            is scaled, so that small gradients do not vanish, and if gradients overflow on one rank, all ranks skip the
            step and halve the scale. "fp32" or None: without autocast.
        snapshots: The folder of the snapshots, the times to take them, and whether to resume.
        patience: The number of evaluations in a row without an improvement of the last metric after which the training
            stops.
        pipelined: Whether the ids of the next batch are sent to the ranks that store their rows during the backward
            pass of the current batch. This is for sharded models, and loaders with `keyed=` and without `transform=`.
            None: on GPUs.
        captured: Whether steps are recorded as a CUDA graph and replayed, which reduces the time of a small model to a
            tenth. It needs one rank with a GPU; a model of `replicate`; a loader whose columns are dense and fit on the
            GPU, without `transform=` and `keyed=`; torch's SGD, Adagrad, Adam or AdamW (for tables with `sparse=True`,
            SGD or Adagrad); and no `gradient_accumulation_steps`. `predict` and `loss` are only called in some of the
            steps: they may do nothing but compute tensors, and may not wait for the GPU, as `.item()` and indexing by a
            mask do. None: steps are recorded if that is possible, in runs of 100 steps or more. True: if it is not
            possible, an error is raised.
        check: "nan": the first loss, gradient or parameter that is NaN or infinite ends the training before the step is
            taken, with a `nbdist.NotFinite` that names step, rank, module, parameter, and the rows of the batch with
            all their columns. None: the option of the call (`in_ddp.options(check="nan")`) is used; without it, only
            losses are checked.
        record: A folder for a recording, from which `nbdist.replay_step` can run any step again in the notebook. It
            holds snapshots, which are 25 steps apart at first and further apart in a longer run, at most 20, and a mark
            of each step's result. It is only for CPU ranks. None: nothing is recorded.
        log: The log to which rank 0 also writes each record's numbers: "json_lines" (a file), "tensorboard" (a folder),
            "mlflow" or "wandb"; or a dict from these names to a path, or to a dict of options for the library, such as
            `{"json_lines": "run.jsonl", "wandb": {"project": "clicks"}}`. An active run of MLflow or Weights & Biases
            is used, and left open.
        callbacks: Objects of `Callback`, whose methods are called on every rank.
        progress: Whether rank 0 shows the progress.

    Returns:
        The records of the run, on every rank.

    Raises:
        ValueError: Before anything is trained: an argument is invalid, `fit` cannot use a loader, ranks have different
            numbers of steps, tables are fused and so cannot be clipped or accumulated (see `shard`), snapshots do not
            fit, or the folder `record` already holds a recording. With `captured=True`: steps cannot be recorded; some
            reasons are only found after two steps.
        NotFinite: With `check="nan"`: a number is NaN or infinite.
        RuntimeError: The process is in no process group.

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
    check_model(model)
    goal = objective(loss, sample_weight)
    evaluation = evaluation_of(goal, valid, metrics, patience, eval_batches)
    counts = {"steps": steps, "epochs": epochs, "log_every": log_every, "eval_every": eval_every, "patience": patience}
    counts |= {"gradient_accumulation_steps": gradient_accumulation_steps, "eval_batches": eval_batches}
    check_run(train, valid, counts, evaluation.metrics, snapshots)
    check_options(model, precision, max_grad_norm, gradient_accumulation_steps, check, schedule)
    logging = logging_of(log)
    hooks = Hooks(callbacks, logging)
    for loader in (train, valid):
        if loader is not None:
            loader.to(collective_device())
            check_steps(loader)

    def factor(step: int) -> float:
        return 1.0 if schedule is None else factor_of(schedule, min(step, due.total - 1))

    ahead = sends_ahead(model, train, pipelined)
    run = Run(model, predict, train, goal, factor, precision, max_grad_norm, gradient_accumulation_steps, ahead)
    run.checks, run.each_step = check is not None or nan.active() is not None, hooks.each_step
    snapshots = None if is_replay() else snapshots  # of the training that was recorded
    resumed = "" if snapshots is None else run.restore(snapshots)
    recorded = None if record is None else RecordedRun(record, run)
    due = Due.of(run, counts, snapshots)
    display = shown(run.history, due.total, list(evaluation.metrics) if valid else [], progress, resumed)
    loop = Loop(run, due, evaluation, hooks, snapshots, recorded, display)
    # Before `Run.train_on` first calls zero_grad, which hands the learning rates of the tables to FBGEMM.
    with contextlib.closing(logging), scheduled(model.optimizer, factor, run.step) as rates:
        loop.train(rates, capturing(run, captured, due.total - run.step, schedule is not None))
    return run.history
