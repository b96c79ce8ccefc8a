"""The operation that made a loss not finite, found in the autograd graph of the loss before the backward pass frees
it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .finite import bad_rows

#: By the name of a node: its result, computed again of what it has saved.
_RESULTS: dict[str, Callable[[Any], Any]] = {
    "LogBackward0": lambda node: node._saved_self.log(),
    "Log2Backward0": lambda node: node._saved_self.log2(),
    "Log10Backward0": lambda node: node._saved_self.log10(),
    "Log1PBackward0": lambda node: node._saved_self.log1p(),
    "XlogyBackward0": lambda node: torch.xlogy(node._saved_self, node._saved_other),
    "DivBackward0": lambda node: node._saved_self / node._saved_other,
    "MulBackward0": lambda node: node._saved_self * node._saved_other,
    "PowBackward0": lambda node: node._saved_self**node._saved_exponent,
    "PowBackward1": lambda node: node._saved_self**node._saved_exponent,
    "AddmmBackward0": lambda node: node._saved_mat1 @ node._saved_mat2,
    "MmBackward0": lambda node: node._saved_self @ node._saved_mat2,
    "BmmBackward0": lambda node: node._saved_self @ node._saved_mat2,
    "MseLossBackward0": lambda node: node._saved_self - node._saved_target,
    "AcosBackward0": lambda node: node._saved_self.acos(),
    "AcoshBackward0": lambda node: node._saved_self.acosh(),
    "AtanhBackward0": lambda node: node._saved_self.atanh(),
    "AsinBackward0": lambda node: node._saved_self.asin(),
    "LgammaBackward0": lambda node: node._saved_self.lgamma(),
    "NllLossBackward0": lambda node: node._saved_self,
    "BinaryCrossEntropyWithLogitsBackward0": lambda node: torch.nn.functional.binary_cross_entropy_with_logits(
        node._saved_self, node._saved_target, reduction="none"
    ),
    "BinaryCrossEntropyBackward0": lambda node: torch.nn.functional.binary_cross_entropy(
        node._saved_self, node._saved_target, reduction="none"
    ),
}
#: Nodes that are looked at.
_MOST_NODES = 20_000


class Node(NamedTuple):
    """The first node of a graph whose result is not finite."""

    op: str
    parameter: Tensor | None
    """The nearest parameter before this node; None if there is none."""
    rows: Sequence[int]


def blame(loss: Tensor, rows: int) -> Node | None:
    """Return the first operation whose result is not finite; None if the values saved in the graph do not show one.

    Args:
        loss: The loss, with its graph.
        rows: The number of rows of the batch.
    """
    with torch.no_grad():
        for node in _deepest_first(loss.grad_fn):
            result = _result(node)
            if isinstance(result, Tensor) and result.is_floating_point() and not bool(result.isfinite().all()):
                return Node(_name(node), _parameter(node), bad_rows(result, rows))
    return None


#: Operations whose gradient is infinite, or not a number, at some values.
_STEEP = ("Sqrt", "Rsqrt", "Pow", "LinalgVectorNorm", "Norm", "Std", "Var", "Log", "Div", "Acos", "Asin", "Atan2")


def steepest(loss: Any, until: int) -> str:
    """Return an operation between the model's results and the loss that may have made the gradients not finite.

    Args:
        loss: The node of the loss; its graph may be freed.
        until: The number of the last operation of the model.
    """
    for node in reversed(_deepest_first(loss, until)):
        if str(node.name()).startswith(_STEEP):
            return _name(node)
    return ""


def _result(node: Any) -> Any:
    result = getattr(node, "_saved_result", None)
    if result is None and node.name() in _RESULTS:
        with contextlib.suppress(Exception):  # one of them is not saved
            result = _RESULTS[node.name()](node)
    return result


def _name(node: Any) -> str:
    """Return the name of an operation, such as "log" of LogBackward0."""
    name = str(node.name()).partition("Backward")[0]
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return {"addmm": "linear", "mm": "matmul", "bmm": "matmul", "linalg_vector_norm": "norm"}.get(words, words)


def _deepest_first(root: Any, until: int = -1) -> list[Any]:
    """Yield the nodes of a graph down to a number, each after its arguments."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(root, False)]
    while stack and len(seen) < _MOST_NODES:
        node, done = stack.pop()
        if node is None or node._sequence_nr() <= until:
            continue
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(before, False) for before, _ in node.next_functions]
    return order


def _parameter(node: Any) -> Tensor | None:
    """Return the parameter with the fewest steps in the graph to a node."""
    seen: set[Any] = set()
    level = [node]
    while level and len(seen) < 1000:
        for one in level:
            if hasattr(one, "variable"):
                return one.variable  # type: ignore[no-any-return]
        seen.update(level)
        level = [before for one in level for before, _ in one.next_functions if before is not None]
        level = [one for one in dict.fromkeys(level) if one not in seen]
    return None
