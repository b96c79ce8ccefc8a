"""Export of a fitted workflow and a trained model as a Triton ensemble, whose requests contain raw ids and strings.

In the notebook::

    from nbdist.recsys.triton import export_ensemble, serve

    def click(model, batch):
        return model(keyed_jagged(batch, ["userId", "movieId", "genres"])).sigmoid()

    ensemble = export_ensemble(workflow, model, "repository", "ctr", predict=click, output="click", backend="python")
    with serve("repository") as server:
        client = tritonclient.http.InferenceServerClient(server.http)
        arrays = ensemble.request(frame)  # input → array, for client.infer("ctr", ...)

The repository has three models: ``<name>_preprocess``, the workflow's steps in NumPy; ``<name>_model``, the model as
ONNX; and ``<name>``, the ensemble of the two, to which clients send requests. The first needs the wheel numpy in the
server's Python, the second the server's ONNX Runtime backend or, with ``backend="python"``, the wheel onnxruntime.
Neither needs nbdist, torch or polars.

With ``version=``, the two models have several versions in the repository. A version of one fits only the same version
of the other, because codes differ between versions. Triton has one configuration for all versions of an ensemble, so
each version has an ensemble of its own, ``<name>.<version>``; ``<name>`` uses the newest.

A request has each raw column as a tensor of shape (rows, 1). Booleans, dates and integers are INT64, except that uint64
is UINT64; strings are BYTES (UTF-8); floats are FP32 or FP64. A null is `NULL`, `NULL_UNSIGNED`, `NULL_STRING`, or the
NaN whose bits are `NULL_FLOAT_BITS`. Columns of lists have the shape (rows, longest): shorter lists are padded with
`PADDING`, `PADDING_UNSIGNED` or `PADDING_STRING`, and a null list is a list with one null. In the Python backend,
requests are put into one batch even if their lists differ in length. Unknown ids, nulls and empty lists get the same
codes as in training; see `fill` for ids that did not occur in training.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn

from .. import ranks
from ..etl.unknown import unknown_filled
from ..etl.workflow import Workflow
from ..io.folders import atomic_folder
from ..io.frames import require_frame
from ..loader.columns import Columns
from . import served
from .config import Batching, TensorSpec, ensemble_config, model_config, read_config, write_config
from .onnx import Predict, looked_up, write_onnx
from .request import ServedSteps, arrow_type, as_fitted, served_steps, to_request
from .served.preprocess import Array

_BACKENDS = ("onnxruntime", "python")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Ensemble:
    """An exported workflow and model.

    Examples:
        >>> import polars as pl
        >>> import torch
        >>> from nbdist.recsys.etl import Categorify, Workflow
        >>> from nbdist.recsys.triton import export_ensemble
        >>> workflow = Workflow(Categorify("user")).fit(pl.DataFrame({"user": ["ann", "bob"]}))
        >>> def click(model, batch):
        ...     return model(batch["user"]).sigmoid()
        >>> ensemble = export_ensemble(workflow, torch.nn.Embedding(4, 1), "repository", "ctr", predict=click)
        >>> ensemble.name, ensemble.inputs, ensemble.output
        ('ctr', {'user': 'string'}, 'output')
        >>> ensemble.request({"user": ["bob", "zoe"]})
        {'user': array([[b'bob'], [b'zoe']], dtype=object)}
    """

    path: Path
    """The folder of the model repository."""
    name: str
    """The name of the model for requests."""
    inputs: dict[str, str]
    """The columns of a request, each with the workflow's name of its type."""
    output: str
    """The name of the output tensor, shape (rows, width)."""
    version: int | None = None
    """The version, where there are several."""

    def request(self, frame: Any) -> dict[str, Array]:
        """Return rows of raw data as the tensors of a request.

        Args:
            frame: A polars or pandas frame, an Arrow table, or a dict of lists, with at least the columns of `inputs`.

        Returns:
            A dict from column to array, for tritonclient's `set_data_from_numpy`.

        Raises:
            ValueError: A column is missing, has a different type, or has a value that stands for null or padding.
        """
        table = _to_arrow(frame)
        missing = [name for name in self.inputs if name not in table.column_names]
        if missing:
            raise ValueError(f"the frame has no column {missing[0]!r}: a request has {', '.join(self.inputs)}")
        columns = {name: as_fitted(table[name], kind) for name, kind in self.inputs.items()}
        return {name: to_request(columns[name], name, arrow_type(name, kind)) for name, kind in self.inputs.items()}

    def load(self, client: Any) -> None:
        """Make a running server use the exported model, such as a new version, without interrupting its answers.

        Until the model is loaded, the server answers with the previous version. Each answer comes from a single
        version. The server must run in Triton's model control mode "explicit", like the server of `serve`.

        Args:
            client: A client of the server, of `tritonclient.http` or `tritonclient.grpc`.

        Raises:
            tritonclient.utils.InferenceServerException: The server cannot load a model.
        """
        parts = [f"{self.name}_preprocess", f"{self.name}_model", f"{self.name}.{self.version}"]
        for model in [*(part for part in parts if (self.path / part).is_dir()), self.name]:
            client.load_model(model)


