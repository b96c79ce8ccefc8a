"""The next day of a model: vocabularies and tables follow its rows, which are predicted first and then learned from."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from ...checks import check_count
from ...devices import collective_device
from .. import ranks
from ..etl.fitting import as_in_fit
from ..etl.inputs import Source, opened
from ..etl.workflow import Workflow
from ..io.folders import atomic_folder
from ..io.inspection import NoRows
from ..loader.in_order import InOrderLoader
from ..metrics import AUC
from ..parallel.checkpoint import contents
from ..parallel.protocol import Parallel
from ..training.arguments import check_model, check_options
from ..training.evaluation import (
    Precision,
    Predict,
    add_rows,
    check_metrics,
    computed,
    evaluating,
    predicted,
    reset,
)
from ..training.objective import ONLY, Loss, Objective, by_task, log_loss, objective
from ..training.run import Run
from .day import FILES, Day, write_day


def continue_training(
    yesterday: Day | str | os.PathLike[str],
    log: Source,
    folder: str | os.PathLike[str],
    make: Callable[[Workflow], Parallel],
    predict: Predict,
    *,
    batch_size: int,
    columns: Sequence[str] | None = None,
    keyed: Sequence[str] = (),
    loss: Loss | Mapping[str, Loss] = log_loss,
    metrics: Mapping[str, Metric] | Mapping[str, Mapping[str, Metric]] | None = None,
    sample_weight: str | Mapping[str, str] | None = None,
    precision: Precision | None = None,
    tables: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Day:
    """Learn a day's rows, each once and in their order, and save the day. All ranks must call it.

    1. The workflow of the day before is fitted further: codes stay, and new ids get the next ones, or codes that were
        freed by `time_to_live` (see `Categorify`): the rows of these codes start like new rows.
    2. `make` builds the model for this number of codes; weights and optimizer state are yesterday's. Rows of new ids
       begin as the mean of the known ones (`Vocabulary.unknown_weights`).
    3. Each step's rows are predicted, in evaluation mode, before the step is taken: loss and metrics of these
       predictions are the curve of the day (progressive validation). In these rows, numbers that the workflow has
       learned, such as the means of a `TargetEncoding`, are yesterday's, so that nothing leaks from the targets.
    4. The folder gets the workflow, a snapshot of the model, the delta, and the curve. It appears when it is complete.

    A step has the same rows, whatever the number of ranks. The day's columns are in memory on each rank.

    A day without rows, or whose rows a `Filter` of the workflow all leaves out, is no error: workflow and model stay as
    they are, and ids do not come closer to the end of their `time_to_live`. Its delta and curve are empty.

    Args:
        yesterday: The day before, as `save_day` or `continue_training` returned it, or its folder.
        log: The rows of the day, in the order of time, as for `Workflow.fit`: Parquet files, or a frame. Columns may
            have other types than the day before, as for `Workflow.transform`.
        folder: The folder to write, which all ranks reach.
        make: A function that each rank calls with the workflow. It returns the model, from `shard` or `replicate`, with
            the same optimizer as the day before.
        predict: As for `fit`.
        batch_size: Rows of a step on all ranks together, at most.
        columns: The workflow's outputs that a batch has. None: all.
        keyed: As for `ParquetLoader`.
        loss, sample_weight, precision: As for `fit`.
        metrics: Name → metric, or with several tasks task → these. None: for `log_loss`, "auc".
        tables: Column of codes → the name of its table, where it is not called like the column.
        overwrite: Whether a day that is there is replaced.
        progress: Whether rank 0 shows progress bars, and a line about a day without rows.

    Returns:
        The day, on every rank.

    Raises:
        FileNotFoundError, ValueError: There is no day before; a column is missing or has a different type; there are
            rows, but fewer than ranks; the model does not fit the snapshot; a loss is not finite.
        FileExistsError: The folder is there, and `overwrite` is False or something else is in it.
        RuntimeError: Outside a process group.

    Examples:
        >>> import polars as pl
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.days import continue_training, save_day
        >>> from nbdist.recsys.etl import Categorify, Workflow
        >>> from nbdist.recsys.models import DLRM
        >>> from nbdist.recsys.sharding import replicate
        >>> rows = pl.DataFrame({"user": [1, 2, 3] * 20, "item": [1, 2] * 30, "liked": [True, False, True] * 20})
        >>> def make(workflow):
        ...     sizes = {name: vocabulary.size for name, vocabulary in workflow.vocabularies.items()}
        ...     return replicate(DLRM(sizes, embedding_dim=4), "adagrad")
        >>> def predict(model, batch):
        ...     return model(batch), batch["liked"]
        >>> def two_days():
        ...     workflow = Workflow(Categorify("user", "item")).fit(rows, progress=False)
        ...     first = save_day("day-0", workflow, make(workflow))
        ...     return continue_training(first, rows, "day-1", make, predict, batch_size=10, progress=False)
        >>> day = in_ddp(2, two_days)
        >>> day.curve.select("step", "rows", "loss", "auc").shape
        (6, 4)
    """
    if not dist.is_initialized():
        raise RuntimeError("continue_training() works in a rank: call it in a function that in_ddp or a Session runs")
    check_count(batch_size, least=ranks.world_size(), name="`batch_size`")
    before = yesterday if isinstance(yesterday, Day) else Day.load(yesterday)
    goal = objective(loss, sample_weight)
    named, tasks = by_task(_default_metrics(goal) if metrics is None else metrics)
    check_metrics(named, list(_curve_types({})))
    old = before.workflow
    columns_of = _columns_of(old, before.snapshot, tables)
    with atomic_folder(folder, FILES, overwrite) as scratch:
        workflow, rows = _today(old, log, scratch / "rows", columns, progress)
        model = make(workflow)
        check_model(model)
        check_options(model, precision, None, 1, None, None)
        renewed = {key: workflow.vocabularies[one].renewed(old.vocabularies[one]) for key, one in columns_of.items()}
        parts = {key: old.vocabularies[one].unknown_weights() for key, one in columns_of.items()}
        model.load(before.snapshot, grow=parts)
        state = _state_before(model, parts)
        if any(len(rows) for rows in renewed.values()):  # what they were belongs to the state before
            model.load(before.snapshot, grow=parts, renew=renewed)
        curve, values = pl.DataFrame(schema=_curve_types(named)), dict[str, float]()
        if rows is not None:
            loader = InOrderLoader(rows, batch_size, keyed=keyed).to(collective_device())
            run = Run(model, predict, loader, goal, lambda step: 1.0, precision)
            curve, values = _learned(run, loader, named, tasks, progress)
        elif progress and ranks.rank() == 0:
            print(
                f"{os.fspath(folder)}: the log has no rows, so the model stays as it was on the day before", flush=True
            )
        write_day(scratch / "whole", workflow, model, (before.weights, state), curve, values)
    return Day.load(folder)


def _today(
    old: Workflow, log: Source, folder: Path, columns: Sequence[str] | None, progress: bool
) -> tuple[Workflow, pl.DataFrame | None]:
    """Return the workflow of the day and its rows, written to a folder on the way; without rows, yesterday's workflow
    and None."""
    try:
        with opened(log) as given:  # once: a lazy frame may have other rows the second time, and a stream none
            needed = old.needs([name for name in columns or old.outputs if name in old.outputs])
            known = old.needs(list(old.outputs)).items()
            given = as_in_fit(given, {name: kind for name, kind in known if name in needed or name in given.schema})
            workflow = Workflow(*old.steps, tags=old.tags).fit(given, previous=old, progress=progress)
            return workflow, _rows(workflow, old, given, folder, columns, progress)
    except NoRows:
        ranks.agree("fit", rows=0)  # as ranks with rows do
        return old, None


def _rows(
    workflow: Workflow, old: Workflow, log: Source, folder: Path, columns: Sequence[str] | None, progress: bool
) -> pl.DataFrame:
    """Return the rows of the day with today's codes. All other learned numbers are yesterday's."""
    past = copy.copy(workflow)
    past.state = dataclasses.replace(old.state, vocabularies=workflow.vocabularies)
    files = past.write(
        log,
        folder,
        columns=columns,
        training=False,
        num_files=ranks.world_size(),
        shuffle=False,
        progress=progress,
    )
    return pl.read_parquet(files)


def _default_metrics(goal: Objective) -> dict[str, Any]:
    """Return the metrics of click models if each loss is a click model's loss."""
    if any(one is not log_loss for one in goal.losses.values()):
        return {}
    found: dict[str, Any] = {task: {"auc": AUC()} for task in goal.losses}
    return found.get(ONLY, found)  # type: ignore[no-any-return]


