"""A trained model as ONNX: look-ups instead of embedding bags, any number of rows, compared with the model.

ONNX has no bags of different sizes. So in the exported model, lists are rows padded with -1, and each
`torch.nn.EmbeddingBag` (TorchRec's `EmbeddingBagCollection` consists of them) is replaced by a `_PaddedBag`. The
model's own code runs unchanged: it gets `Ragged` columns whose lists all have the same length. A table of raw ids is
replaced by a `_SearchedTable`.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ..loader.columns import Columns, Ragged, rows_of
from ..loader.foreign_ids import foreign_ids
from ..raw_ids import RawTable
from .request import Feature

Predict: TypeAlias = Callable[[nn.Module, Columns], Tensor]
"""A function that calls the model with a batch. The server answers with its value."""

_OPSET = 18
"""The version of ONNX's operators, which ONNX Runtime has supported since 1.14, of February 2023."""


class _PaddedBag(nn.Module):
    """An `nn.EmbeddingBag` whose bags all have the same length, padded with -1.

    Raises:
        ValueError: The `nn.EmbeddingBag` has an option that cannot be exported.
    """

    def __init__(self, bag: nn.EmbeddingBag, path: str) -> None:
        super().__init__()
        if bag.mode not in ("sum", "mean") or bag.padding_idx is not None or bag.max_norm is not None:
            raise ValueError(
                f"{path}: an EmbeddingBag with mode={bag.mode!r}, padding_idx={bag.padding_idx} and "
                f"max_norm={bag.max_norm} cannot be exported: mode must be 'sum' or 'mean', the two others None"
            )
        self.weight, self.mean = bag.weight, bag.mode == "mean"
        self.last_offset = int(bag.include_last_offset)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if per_sample_weights is not None:
            raise ValueError("embedding bags with weights per sample cannot be exported")
        ids = input if offsets is None else input.view(offsets.shape[0] - self.last_offset, -1)  # (rows, longest)
        there = (ids >= 0).unsqueeze(2)
        pooled = nn.functional.embedding(ids.clamp(min=0), self.weight).where(there, 0).sum(1)  # (rows, columns)
        return pooled / there.sum(1).clamp(min=1) if self.mean else pooled


class _SearchedTable(nn.Module):
    """A table of raw ids, sorted by id, with a binary search: ONNX has neither maps nor searches."""

    def __init__(self, table: RawTable) -> None:
        super().__init__()
        state = table.rows_state()
        default = table.weight.new_zeros(1, table.weight.shape[1])
        if table.default_row is not None:
            default = table.default_row.detach()[None]
        self.keys = nn.Buffer(state["ids"])
        self.vectors_by_id = nn.Buffer(torch.cat([state["weight"], default]))  # the last one is of unknown ids

    def forward(self, ids: Tensor) -> Tensor:
        ids, size = ids.long(), len(self.keys)
        below = torch.zeros_like(ids)  # how many ids of the table are known to be at most this one
        for bit in reversed(range(size.bit_length())):
            further = below + (1 << bit)
            there = (further <= size) & (self.keys[(further - 1).clamp(max=size - 1)] <= ids)
            below = torch.where(there, further, below)
        if not size:
            return self.vectors_by_id[below]
        row = (below - 1).clamp(min=0)
        return self.vectors_by_id[torch.where(self.keys[row] == ids, row, size)]


class _Served(nn.Module):
    """A model whose inputs are tensors, one for each column, shape (rows, 1) or (rows, longest), instead of a batch."""

    def __init__(self, model: nn.Module, features: Mapping[str, Feature], predict: Predict) -> None:
        super().__init__()
        self.model, self.features, self.predict = model, features, predict

    def forward(self, *tensors: Tensor) -> Tensor:
        batch: Columns = {}
        for (name, feature), tensor in zip(self.features.items(), tensors, strict=True):
            if feature.is_list:
                rows, longest = tensor.shape
                batch[name] = Ragged(tensor.reshape(-1), torch.arange(rows + 1) * longest)
            else:
                batch[name] = tensor.squeeze(1)
        return _two_dimensional(self.predict(self.model, batch))


def write_onnx(model: nn.Module, features: Mapping[str, Feature], predict: Predict, output: str, path: Path) -> Tensor:
    """Write `model` to `path`, and its weights to a file next to it. Check that it answers like the model.

    Args:
        model: The model; it is not changed.
        features: The columns of a batch, in order, which become the inputs.
        predict: The function that calls the model.
        output: The name of the output, of shape (rows, width).

    Returns:
        The model's answers for some rows.

    Raises:
        ValueError: The model does not accept such columns, cannot be exported, or its export answers differently.
    """
    plain = _plain_copy(model)
    answers = {rows: _ask(plain, predict, _batch(features, rows)) for rows in (200, 64, 1)}
    served = _Served(_with_padded_bags(plain), features, predict).eval()
    batch, dim = _padded(_batch(features, 64)), torch.export.Dim
    shapes = tuple(
        {0: dim("rows"), 1: dim(f"longest_{i}")} if f.is_list else {0: dim("rows")}
        for i, f in enumerate(features.values())
    )
    try:
        with torch.no_grad(), _quiet():
            torch.onnx.export(
                served,
                tuple(batch.values()),
                path,
                dynamo=True,
                input_names=list(features),
                output_names=[output],
                dynamic_shapes=(shapes,),
                opset_version=_OPSET,
                external_data=True,
                verbose=False,
            )
    except Exception as error:
        raise ValueError(
            f"torch cannot export the model to ONNX: {error}\nIts forward may not decide by the data in tensors, and "
            "lists go to an EmbeddingBag, or by nbdist.recsys.loader.columns.keyed_jagged to an EmbeddingBagCollection"
        ) from error
    for rows, answer in answers.items():
        _compare(path, _padded(_batch(features, rows)), answer, output)
    return answers[64]


