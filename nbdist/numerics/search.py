"""The search for the cause of a loss, gradient or parameter that is NaN or infinite. It runs only after one was
found."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import NotFinite
from .finite import all_finite, bad_rows, batch_rows, is_float, number, tensors_in
from .graph import blame, steepest
from .report import error, name_of, path_of, text_of, unwrapped
from .trace import Culprit, Source, run_again

#: Seconds that a rank waits whose own numbers are right: the rank that made others not finite says more.
PATIENCE = 20.0


class ModelCall(NamedTuple):
    """The forward pass of a model, with everything that is needed to run it again."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[str, torch.dtype | None]
    """The kind of device, and the type that autocast used there; None without autocast."""
    gradients: dict[int, Tensor]
    """The gradients of its results, by number, after a backward pass."""
    results: int
    """The number of results that require a gradient."""
    last: int
    """The number of the last operation in its graph. The graph itself is not kept, because it holds all activations."""

    def again(self) -> Any:
        """Run the forward pass."""
        kind, dtype = self.autocast
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            return self.module(*self.args, **self.kwargs)


class Batch(NamedTuple):
    """The batch of a training loop."""

    step: int
    loss: Callable[[], Tensor]
    """A function that computes the loss of the batch again."""
    columns: Any
    """A mapping from name to column, or tensors."""
    rows: int

    def values(self) -> Sequence[Any]:
        """Return the columns in the form of a model's arguments."""
        return self.columns if isinstance(self.columns, (list, tuple)) else [self.columns]


