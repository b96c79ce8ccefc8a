"""A single table for several columns: it learns what separate tables learn, and is saved, gathered and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import polars as pl
import pytest
import torch
from conftest import Sessions
from torch import nn

from nbdist.recsys.etl import Categorify, Workflow
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.loader.foreign_ids import foreign_ids
from nbdist.recsys.models import OneTable, PooledTables
from nbdist.recsys.raw_ids import RawIds
from nbdist.recsys.sharding import replicate, shard
from nbdist.recsys.training import fit
from nbdist.recsys.triton import export_ensemble

WARM = "import torchrec.distributed"
OPTIONS = {"threads": 1}
SIZES = {"user": 30, "movie": 12, "hour": 24}


class Apart(nn.Module):
    """The same with torch's tables, one for each column."""

    def __init__(self, one: OneTable) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                name: nn.Embedding.from_pretrained(part.weight.clone(), freeze=False, sparse=one.table.sparse)
                for name, part in one.embedding_bags.items()
            }
        )

    def forward(self, batch: Any) -> torch.Tensor:
        return torch.cat([table(batch[name]) for name, table in self.tables.items()], dim=1)


class Clicks(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.tower = tables, nn.Linear(24, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.tower(self.tables(batch)).squeeze(1)  # type: ignore[no-any-return]


def rows() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    found = {name: torch.randint(size, (600,), generator=draw) for name, size in SIZES.items()}
    return found | {"liked": (found["user"] + found["movie"]) % 2}


OPTIMIZERS = {
    "Adagrad": lambda some: torch.optim.Adagrad(some, lr=0.1),
    "SGD": lambda some: torch.optim.SGD(some, lr=0.1),
    "Adam": lambda some: torch.optim.Adam(some, lr=0.01),
}


def train(together: bool, sparse: bool, optimizer: str, folder: str | None = None) -> Any:
    """In a rank: the losses, the rows of each column, and whether the model was put together on the CPU."""
    torch.manual_seed(0)
    one = OneTable(SIZES, embedding_dim=8, sparse=sparse)
    model = replicate(Clicks(one if together else Apart(one)), OPTIMIZERS[optimizer])
    batches = MemoryLoader(rows(), 50, shuffle=True, seed=1)
    history = fit(model, lambda m, b: (m(b), b["liked"]), batches, epochs=3, progress=False)
    if folder is not None:
        model.save(folder)
        nn.init.zeros_(model.module.get_submodule("tables.table").weight)  # type: ignore[arg-type]
        model.load(folder)
    gathered: Any = model.gather()
    if gathered is None:
        return None
    tables = gathered.tables.embedding_bags if together else gathered.tables.tables
    return [record.loss for record in history], {name: one.weight.detach() for name, one in tables.items()}


@pytest.mark.parametrize("nranks", [1, 2])
@pytest.mark.parametrize(
    ("optimizer", "sparse"), [("Adagrad", True), ("SGD", True), ("Adagrad", False), ("Adam", False)]
)
def test_it_learns_what_separate_tables_learn(
    sessions: Sessions, tmp_path: Path, nranks: int, optimizer: str, sparse: bool
) -> None:
    losses, weights = sessions[nranks].run(train, True, sparse, optimizer, str(tmp_path / "checkpoint"))
    wanted, wanted_weights = sessions[nranks].run(train, False, sparse, optimizer)
    assert losses == pytest.approx(wanted, rel=1e-6) and losses[-1] < losses[0]
    for name, weight in wanted_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def test_each_column_begins_as_its_own_table_would() -> None:
    torch.manual_seed(0)
    one = OneTable(SIZES, embedding_dim=8)
    torch.manual_seed(0)
    apart = PooledTables(SIZES, embedding_dim=8)
    for name, table in apart.embedding_bags.items():
        assert torch.equal(one.embedding_bags[name].weight, table.weight)  # type: ignore[arg-type]
    batch = rows()
    assert torch.equal(one(batch), apart(batch)) and torch.equal(one.apart()(batch), apart(batch))


@pytest.mark.parametrize(("column", "wrong"), [("user", 30), ("movie", -1), ("hour", 24)])
def test_an_id_without_a_row_is_not_the_row_of_another_column(column: str, wrong: int) -> None:
    one, batch = OneTable(SIZES, embedding_dim=4), rows()
    batch[column][7] = wrong
    with pytest.raises(IndexError, match="an id of the batch has no row in the table"):
        one(batch)
    said = foreign_ids(nn.ModuleDict({"tables": one}), batch)
    assert said is not None and f"column '{column}' must have ids 0 to {SIZES[column] - 1}" in said
    assert f"got {wrong} in row 7" in said


def test_it_is_exported_as_a_table_for_each_column(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": ["a", "b", "c", "a"], "movie": [7, 8, 7, 9]})
    workflow = Workflow(*map(Categorify, frame.columns)).fit(frame)
    sizes = {name: workflow.vocabularies[name].size for name in frame.columns}
    torch.manual_seed(0)
    one = OneTable(sizes, embedding_dim=4)
    before, inputs = one.table.weight.clone(), {"user": np.array([[2], [0], [4]]), "movie": np.array([[4], [3], [1]])}
    for model in (one, nn.Sequential(one, nn.Linear(8, 1))):
        folder = tmp_path / type(model).__name__
        options = {"columns": list(sizes), "output": "found", "predict": lambda model, batch: model(batch)}
        export_ensemble(workflow, model, folder, "ctr", **options)
        [file] = folder.rglob("*.onnx")
        (found,) = onnxruntime.InferenceSession(file).run(None, inputs)
        rows = one.embedding_bags["user"].weight[[2, 4]]
        if model is one:
            assert torch.equal(torch.from_numpy(found)[[0, 2], :4], rows)
            mean = (2 * one.embedding_bags["user"].weight[2] + one.embedding_bags["user"].weight[3:].sum(0)) / 4
            torch.testing.assert_close(torch.from_numpy(found)[1, :4], mean)  # of null, which no row had
        with pytest.raises(Exception, match=r"out of bounds|indices element"):
            onnxruntime.InferenceSession(file).run(None, inputs | {"user": np.array([[5], [0], [0]])})
    assert torch.equal(one.table.weight, before), "the model is not changed"


def test_weights_of_other_columns_are_refused(sessions: Sessions, tmp_path: Path) -> None:
    one, other = OneTable({"user": 10, "movie": 5}, embedding_dim=4), OneTable({"user": 9, "movie": 6}, embedding_dim=4)
    with pytest.raises(ValueError, match=r"OneTable must be \[10, 5\], as saved, got \[9, 6\]"):
        other.load_state_dict(one.state_dict())

    def save_and_load(folder: str) -> None:
        replicate(one, OPTIMIZERS["SGD"]).save(folder)
        replicate(other, OPTIMIZERS["SGD"]).load(folder)

    with pytest.raises(ValueError, match=r"OneTable must be \[10, 5\], as saved, got \[9, 6\]"):
        sessions[2].run(save_and_load, str(tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"cardinalities": {"user": RawIds()}}, ValueError, "got raw ids for 'user': use PooledTables"),
        ({"cardinalities": {}}, ValueError, "got no column: use PooledTables"),
        ({"cardinalities": {"user": 0}}, ValueError, "must be at least 1, got 0"),
        ({"embedding_dim": 0}, ValueError, "`embedding_dim` must be at least 1, got 0"),
        ({"sparse": "yes"}, TypeError, "`sparse` must be True or False, got 'yes'"),
    ],
)
def test_invalid_arguments(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        OneTable(**{"cardinalities": SIZES, **options})


def test_columns_that_it_does_not_take(sessions: Sessions) -> None:
    one, batch = OneTable(SIZES, embedding_dim=4), rows()
    with pytest.raises(ValueError, match="column 'hour' must have one integer per row for OneTable, got lists"):
        one(batch | {"hour": Ragged(torch.arange(600), torch.arange(601))})
    with pytest.raises(ValueError, match=r"column 'hour' must have one integer per row .*, got torch.float32"):
        one(batch | {"hour": batch["hour"].float()})
    with pytest.raises(ValueError, match="OneTable has no PooledTables"):
        sessions[2].run(lambda: shard(OneTable(SIZES, embedding_dim=4), batch_size=2))
