"""Steps of `fit` on an imitated GPU: what they make the host wait for, what they launch, and that results are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from imitated.computing import Computing, kernels
from torch import nn

from nbdist import Session, rank_device
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.models import OneTable

WARM = "from nbdist.recsys.training import fit"
RANKS = 1
OPTIONS = {"devices": "cuda"}
ROWS, BATCH = 4096, 64


def rows() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    user, movie = (torch.randint(size, (ROWS,), generator=draw, dtype=torch.int32) for size in (500, 200))
    return {"user": user, "movie": movie, "liked": ((user + movie) % 2).to(torch.uint8)}


class Clicks(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.user, self.movie = nn.Embedding(500, 8, sparse=sparse), nn.Embedding(200, 8, sparse=sparse)
        self.tower = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.tower(torch.cat([self.user(batch["user"]), self.movie(batch["movie"])], 1)).squeeze(1)


class Together(nn.Module):
    """The same with one table for both columns, which begins with the same rows."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        apart = Clicks(sparse)
        self.table, self.tower = OneTable({"user": 500, "movie": 200}, embedding_dim=8, sparse=sparse), apart.tower
        self.table.table.weight.data = torch.cat([apart.user.weight.data, apart.movie.weight.data])

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.tower(self.table(batch)).squeeze(1)


def predict(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch), batch["liked"]


def fitted(
    gpu: Computing, sparse: bool, device: str, runs: tuple[int, ...], together: bool = False, **options: Any
) -> list[Any]:
    """Operations, waits, losses and a checksum of the weights after each of some runs of `fit`, one after the other."""
    from nbdist.recsys.parallel import device_rows
    from nbdist.recsys.sharding import replicate
    from nbdist.recsys.training import fit

    device_rows.FUSED = False  # kernels of Triton are not imitated
    torch.manual_seed(0)
    model = replicate((Together if together else Clicks)(sparse), lambda some: torch.optim.Adagrad(some, lr=0.05))
    train = MemoryLoader(rows(), BATCH, shuffle=True, seed=1, remainder="drop", device=device)
    found = []
    for steps in runs:
        gpu.clear()
        history = fit(model, predict, train, steps=steps, progress=False, log_every=1000, **options)
        counted = dict(gpu.operations), dict(gpu.waits)
        weights = torch.cat([one.detach().cpu().flatten() for one in model.module.parameters()])
        found.append((*counted, history[-1].loss, weights))
    return found


def counted(
    sparse: bool, runs: tuple[int, int, int] = (4, 8, 16), **options: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """In a rank: operations and waits of one step of `fit`.

    Args:
        runs: Steps of three runs. The first brings data to the GPU; the other two differ in steps alone.
    """
    with Computing() as gpu:
        _, (few, some_waits, *_), (many, more_waits, *_) = fitted(gpu, sparse, "cuda", runs, **options)
    assert kernels() == 0
    steps = runs[2] - runs[1]

    def of_one(few: dict[str, int], many: dict[str, int]) -> dict[str, float]:
        names = few.keys() | many.keys()
        more = {name: many.get(name, 0) - few.get(name, 0) for name in names}
        return {name: count / steps for name, count in more.items() if count}

    return of_one(few, many), of_one(some_waits, more_waits)


def test_a_step_waits_for_nothing(session: Session) -> None:
    operations, waits = session.run(counted, False)
    assert waits == {} and sum(operations.values()) <= 32, operations


def test_a_step_with_sparse_gradients_waits_in_torchs_adagrad_alone(session: Session) -> None:
    operations, waits = session.run(counted, True)
    assert waits == {"aten::_coalesce": 2, "aten::sparse_mask": 2}, "two for each table"
    assert sum(operations.values()) <= 60, operations


@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_of_a_graph_gives_the_gpu_next_to_nothing(session: Session, sparse: bool) -> None:
    operations, waits = session.run(counted, sparse, (128, 128, 192), captured=True)
    assert sum(operations.values()) < 1, operations
    assert waits.get("cuda", 0) < 1 and not waits.keys() - {"cuda"}, waits


def trained(sparse: bool, device: str, **options: Any) -> tuple[list[float], torch.Tensor]:
    with Computing() as gpu:
        found = fitted(gpu, sparse, device, (40, 120), **options)
    assert kernels() == 0
    return [loss for *_, loss, _ in found], found[-1][-1]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_training_gives_what_it_gives_on_a_cpu(session: Session, captured: bool, sparse: bool) -> None:
    losses, weights = session.run(trained, sparse, "cuda", captured=captured)
    with Session(1, devices="cpu") as other:
        wanted, wanted_weights = other.run(trained, sparse, "cpu")
    assert losses == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_one_table_learns_what_separate_ones_learn_on_a_cpu(session: Session, captured: bool, sparse: bool) -> None:
    losses, weights = session.run(trained, sparse, "cuda", together=True, captured=captured)
    with Session(1, devices="cpu") as other:
        wanted, wanted_weights = other.run(trained, sparse, "cpu")
    assert losses == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-4, atol=1e-6)


