"""Values that training never saw have the mean of the known ones, and not the vector that a table began with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import polars as pl
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from nbdist.recsys.etl import Categorify, Workflow, fill_unknown
from nbdist.recsys.loader import MemoryLoader, keyed_jagged
from nbdist.recsys.loader.columns import Ragged
from nbdist.recsys.triton import export_ensemble

ROWS = pl.DataFrame(
    {
        "user": ["a", "a", "a", "b", "rare"],
        "movie": [1, 1, 2, None, 2],
        "tags": [["x", "y"], ["x"], [], ["x"], ["y", None]],
    }
)


class Taste(nn.Module):
    """Bags of one column each, summed up."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.columns = list(sizes)
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"table of {name}", num_embeddings=size, embedding_dim=4, feature_names=[name])
                for name, size in sizes.items()
            ]
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.tables(keyed_jagged(batch, self.columns)).values().sum(1)


@pytest.fixture
def workflow() -> Workflow:
    return Workflow(Categorify("user", "movie", "tags", min_count={"user": 2})).fit(ROWS, progress=False)


@pytest.fixture
def model(workflow: Workflow) -> Taste:
    torch.manual_seed(0)
    return Taste({name: vocabulary.size for name, vocabulary in workflow.vocabularies.items()})


def weights(model: Taste) -> dict[str, torch.Tensor]:
    return {name: model.tables.embedding_bags[f"table of {name}"].weight.detach().clone() for name in model.columns}


def test_rows_that_were_never_looked_up_get_the_mean(workflow: Workflow, model: Taste) -> None:
    before = weights(model)
    # "rare" and "b" are left out and trained code 1 of user; movies and tags have a null, which trained code 0.
    assert {name: (v.nulls, v.unseen) for name, v in workflow.vocabularies.items()} == {
        "user": (0, 2),
        "movie": (1, 0),
        "tags": (1, 0),
    }
    assert fill_unknown(model, workflow) == {"user": [0], "movie": [1], "tags": [1]}
    after = weights(model)
    torch.testing.assert_close(after["user"][0], before["user"][2])
    torch.testing.assert_close(after["movie"][1], (2 * before["movie"][2] + 2 * before["movie"][3]) / 4)
    torch.testing.assert_close(after["tags"][1], (3 * before["tags"][2] + 2 * before["tags"][3]) / 5)
    for name, code in (("user", 0), ("movie", 1), ("tags", 1)):
        others = torch.arange(len(before[name])) != code
        torch.testing.assert_close(after[name][others], before[name][others], rtol=0, atol=0)
    fill_unknown(model, workflow)
    torch.testing.assert_close(weights(model), after, msg="a second time changes nothing")


def test_a_saved_workflow_knows_what_it_saw(workflow: Workflow, tmp_path: Path) -> None:
    workflow.save(tmp_path / "saved")
    loaded = Workflow.load(tmp_path / "saved").vocabularies
    assert [(v.nulls, v.unseen) for v in loaded.values()] == [(0, 2), (1, 0), (1, 0)]


def test_tables_that_are_not_torchrecs(workflow: Workflow) -> None:
    users, both = nn.Embedding(workflow.vocabularies["user"].size, 3), nn.EmbeddingBag(9, 3)
    model = nn.ModuleList([users, both])
    row, known = both.weight[1].clone(), both.weight[2:4].clone()
    assert fill_unknown(model, workflow) == {}
    # A table of two columns: the values of both count, and the null of either has trained code 0.
    filled = fill_unknown(model, workflow, {"user": users, "movie": both, "tags": both})
    assert filled == {"user": [0], "movie": [1], "tags": [1]}
    torch.testing.assert_close(both.weight[1], (5 * known[0] + 4 * known[1]) / 9)
    assert not torch.equal(both.weight[1], row)
    with pytest.raises(ValueError, match="'item' is no column of codes; there are user, movie, tags"):
        fill_unknown(model, workflow, {"item": users})
    message = r"column 'movie' has 4 codes, but its table has only 3 rows: .* another workflow"
    with pytest.raises(ValueError, match=message):
        fill_unknown(model, workflow, {"movie": nn.Embedding(3, 2)})


@pytest.mark.long("Triton: exports and a server")
@pytest.mark.parametrize("fill", [True, False])
def test_an_export_has_filled_tables_and_leaves_the_model(
    workflow: Workflow, model: Taste, tmp_path: Path, fill: bool
) -> None:
    before = weights(model)
    export_ensemble(workflow, model, tmp_path / "repository", "taste", fill=fill)
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0, msg="the model is left as it is")
    session = onnxruntime.InferenceSession(tmp_path / "repository" / "taste_model" / "1" / "model.onnx")
    asked = pl.DataFrame({"user": [None, "a"], "movie": [77, 1], "tags": [["?"], ["x"]]}, schema=ROWS.schema)
    (batch,) = MemoryLoader(workflow.transform(asked).collect(), 2)
    request = {
        name: (column.values if isinstance(column, Ragged) else column).numpy().reshape(2, 1)
        for name, column in batch.items()
    }
    (answers,) = session.run(None, request)
    if fill:
        fill_unknown(model, workflow)
    with torch.no_grad():
        np.testing.assert_allclose(answers[:, 0], model(batch).numpy(), rtol=1e-5)
