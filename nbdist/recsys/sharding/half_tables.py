"""Tables of half precision: the supported types, and optimizers that compute in single precision.

The square of a gradient of 1e-4 is 0 in float16, and so is an eps of 1e-8: a step of Adagrad would be infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType

from .strategies import Table

TRAINED = (DataType.FP32, DataType.FP16)


def check_types(tables: Mapping[str, Table]) -> None:
    """Raise `ValueError` for tables of a type that FBGEMM does not train on both CPUs and GPUs."""
    for name, table in tables.items():
        data_type = getattr(table.config, "data_type", DataType.FP32)
        if data_type not in TRAINED:
            raise ValueError(
                f"`data_type` of table {name!r} must be {' or '.join(one.name for one in TRAINED)}, got "
                f"{data_type.name}: FBGEMM does not train others"
            )


class SinglePrecision(torch.optim.Optimizer):
    """An optimizer that updates parameters of half precision in single precision, and keeps its state in single
    precision.

    Args:
        params: The parameters.
        make: A function that makes the optimizer to compute with.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        mine = list(params)
        self._inner = make([nn.Parameter(one.detach().float()) for one in mine])
        (group,) = self._inner.param_groups
        super().__init__(mine, {name: value for name, value in group.items() if name != "params"})
        for one, single in zip(mine, group["params"], strict=True):
            self._keep(one, single)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step, with the current options of the groups."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})
            pairs += zip(group["params"], inner["params"], strict=True)
        for one, single in pairs:
            single.data = one.detach().float()
            single.grad = None if one.grad is None else one.grad.float()
            self._inner.state[single] = self.state[one]
        self._inner.step()
        for one, single in pairs:
            one.copy_(single)
            self._keep(one, single)
        return loss

    def _keep(self, one: nn.Parameter, single: nn.Parameter) -> None:
        """Keep the state of a parameter, and free its substitute's memory."""
        self.state[one] = self._inner.state[single]
        single.grad, single.data = None, single.data.new_empty(0)
