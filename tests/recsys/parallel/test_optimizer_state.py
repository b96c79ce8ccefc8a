"""State of optimizers is saved as it is: saving changes no training, and a run that is resumed ends bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clicks import build, loaders, predict
from torch import nn

from nbdist import Session
from nbdist.recsys.sharding import replicate

pytestmark = pytest.mark.slow

WARM = "import torchrec.distributed"

MORE = pytest.mark.long("more optimizers on replicated models")


class Averaged(torch.optim.Optimizer):
    """Plain steps of a rate that falls with a count, which is kept in the group, as schedule-free ones and Lamb do."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "fastest": -1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["seen"] = [*group.get("seen", []), group["k"]]
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("mean", p.clone()).lerp_(p, 1 / group["k"])
                    self.state[p]["steps"] = len(group["seen"])
                    p -= group["lr"] / group["k"] * p.grad + 1e-3 * self.state[p]["mean"]
                    group["fastest"] = max(group["fastest"], float(p.grad.abs().max()))


OPTIMIZERS: dict[str, Any] = {
    "averaged": Averaged,
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),  # has a product in its state that begins with 1
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.01),
}


def steps(model: Any, first: int, last: int) -> None:
    train, _ = loaders(1200, 64)
    for number, batch in enumerate(train):
        if first <= number < last:
            model.optimizer.zero_grad()
            logits, labels = predict(model.model, batch)
            nn.functional.binary_cross_entropy_with_logits(logits, labels.float()).backward()
            model.optimizer.step()


def run(how: str, optimizer: str, saves: dict[int, Path], begin: Path | None = None, first: int = 0) -> Any:
    """In a rank: eight steps, or those from `first` on after loading; saved after the steps in `saves`."""
    model = build(how, optimizer=OPTIMIZERS[optimizer])
    if begin is not None:
        model.load(begin)
    for stop in sorted({*saves, 8}):
        steps(model, first, stop)
        first = stop
        if stop in saves:
            model.save(saves[stop])
    whole = model.gather()
    return None if whole is None else dict(whole.state_dict())


@pytest.mark.parametrize(
    ("how", "optimizer"),
    [
        *(("sharded", optimizer) for optimizer in OPTIMIZERS),
        *(("replicated", optimizer) for optimizer in ("averaged", "adam")),
        *(pytest.param("replicated", one, marks=MORE) for one in ("nadam", "momentum", "plain")),
    ],
)
def test_saved_and_resumed_bit_for_bit(session: Session, tmp_path: Path, how: str, optimizer: str) -> None:
    expected = session.run(run, how, optimizer, {})
    saves = {stop: tmp_path / str(stop) for stop in (0, 4)}
    found = session.run(run, how, optimizer, saves)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, msg="saving changes nothing, not before the first step")
    for first, folder in saves.items():
        resumed = session.run(run, how, optimizer, {}, folder, first)
        torch.testing.assert_close(resumed, expected, rtol=0, atol=0, msg=f"resumed after {first} steps")


def test_a_parameter_without_gradient_costs_the_others_no_state(session: Session, tmp_path: Path) -> None:
    """The parameter never gets a state of its own."""

    def train(folder: Path | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleDict({"used": nn.Linear(3, 1), "idle": nn.Linear(3, 1)})
        model = replicate(layers, lambda p: torch.optim.Adam(p, lr=0.1), find_unused_parameters=True)
        model.model.forward = lambda x: layers["used"](x)  # type: ignore[method-assign]
        for step in range(6):
            if step == 3 and folder is not None:
                model.save(folder)
            model.optimizer.zero_grad()
            layers["used"](torch.ones(2, 3) * (step + 1)).square().sum().backward()
            model.optimizer.step()
        return dict(layers.state_dict())

    torch.testing.assert_close(session.run(train, tmp_path), session.run(train, None), rtol=0, atol=0)


def test_the_state_of_another_optimizer_is_refused(session: Session, tmp_path: Path) -> None:
    session.run(run, "sharded", "adam", {4: tmp_path})
    with pytest.raises(ValueError, match=r"state in .* does not fit: that of over.0.weight is Adam's, and .* by NAdam"):
        session.run(run, "sharded", "nadam", {}, tmp_path, 4)
    with pytest.raises(ValueError, match=r"does not fit: the checkpoint has none of tables.embedding_bags.user.weight"):
        session.run(run, "replicated", "adam", {}, tmp_path, 4)


def test_options_of_the_new_optimizer_hold(session: Session, tmp_path: Path) -> None:
    """Options of now hold, and not the ones of the saved checkpoint."""

    def options(decay: float, load: bool) -> dict[str, Any]:
        model = build("replicated", optimizer=lambda p: torch.optim.Adam(p, lr=0.01 * (1 + decay), weight_decay=decay))
        if load:
            model.load(tmp_path)
        else:
            steps(model, 0, 1)
            model.save(tmp_path)
        dist.barrier()
        (group,) = model.optimizer.param_groups
        return {name: group[name] for name in ("lr", "weight_decay")}

    session.run(options, 0.5, False)
    assert session.run(options, 0.25, True) == {"lr": 0.0125, "weight_decay": 0.25}
