"""The check of each step's loss and gradients, and the search for what made one of them NaN or infinite."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import NotFinite
from .finite import all_finite, bad_rows, batch_rows, is_float, number, tensors_in
from .graph import blame, steepest
from .hooks import Models, after_forward, around_steps, in_training, parameters_of, replace
from .report import error, name_of, path_of, text_of, unwrapped
from .trace import Culprit, Source, run_again

#: Calls of models that are remembered, for the search.
_MOST_CALLS = 16
#: Seconds that a rank waits whose own numbers are right: the rank that made others not finite says more.
PATIENCE = 20.0


class ModelCall(NamedTuple):
    """The forward pass of a model, and what it takes to run it again."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[str, bool, torch.dtype]
    gradients: dict[int, Tensor]
    """Those of its results, by number, once a backward pass has made them."""
    results: Sequence[Any]
    """The nodes of those results that require a gradient."""

    def again(self) -> Any:
        """Run the forward pass."""
        kind, enabled, dtype = self.autocast
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            return self.module(*self.args, **self.kwargs)


class Batch(NamedTuple):
    """The batch that a loop trains on."""

    step: int
    loss: Callable[[], Tensor]
    """Computes its loss, again."""
    columns: Any
    """A mapping from name to column, or tensors."""
    rows: int

    def values(self) -> Sequence[Any]:
        """Return the columns as arguments of a model are given."""
        return self.columns if isinstance(self.columns, (list, tuple)) else [self.columns]


class NanCheck:
    """The check of one call."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        """Set by loops that know it, such as `fit`."""
        self._calls: collections.deque[ModelCall] = collections.deque(maxlen=_MOST_CALLS)
        self._models = Models()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers in a step
        self._losses: list[Tensor] = []
        self._scaled = False
        self._in_closure: Any = None
        self._node: Any = None  # of the last loss

    # ------------------------------------------------------------------------------------------------- what it hears

    def called(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Remember a call of a model in training; hooked to all modules."""
        if self._models.is_inner(module) or not in_training():
            return
        if self._models.is_new(module):
            inner = {id(one) for one in module.modules() if one is not module}
            kept = [call for call in self._calls if id(call.module) not in inner]  # the others were called by this one
            self._calls = collections.deque(kept, maxlen=_MOST_CALLS)
        gradients: dict[int, Tensor] = {}
        results = [one for one in tensors_in(output) if one.requires_grad]
        kind = results[0].device.type if results else "cpu"
        autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        for place, one in enumerate(results):
            one.register_hook(functools.partial(gradients.__setitem__, place))
        nodes = [one.grad_fn for one in results]
        self._calls.append(ModelCall(module, args, kwargs, autocast, gradients, nodes))

    def before_backward(self, tensors: Any, gradients: Any) -> None:
        """Check a loss: on a CPU now, else together with the gradients, as the host would have to wait."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if gradients is not None or self._scaled:
            return
        for loss in tensors:
            if loss.numel() != 1 or not loss.is_floating_point():
                continue
            self._node = loss.grad_fn
            if loss.device.type != "cpu":
                self._losses.append(loss.detach())
            elif not -float("inf") < loss.item() < float("inf"):
                raise self._loss_error(loss)

    def scaled(self) -> None:
        """A gradient scaler is in use: it leaves steps out that overflow."""
        self._scaled = True

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check the gradients, those of a closure after each of its calls."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        if optimizer in self._open:  # called by the `step` of a subclass
            return None
        self._open.add(optimizer)
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if closure is None:
            self._check(optimizer)
            return None

        def checked() -> Any:
            self._in_closure = optimizer
            try:
                loss = closure()
                self._check(optimizer)
            finally:
                self._in_closure = None
            return loss

        return (args[0], checked, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Know that a step is over."""
        self._open.discard(optimizer)

    def _check(self, optimizer: Any) -> None:
        """Raise `NotFinite` unless the losses and gradients of a step are finite."""
        losses, self._losses = self._losses, []
        parameters = parameters_of(optimizer)
        gradients = [one.grad for one in parameters if one.grad is not None]
        # A scaler that leaves it to the optimizer to skip a step has set `found_inf`.
        if getattr(optimizer, "found_inf", None) is None and not all_finite([*losses, *gradients]):
            for loss in losses:
                if not bool(loss.isfinite()):
                    raise self._loss_error(loss)
            raise self._gradient_error(parameters, optimizer)
        self._node = None
        if len(self._steps) == 1:
            self._calls.clear()

    def at_the_end(self) -> None:
        """Check the parameters that the last steps have left."""
        for optimizer, steps in list(self._steps.items()):
            found = self._bad_parameter(parameters_of(optimizer), steps) if steps else None
            if found is not None:
                raise found

    # ---------------------------------------------------------------------------------------------------- the search

    def _step(self, optimizer: Any = None) -> int:
        """Return the number of the step that is being made."""
        if self.batch is not None:
            return self.batch.step
        optimizer = optimizer or self._in_closure
        if optimizer is not None:
            return self._steps[optimizer]
        return min(self._steps.values(), default=0) + 1

    def _roots(self) -> list[nn.Module]:
        return list(dict.fromkeys([*(call.module for call in self._calls), *self._models.all]))

    def _loss_error(self, loss: Tensor) -> NotFinite:
        step, value = self._step(), number(float(loss.detach()))
        for call in self._calls:
            found = self._bad_parameter(list(call.module.parameters()), step - 1)
            if found is not None:
                return found
        batch: Sequence[Any]
        if self.batch is None:
            for call in self._calls:
                size = batch_rows([call.args, call.kwargs])
                culprit = run_again(call.again, size)
                if culprit is not None:
                    return self._error("loss", step, value, culprit, _named(call), size)
            batch = [one for call in list(self._calls)[:1] for one in _named(call)]
            size = batch_rows(batch)
        else:
            batch, size = self.batch.values(), self.batch.rows
            culprit = run_again(self.batch.loss, size)
            if culprit is not None:
                return self._error("loss", step, value, culprit, batch, size)
        node = blame(loss, size) if loss.grad_fn is not None else None
        if node is None:
            cause = "the results of the model are finite: look at what computes the loss from them"
            return error("loss", step, value, cause=cause if self._calls else "")
        _, module = ("", "") if node.parameter is None else name_of(node.parameter, self._roots())
        about: dict[str, Any] = {"rows": node.rows, "batch": batch, "size": size}
        return error("loss", step, value, op=node.op, module=module, after=True, **about)

    def _gradient_error(self, parameters: Sequence[Tensor], optimizer: Any) -> NotFinite:
        step = self._step(optimizer)
        found = self._bad_parameter(parameters, step - 1)
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
        op = steepest(self._node, call.results) if self._node is not None else ""
        cause = "it is so for the model's result already: look at what computes the loss from that"
        about: dict[str, Any] = {"rows": rows, "batch": _named(call), "size": size, "op": op, "after": bool(op)}
        return error("gradient", step, value, module=own, cause=cause, backward=bool(op), **about)

    def _runs(self, parameters: Sequence[Tensor]) -> Iterator[tuple[Any, Sequence[Tensor], Any, Sequence[Any], int]]:
        """What can be run again with its backward pass, the last first."""
        if self.batch is not None:
            yield self.batch.loss, parameters, (), self.batch.values(), self.batch.rows
            return
        for call in reversed(self._calls):
            gradients = [call.gradients.get(place) for place in range(len(call.results))]
            finite = [one for one in gradients if one is not None]
            if finite and all_finite(finite):
                wanted = [one for one in call.module.parameters() if one.requires_grad]
                wanted += [one for one in tensors_in([call.args, call.kwargs]) if one.requires_grad]
                yield call.again, wanted, gradients, _named(call), batch_rows([call.args, call.kwargs])

    def _bad_parameter(self, parameters: Sequence[Tensor], step: int) -> NotFinite | None:
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
        if name:
            cause = f"`{name}` has {text_of(found.tensor)}"
        else:
            cause, module = f"the batch has {text_of(found.tensor)}{_column(batch)}", self._first_module()
        return error(kind, step, value, **about, module=module, parameter=name, cause=cause)

    def _first_module(self) -> str:
        return type(unwrapped(self._calls[0].module)).__name__ if self._calls else ""

    def _wait_for_others(self) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            time.sleep(PATIENCE)  # an interrupt ends it as soon as another rank has said why