def export_ensemble(
    workflow: Workflow | str | os.PathLike[str],
    model: nn.Module,
    path: str | os.PathLike[str],
    name: str,
    *,
    columns: Iterable[str] | None = None,
    predict: Predict | None = None,
    output: str = "output",
    backend: str = "onnxruntime",
    max_batch_size: int = 4096,
    max_queue_delay: float = 100e-6,
    fill: bool = True,
    version: int | None = None,
    overwrite: bool = False,
) -> Ensemble:
    """Write a Triton model repository that maps raw columns to the model's answers.

    The repository appears complete or not at all. The export is compared with the model on batches of random codes.

    Args:
        workflow: The fitted workflow, or the folder to which it was saved.
        model: The trained model as a plain module: the result of `gather` for a sharded or replicated model.
        path: The folder to write. If it exists, it must be empty, or contain other versions.
        name: The name of the ensemble. The names of the two other models are ``<name>_preprocess`` and
            ``<name>_model``.
        columns: The outputs of the workflow that the model uses. None: all categorified ones.
        predict: A function like `predict` of `fit`, without targets: ``predict(model, batch)`` returns the answers for
            a batch, one tensor of shape (rows,) or (rows, width). The batch is as from a loader: a dict from column to
            tensor, or to `Ragged` for lists. None: ``model(batch)``.
        output: The name of the output tensor.
        backend: The backend of the server that runs the model: "onnxruntime", or "python" with the wheel onnxruntime.
        max_batch_size: The largest number of rows of a request, and of requests that are combined.
        max_queue_delay: The longest time, in seconds, that a request may wait to be combined with others.
        fill: Whether nulls and unknown ids that did not occur in training get the mean of the known rows, as from
            `etl.fill_unknown`; otherwise they get the initial values of their tables. The table of a column is found by
            the ids that an `nn.Embedding` or `nn.EmbeddingBag` looks up; a warning names columns whose table is not
            found. The row of a table's `padding_idx` does not change.
        version: A number, for several versions with the same inputs and outputs in one repository: ``<name>.<version>``
            is this version, `name` the one with the largest number. Remove the folders of a version when no client uses
            it any more. None: there is only one version.
        overwrite: Whether to replace an ensemble with this name, and version, of an earlier export to `path`.

    Raises:
        ValueError: `name` cannot be the name of a model, the model does not accept the columns or cannot be exported, a
            request cannot carry a column, or other versions have other columns.
        RuntimeError: The workflow is not fitted, or this process is a rank.
        TypeError: The model is still sharded or wrapped.
        FileExistsError: `path` has other files.

    Examples:
        >>> import polars as pl
        >>> import torch
        >>> from nbdist.recsys.etl import Categorify, Workflow
        >>> from nbdist.recsys.triton import export_ensemble
        >>> workflow = Workflow(Categorify("user")).fit(pl.DataFrame({"user": ["ann", "bob"]}))
        >>> model = torch.nn.Embedding(workflow.vocabularies["user"].size, 1)  # stands for a trained one
        >>> def click(model, batch):
        ...     return model(batch["user"]).sigmoid()
        >>> ensemble = export_ensemble(workflow, model, "repository", "ctr", predict=click, output="click")
        >>> sorted(folder.name for folder in ensemble.path.iterdir())
        ['ctr', 'ctr_model', 'ctr_preprocess']
    """
    path = Path(path).expanduser().absolute()
    _check(model, name, backend, max_batch_size, max_queue_delay, version)
    if isinstance(workflow, (str, os.PathLike)):
        workflow = Workflow.load(workflow)
    steps = served_steps(workflow, columns if columns is None else list(columns))
    if output in {*steps.inputs, *steps.outputs}:
        raise ValueError(f"`output` must not be the name of a column, got {output!r}")
    predict = predict or _plain_call
    others = [] if version is None else _other_versions(path, name, version, overwrite)
    number = version or 1
    ensembles = {name: max([number, *others])}  # ensemble → the version that it takes
    replaced = [f"{name}_preprocess", f"{name}_model", name]
    if version is not None:
        ensembles[f"{name}.{version}"] = version
        replaced += [f"{name}.{one}" for one in (version, *others)]
    with atomic_folder(path, replaced, overwrite or bool(others)) as scratch:
        repository = scratch / "whole"
        if others:
            shutil.copytree(path, repository, dirs_exist_ok=True, copy_function=os.link)  # models are large
        folders = [repository / f"{name}_{part}" / str(number) for part in ("preprocess", "model")]
        for folder in [*folders, *(repository / one for one in ensembles)]:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        steps.write(folders[0])
        copy_source("preprocess.py", folders[0])
        with contextlib.ExitStack() as stack:
            if fill:
                tables = looked_up(model, steps.outputs, predict)
                stack.enter_context(unknown_filled(model, workflow, list(steps.outputs), tables))
            answer = write_onnx(model, steps.outputs, predict, output, folders[1] / "model.onnx")
        if backend == "python":
            copy_source("predict.py", folders[1])
        answers = TensorSpec(output, answer.numpy().dtype, answer.shape[1])
        batching = Batching(max_batch_size, max_queue_delay)
        _write_configs(repository, name, ensembles, steps, answers, backend, batching, number if others else None)
    return Ensemble(path, name, steps.inputs, output, version)