class Search:
    """The search after a check has failed.

    Args:
        calls: The calls of models since the last step.
        models: All models of the call.
        batches: The batches of the step, if the training loop knows them.
        updated: The `id` of each parameter that optimizers update.
        bad_before: The `id` of each parameter that was not finite before its first update.
    """

    def __init__(
        self,
        calls: Sequence[ModelCall],
        models: Iterable[nn.Module],
        batches: Sequence[Batch],
        updated: Container[int],
        bad_before: Container[int],
    ) -> None:
        self._calls, self._models, self._batches = calls, list(models), batches
        self._updated, self._bad_before = updated, bad_before

    def _roots(self) -> list[nn.Module]:
        return list(dict.fromkeys([*(call.module for call in self._calls), *self._models]))

    def _called(self) -> list[nn.Module]:
        """Return the models that the step has called; all models if the calls are not recorded."""
        return [call.module for call in self._calls] or self._models

    def loss_error(self, loss: Tensor, step: int) -> NotFinite:
        """Return the error for a loss that is not finite."""
        value = number(float(loss.detach()))
        for module in self._called():
            found = self.bad_parameter(list(module.parameters()), step - 1)
            if found is not None:
                return found
        batch: Sequence[Any]
        if not self._batches:
            for call in self._calls:
                size = batch_rows([call.args, call.kwargs])
                culprit = run_again(call.again, size)
                if culprit is not None:
                    return self._error("loss", step, value, culprit, _named(call), size)
            batch = [one for call in list(self._calls)[:1] for one in _named(call)]
            size = batch_rows(batch)
        else:
            last = self._batches[-1]
            batch, size = last.values(), last.rows
            culprit = run_again(last.loss, size)
            if culprit is not None:
                return self._error("loss", step, value, culprit, batch, size)
        node = blame(loss, size) if loss.grad_fn is not None else None
        if node is None:
            cause = "the results of the model are finite: look at what computes the loss from them"
            return error("loss", step, value, cause=cause if self._calls or self._batches else "")
        _, path = ("", "") if node.parameter is None else name_of(node.parameter, self._roots())
        about: dict[str, Any] = {"rows": node.rows, "batch": batch, "size": size}
        return error("loss", step, value, op=node.op, module=path, after=True, **about)

    def gradient_error(self, parameters: Sequence[Tensor], step: int, node: Any) -> NotFinite:
        """Return the error for gradients if some are not finite. `node` is the node of the last loss in its
        graph."""
        found = self.bad_parameter(parameters, step - 1)
        if found is not None:
            return found
        bad = [one for one in parameters if one.grad is not None and not all_finite([one.grad])]
        value = text_of(bad[0].grad) if bad[0].grad is not None and not bad[0].grad.is_sparse else "not finite"
        outside: tuple[Sequence[int], ModelCall] | None = None
        for run, wanted, gradients, batch, size in self._runs(parameters):
            culprit = run_again(run, size, wanted, gradients)
            if culprit is not None:
                return self._error("gradient", step, value, culprit, batch, size)
        for call in reversed(self._calls):
            incoming = [one for one in call.gradients.values() if not all_finite([one])]
            if incoming:
                outside = bad_rows(incoming[0], batch_rows([call.args, call.kwargs])), call
        name, module = name_of(bad[-1], self._roots())
        if outside is None:
            self._wait_for_others()
            cause = "no operation of this rank makes it so: another rank's gradients, or what was done to them, may"
            return error("gradient", step, value, parameter=name, module=module, cause=cause)
        rows, call = outside
        size, own = batch_rows([call.args, call.kwargs]), type(unwrapped(call.module)).__name__
        op = steepest(node, call.last) if node is not None else ""
        cause = "it is so for the model's result already: look at what computes the loss from that"
        about: dict[str, Any] = {"rows": rows, "batch": _named(call), "size": size, "op": op, "after": bool(op)}
        return error("gradient", step, value, module=own, cause=cause, backward=bool(op), **about)

    def _runs(self, parameters: Sequence[Tensor]) -> Iterator[tuple[Any, Sequence[Tensor], Any, Sequence[Any], int]]:
        """Yield the forward passes that can be run again together with their backward pass, the last one first."""
        for batch in reversed(self._batches):
            yield batch.loss, parameters, (), batch.values(), batch.rows
        if self._batches:
            return
        for call in reversed(self._calls):
            gradients = [call.gradients.get(place) for place in range(call.results)]
            finite = [one for one in gradients if one is not None]
            if finite and all_finite(finite):
                wanted = [one for one in call.module.parameters() if one.requires_grad]
                wanted += [one for one in tensors_in([call.args, call.kwargs]) if one.requires_grad]
                yield call.again, wanted, gradients, _named(call), batch_rows([call.args, call.kwargs])

    def bad_parameter(self, parameters: Sequence[Tensor], step: int) -> NotFinite | None:
        """Return the error for the first parameter that an update has made not finite, if there is one."""
        parameters = [one for one in parameters if id(one) in self._updated and id(one) not in self._bad_before]
        if all_finite(parameters):
            return None
        one = next(one for one in parameters if not all_finite([one]))
        name, module = name_of(one, self._roots())
        return error("parameter", step, text_of(one), parameter=name or "of no module", module=module)

    def _error(
        self, kind: str, step: int, value: str, found: Culprit | Source, batch: Sequence[Any], size: int
    ) -> NotFinite:
        about: dict[str, Any] = {"rows": found.rows, "batch": batch, "size": size}
        if isinstance(found, Culprit):
            module = path_of(found.module, self._roots())
            about |= {"op": found.op, "backward": found.backward, "place": found.place, "module": module}
            return error(kind, step, value, **about, dtype=found.dtype)
        name, module = name_of(found.tensor, self._roots())
        is_parameter = isinstance(found.tensor, nn.Parameter)
        frozen = is_parameter and not found.tensor.requires_grad
        if name and is_parameter and (frozen or step == 1 or id(found.tensor) in self._bad_before):
            cause = "no update of an optimizer made it so" + ", it is frozen" * frozen
            return error("parameter", step, text_of(found.tensor), module=module, parameter=name, cause=cause)
        if name:
            cause = f"`{name}` has {text_of(found.tensor)}"
        else:
            cause, module = f"the batch has {text_of(found.tensor)}{_column(batch)}", self._first_module()
        return error(kind, step, value, **about, module=module, parameter=name, cause=cause)

    def _first_module(self) -> str:
        return type(unwrapped(self._called()[0])).__name__ if self._called() else ""

    def _wait_for_others(self) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            time.sleep(PATIENCE)  # an interrupt ends it as soon as another rank has said why


def _named(call: ModelCall) -> list[Any]:
    return [*call.args, dict(call.kwargs)]


def _column(batch: Sequence[Any]) -> str:
    """Describe the column of a batch that is not finite; empty for a batch without names."""
    named = [(name, one) for value in batch if isinstance(value, Mapping) for name, one in value.items()]
    bad = [name for name, one in named if is_float(one) and not all_finite([one])]
    return f" in column `{bad[0]}`" if bad else ""
