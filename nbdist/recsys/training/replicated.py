"""A model with a copy on every rank, under DistributedDataParallel: used like a sharded one, without TorchRec."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.nn.parallel import DistributedDataParallel

from ...devices import collective_device


@dataclass(frozen=True)
class Replicated:
    """A model that every rank has a copy of, inside a rank."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer

    def gather(self) -> nn.Module | None:
        """The model as a plain module, on the CPU of rank 0; None on the other ranks."""
        return copy.deepcopy(self.model.module).cpu() if dist.get_rank() == 0 else None

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save weights and optimizer state with `torch.distributed.checkpoint`. All ranks have to call it."""
        dcp.save({"model": self._weights(), "optimizer": self._moments()}, checkpoint_id=folder)

    def load(self, folder: str | os.PathLike[str], *, optimizer: bool = True) -> None:
        """Load what `save` wrote, on any number of ranks; or the weights that `Sharded.save` wrote of such a model.

        Args:
            folder: What `save` was given.
            optimizer: Whether to load the optimizer's state too. Learning rates are not part of it.

        Raises:
            ValueError: The checkpoint is of another model, or of another optimizer.
        """
        from ..checkpoint import check

        state: dict[str, Any] = {"model": self._weights()}
        if optimizer:
            state["optimizer"] = self._moments()
        check(state, folder)
        dcp.load(state, checkpoint_id=folder)
        states.set_model_state_dict(self.model, state["model"])
        if optimizer:
            groups = states.get_optimizer_state_dict(self.model, self.optimizer)["param_groups"]
            both = {"state": state["optimizer"], "param_groups": groups}
            states.set_optimizer_state_dict(self.model, self.optimizer, both)

    def _weights(self) -> dict[str, Any]:
        return dict(states.get_model_state_dict(self.model))

    def _moments(self) -> dict[str, Any]:
        moments: Any = states.get_optimizer_state_dict(self.model, self.optimizer)["state"]
        return dict(moments)


def replicate(
    model: nn.Module, optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], **options: Any
) -> Replicated:
    """Put a copy of `model` on every rank, embedding tables included. All ranks have to call it.

    Every copy starts with rank 0's values. The gradient of a step is the mean of the ranks' gradients.

    Args:
        model: Any module, with values. It is moved to the rank's device.
        optimizer: Makes the optimizer, such as `lambda parameters: torch.optim.Adam(parameters, lr=1e-3)`.
        **options: For `DistributedDataParallel`.

    Raises:
        ValueError: Something of the model is on the meta device.
        RuntimeError: Outside a process group.
    """
    if not dist.is_initialized():
        raise RuntimeError("replicate() works in a rank: call it in a function that in_ddp or a Session runs")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type == "meta":
            raise ValueError(f"{name} is on the meta device and has no values to copy: build the model on the CPU")
    device = collective_device()
    parallel = DistributedDataParallel(
        model.to(device), device_ids=[device] if device.type == "cuda" else None, **options
    )
    return Replicated(parallel, optimizer([p for p in model.parameters() if p.requires_grad]))