def check_name(name: str) -> None:
    """Raise `ValueError` for what cannot be the name of a model."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"`name` must have letters, digits, '_', '-' and '.' only, got {name!r}")


def _check(
    model: Any, name: str, backend: str, max_batch_size: int, max_queue_delay: float, version: int | None
) -> None:
    """Raise an error for invalid arguments."""
    check_name(name)
    if backend not in _BACKENDS:
        raise ValueError(f"`backend` must be one of {', '.join(_BACKENDS)}, got {backend!r}")
    if version is not None and version < 1:
        raise ValueError(f"`version` must be at least 1, got {version}")
    if max_batch_size < 1 or max_queue_delay < 0:
        raise ValueError(
            f"`max_batch_size` must be at least 1 and `max_queue_delay` at least 0, got {max_batch_size} and "
            f"{max_queue_delay}"
        )
    kind = type(model).__name__
    if not isinstance(model, nn.Module) or kind in ("DistributedDataParallel", "DistributedModelParallel"):
        raise TypeError(f"the model is a {kind}: give the plain module, which gather() returns in a rank")
    if ranks.world_size() > 1:
        raise RuntimeError("export_ensemble works in the notebook: return the model's gather() from the ranks")


def _write_configs(
    repository: Path,
    name: str,
    ensembles: Mapping[str, int],
    steps: ServedSteps,
    answers: TensorSpec,
    backend: str,
    batching: Batching,
    added: int | None,
) -> None:
    """Write the configurations of the two models and of the ensembles.

    Args:
        repository: The folder of all models.
        name: The name of the ensemble.
        ensembles: The version that each ensemble uses, by the ensemble's name.
        steps, answers, backend, batching: The parts that the configurations describe.
        added: The version that is added to others, whose configurations must be equal. None: there are no other
            versions.
    """
    raw, taken = tensors_of(steps)
    first = model_config(f"{name}_preprocess", "python", batching, raw, taken)
    second = model_config(f"{name}_model", backend, batching, taken, [answers])
    for config in (first, second):
        if added is not None:
            _check_same(config, repository / config.name, name, added)
        write_config(config, repository / config.name)
    for one, version in ensembles.items():
        (repository / one / str(version)).mkdir()
        write_config(ensemble_config(one, batching, raw, [answers], [first, second], version), repository / one)


def _other_versions(path: Path, name: str, version: int, overwrite: bool) -> list[int]:
    """Return the other versions of an ensemble in a repository.

    Raises:
        FileExistsError: The version exists, and `overwrite` is false.
    """
    there = [int(one.suffix[1:]) for one in path.glob(f"{name}.*") if one.suffix[1:].isdecimal()]
    if version in there and not overwrite:
        raise FileExistsError(f"{path} has version {version} of {name} already: choose another, or give overwrite=True")
    return [one for one in there if one != version]


def _check_same(config: Any, folder: Path, name: str, version: int) -> None:
    """Raise `ValueError` if the versions in a model's folder have another configuration."""
    for part in ("input", "output", "backend"):
        if getattr(read_config(folder), part) != getattr(config, part):
            raise ValueError(
                f"{config.name}: the {part} of version {version} of {name} is not that of the versions in "
                f"{folder.parent}. All versions must have the same: choose another name"
            )


def _plain_call(model: nn.Module, batch: Columns) -> torch.Tensor:
    return model(batch)  # type: ignore[no-any-return]


def tensors_of(steps: ServedSteps) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return the inputs and outputs of the model that runs a workflow's steps."""
    raw = [tensor_of(column, arrow_type(column, kind)) for column, kind in steps.inputs.items()]
    made = [TensorSpec(column, one.dtype, -1 if one.is_list else 1) for column, one in steps.outputs.items()]
    return raw, made


def tensor_of(column: str, kind: pa.DataType) -> TensorSpec:
    """Return the tensor of a request that carries a column."""
    is_list = pa.types.is_large_list(kind)
    inner = kind.value_type if is_list else kind
    dtype = object if pa.types.is_large_binary(inner) else inner.to_pandas_dtype()
    return TensorSpec(column, dtype, -1 if is_list else 1)


def copy_source(file: str, folder: Path) -> None:
    """Write a file of `served` as the code of a model of the Python backend."""
    (folder / "model.py").write_bytes((resources.files(served) / file).read_bytes())


def _to_arrow(frame: Any) -> pa.Table:
    return frame if isinstance(frame, pa.Table) else require_frame(frame, "the frame").lazy().collect().to_arrow()
