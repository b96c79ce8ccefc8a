"""Steps of loops with Lightning, recorded as docs/how-to/hangs.md says, run again bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from nbdist import Recording, Session, replay_step, warm

pytestmark = [pytest.mark.slow, pytest.mark.long("imports Lightning in ranks, and starts ranks for each step")]

Sink = dict[int, Any]
EPOCHS, STEPS = 5, 40


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def rows() -> torch.Tensor:
    return torch.randn(128, 2, generator=torch.Generator().manual_seed(5))


def keep(sink: Sink, recording: Recording, loss: torch.Tensor, model: nn.Module) -> None:
    sink[recording._step + 1] = loss.item(), [one.grad.clone() for one in model.parameters() if one.grad is not None]


def with_fabric(folder: Path, sink: Sink) -> Sink:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = layers()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(rows(), batch_size=8, shuffle=True))  # counts its epochs
    recording = Recording(folder, model, optimizer)
    for _ in range(EPOCHS):
        for batch in recording.steps(loader):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            fabric.backward(loss)
            keep(sink, recording, loss, model)
            optimizer.step()
    return sink


class Steps:
    """The batches of a loader; each is a step of the recording."""

    def __init__(self, folder: Path, module: Any, loader: Any) -> None:
        self.folder, self.module, self.loader = folder, module, loader
        self.recording: Recording | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        if self.recording is None:  # the optimizer is there by now
            self.recording = Recording(self.folder, self.module, self.module.optimizers(use_pl_optimizer=False))
        return self.recording.steps(self.loader)


def with_trainer(folder: Path, sink: Sink) -> Sink:
    from lightning.pytorch import LightningModule, Trainer

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def training_step(self, batch: Any, _: int) -> Any:
            self.loss = self.layers(batch).square().mean()
            return self.loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.steps.recording is not None
            keep(sink, self.steps.recording, self.loss, self)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

        def train_dataloader(self) -> Any:
            sampler: Any = DistributedSampler(rows(), seed=3)  # type: ignore[arg-type]
            self.steps = Steps(folder, self, DataLoader(rows(), batch_size=8, sampler=sampler))  # type: ignore[arg-type]
            return self.steps

    shown = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    how: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    Trainer(max_epochs=EPOCHS, enable_model_summary=False, **how, **shown).fit(Net())
    return sink


@pytest.mark.parametrize("train", [with_fabric, with_trainer])
def test_steps_are_equal_bit_for_bit(train: Any, session: Session, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    warm("import lightning.pytorch")
    recorded = session.run_all(train, tmp_path / "run", {})
    assert list(recorded[0]) == list(range(1, STEPS + 1))
    for step, rank in ((3, 0), (33, 1)):
        sink: Sink = {}
        assert replay_step(tmp_path / "run", train, tmp_path / "run", sink, step=step, rank=rank).same
        assert list(sink) == [step] and sink[step][0] == recorded[rank][step][0]
        assert all(map(torch.equal, sink[step][1], recorded[rank][step][1]))