def _named(call: ModelCall) -> list[Any]:
    return [*call.args, dict(call.kwargs)]


def _column(batch: Sequence[Any]) -> str:
    """Return which column of a batch is not finite, in words; empty for a batch without names."""
    named = [(name, one) for value in batch if isinstance(value, Mapping) for name, one in value.items()]
    bad = [name for name, one in named if is_float(one) and not all_finite([one])]
    return f" in column `{bad[0]}`" if bad else ""


_active: list[NanCheck] = []


def active() -> NanCheck | None:
    """Return the check of the call that runs; None where none was asked for."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def nan_check() -> Iterator[NanCheck]:
    """Check each loss and gradient inside `with`; raises `NotFinite`. Where that is done already, this adds nothing."""
    if _active:
        yield _active[-1]
        return
    check = NanCheck()
    _active.append(check)
    with contextlib.ExitStack() as stack:
        stack.callback(_active.remove, check)
        after_forward(stack, check.called)
        around_steps(stack, check.before_step, check.after_step)
        replace(stack, torch.autograd, "backward", functools.partial(_backward, check))
        for name in ("torch.amp.grad_scaler", "torch.distributed.fsdp.sharded_grad_scaler"):
            for scaler in ("GradScaler", "ShardedGradScaler"):
                module = sys.modules.get(name)
                if module is not None and "scale" in vars(getattr(module, scaler, object)):
                    replace(stack, getattr(module, scaler), "scale", functools.partial(_scale, check))
        yield check
        check.at_the_end()


def _backward(check: NanCheck, original: Any) -> Any:
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        check.before_backward(tensors, grad_tensors)
        original(tensors, grad_tensors, *args, **kwargs)

    return backward


def _scale(check: NanCheck, original: Any) -> Any:
    def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            check.scaled()
        return original(scaler, *args, **kwargs)

    return scale
