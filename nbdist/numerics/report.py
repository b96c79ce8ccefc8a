"""The texts of errors about numbers that are not finite: the number, its place, the rows, and what helps."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import NotFinite
from .finite import MOST_ROWS, number

#: Wrappers of a model, as they appear in the names of its parameters.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_dmp_wrapped_module.", "_checkpoint_wrapped_module.")
#: Numbers of a row that are shown of one tensor, and tensors that are shown.
_MOST_NUMBERS, _MOST_COLUMNS = 6, 12
_HALF = {torch.float16, torch.bfloat16}

_LOGARITHM = "give a logarithm values above 0 only, such as x.clamp(min=1e-6).log(), or use a loss of logits"
_QUOTIENT = "keep the denominator away from 0"
_ROOT = "add a small number below a root, sqrt(x + eps): its gradient at 0 is infinite"
_EXPONENTIAL = "subtract the maximum first, as softmax and logsumexp do, or clamp the exponent"
_MASK = "let no mask hide all of a row"
_HELP = {
    **dict.fromkeys(("log", "log2", "log10", "xlogy"), _LOGARITHM),
    **dict.fromkeys(("div", "reciprocal"), _QUOTIENT),
    **dict.fromkeys(("sqrt", "rsqrt", "norm", "pow", "std", "vector_norm"), _ROOT),
    **dict.fromkeys(("exp", "expm1", "sinh", "cosh"), _EXPONENTIAL),
    **dict.fromkeys(("softmax", "log_softmax"), _MASK),
}
_RATE = "a lower learning rate, a warm-up, or clipped gradients (torch.nn.utils.clip_grad_norm_)"
_SOURCE = "look at where this value comes from: a checkpoint that was loaded, or the initialization"
_DATA = "mend or leave out such rows"


def rank() -> int:
    """Return the number of this rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def name_of(tensor: Tensor, models: Iterable[nn.Module]) -> tuple[str, str]:
    """Return the name of a parameter or buffer and the path of its module; empty texts if no module has it."""
    for model in (*models, *(one for one in gc.get_objects() if issubclass(type(one), nn.Module))):
        for name, one in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
            if one is tensor:
                name = plain(name)
                return name, name.rpartition(".")[0] or type(unwrapped(model)).__name__
    return "", ""


def path_of(module: nn.Module | None, models: Iterable[nn.Module]) -> str:
    """Return the path of a module in its model; for a model itself, the name of its class."""
    if module is None:
        return ""
    for model in models:
        for name, one in model.named_modules():
            if one is module and name:
                return plain(name + ".")[:-1] or type(unwrapped(module)).__name__
    return type(unwrapped(module)).__name__


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and `torch.compile`."""
    for name in ("module", "_orig_mod"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module) and type(model).__name__ in ("DistributedDataParallel", "OptimizedModule"):
            return unwrapped(inner)
    return model


def plain(name: str) -> str:
    """Return the name of a parameter without the prefixes of its model's wrappers."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def row_values(values: Sequence[Any], row: int, rows: int) -> dict[str, Any]:
    """Return the values in a row of a batch, by the names of the columns or the positions of the arguments."""
    found: dict[str, Any] = {}
    for place, value in enumerate(values, 1):
        named = value if isinstance(value, Mapping) else {f"argument {place}": value}
        for name, one in named.items():
            own = _row_of(one, row, rows)
            if own is not None and len(found) < _MOST_COLUMNS:
                found[str(name)] = own
    return found


def _row_of(one: Any, row: int, rows: int) -> Any:
    offsets = getattr(one, "offsets", None)  # of lists
    if isinstance(offsets, Tensor) and not isinstance(one, Tensor) and offsets.shape == (rows + 1,):
        return _numbers(one.values[int(offsets[row]) : int(offsets[row + 1])])
    if isinstance(one, Tensor) and one.ndim and one.shape[0] == rows:
        return _numbers(one[row])
    return None


def _numbers(own: Tensor) -> Any:
    values = own.detach().flatten()[:_MOST_NUMBERS].tolist()
    return values[0] if own.ndim == 0 else [*values, "..."] if own.numel() > _MOST_NUMBERS else values


def error(
    kind: str,
    step: int,
    value: str,
    *,
    op: str = "",
    backward: bool = False,
    module: str = "",
    parameter: str = "",
    place: str = "",
    rows: Sequence[int] = (),
    batch: Sequence[Any] = (),
    size: int = 0,
    dtype: torch.dtype | None = None,
    cause: str = "",
    after: bool = False,
) -> NotFinite:
    """Return the error for a number that is not finite.

    Args:
        kind: "loss", "gradient" or "parameter".
        step: The step of the optimizer, from 1. For a parameter without `cause`: the step whose update made it so.
        value: The number as text.
        op, backward, module, place, rows: The fields of `Culprit`, with the module as its path.
        parameter: The name of the parameter.
        batch: The batch, or the arguments of the model.
        size: The number of rows of the batch.
        dtype: The type of the operation's result.
        cause: The cause as text, if no operation is known.
        after: Whether the operation is not in the module, but computes the loss from the module's result.
    """
    own = rank()
    if kind == "parameter":
        first = f"parameter `{parameter}` of rank {own} is {value}"
        first += f": {cause}" if cause else f" after the update of step {step}"
    else:
        of = f" of parameter `{parameter}`" if kind == "gradient" and parameter else ""
        first = f"the {kind}{of} of step {step} is {value} on rank {own}"
    if op:
        first += f": {'the backward pass of ' if backward else 'the result of '}{op} is not finite"
    elif cause and kind != "parameter":
        first += f": {cause}"
    first += f" at {place}" if place else ""
    if module and kind != "parameter":
        first += (
            f", which computes the loss from the result of module `{module}`" if after else f", in module `{module}`"
        )
    named = list(rows)[:MOST_ROWS]
    first += f", in {_rows(named, len(rows))} of the batch" if named else ""
    values = [row_values(batch, row, size) for row in named] if size else []
    lines = [first]
    for row, columns in zip(named[:3], values, strict=False):
        if columns:
            lines.append(f"  Row {row}: {', '.join(f'{name}={value}' for name, value in columns.items())}.")
    helps = _help(kind, op, dtype, bool(named)) if kind != "parameter" or not cause else _SOURCE
    lines.append(f"  What helps: {helps}.")
    about: dict[str, Any] = {"module": module, "parameter": parameter, "rows": named, "values": values}
    return NotFinite("\n".join(lines), step=step, rank=own, kind=kind, op=op, **about)


def _rows(named: Sequence[int], count: int) -> str:
    if count == 1:
        return f"row {named[0]}"
    more = f" and {count - len(named)} more" if count > len(named) else ""
    return f"rows {', '.join(map(str, named))}{more}"


def _help(kind: str, op: str, dtype: torch.dtype | None, rows: bool) -> str:
    if kind == "parameter":
        return f"{_RATE}, or a larger eps of the optimizer"
    if dtype in _HALF and op not in _HELP:
        return f"compute this in float32 (torch.autocast(enabled=False)): {str(dtype).removeprefix('torch.')} overflows"
    if op in _HELP and (rows or op not in ("pow", "std", "norm")):
        return _HELP[op]
    return _DATA if rows else _RATE


def text_of(tensor: Tensor) -> str:
    """Return the first element that is not finite, as text."""
    flat = tensor.detach().flatten()
    bad = flat[~flat.isfinite()]
    return number(float(bad[0])) if len(bad) else "not finite"
