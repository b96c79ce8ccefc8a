"""Models with tables of raw ids, exported: known and unknown ids are answered as in the notebook."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from nbdist.recsys.etl import Categorify, Workflow
from nbdist.recsys.models import DLRM
from nbdist.recsys.raw_ids import RawIds, RawTable
from nbdist.recsys.raw_ids.table import Records
from nbdist.recsys.triton import export_ensemble
from nbdist.recsys.triton.onnx import _SearchedTable

onnxruntime = pytest.importorskip("onnxruntime")
KNOWN = torch.tensor([-(2**63), -5, 0, 1, 7, 2**40, 2**63 - 1])


def filled(table: RawTable, known: int) -> torch.Tensor:
    """Give a table some of the ids; return ids that it has, and others."""
    ids = KNOWN[:known]
    table.put(Records(ids, torch.ones_like(ids), torch.ones_like(ids)), torch.randn(known, 4))
    torch.nn.init.normal_(table.default_row)
    return torch.cat([KNOWN, KNOWN + 1, torch.tensor([3, -6])])


@pytest.mark.parametrize("known", range(8))
def test_ids_are_found_by_halves(known: int) -> None:
    table = RawTable(4, RawIds(unknown="learned"))
    users = filled(table, known)
    assert torch.equal(_SearchedTable(table)(users), table(users))


@pytest.mark.long("exports a model")
def test_an_exported_model_knows_raw_ids(tmp_path: Path) -> None:
    torch.manual_seed(0)  # some models answer alike to all
    workflow = Workflow(Categorify("movie")).fit(pl.DataFrame({"user": [1, 2**40], "movie": ["a", "b"]}))
    model = DLRM({"user": RawIds(unknown="learned"), "movie": 4}, embedding_dim=4, top_mlp=[4])
    users = filled(model.features.embeddings.embedding_bags["user"], 6)
    movies = torch.arange(len(users)) % 4
    export_ensemble(workflow, model, tmp_path, "ctr", columns=["user", "movie"], fill=False)
    session = onnxruntime.InferenceSession(tmp_path / "ctr_model" / "1" / "model.onnx")
    (found,) = session.run(None, {"user": users.numpy()[:, None], "movie": movies.numpy()[:, None]})
    with torch.no_grad():
        expected = model({"user": users, "movie": movies}).numpy()
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-6)
    assert len(np.unique(expected.round(5))) > 6
