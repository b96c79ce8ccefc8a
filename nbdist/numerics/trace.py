"""A second run of a forward and backward pass, to find the first operation that makes a number not finite."""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode

from ..notebook.shell import cell_numbers
from ..system.interrupts import undivided
from ..system.source_files import is_library
from .alone import alone, eager
from .finite import bad_rows, badness, is_float, tensors_in

#: Operations that write infinities on purpose, as masks do.
_CONSTANTS = {
    *("masked_fill", "where", "full", "full_like", "new_full", "fill", "triu", "tril", "tensor"),
    *("setitem", "as_tensor", "scalar_tensor", "index_fill", "masked_scatter", "scatter"),
}
#: Operators by the functions that do the same.
_NAMES = {
    **dict.fromkeys(("truediv", "rtruediv", "rdiv", "itruediv", "true_divide"), "div"),
    **{"rpow": "pow", "ipow": "pow", "rmul": "mul", "imul": "mul", "rsub": "sub", "isub": "sub"},
    **{"radd": "add", "iadd": "add", "rmatmul": "matmul"},
}


class Culprit(NamedTuple):
    """The operation that made a number not finite."""

    op: str
    backward: bool
    """True if the backward pass of the operation made it so; False if the result is not finite."""
    module: nn.Module | None
    """The innermost module in which the operation was called."""
    place: str
    """The line of the user's code that called the operation; empty if it is unknown."""
    rows: Sequence[int]
    """The rows of the batch; empty if they are unknown, or if all rows are concerned."""
    dtype: torch.dtype | None = None
    """The type of the result."""


class Source(NamedTuple):
    """A tensor that was not finite before any operation: a column of the batch, or a parameter."""

    tensor: Tensor
    rows: Sequence[int]


class _Op(NamedTuple):
    name: str
    module: nn.Module | None
    place: str
    inputs: Sequence[tuple[Tensor, int, int]]
    """For each tensor, how it is not finite, and the number of the operation that made it; -1: no operation."""
    outputs: Sequence[tuple[Tensor, int]]