def looked_up(model: nn.Module, features: Mapping[str, Feature], predict: Predict) -> list[tuple[nn.Module, list[str]]]:
    """Return the tables of a model, each with the columns of codes that it looks up in a batch.

    Args:
        model, features, predict: As for `write_onnx`.

    Raises:
        ValueError: The model does not accept such columns.
    """
    plain = _plain_copy(model)
    batch = _batch(features, 64)
    codes = {name: column for name, column in batch.items() if features[name].size is not None}
    found: dict[str, list[str]] = {}

    def look(path: str, ids: object) -> None:
        for name, column in codes.items():
            values = column.values if isinstance(column, Ragged) else column
            if isinstance(ids, Tensor) and torch.equal(ids.reshape(-1), values) and name not in found[path]:
                found[path].append(name)

    for path, module in plain.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            found[path] = []
            module.register_forward_pre_hook(lambda _, given, path=path: look(path, given[0] if given else None))
    _ask(plain, predict, batch)
    return [(model.get_submodule(path), columns) for path, columns in found.items() if columns]


def _plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the CPU, in evaluation mode. Tensors that are on the CPU are shared."""
    tensors = [*model.parameters(), *model.buffers()]
    plain = copy.deepcopy(model, {id(t): t for t in tensors if t.device.type == "cpu"}).cpu().eval()
    around = nn.ModuleDict({"model": plain})
    child: Any
    for module in [*around.modules()]:
        for name, child in module.named_children():
            if hasattr(child, "apart"):  # one table for several columns, where a wrong id is another column's row
                setattr(module, name, child.apart().eval())
    return around["model"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep log messages of torch and TorchRec out of the cell."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # torch.onnx, torch.fx and, on the root logger, TorchRec
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _two_dimensional(answer: object) -> Tensor:
    """Return a model's answer, shape (rows,) or (rows, width), as (rows, width)."""
    if not isinstance(answer, Tensor) or answer.ndim not in (1, 2):
        found = f"of shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else f"a {type(answer).__name__}"
        raise ValueError(f"the model's answer is {found}: it has to be one tensor of shape (rows,) or (rows, width)")
    return answer.unsqueeze(1) if answer.ndim == 1 else answer


def _with_padded_bags(model: nn.Module) -> nn.Module:
    for path, module in model.named_modules():
        for name, child in module.named_children():
            if isinstance(child, nn.EmbeddingBag):
                setattr(module, name, _PaddedBag(child, f"{path}.{name}".lstrip(".")))
            elif isinstance(child, RawTable):
                setattr(module, name, _SearchedTable(child))
    return _PaddedBag(model, "the model") if isinstance(model, nn.EmbeddingBag) else model


def _batch(features: Mapping[str, Feature], rows: int) -> Columns:
    """Make rows to test with, always the same: random codes, including the highest, and lists of 0 to 4 codes. If
    there are lists of numbers, all lists of a row have one length.
    """
    draw = np.random.default_rng(rows)
    batch: Columns = {}
    alike = any(feature.is_list and feature.size is None for feature in features.values())
    common = draw.integers(0, 5, rows)
    for name, feature in features.items():
        lengths = (common if alike else draw.integers(0, 5, rows)) if feature.is_list else np.ones(rows, int)
        lengths[0] = 4 if feature.is_list else 1
        if feature.size is None:
            most = min(1_000_000, np.iinfo(feature.dtype).max) if feature.is_list else 2
            values = draw.integers(0, most, lengths.sum()).astype(feature.dtype)
        else:
            values = draw.integers(0, feature.size, lengths.sum())
            values[0] = feature.size - 1
        column = torch.from_numpy(values)
        batch[name] = Ragged(column, torch.from_numpy(np.cumsum([0, *lengths]))) if feature.is_list else column
    return batch


def _padded(batch: Columns) -> dict[str, Tensor]:
    """Return the columns in the form of the exported model's inputs."""
    result = {}
    for name, column in batch.items():
        if isinstance(column, Ragged):
            there = torch.arange(int(column.lengths.max())) < column.lengths[:, None]
            result[name] = torch.full(there.shape, -1, dtype=column.values.dtype).masked_scatter(there, column.values)
        else:
            result[name] = column.unsqueeze(1)
    return result


def _ask(model: nn.Module, predict: Predict, batch: Columns) -> Tensor:
    try:
        with torch.no_grad(), _quiet():
            answer = _two_dimensional(predict(model, batch))
    except Exception as error:
        why = isinstance(error, IndexError) and foreign_ids(model, batch)
        why = why or f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the model cannot take the workflow's {', '.join(batch)}: {why}. It is tested "
            "with batches like a loader's, dicts of these columns with random codes; see columns= and predict="
        ) from error
    if len(answer) != rows_of(next(iter(batch.values()))):
        raise ValueError(f"the model's answer to a batch has the shape {tuple(answer.shape)}: not an answer per row")
    return answer


def _compare(path: Path, batch: Mapping[str, Tensor], answer: Tensor, output: str) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run([output], {name: tensor.numpy() for name, tensor in batch.items()})
    difference = float(np.abs(found - answer.numpy()).max())
    if not difference <= 1e-5 * max(1.0, float(answer.abs().max())):
        raise ValueError(
            f"the exported model's answers differ from the model's by up to {difference:.2g}: something in its forward "
            "depends on the length or order of lists, or on random numbers"
        )
