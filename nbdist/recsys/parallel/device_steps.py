"""Steps of torch's optimizers that never wait for the GPU: learning rates and counts are on the device, as CUDA graphs
need.

The state is the optimizer's own, so that its own `step` can continue at any time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .device_rows import RowSteps, coalesced


def unsuitable(optimizer: torch.optim.Optimizer, sparse: Iterable[nn.Parameter], tables: object = None) -> str:
    """Return the reason why `DeviceSteps` cannot take an optimizer's steps; empty if it can.

    Args:
        optimizer: Any optimizer.
        sparse: The parameters with sparse gradients.
        tables: The tables, whose step hook does nothing on one rank.
    """
    kind = type(optimizer).__name__
    if type(optimizer) not in _STEPS:
        return f"the optimizer is {kind}, not one of torch's {', '.join(one.__name__ for one in _STEPS)}"
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    if any(getattr(hook, "__self__", None) is not tables for hook in hooks):
        return "the optimizer has hooks of its steps"
    rows = set(sparse)
    for group in optimizer.param_groups:
        for name in ("differentiable", "lr_decay", "decoupled_weight_decay"):
            if group.get(name) and type(optimizer) is not torch.optim.AdamW:
                return f"{kind} has {name}={group[name]}"
        if any(isinstance(group.get(name), Tensor) for name in ("lr", "betas")):
            return f"{kind} has a learning rate that is a tensor"
        if any(one.dtype != torch.float32 for one in group["params"]):
            return "a parameter is not float32"
        if rows.intersection(group["params"]):
            if type(optimizer) not in (torch.optim.SGD, torch.optim.Adagrad):
                return f"a table says sparse=True and is trained by {kind}, not by SGD or Adagrad"
            if group["weight_decay"] or group.get("momentum") or group.get("eps") == 0:
                return f"a table says sparse=True, and {kind} has weight decay, momentum or eps=0"
    return ""


class DeviceSteps:
    """The steps of an optimizer that has already taken one step itself, and for which `unsuitable` returns an empty
    text.

    Args:
        optimizer: The optimizer whose parameters and state are used.
        sparse: The parameters with sparse gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sparse: Iterable[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._take = _STEPS[type(optimizer)]
        rows = set(sparse)
        self._dense = [[one for one in group["params"] if one not in rows] for group in optimizer.param_groups]
        self._rows = [self._row_steps(group, rows) for group in optimizer.param_groups]
        self._counts: dict[Tensor, Tensor] = {}
        for group in optimizer.param_groups:
            for one in group["params"]:
                count = optimizer.state.get(one, {}).get("step")
                if count is not None:
                    self._counts[one] = torch.full((), float(count), device=one.device)

    @torch.no_grad()
    def step(self, grads: Mapping[Tensor, Tensor], rates: Sequence[Tensor]) -> None:
        """Update the parameters from their gradients.

        Args:
            grads: A mapping from parameters to gradients. Parameters without a gradient are missing.
            rates: The learning rate of each group of parameters, shape (), on the device.
        """
        for group, dense, rows, rate in zip(self._optimizer.param_groups, self._dense, self._rows, rates, strict=True):
            some = [one for one in dense if one in grads]
            if some:
                states = [self._optimizer.state[one] for one in some]
                counts = [self._counts[one] for one in some if one in self._counts]
                laid_out = [_laid_out(grads[one], one) for one in some]
                self._take(_Dense(some, laid_out, states, counts, rate, group))
            for steps in rows:
                steps.step([grads.get(table) for table in steps.tables], rate)

    @torch.no_grad()
    def clipped(self, grads: Mapping[Tensor, Tensor], norm: float) -> dict[Tensor, Tensor]:
        """Return the gradients, scaled so that the norm of all of them together is at most `norm`."""
        dense = {one: grad for one, grad in grads.items() if not grad.is_sparse}
        sparse = {one: grad for one, grad in grads.items() if grad.is_sparse}
        squares = [one.square() for one in torch._foreach_norm(list(dense.values()))] if dense else []
        squares += [coalesced(one._indices()[0], one._values())[0].square().sum() for one in sparse.values()]
        scale = (norm / (torch.stack(squares).sum().sqrt() + 1e-6)).clamp(max=1.0)
        found = dict(zip(dense, torch._foreach_mul(list(dense.values()), scale), strict=True)) if dense else {}
        for one, grad in sparse.items():
            rows = grad._values() * scale
            found[one] = torch.sparse_coo_tensor(grad._indices(), rows, grad.shape, check_invariants=False)
        return found

    def count(self, steps: int) -> None:
        """Add `steps` to the optimizer's own counts of steps."""
        for one in self._counts:
            self._optimizer.state[one]["step"] += steps

    def follow(self) -> None:
        """Continue after steps that the optimizer has taken itself."""
        for one, count in self._counts.items():
            count.fill_(float(self._optimizer.state[one]["step"]))

    def _row_steps(self, group: dict[str, Any], rows: set[nn.Parameter]) -> list[RowSteps]:
        """Make the objects that update the tables of a group: one for each width of a table."""
        tables = [one for one in group["params"] if one in rows]
        found = []
        for width in dict.fromkeys(table.shape[1] for table in tables):
            some = [table for table in tables if table.shape[1] == width]
            sums = None
            if isinstance(self._optimizer, torch.optim.Adagrad):
                sums = [self._optimizer.state[table]["sum"] for table in some]
            found.append(RowSteps(some, sums, eps=group.get("eps", 0.0), maximize=group["maximize"]))
        return found


def _laid_out(grad: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient with the strides of its parameter, which fused steps need."""
    return grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)


class _Dense(NamedTuple):
    """The arguments of a step for a group of parameters with dense gradients."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Tensor]]
    counts: list[Tensor]
    """The number of earlier steps of each parameter, if the optimizer counts them."""
    rate: Tensor
    group: dict[str, Any]


def _adagrad(dense: _Dense) -> None:
    """Take the step of torch's `_multi_tensor_adagrad`, which accepts the learning rate only as a number on the
    host.
    """
    params, grads, group = dense.params, dense.grads, dense.group
    sums = [state["sum"] for state in dense.states]
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    if group["weight_decay"]:
        grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
    torch._foreach_addcmul_(sums, grads, grads, value=1)
    scales = torch._foreach_sqrt(sums)
    torch._foreach_add_(scales, group["eps"])
    steps = torch._foreach_div(grads, scales)
    torch._foreach_mul_(steps, dense.rate)
    torch._foreach_sub_(params, steps)


def _adam(dense: _Dense, take: Callable[..., None] = torch._fused_adam_) -> None:
    """Take a step with torch's `_fused_adam`, and count it."""
    torch._foreach_add_(dense.counts, 1)
    take(
        dense.params,
        dense.grads,
        [state["exp_avg"] for state in dense.states],
        [state["exp_avg_sq"] for state in dense.states],
        [state["max_exp_avg_sq"] for state in dense.states] if dense.group["amsgrad"] else [],
        dense.counts,
        lr=dense.rate,
        beta1=dense.group["betas"][0],
        beta2=dense.group["betas"][1],
        **{name: dense.group[name] for name in ("amsgrad", "weight_decay", "eps", "maximize")},
    )


def _sgd(dense: _Dense) -> None:
    """Take a step with torch's `_fused_sgd`."""
    torch._fused_sgd_(
        dense.params,
        dense.grads,
        [state["momentum_buffer"] for state in dense.states] if dense.group["momentum"] else [],
        lr=dense.rate,
        is_first_step=False,
        **{name: dense.group[name] for name in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")},
    )


_STEPS: dict[type, Callable[[_Dense], None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: functools.partial(_adam, take=torch._fused_adamw_),
}
