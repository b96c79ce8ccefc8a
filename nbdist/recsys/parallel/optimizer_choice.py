"""The optimizer of a model on all ranks, as the user gives it: a name with a learning rate, or a callable."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""A function from parameters to their optimizer, such as `lambda parameters: torch.optim.Adam(parameters, lr=1e-3)`."""

LR, EPS = 0.01, 1e-8
"""The defaults of an optimizer that is chosen by name."""

BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr, eps: torch.optim.SGD(parameters, lr=lr),
    "adagrad": lambda parameters, lr, eps: torch.optim.Adagrad(parameters, lr=lr, eps=eps),
    "adam": lambda parameters, lr, eps: torch.optim.Adam(parameters, lr=lr, eps=eps),
}
"""The optimizers of torch for parameters of any kind."""

_OPTIONS = {"sgd": ("lr", "momentum", "nesterov"), "adagrad": ("lr", "eps"), "adam": ("lr", "eps")}
"""The options that an optimizer of sharded tables may have."""

_CLASSES: dict[type, str] = {torch.optim.SGD: "sgd", torch.optim.Adagrad: "adagrad", torch.optim.Adam: "adam"}


class Momentum(NamedTuple):
    """The momentum of SGD for tables. The velocity of a row changes only in steps that use the row."""

    factor: float
    nesterov: bool


class Described(NamedTuple):
    """The optimizer of tables that a callable makes."""

    name: str
    lr: float
    eps: float
    momentum: Momentum | None = None


def maker(optimizer: str | MakeOptimizer, lr: float | None, eps: float | None) -> MakeOptimizer:
    """Return a function that makes the optimizer: the named one, or `optimizer` itself.

    Raises:
        TypeError: `optimizer` is an optimizer that has its parameters already.
        ValueError: No optimizer has this name, or `lr` or `eps` is given together with a callable.
    """
    if callable(optimizer):
        check_alone(lr, eps)
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"`optimizer` must be a name or a function of parameters, got a {name} that is made already: give "
            f"lambda parameters: {name}(parameters, lr=...)"
        )
    if optimizer not in BY_NAME:
        raise ValueError(f"`optimizer` must be a callable or one of {', '.join(BY_NAME)}, got {optimizer!r}")
    make = BY_NAME[optimizer]
    return lambda parameters: make(parameters, lr=LR if lr is None else lr, eps=EPS if eps is None else eps)


def described(make: MakeOptimizer) -> Described:
    """Return the description of the optimizer that a callable makes, for tables that are sharded.

    Raises:
        ValueError: `make` makes an optimizer that is not in `BY_NAME`, or one with further options.
    """
    parameter = nn.Parameter(torch.zeros(1))
    made = make([parameter])
    name = _CLASSES.get(type(made))
    if name is None:
        raise ValueError(
            f"`optimizer` must make torch's {', '.join(kind.__name__ for kind in _CLASSES)} for tables that are "
            f"sharded, got {type(made).__name__}: give a name for the tables, and the callable as dense_optimizer"
        )
    options: dict[str, Any] = made.defaults
    lr, eps = float(options["lr"]), float(options.get("eps", EPS))
    usual = BY_NAME[name]([parameter], lr=lr, eps=eps).defaults
    other = [key for key, value in options.items() if key not in _OPTIONS[name] and value != usual.get(key)]
    if other:
        *first, last = _OPTIONS[name]
        raise ValueError(
            f"`optimizer` must make {type(made).__name__} with no options but {', '.join(first)} and {last} for tables "
            f"that are sharded, got {other[0]}={options[other[0]]}: give a name for the tables, and the callable as "
            "dense_optimizer"
        )
    momentum = Momentum(float(options["momentum"]), options["nesterov"]) if options.get("momentum") else None
    return Described(name, lr, eps, momentum)


def check_alone(lr: Any, eps: Any) -> None:
    """Raise `ValueError` for an `lr` or `eps` together with a callable, which sets its own."""
    for name, value in (("lr", lr), ("eps", eps)):
        if value is not None:
            raise ValueError(f"`{name}` must be left out where `optimizer` is a callable, got {value}: set it there")


def check_eps(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` if `eps` is 0 in the type of a parameter: a step would divide by 0."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        for parameter in group["params"]:
            if eps and not torch.tensor(eps, dtype=parameter.dtype):
                raise ValueError(
                    f"`eps` of {type(optimizer).__name__} must not be 0 in {parameter.dtype}, the type of a parameter, "
                    f'got {eps}: keep the model in float32, and give fit(precision="bf16") or fit(precision="fp16")'
                )


def check_dampening(optimizer: torch.optim.Optimizer, tables: Container[Any]) -> None:
    """Raise `ValueError` if a table whose rows are updated alone has momentum with dampening: torch does not dampen the
    first gradient, and each row has another first step."""
    for group in optimizer.param_groups:
        if group.get("dampening") and group["momentum"] and any(one in tables for one in group["params"]):
            raise ValueError(
                "`dampening` must be 0 where a table has sparse=True or raw ids and the optimizer has momentum, got "
                f"{group['dampening']}"
            )
