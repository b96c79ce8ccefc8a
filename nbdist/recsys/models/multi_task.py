"""Click models of several tasks: they share experts, whose outputs are mixed by a gate for each task.

MMoE (Ma et al., KDD 2018, doi:10.1145/3219819.3220007) has only shared experts. PLE (Tang et al., RecSys 2020,
doi:10.1145/3383313.3412236) also has experts for each task, in one or several levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..loader.columns import Columns
from .features import Features, linear_layers
from .tables import Cardinality


class _Experts(nn.Module):
    """Parallel experts: each is a stack of layers over the same input. The result has shape (rows, experts, width)."""

    def __init__(self, count: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(*linear_layers(widths), nn.ReLU()) for _ in range(count))

    def forward(self, found: Tensor) -> Tensor:
        return torch.stack([expert(found) for expert in self.experts], dim=1)


def _mixed(experts: Tensor, gate: Tensor) -> Tensor:
    """Return the sum of experts, shape (rows, experts, width), with the weights of a gate, shape (rows, experts)."""
    return torch.einsum("rew,re->rw", experts, gate.softmax(1))


class _Tasks(nn.Module):
    """The common parts of both models: the columns' vectors, and for each task the layers over its mixture of
    experts."""

    def __init__(
        self,
        tasks: Sequence[str],
        cardinalities: Mapping[str, Cardinality],
        dense_features: Sequence[str],
        embedding_dim: int,
        mixed: int,
        task_mlp: Sequence[int],
        device: torch.device | str,
    ) -> None:
        super().__init__()
        if isinstance(tasks, str) or not tasks or len(set(tasks)) < len(tasks):
            raise ValueError(f"`tasks` must be names, each once, got {tasks!r}")
        if bad := [task for task in tasks if not task or "." in task or hasattr(nn.ModuleDict, task)]:
            raise ValueError(f"no task can have the name {bad[0]!r}, which torch uses itself: rename it")
        self.tasks = list(tasks)
        self.features = Features(cardinalities, dense_features, embedding_dim, device)
        self.width = len(cardinalities) * embedding_dim + len(dense_features)
        self.towers = nn.ModuleDict({task: linear_layers([mixed, *task_mlp, 1]) for task in tasks})

    def inputs(self, batch: Columns) -> Tensor:
        """Return the input of the experts, shape (rows, width)."""
        vectors, numbers = self.features(batch)
        return torch.cat([vectors.flatten(1), numbers], dim=1)


class MMoE(_Tasks):
    """A click model of several tasks, with experts that all tasks share, and a gate for each task.

    Args:
        tasks: The names of the tasks.
        cardinalities: A mapping from the name of each column of codes to its number of codes, or from a column of raw
            ids to a `RawIds`. The vectors of a list are averaged.
        dense_features: The names of columns with one number per row.
        embedding_dim: The width of the tables.
        experts: The number of experts.
        expert_mlp: The widths of the layers of each expert.
        task_mlp: The widths of the layers between a task's mixture of experts and its logit.
        device: The device of the tables.

    Raises:
        ValueError: A task has no name, or two tasks have one name.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import MMoE
        >>> model = MMoE(["click", "buy"], {"user": 20, "item": 9}, embedding_dim=8)
        >>> logits = model({"user": torch.tensor([3, 4, 5]), "item": torch.tensor([1, 1, 2])})
        >>> {task: one.shape for task, one in logits.items()}
        {'click': torch.Size([3]), 'buy': torch.Size([3])}
    """

    def __init__(
        self,
        tasks: Sequence[str],
        cardinalities: Mapping[str, Cardinality],
        dense_features: Sequence[str] = (),
        *,
        embedding_dim: int = 64,
        experts: int = 4,
        expert_mlp: Sequence[int] = (64,),
        task_mlp: Sequence[int] = (32,),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(tasks, cardinalities, dense_features, embedding_dim, expert_mlp[-1], task_mlp, device)
        self.experts = _Experts(experts, [self.width, *expert_mlp])
        self.gates = nn.ModuleDict({task: nn.Linear(self.width, experts) for task in tasks})

    def forward(self, batch: Columns) -> dict[str, Tensor]:
        """Return the logits of each task, by name, shape (rows,)."""
        found = self.inputs(batch)
        experts = self.experts(found)
        return {task: self.towers[task](_mixed(experts, self.gates[task](found))).squeeze(1) for task in self.tasks}


class PLE(_Tasks):
    """A click model of several tasks, with shared experts and experts for each task, in levels (CGC has one level).

    Args:
        tasks: The names of the tasks.
        cardinalities: See `MMoE`.
        dense_features: The names of columns with one number per row.
        embedding_dim: The width of the tables.
        shared_experts: The number of experts in a level that all tasks share.
        task_experts: The number of experts in a level that each task has for itself.
        levels: The number of levels. The input of a level is the mixtures of the level before.
        expert_mlp: The widths of the layers of each expert.
        task_mlp: The widths of the layers between a task's mixture in the last level and its logit.
        device: The device of the tables.

    Raises:
        ValueError: A task has no name, or two tasks have one name.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import PLE
        >>> model = PLE(["click", "buy"], {"user": 20, "item": 9}, embedding_dim=8, levels=2)
        >>> logits = model({"user": torch.tensor([3, 4, 5]), "item": torch.tensor([1, 1, 2])})
        >>> {task: one.shape for task, one in logits.items()}
        {'click': torch.Size([3]), 'buy': torch.Size([3])}
    """

    def __init__(
        self,
        tasks: Sequence[str],
        cardinalities: Mapping[str, Cardinality],
        dense_features: Sequence[str] = (),
        *,
        embedding_dim: int = 64,
        shared_experts: int = 2,
        task_experts: int = 2,
        levels: int = 1,
        expert_mlp: Sequence[int] = (64,),
        task_mlp: Sequence[int] = (32,),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(tasks, cardinalities, dense_features, embedding_dim, expert_mlp[-1], task_mlp, device)
        widths = [self.width] + [expert_mlp[-1]] * (levels - 1)
        self.levels = nn.ModuleList(
            _Level(self.tasks, width, shared_experts, task_experts, expert_mlp, last=number == levels - 1)
            for number, width in enumerate(widths)
        )

    def forward(self, batch: Columns) -> dict[str, Tensor]:
        """Return the logits of each task, by name, shape (rows,)."""
        shared = self.inputs(batch)
        own = dict.fromkeys(self.tasks, shared)
        for level in self.levels:
            own, shared = level(own, shared)
        return {task: self.towers[task](own[task]).squeeze(1) for task in self.tasks}


class _Level(nn.Module):
    """A level of PLE: the gate of a task mixes its own and the shared experts. Between levels, a shared gate mixes all
    experts."""

    def __init__(
        self, tasks: Sequence[str], width: int, shared: int, each: int, expert_mlp: Sequence[int], last: bool
    ) -> None:
        super().__init__()
        self.shared = _Experts(shared, [width, *expert_mlp])
        self.own = nn.ModuleDict({task: _Experts(each, [width, *expert_mlp]) for task in tasks})
        self.gates = nn.ModuleDict({task: nn.Linear(width, shared + each) for task in tasks})
        self.shared_gate = None if last else nn.Linear(width, shared + each * len(tasks))

    def forward(self, own: Mapping[str, Tensor], shared: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        common = self.shared(shared)
        experts = {task: self.own[task](one) for task, one in own.items()}
        mixed = {
            task: _mixed(torch.cat([experts[task], common], 1), self.gates[task](one)) for task, one in own.items()
        }
        if self.shared_gate is not None:
            shared = _mixed(torch.cat([*experts.values(), common], 1), self.shared_gate(shared))
        return mixed, shared