class Trace(TorchFunctionMode):
    """The recorder of the operations that run in the `with` block. It is used only in a search, because it is slow."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self._ops: list[_Op] = []
        self._made_by: dict[int, int] = {}
        self._modules: list[nn.Module] = []
        self._grads: dict[int, int] = {}  # by the identity of a tensor: how bad its gradient is
        self._bad_grads: dict[int, Tensor] = {}
        self._hooked: list[Tensor] = []  # kept, so that identities are not given again

    def __torch_function__(
        self, func: Any, _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [one for one in tensors_in([list(args), dict(kwargs or {})]) if is_float(one)]
        inputs = [(one, badness(one), self._made_by.get(id(one), -1)) for one in given]
        found = func(*args, **(kwargs or {}))
        outputs = [(one, badness(one)) for one in tensors_in(found) if is_float(one)]
        if outputs:
            name = getattr(func, "__name__", str(func)).strip("_")
            name = _NAMES.get(name, name)
            place = _place() if any(bad for _, bad in outputs) or torch.is_grad_enabled() else ""
            self._ops.append(_Op(name, self._modules[-1] if self._modules else None, place, inputs, outputs))
            self._made_by.update({id(one): len(self._ops) - 1 for one, _ in outputs})
            if torch.is_grad_enabled():
                for one in (*given, *(one for one, _ in outputs)):
                    self._hook(one)
        return found

    def _hook(self, tensor: Tensor) -> None:
        if tensor.requires_grad and id(tensor) not in self._grads:
            self._hooked.append(tensor)
            self._grads[id(tensor)] = 0

            def note(grad: Tensor, key: int = id(tensor)) -> None:
                self.note_gradient(key, grad)

            if not tensor.is_leaf:
                tensor.register_hook(note)

    def note_gradient(self, key: int, grad: Tensor) -> None:
        """Record whether the gradient of a tensor, which is given by its id, is finite."""
        if is_float(grad) and (bad := badness(grad)):
            self._grads[key] = bad
            self._bad_grads[key] = grad

    @contextlib.contextmanager
    def following_modules(self) -> Iterator[None]:
        """Record the running module in the `with` block."""
        before = modules.register_module_forward_pre_hook(lambda module, args: self._modules.append(module))
        after = modules.register_module_forward_hook(lambda module, args, out: self._leave(module), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _leave(self, module: nn.Module) -> None:
        while self._modules and self._modules.pop() is not module:
            pass

    def forward_culprit(self, outputs: Iterable[Tensor]) -> Culprit | Source | None:
        """Return the reason why one of these results is not finite; None if all are finite."""
        for one in outputs:
            if is_float(one) and badness(one):
                return self._origin(one)
        return None

    def _origin(self, tensor: Tensor) -> Culprit | Source:
        number = self._made_by.get(id(tensor), -1)
        if number < 0:
            return Source(tensor, bad_rows(tensor, self._rows))
        rows: Sequence[int] = []
        while True:
            op = self._ops[number]
            rows = next((own for one, bad in op.outputs if bad and (own := bad_rows(one, self._rows))), rows)
            worst = max((bad for _, bad in op.outputs), default=0)
            bad = sorted((one for one in op.inputs if one[1]), key=lambda one: -one[1])
            if not bad:
                return Culprit(op.name, False, op.module, op.place, rows, op.outputs[0][0].dtype)
            earlier, level, made_by = bad[0]
            if made_by < 0 or made_by >= number:
                return Source(earlier, bad_rows(earlier, self._rows) or rows)
            if level < worst and self._is_constant(made_by):
                return Culprit(op.name, False, op.module, op.place, rows, op.outputs[0][0].dtype)
            number = made_by

    def _is_constant(self, number: int) -> bool:
        """Return whether an operation has written infinities on purpose, as masking does."""
        while True:
            op = self._ops[number]
            if op.name in _CONSTANTS:
                return True
            earlier = [made_by for _, bad, made_by in op.inputs if bad and 0 <= made_by < number]
            if not earlier:
                return False
            number = earlier[0]

    def backward_culprit(self) -> Culprit | None:
        """Return the operation whose backward pass made a gradient not finite; None if there is none.

        It is the last operation of the forward pass whose results have finite gradients while one of its arguments has
        not.
        """
        for op in reversed(self._ops):
            if any(self._grads.get(id(one), 0) for one, _ in op.outputs):
                continue
            for one, _, _ in op.inputs:
                if self._grads.get(id(one), 0):
                    rows = bad_rows(self._bad_grads[id(one)], self._rows)
                    return Culprit(op.name, True, op.module, op.place, rows, one.dtype)
        return None


@undivided("searches for the first number that is not finite")
def run_again(
    run: Callable[[], Any], rows: int, parameters: Sequence[Tensor] = (), gradients: Sequence[Tensor | None] = ()
) -> Culprit | Source | None:
    """Run a forward pass again, and its backward pass if `parameters` are given. Return the first operation that gives
    a number that is not finite.

    Args:
        run: The forward pass. It must call no collectives: they raise here, and then no operation is found.
        rows: The number of rows of the batch.
        parameters: The parameters whose gradients are computed. The gradients are not kept.
        gradients: The gradients of the results of `run` that require one, in their order. None: the result is a loss.

    Returns:
        The operation, or None.
    """
    trace = Trace(rows)
    with contextlib.suppress(Exception), warnings.catch_warnings(), alone(), eager():
        warnings.simplefilter("ignore")
        with torch.enable_grad() if parameters else torch.no_grad(), trace.following_modules(), trace:
            results = list(tensors_in(run()))
        found = trace.forward_culprit(results)
        if found is not None or not parameters:
            return found
        wanted = [one for one in results if one.requires_grad]
        given = list(gradients) or [None] * len(wanted)
        kept = [(one, grad) for one, grad in zip(wanted, given, strict=True) if grad is not None or not gradients]
        known = {id(one): one for one in parameters if one.requires_grad}
        grads = torch.autograd.grad(
            [one for one, _ in kept], list(known.values()), [grad for _, grad in kept], allow_unused=True
        )
        for one, grad in zip(known, grads, strict=True):
            if grad is not None:
                trace.note_gradient(one, grad)
        return trace.backward_culprit()
    return None


def _place() -> str:
    """Return the innermost line outside libraries."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith("<") or is_library(file)):
            return place_of(file, frame.f_lineno)
        frame = frame.f_back
    return ""


def place_of(file: str, line: int) -> str:
    """Return a line of code in the form that errors use."""
    number = cell_numbers().get(file)
    return f"{os.path.basename(file)}:{line}" if number is None else f"Cell In[{number}], line {line}"
