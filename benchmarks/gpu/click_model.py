"""HugeCTR's example of a click model on one GPU: runs of `fit` step by step and captured, compared and profiled."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nbdist import rank_device
from nbdist.recsys.models import OneTable

SIZES = (162_541, 59_047)
"""Rows of the tables: users and movies of MovieLens 25M."""
ROWS = 16_000_000
DRY = os.environ.get("NBDIST_GPU_DRY_RUN") == "1"


class Clicks(nn.Module):
    """Embeddings of some columns, and a tower of 128-128-1 on them: HugeCTR's example, with two columns of 16."""

    def __init__(self, width: int, sizes: Sequence[int] = SIZES, sparse: bool = True) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width, sparse=sparse) for size in sizes)
        widths = (len(sizes) * width, 128, 128)
        hidden = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.tower = nn.Sequential(*hidden, nn.Linear(128, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = [table(batch[f"c{i}"]) for i, table in enumerate(self.tables)]
        return self.tower(torch.cat(found, dim=1)).squeeze(1)  # (rows,)


class OneTableClicks(nn.Module):
    """The same with one table for all columns."""

    def __init__(self, width: int, sizes: Sequence[int] = SIZES, sparse: bool = True) -> None:
        super().__init__()
        columns = {f"c{i}": size for i, size in enumerate(sizes)}
        self.table = OneTable(columns, embedding_dim=width, sparse=sparse, init=nn.init.normal_)
        self.tower = Clicks(width, sizes).tower

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.tower(self.table(batch)).squeeze(1)  # (rows,)


def predict(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch), batch["liked"]


def rows_of(sizes: Sequence[int], count: int) -> dict[str, torch.Tensor]:
    """Rows on the rank's device, most of them of few ids."""
    device = rank_device()
    draw = torch.Generator(device).manual_seed(0)
    ids = [(torch.rand(count, generator=draw, device=device) ** 2 * size).int() for size in sizes]
    liked = (ids[0] + ids[-1] + torch.randint(5, (count,), generator=draw, device=device)) % 2
    return {f"c{i}": one for i, one in enumerate(ids)} | {"liked": liked.to(torch.uint8)}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda some: torch.optim.Adagrad(some, lr=0.01, eps=1e-8),
    "sgd": lambda some: torch.optim.SGD(some, lr=0.05),
    "adam": lambda some: torch.optim.Adam(some, lr=1e-3),
}


def fitted(
    width: int,
    batch: int,
    steps: int,
    *,
    captured: bool,
    sizes: Sequence[int] = SIZES,
    unrolled: int = 16,
    optimizer: str = "adagrad",
    sparse: bool = True,
    tf32: bool = False,
    fused: bool = True,
    count: int = 0,
    last_bit: bool = False,
    one_table: bool = False,
    **options: Any,
) -> Any:
    """In a rank: history and model of a run; with `last_bit`, of one whose weights begin one bit away."""
    from nbdist.recsys.loader import MemoryLoader
    from nbdist.recsys.parallel import device_rows
    from nbdist.recsys.sharding import replicate
    from nbdist.recsys.training import captured as module
    from nbdist.recsys.training import fit

    torch.manual_seed(0)
    module.UNROLLED = unrolled
    device_rows.FUSED = fused
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    clicks = (OneTableClicks if one_table else Clicks)(width, sizes, sparse)
    if last_bit:
        for one in clicks.parameters():
            one.data.mul_(1 + torch.finfo(one.dtype).eps)
    model = replicate(clicks, OPTIMIZERS[optimizer])
    train = MemoryLoader(rows_of(sizes, count or (20 * batch if DRY else ROWS)), batch, shuffle=True, seed=1)
    dry = DRY and captured
    history = fit(model, predict, train, steps=steps, progress=False, captured=None if dry else captured, **options)
    return history, model


def speed(*args: Any, steps: int, **options: Any) -> float:
    """In a rank: rows/s of the second half of a run, which has nothing of its beginning."""
    steps = 4 if DRY else steps
    return fitted(*args, steps, log_every=steps // 2, **options)[0][-1].rows_per_second


def difference(**options: Any) -> dict[str, Any]:
    """In a rank: how far apart captured and eager training end, with an uneven last batch and learning rates.

    Adagrad and Adam divide by the size of the gradients: the last bit of one near zero decides the sign of a step. So
    the result also has how far apart two eager runs end whose first weights differ in the last bit.
    """
    from nbdist.recsys.training import warmup_decay

    sizes, steps = (500, 300), 8 if DRY else 250
    options |= {"sizes": sizes, "log_every": max(steps // 5, 1), "count": 2048 * (5 if DRY else 60) + 100}
    options |= {"schedule": warmup_decay(steps, warmup=3)}
    ways: list[dict[str, Any]] = [{"captured": False}, {"captured": True}, {"captured": False, "last_bit": True}]
    runs = [fitted(16, 2048, steps, **way, **options) for way in ways]
    eager, captured, beside = [dict(model.module.state_dict()) for _, model in runs]
    far, yardstick = (
        sum(float((one[name] - eager[name]).double().square().sum()) for name in eager) ** 0.5
        for one in (captured, beside)
    )
    losses = [[record.loss for record in history] for history, _ in runs]
    return {"weights": far, "weights of eager, a bit away": yardstick, "losses": losses}


def refused() -> dict[str, Any]:
    """In a rank: what is said where a step cannot be recorded, and whether the run is one all the same."""
    import numpy as np

    from nbdist.recsys.loader import MemoryLoader
    from nbdist.recsys.sharding import replicate
    from nbdist.recsys.training import fit

    def waits(model: nn.Module, batch: Any) -> Any:
        logits, labels = predict(model, batch)
        return logits * (1 + 0 * logits.mean().item()), labels

    def masks(model: nn.Module, batch: Any) -> Any:
        logits, labels = predict(model, batch)
        chosen = labels >= 0
        return logits[chosen], labels[chosen]

    def copies(model: nn.Module, batch: Any) -> Any:
        logits, labels = predict(model, batch)
        return logits * torch.tensor([1.0], device=logits.device), labels

    def draws(model: nn.Module, batch: Any) -> Any:
        logits, labels = predict(model, batch)
        return logits + 0.001 * float(np.random.random()), labels

    def drops(model: nn.Module, batch: Any) -> Any:
        logits, labels = predict(model, batch)
        return nn.functional.dropout(logits, 0.1, model.training), labels

    found: dict[str, Any] = {}
    for forward in (waits, masks, copies, draws, drops):
        for captured in (True, None):
            torch.manual_seed(0)
            model = replicate(Clicks(16, (500, 300)), OPTIMIZERS["adagrad"])
            train = MemoryLoader(rows_of((500, 300), 100_000), 1000, shuffle=True, seed=1)
            try:
                options = {"steps": 8 if DRY else 120, "progress": False, "captured": captured}
                found[f"{forward.__name__}, {captured}"] = [r.loss for r in fit(model, forward, train, **options)]
            except ValueError as error:
                found[f"{forward.__name__}, {captured}"] = str(error)
    return found


def profiled(width: int, batch: int, captured: bool) -> dict[str, Any]:
    """In a rank: what a run's steps spend their time in."""
    from torch.profiler import ProfilerActivity, profile

    cuda = rank_device().type == "cuda"
    fitted(width, batch, 4 if DRY else 200, captured=captured, log_every=100)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as seen:
        fitted(width, batch, 4 if DRY else 130 if captured else 20, captured=captured, log_every=65)
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    return {"table": seen.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=70)}


def described() -> dict[str, Any]:
    """In a rank: where this is."""
    cuda = rank_device().type == "cuda"
    return {
        "torch": torch.__version__,
        "GPU": torch.cuda.get_device_name() if cuda else "none: a dry run",
        "capability": torch.cuda.get_device_capability() if cuda else None,
    }


Part = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def parts() -> list[Part]:
    """Title, function of the rank, and its arguments; what proves most comes first."""
    found: list[Part] = [("where", described, (), {})]
    small = {"steps": 2000, "captured": True}
    torchs = {"fused": False}
    found += [
        ("eager, 2,048 x 16", speed, (16, 2048), {"steps": 200, "captured": False}),
        ("captured, 2,048 x 16, rows by torch", speed, (16, 2048), small | torchs),
        ("same: rows by torch", difference, (), torchs),
        ("captured, 2,048 x 16", speed, (16, 2048), small),
        ("same: adagrad", difference, (), {}),
        ("captured, 65,536 x 16", speed, (16, 65_536), {"steps": 220, "captured": True}),
        ("eager, 65,536 x 16", speed, (16, 65_536), {"steps": 100, "captured": False}),
        ("profile of captured, 2,048 x 16", profiled, (16, 2048, True), {}),
        ("profile of captured, 65,536 x 16", profiled, (16, 65_536, True), {}),
        ("profile of eager, 2,048 x 16", profiled, (16, 2048, False), {}),
    ]
    found += [(f"captured, 2,048 x 16, unrolled {u}", speed, (16, 2048), small | {"unrolled": u}) for u in (1, 8, 32)]
    found += [
        ("captured, 2,048 x 16, TF32", speed, (16, 2048), small | {"tf32": True}),
        ("captured, 2,048 x 16, bf16", speed, (16, 2048), small | {"precision": "bf16"}),
    ]
    large = {"steps": 220, "captured": True}
    for width in (16, 64):
        found += [
            (f"captured, 65,536 x {width}, TF32", speed, (width, 65_536), large | {"tf32": True}),
            (f"captured, 65,536 x {width}, bf16", speed, (width, 65_536), large | {"precision": "bf16"}),
            (f"captured, 65,536 x {width}, rows by torch", speed, (width, 65_536), large | torchs),
        ]
    columns = {"sizes": (50_000,) * 16, "count": 4_100_000}
    found += [
        ("same: sgd", difference, (), {"optimizer": "sgd"}),
        ("same: adam, dense", difference, (), {"optimizer": "adam", "sparse": False}),
        ("same: adagrad, dense", difference, (), {"sparse": False}),
        ("same: bf16", difference, (), {"precision": "bf16"}),
        ("refused", refused, (), {}),
        ("captured, 65,536 x 64", speed, (64, 65_536), large),
        ("eager, 65,536 x 64", speed, (64, 65_536), {"steps": 60, "captured": False}),
        ("captured, 2,048 x 16, 16 columns", speed, (16, 2048), small | columns),
        ("captured, 2,048 x 16, one table", speed, (16, 2048), small | {"one_table": True}),
        ("captured, 2,048 x 16, 16 columns, one table", speed, (16, 2048), small | columns | {"one_table": True}),
        ("eager, 2,048 x 16, 16 columns", speed, (16, 2048), {"steps": 60, "captured": False} | columns),
    ]
    return found
