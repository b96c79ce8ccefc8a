"""Code written for torchrun and for other launchers runs unmodified in ranks: each of them, on gloo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbdist.integrations.pytest import Launcher

pytestmark = pytest.mark.slow


def regression(rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """A problem that one weight per column solves: 1, 2, 3, 4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator)
    return x, x @ torch.arange(1.0, 5.0)


def descend(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 60, backward: Any = None) -> float:
    """Train on this rank's half of the problem; returns the last loss."""
    x, y = (part[dist.get_rank() :: dist.get_world_size()] for part in regression())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x)[:, 0], y)
        loss.backward() if backward is None else backward(loss)
        optimizer.step()
    return float(loss)


def same_everywhere(tensor: torch.Tensor) -> bool:
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.detach().contiguous())
    return all(torch.equal(tensor, other) for other in others)


def with_ddp() -> tuple[float, bool, list[float]]:
    model = torch.nn.Linear(4, 1, bias=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    loss = descend(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    return loss, same_everywhere(model.weight), model.weight[0].tolist()


def test_distributed_data_parallel(ddp: Launcher) -> None:
    loss, same, weights = ddp(2, with_ddp)
    assert loss < 1e-3 and same and weights == pytest.approx([1, 2, 3, 4], abs=0.05)


def with_accelerate() -> tuple[float, int, bool, float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    x, y = regression()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(30):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs)[:, 0], targets))
            optimizer.step()
    weight = accelerator.unwrap_model(model).weight
    total = float(accelerator.gather(torch.ones(1)).sum())
    return float((weight[0] - torch.arange(1.0, 5.0)).abs().max()), len(loader), same_everywhere(weight), total


def test_accelerate(ddp: Launcher) -> None:
    error, steps, same, total = ddp(2, with_accelerate)
    assert error < 0.05 and steps == 2 and same and total == 2.0


def with_fabric(folder: str) -> tuple[float, bool, int, float]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, num_nodes=1, strategy="ddp")
    fabric.launch()
    model = torch.nn.Linear(4, 1, bias=False)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = descend(model, optimizer, backward=fabric.backward)
    fabric.save(os.path.join(folder, "fabric.ckpt"), {"model": model})
    fabric.barrier()
    return (
        loss,
        same_everywhere(model.weight),
        fabric.world_size,
        float(fabric.all_reduce(torch.ones(1), reduce_op="sum")),
    )


def test_lightning_fabric(ddp: Launcher, tmp_path: Path) -> None:
    loss, same, world_size, total = ddp(2, with_fabric, str(tmp_path))
    assert loss < 1e-3 and same and world_size == 2 and total == 2.0
    assert torch.load(tmp_path / "fabric.ckpt")["model"]["weight"].shape == (1, 4)


def written_for_torchrun() -> dict[str, Any]:
    """A script's main function: it knows nothing but torchrun's environment."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    world_size, local_size = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    assert rank == dist.get_rank() and world_size == dist.get_world_size()
    sampler = torch.utils.data.distributed.DistributedSampler(range(10), shuffle=False)
    mine = list(sampler)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo")  # meets at MASTER_ADDR and MASTER_PORT
    total = torch.tensor(sum(mine))
    dist.all_reduce(total)
    return {"rank": rank, "local": (local_rank, local_size), "mine": mine, "total": int(total)}


def test_a_script_written_for_torchrun_runs(ddp: Launcher) -> None:
    found = ddp(2, written_for_torchrun)
    assert found == {"rank": 0, "local": (0, 2), "mine": [0, 2, 4, 6, 8], "total": 45}


def with_torchmetrics() -> tuple[float, float, float]:
    from torchmetrics.classification import BinaryAUROC
    from torchmetrics.regression import MeanSquaredError

    rank = dist.get_rank()
    scores, labels = torch.tensor([[0.1, 0.9], [0.8, 0.2]][rank]), torch.tensor([[0, 1], [0, 1]][rank])
    auc, mse = BinaryAUROC(), MeanSquaredError(squared=False)
    auc.update(scores, labels)
    mse.update(scores, labels.float())
    return float(auc.compute()), float(mse.compute()), float(auc(scores, labels))


def test_torchmetrics_over_all_ranks(ddp: Launcher) -> None:
    auc, rmse, _ = ddp(2, with_torchmetrics)
    assert auc == 0.75, "ranks alone have 1.0 and 0.0"
    assert rmse == pytest.approx(((0.01 + 0.01 + 0.64 + 0.64) / 4) ** 0.5)


def with_fsdp2() -> tuple[float, list[int], list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 1, bias=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = descend(model, torch.optim.Adam(model.parameters(), lr=0.05), steps=200)
    local = [parameter.to_local().numel() for parameter in model.parameters()]
    product = model[1].weight.full_tensor() @ model[0].weight.full_tensor()
    return loss, local, product[0].tolist()


@pytest.mark.long("larger trainings")
def test_fsdp2_fully_shard(ddp: Launcher) -> None:
    loss, local, weights = ddp(2, with_fsdp2)
    assert loss < 0.05 and weights == pytest.approx([1, 2, 3, 4], abs=0.3)
    assert local[0] == 16, "half of the first layer's 32 weights"


def save_checkpoint(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
    dcp.save({"weight": weight, "epoch": 3}, checkpoint_id=folder)


def load_checkpoint(folder: str) -> tuple[list[float], int, int]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {"weight": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)]), "epoch": 0}
    dcp.load(state, checkpoint_id=folder)
    return state["weight"].full_tensor().flatten().tolist(), len(state["weight"].to_local()), state["epoch"]


def test_a_distributed_checkpoint_of_two_ranks_is_loaded_by_three(ddp: Launcher, tmp_path: Path) -> None:
    ddp(2, save_checkpoint, str(tmp_path))
    values, rows, epoch = ddp(3, load_checkpoint, str(tmp_path))
    assert values == list(range(12)) and rows == 2 and epoch == 3


def hugging_face_style() -> tuple[int, int, bool, list[int]]:
    """Work like `transformers`: accelerate's state from the environment, main process first, gathering."""
    from accelerate import PartialState
    from accelerate.utils import gather_object

    state = PartialState(cpu=True)  # as `TrainingArguments(use_cpu=True)` does; on a GPU nothing has to be said
    with state.main_process_first():
        pass
    with state.split_between_processes(list(range(5))) as mine:
        gathered = gather_object(list(mine))
    return state.num_processes, state.local_process_index, state.is_main_process, gathered


def test_code_that_goes_by_the_environment(ddp: Launcher) -> None:
    found = ddp.run_all(2, hugging_face_style)
    assert found == [(2, rank, rank == 0, [0, 1, 2, 3, 4]) for rank in range(2)]
