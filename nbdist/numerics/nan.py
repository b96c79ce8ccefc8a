"""The check of the loss and the gradients of each step for NaN and infinities."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..errors import NotFinite
from ..system.interrupts import undivided_context
from .finite import all_finite, has_graph, tensors_in
from .hooks import AfterForward, Models, around_steps, gradients_of, in_training, is_running, parameters_of, replace
from .search import Batch, ModelCall, Search

#: Calls of models that are remembered, for the search.
_MOST_CALLS = 16
#: Steps of an optimizer after which its models are known.
_STEPS_TO_KNOW = 2


class NanCheck:
    """The check of one call.

    What runs in each step is kept short: it runs with cold caches, after the model's own operations, and takes there
    some five times as long as in a loop of its own.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        """The batches of the current step, from loops that can compute their losses again, such as `fit`."""
        self.forwards: AfterForward | None = None
        """Set by `nan_check`: the source of calls of models."""
        self._calls: collections.deque[ModelCall] = collections.deque(maxlen=_MOST_CALLS)
        self._models = Models()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._bad_before: dict[int, Tensor] = {}  # by `id`: parameters that were not finite before their first update
        self._in_step: list[tuple[Any, types.FrameType]] = []  # optimizers, each with the frame of its step
        self._losses: list[Tensor] = []
        self._scaled = False
        self._in_closure: Any = None
        self._node: Any = None  # of the last loss

    # ------------------------------------------------------------------------------------------------- what is checked

    def begin(self, batch: Batch) -> None:
        """Record that a loop begins with a batch."""
        if self.batches and self.batches[0].step != batch.step:
            self.batches = []
        self.batches.append(batch)

    def end_of_batches(self) -> None:
        """Record that the loop has ended: the calls of models are needed again."""
        assert self.forwards is not None
        self.batches = []
        self.forwards.of_all()

    def called(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Remember a call of a model in training. A hook of all modules calls this."""
        assert self.forwards is not None
        unsure = self.forwards.everywhere  # or else only models are hooked
        if not in_training() or (unsure and self._models.is_inner(module)):
            return
        if unsure and self._models.is_new(module):
            inner = {id(one) for one in module.modules() if one is not module}
            kept = [call for call in self._calls if id(call.module) not in inner]  # the others were called by this one
            self._calls = collections.deque(kept, maxlen=_MOST_CALLS)
        gradients: dict[int, Tensor] = {}
        results = [one for one in ([output] if type(output) is Tensor else tensors_in(output)) if one.requires_grad]
        kind = "cpu" if not results or results[0].is_cpu else results[0].device.type
        autocast = kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        last = 0
        for place, one in enumerate(results):
            last = max(last, _on_gradient(one, functools.partial(gradients.__setitem__, place)))
        if has_graph(args) or (kwargs and has_graph(kwargs)):
            args, kwargs = tree_map(_without_graph, (args, kwargs))
        self._calls.append(ModelCall(module, args, kwargs, autocast, gradients, len(results), last))

    def before_backward(self, tensors: Any, gradients: Any) -> None:
        """Check a loss: on a CPU immediately; on a GPU together with the gradients, because otherwise the host
        would have to wait.
        """
        if gradients is not None or self._scaled:
            return
        for loss in [tensors] if isinstance(tensors, Tensor) else list(tensors):
            if loss.numel() != 1 or not loss.is_floating_point():
                continue
            self._node = loss.grad_fn
            if not loss.is_cpu:
                self._losses.append(loss.detach())
            elif not -float("inf") < loss.item() < float("inf"):
                raise self._found(functools.partial(Search.loss_error, loss=loss, step=self._step()))

    def scaled(self) -> None:
        """Record that a gradient scaler is in use, which skips steps whose gradients overflow."""
        self._scaled = True

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check the gradients. If a step has a closure, check them after each call of the closure."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        if self._in_step:  # a step that raised is not reported as over, but its frame has ended
            self._in_step = [one for one in self._in_step if is_running(one[1])]
            if any(one[0] is optimizer for one in self._in_step):  # called by the `step` of a subclass
                return None
        self._in_step.append((optimizer, sys._getframe(1)))
        self._steps[optimizer] = steps = self._steps.get(optimizer, 0) + 1
        if steps == 1 and not all_finite(parameters := parameters_of(optimizer)):
            self._bad_before |= {id(one): one for one in parameters if not all_finite([one])}
        if closure is None:
            self._check(optimizer, steps)
            return None

        def checked() -> Any:
            self._in_closure = optimizer
            try:
                loss = closure()
                self._check(optimizer, steps)
            finally:
                self._in_closure = None
            return loss

        return (args[0], checked, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Record that a step is over."""
        if self._in_step and self._in_step[-1][0] is optimizer:
            self._in_step.pop()

    def _check(self, optimizer: Any, steps: int) -> None:
        """Raise `NotFinite` unless the losses and gradients of a step are finite."""
        losses, self._losses = self._losses, []
        gradients = gradients_of(optimizer)
        # A scaler that leaves it to the optimizer to skip a step has set `found_inf`.
        if getattr(optimizer, "found_inf", None) is None and not all_finite(losses + gradients):
            for loss in losses:
                if not bool(loss.isfinite()):
                    raise self._found(functools.partial(Search.loss_error, loss=loss, step=self._step()))
            parameters, step = parameters_of(optimizer), self._step(optimizer)
            raise self._found(lambda search: search.gradient_error(parameters, step, self._node))
        self._node = None
        self._look_at_models(steps)
        if len(self._steps) == 1:
            self._calls.clear()

    def _look_at_models(self, steps: int) -> None:
        """Hook only the models once they are known, or no module if the losses of batches can be computed again. If no
        model was called in a step, hook all modules again."""
        assert self.forwards is not None
        if self.forwards.everywhere and self._calls and steps > _STEPS_TO_KNOW:
            self.forwards.only_of(() if self.batches else self._models.all)
        elif not self.forwards.everywhere and not self._calls and not self.batches:
            self.forwards.of_all()

    def at_the_end(self) -> None:
        """Check the parameters after the last steps."""
        for optimizer, steps in list(self._steps.items()):
            found = self._search().bad_parameter(parameters_of(optimizer), steps) if steps else None
            if found is not None:
                raise found

    def _found(self, search: Callable[[Search], NotFinite]) -> NotFinite:
        """Return the error that a search finds, and forget the calls of models: neither the calls before the error nor
        the calls that the search repeats belong to later steps of a loop that catches the error."""
        try:
            return search(self._search())
        finally:
            self._calls.clear()

    def _search(self) -> Search:
        updated = {id(one) for optimizer in list(self._steps) for one in parameters_of(optimizer) if one.requires_grad}
        return Search(list(self._calls), self._models.all, self.batches, updated, self._bad_before)

    def _step(self, optimizer: Any = None) -> int:
        """Return the number of the current step."""
        if self.batches:
            return self.batches[-1].step
        optimizer = optimizer or self._in_closure
        if optimizer is not None:
            return self._steps[optimizer]
        return min(self._steps.values(), default=0) + 1


def _on_gradient(result: Tensor, action: Callable[[Tensor], None]) -> int:
    """Call `action` with the gradient of a result in the backward pass. Return the number of the operation that made
    the result; 0 if none did."""
    node: Any = result.grad_fn
    if node is None or type(result) is not Tensor or result._backward_hooks is not None:
        result.register_hook(action)
        return 0 if node is None else int(node._sequence_nr())
    # As `register_hook` does it. The handle for the removal, which it also makes, takes most of its time.
    result._backward_hooks = collections.OrderedDict(nbdist=action)
    node._register_hook_dict(result)
    return int(node._sequence_nr())


def _without_graph(value: Any) -> Any:
    """Return a result as a tensor that keeps neither its graph nor the memory of other tensors."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


_active: list[NanCheck] = []


def active() -> NanCheck | None:
    """Return the check of the current call; None if no check was asked for."""
    return _active[-1] if _active else None


@undivided_context
def nan_check() -> Iterator[NanCheck]:
    """Check each loss and gradient in the `with` block. Raises `NotFinite`. If a check already runs, it goes on
    alone."""
    if _active:
        yield _active[-1]
        return
    check = NanCheck()
    _active.append(check)
    with contextlib.ExitStack() as stack:
        stack.callback(_active.remove, check)
        check.forwards = AfterForward(stack, check.called)
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