def _columns_of(old: Workflow, snapshot: Path, tables: Mapping[str, str] | None) -> dict[str, str]:
    """Return a mapping from the name of each weight of a table of codes, in the snapshot, to a column that is looked up
    in the table.
    """
    if foreign := (tables or {}).keys() - old.vocabularies.keys():
        raise ValueError(f"`tables` must have columns of codes, {', '.join(old.vocabularies)}, got {min(foreign)!r}")
    saved = [key.removeprefix("model.") for key in contents(snapshot) if key.startswith("model.")]
    found: dict[str, str] = {}
    for column in old.vocabularies:
        name = (tables or {}).get(column, column)
        keys = [key for key in saved if f".{key}".endswith((f".{name}", f".{name}.weight"))]
        if not keys and name != column:
            raise ValueError(f"`tables` must name weights of {snapshot}, got {name!r} for column {column!r}")
        found |= dict.fromkeys(keys, column)
    return found


def _state_before(model: Parallel, parts: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return, on rank 0, the state of the day before, without the rows whose codes were not used."""
    whole = model.gather()
    if whole is None:
        return {}
    state = whole.state_dict()
    return {name: value[: len(parts[name])] if name in parts else value for name, value in state.items()}


def _learned(
    run: Run, loader: InOrderLoader, metrics: Mapping[str, Metric], tasks: Mapping[str, str], progress: bool
) -> tuple[pl.DataFrame, dict[str, float]]:
    """Predict the rows of each step before taking the step. Return the curve, and the metrics of all rows."""
    whole = copy.deepcopy(dict(metrics))
    reset(whole)
    curve: list[dict[str, Any]] = []
    with ranks.progress_bar("learn", loader.rows, progress) as bar:
        for number, batch in enumerate(loader):
            reset(metrics)
            with evaluating(run.model.model):
                found = predicted(run.model.model, run.predict, batch, run.precision)
                loss = _loss(run.objective, found, batch, loader.partition.size(ranks.rank(), number))
            for some in (metrics, whole):
                add_rows(some, found, batch, tasks, run.objective.columns)
            rows = sum(loader.partition.size(rank, number) for rank in range(ranks.world_size()))
            curve.append({"step": number + 1, "rows": rows, "loss": loss, **computed(metrics)[0]})
            run.train_on([(number, batch)])
            bar.update(rows)
    run.check_finite()
    frame = pl.DataFrame(curve, schema=_curve_types(metrics))
    mean = sum(one["loss"] * one["rows"] for one in curve) / loader.rows
    return frame, {"loss": mean, **computed(whole)[0]}


def _curve_types(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    return {"step": pl.Int64, "rows": pl.Int64, "loss": pl.Float64, **dict.fromkeys(metrics, pl.Float64)}


def _loss(goal: Objective, found: Mapping[str, Sequence[Any]], batch: Any, rows: int) -> float:
    """Return the loss of predictions, over the rows of all ranks."""
    parts = [(loss, loss.new_tensor(float(rows)) if own is None else own) for loss, own in goal.of(found, batch)]
    sums = torch.stack([torch.stack([loss.double() * own, own.double()]) for loss, own in parts])  # (tasks, 2)
    dist.all_reduce(sums)
    return float((sums[:, 0] / sums[:, 1].clamp(min=torch.finfo(sums.dtype).tiny)).sum())
