"""Seeded faults of plain training loops, each with the step, the module and the rows that have to be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

Data = Callable[[int], Tensor]


class Fault(NamedTuple):
    """A training that goes wrong.

    Attributes: `model`, makes the model; `data`, step from 1 → batch; `loss`, of predictions and batch; `kind`, `step`,
    `module`, `rows`, `op`: what `NotFinite` has to say.
    """

    model: Callable[[], nn.Module]
    data: Data
    loss: Callable[[Any, Tensor], Tensor]
    kind: str
    step: int
    module: str
    rows: list[int]
    op: str
    rate: float = 0.01
    autocast: bool = False
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def net(*middle: nn.Module) -> Callable[[], nn.Module]:
    """A model whose module `1` is what can fail."""
    return lambda: nn.Sequential(nn.Linear(3, 4), *middle, nn.Linear(4, 1))


def with_row(step: int, row: int, column: int, value: float, rows: int = 8) -> Data:
    """Batches of numbers from 1 to 2; one batch has a bad row."""

    def data(now: int) -> Tensor:
        batch = torch.rand(rows, 3, generator=torch.Generator().manual_seed(now)) + 1
        if now == step:
            batch[row, column] = value
        return batch

    return data


def mean(predictions: Tensor, batch: Tensor) -> Tensor:
    return predictions.mean()


def square(predictions: Tensor, batch: Tensor) -> Tensor:
    return (predictions.squeeze(1) - batch[:, 0]).square().mean()


def _first(x: Tensor) -> Tensor:
    """The first column of a batch, with a gradient to what comes before."""
    return x[:, :1]


class Head(nn.Module):
    """Two layers, the second of a function of the batch's first column."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = Apply(function)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x) * self.head(_first(x)))


class Roots(nn.Module):
    """Takes the root of a prediction that is 0 for rows whose first column is 0."""

    def __init__(self, root: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Linear(3, 1)
        self.head = Apply(root)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).square() * _first(x))


class Attention(nn.Module):
    """Attention over the columns; zeros are hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(3, 3)
        self.weights = Apply(lambda x: x.softmax(1))
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.weights(self.scores(x).masked_fill(x == 0, float("-inf"))))


def hidden(step: int, row: int) -> Data:
    """Batches that each have a zero; one has a row of zeros."""

    def data(now: int) -> Tensor:
        batch = with_row(now, 0, 0, 0.0)(now)
        if now == step:
            batch[row] = 0
        return batch

    return data


def scaled(step: int, row: int, by: float) -> Data:
    """Batches; one has a row that is `by` times as large."""

    def data(now: int) -> Tensor:
        batch = with_row(0, 0, 0, 0.0)(now)
        if now == step:
            batch[row] *= by
        return batch

    return data


class Rated(torch.optim.SGD):
    """SGD whose learning rate becomes too high from step 300 on."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps >= 300:
            self.param_groups[0]["lr"] = 1e30
        return super().step(closure)


FAULTS = {
    "a zero in a logarithm of the model": Fault(
        lambda: Head(torch.log), with_row(3, 5, 0, 0.0), mean, "loss", 3, "head", [5], "log"
    ),
    "a negative number in a logarithm of the loss": Fault(
        net(), with_row(4, 2, 0, -1.0), lambda y, x: (y * 0 + x[:, :1]).log().mean(), "loss", 4, "1", [2], "log"
    ),
    "a division by zero": Fault(
        lambda: Head(lambda x: 1 / x), with_row(2, 7, 0, 0.0), mean, "loss", 2, "head", [7], ""
    ),
    "an exponential that overflows": Fault(
        lambda: Head(torch.exp), with_row(3, 1, 0, 1e3), mean, "loss", 3, "head", [1], "exp"
    ),
    "an overflow in bf16": Fault(
        lambda: Head(lambda x: x), scaled(3, 6, 1e20), square, "loss", 3, "", [6], "", autocast=True
    ),
    "one bad row of 100,000": Fault(
        net(nn.ReLU()), with_row(2, 77_777, 1, float("nan"), 100_000), mean, "loss", 2, "Sequential", [77_777], ""
    ),
    "an infinite feature": Fault(
        net(nn.ReLU()), with_row(5, 3, 2, float("inf")), mean, "loss", 5, "Sequential", [3], ""
    ),
    "a target that is missing": Fault(
        net(nn.ReLU()), with_row(5, 3, 0, float("nan")), lambda y, x: square(y, x), "loss", 5, "Sequential", [3], ""
    ),
    "a learning rate too high from step 300 on": Fault(
        net(nn.ReLU()), scaled(0, 0, 1), square, "any", 301, "", [], "", optimizer=Rated
    ),
    "a learning rate that makes a parameter infinite": Fault(
        net(), with_row(0, 0, 0, 0.0), lambda y, x: 1e20 * y.mean(), "parameter", 1, "", [], "", rate=1e25
    ),
    "the root of zero, in the backward pass": Fault(
        lambda: Roots(torch.sqrt), with_row(3, 4, 0, 0.0), mean, "gradient", 3, "head", [4], "sqrt"
    ),
    "the norm of zeros by hand": Fault(
        lambda: Roots(lambda x: x**0.5), with_row(2, 1, 0, 0.0), mean, "gradient", 2, "head", [1], "pow"
    ),
    "the root of zero in the loss": Fault(
        net(),
        with_row(3, 4, 0, 0.0),
        lambda y, x: (y.squeeze(1) ** 2 * x[:, 0]).sqrt().mean(),
        "gradient",
        3,
        "Sequential",
        [4],
        "sqrt",
    ),
    "a mask that hides all of a row": Fault(Attention, hidden(3, 5), mean, "loss", 3, "weights", [5], "softmax"),
    "an arc cosine beyond 1": Fault(
        lambda: Head(lambda x: torch.acos(x - 1)), with_row(4, 0, 0, 2.5), mean, "loss", 4, "head", [0], "acos"
    ),
    "a power of a negative number": Fault(
        lambda: Head(lambda x: x**0.3), with_row(2, 3, 0, -2.0), mean, "loss", 2, "head", [3], "pow"
    ),
    "squares that overflow": Fault(
        lambda: Head(lambda x: x * x), with_row(6, 2, 0, 1e30), mean, "loss", 6, "head", [2], "mul"
    ),
    "binary cross entropy of an infinite logit": Fault(
        net(),
        with_row(3, 3, 0, 3e38),
        lambda y, x: functional.binary_cross_entropy_with_logits(y.squeeze(1) * 0 + x[:, 0] * 10, x[:, 1] * 0),
        "loss",
        3,
        "1",
        [3],
        "binary_cross_entropy_with_logits",
    ),
    "a hyperbolic arc tangent of 1": Fault(
        lambda: Head(lambda x: torch.atanh(x - 1)), with_row(3, 2, 0, 2.0), mean, "loss", 3, "head", [2], "atanh"
    ),
    "logarithm of a softmax that is zero": Fault(
        net(Apply(lambda x: (x * 1e4).softmax(1).log())), with_row(0, 0, 0, 0.0), mean, "loss", 1, "1", [], "log"
    ),
}


def run(fault: Fault) -> None:
    """Train for as long as it takes."""
    torch.manual_seed(0)
    model = fault.model()
    optimizer = fault.optimizer(model.parameters(), lr=fault.rate)  # type: ignore[call-arg]
    for step in range(1, 400):
        optimizer.zero_grad()
        batch = fault.data(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=fault.autocast):
            predictions = model(batch)
        fault.loss(predictions, batch).backward()
        optimizer.step()