def test_a_wrong_id_of_one_table_fails_an_assertion(session: Session) -> None:
    def look() -> None:
        with Computing():
            table = OneTable({"user": 500, "movie": 200}).to("cuda")
            batch = {"user": torch.tensor([500], device="cuda"), "movie": torch.tensor([0], device="cuda")}
            table(batch)

    with pytest.raises(RuntimeError, match="device-side assert"):
        session.run(look)


def test_fp16_learns_what_fp32_learns(session: Session) -> None:
    losses, _ = session.run(trained, False, "cuda", precision="fp16")
    wanted, _ = session.run(trained, False, "cuda")
    assert losses == pytest.approx(wanted, rel=1e-2) and losses != wanted


# ---------------------------------------------------------------------------------------------------------- the loader


def batches(kind: str, device: str) -> tuple[set[str], list[list[int]], int]:
    """In a rank: where the batches of two epochs are, their rows, and how many copies they took after the first."""
    ids = torch.arange(1000)
    column: Any = Ragged(ids, torch.arange(0, 1001, 2)) if kind == "ragged" else ids
    with Computing() as gpu:
        loader = MemoryLoader({"row": column}, 64, shuffle=True, seed=3, device=device)
        where, found = set(), []
        for _ in range(2):
            gpu.clear()
            for batch in loader:
                values = batch["row"].values if kind == "ragged" else batch["row"]
                where.add(str(values.device))
                found.append(values)
            copies = gpu.operations["aten::_to_copy"] + gpu.operations["aten::copy_"]
        return where, [values.tolist() for values in found], copies


@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_batches_of_the_loader(session: Session, kind: str) -> None:
    where, found, copies = session.run(batches, kind, "cuda")
    _, wanted, _ = session.run(batches, kind, "cpu")
    assert where == {"cuda:0"} and found == wanted
    if kind == "dense":
        assert copies <= 2, "the table stays on the GPU; the epoch's order goes there"


def test_a_large_order_is_drawn_on_the_gpu_and_is_that_of_a_cpu(session: Session) -> None:
    def look(device: str) -> tuple[list[int], set[str]]:
        with Computing() as gpu:
            loader = MemoryLoader({"row": torch.arange(1 << 18)}, 1 << 16, shuffle=True, seed=3, device=device)
            found = torch.cat([batch["row"] for batch in loader])
            return found.tolist(), {name for name in gpu.operations if "xor" in name}

    (found, hashes), (wanted, none) = session.run(look, "cuda"), session.run(look, "cpu")
    assert found == wanted and hashes and not none


def test_a_table_larger_than_a_part_of_the_memory_is_copied_batch_by_batch(session: Session) -> None:
    def look() -> tuple[bool, int]:
        with Computing():
            free = torch.cuda.mem_get_info()[0]
            taken = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
            loader = MemoryLoader({"row": torch.arange(4 << 20)}, 1 << 20, device="cuda")
            sums = [batch["row"].sum() for batch in loader]
            del taken
            return all(one.is_cuda for one in sums), int(sum(one.item() for one in sums))

    count = 4 << 20
    assert session.run(look) == (True, count * (count - 1) // 2)


def test_rank_device_is_where_models_go(session: Session) -> None:
    assert session.run(lambda: str(nn.Linear(2, 2).to(rank_device()).weight.device)) == "cuda:0"
