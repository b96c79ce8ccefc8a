"""DLRM, DCNv2 and DeepFM: what their papers say, the same on ranks as in one process, and served as trained."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import polars as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from nbdist import Session
from nbdist.recsys.etl import Categorify, Log, Workflow
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.models import DLRM, DCNv2, DeepFM, PositionBias
from nbdist.recsys.raw_ids import RawIds
from nbdist.recsys.sharding import shard
from nbdist.recsys.training import fit
from nbdist.recsys.triton import export_ensemble

WARM = "import torchrec.distributed"
SIZES = {"user": 30, "movie": 20, "genres": 8}
MODELS = {
    "dlrm": lambda numbers: DLRM(SIZES, numbers, embedding_dim=8, bottom_mlp=[16], top_mlp=[16, 8]),
    "dcnv2": lambda numbers: DCNv2(SIZES, numbers, embedding_dim=8, crosses=2, top_mlp=[16]),
    "low rank": lambda numbers: DCNv2(SIZES, numbers, embedding_dim=8, crosses=2, low_rank=4, top_mlp=[16]),
    "deepfm": lambda numbers: DeepFM(SIZES, numbers, embedding_dim=8, top_mlp=[16]),
}


def rows(count: int, seed: int = 0) -> dict[str, Any]:
    """A movie is liked where the user and it are both even or both odd, and by the young more."""
    draw = torch.Generator().manual_seed(seed)
    user, movie = (torch.randint(2, SIZES[name], (count,), generator=draw) for name in ("user", "movie"))
    lengths = torch.randint(0, 4, (count,), generator=draw)
    genres = torch.randint(2, SIZES["genres"], (int(lengths.sum()),), generator=draw)
    age, year = torch.rand(count, generator=draw), torch.randint(0, 3, (count,), generator=draw)
    liked = torch.where(age < 0.2, True, user % 2 == movie % 2)
    offsets = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
    return {"user": user, "movie": movie, "genres": Ragged(genres, offsets), "age": age, "year": year, "liked": liked}


def build(name: str, numbers: list[str]) -> Any:
    torch.manual_seed(1)
    return MODELS[name](numbers)


# --- what the papers say ---


def parts(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The embeddings of each column by themselves, shape (rows, columns, dim), and the numbers."""
    tables = model.features.embeddings.embedding_bags
    lists = batch["genres"].values.split(batch["genres"].lengths.tolist())
    mean = [tables["genres"].weight[one].mean(0) if len(one) else torch.zeros(8) for one in lists]
    own = [tables[name].weight[batch[name]] for name in ("user", "movie")]
    return torch.stack([*own, torch.stack(mean)], dim=1), torch.stack([batch["age"], batch["year"].float()], dim=1)


@torch.no_grad()
def test_dlrm_has_the_products_of_all_pairs() -> None:
    batch = rows(9)
    for numbers in ([], ["age", "year"]):
        model = build("dlrm", numbers)
        vectors, values = parts(model, batch)
        if numbers:
            vectors = torch.cat([model.bottom_mlp(values)[:, None], vectors], dim=1)
        pairs = itertools.combinations(range(vectors.shape[1]), 2)
        products = torch.stack([(vectors[:, a] * vectors[:, b]).sum(1) for a, b in pairs], dim=1)
        expected = model.top_mlp(torch.cat([vectors[:, 0], products], dim=1) if numbers else products).squeeze(1)
        torch.testing.assert_close(model(batch), expected)


@torch.no_grad()
def test_dcnv2_crosses_with_the_first_layer() -> None:
    batch = rows(9)
    for name in ("dcnv2", "low rank"):
        model = build(name, ["age", "year"])
        vectors, values = parts(model, batch)
        first = x = torch.cat([vectors.flatten(1), values], dim=1)
        for layer in range(2):
            net = model.crosses
            whole = net.outer[layer] if name == "dcnv2" else net.outer[layer] @ net.inner[layer]
            x = first * (x @ whole.T + net.bias[layer]) + x
        torch.testing.assert_close(model(batch), model.top_mlp(x).squeeze(1))


@torch.no_grad()
def test_deepfm_adds_the_inner_products() -> None:
    batch = rows(9)
    model = build("deepfm", ["age", "year"])
    vectors, values = parts(model, batch)
    fields = torch.cat([vectors, values[:, :, None] * model.dense_embeddings], dim=1)  # (rows, 5, 8)
    inner = sum((fields[:, a] * fields[:, b]).sum(1) for a, b in itertools.combinations(range(5), 2))
    flat = fields.flatten(1)
    expected = model.linear(flat).squeeze(1) + inner + model.top_mlp(flat).squeeze(1)
    torch.testing.assert_close(model(batch), expected)


class Relevance(nn.Module):
    """A logit for each item."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(items))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.logits[batch["item"]]


@pytest.mark.parametrize("separate", [True, False])
def test_what_was_shown_first_is_not_what_is_best(separate: bool) -> None:
    """The worst items were shown first, and so were clicked most."""
    draw = torch.Generator().manual_seed(0)
    items, positions = 8, 4
    item = torch.randint(items, (20_000,), generator=draw)
    position = ((item * positions) // items + torch.randint(2, item.shape, generator=draw)).clamp(max=positions - 1)
    clicked = torch.rand(item.shape, generator=draw) < (1.0 * item - 3.0 * position).sigmoid()
    model: nn.Module = Relevance(items)
    if separate:
        model = PositionBias(model, positions)
    batch = {"item": item, "position": position}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(batch), clicked.float()).backward()
        optimizer.step()
    with torch.no_grad():
        asked = model.eval()({"item": torch.arange(items)})
    best_last = bool((asked.diff() > 0).all())
    assert best_last == separate
    assert separate or asked.argmax() < asked.argmin(), "without positions, what was shown first seems best"


def test_positions_that_are_missing_or_out_of_range() -> None:
    model = PositionBias(Relevance(3), 2)
    with torch.no_grad():
        model.bias[:] = torch.tensor([5.0, 7.0])
    item = torch.tensor([0, 1, 2])
    assert model({"item": item, "position": torch.tensor([0, 1, 9])}).tolist() == [5.0, 7.0, 7.0]
    for wrong in ({}, {"position": torch.zeros(3, 1)}):
        with pytest.raises(ValueError, match="the batch has no column 'position' with one position per row"):
            model({"item": item, **wrong})
    with pytest.raises(ValueError, match="`positions` must be at least 1, got 0"):
        PositionBias(Relevance(3), 0)


def test_models_that_make_no_sense() -> None:
    for make in (DLRM, DCNv2, DeepFM):
        for size in (RawIds, "many", 10.5, True):
            with pytest.raises(TypeError, match=r"`cardinalities\['user'\]` must be the number of codes, or a RawIds"):
                make({"user": size}, ["age"])
        with pytest.raises(TypeError, match="`cardinalities` must be a mapping from columns"):
            make(RawIds(), ["age"])
        with pytest.raises(ValueError, match=r"`cardinalities\['user'\]` must be at least 1, got 0"):
            make({"user": 0}, ["age"])
        for names in (8, "age"):
            with pytest.raises(TypeError, match="`dense_features` must be a list of names of columns"):
                make({"user": 3}, names)
        with pytest.raises(ValueError, match="must have a column of codes"):
            make({}, ["age", "year"])
        with pytest.raises(ValueError, match="'age' is in `cardinalities` and in `dense_features`: remove it"):
            make({"age": 3, "user": 4}, ["age"])
        with pytest.raises(ValueError, match=r"`dense_features` must name each column once, got \['age', 'age'\]"):
            make({"user": 3, "item": 4}, ["age", "age"])
        for name in ("items", "keys", "a.b", ""):
            with pytest.raises(ValueError, match="no table can have the name"):
                make({"user": 3, name: 4})
    with pytest.raises(ValueError, match="nothing to take products of"):
        DLRM({"user": 3})
    with pytest.raises(ValueError, match="`crosses` and `low_rank` must be at least 1, got 0"):
        DCNv2({"user": 3}, crosses=0)
    with pytest.raises(ValueError, match="no column 'height' with one number per row; its columns are user, movie"):
        DeepFM(SIZES, ["height"])(rows(3))


# --- on ranks ---


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1, eps=1e-8)


def predict(model: nn.Module, batch: Any) -> Any:
    return model(batch), batch["liked"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long("larger trainings") if name != "dlrm" else ()) for name in MODELS],
)
def test_the_same_losses_as_in_one_process(session: Session, name: str) -> None:
    strategies = {"user": "row_wise", "movie": "column_wise", "genres": "table_wise"}

    def train() -> Any:
        options = {"optimizer": "adagrad", "lr": 0.1, "dense_optimizer": adagrad}
        model = shard(build(name, ["age", "year"]), strategies, batch_size=20, **options)
        history = fit(model, predict, MemoryLoader(rows(300), 20), steps=12, log_every=1, progress=False)
        return [record.loss for record in history], model.gather()

    losses, trained = session.run(train)
    model = build(name, ["age", "year"])
    optimizer = adagrad(model.parameters())
    halves = [MemoryLoader(rows(300), 20, rank=rank, world_size=2) for rank in range(2)]
    expected = []
    batches = itertools.chain.from_iterable(zip(*halves, strict=True) for _ in range(2))
    for pair in itertools.islice(batches, 12):
        optimizer.zero_grad()
        logits = torch.cat([model(batch) for batch in pair])
        loss = binary_cross_entropy_with_logits(logits, torch.cat([batch["liked"] for batch in pair]).float())
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-4)
    assert sum(expected[6:]) < sum(expected[:6]), "it learns"
    torch.testing.assert_close(dict(trained.state_dict()), dict(model.state_dict()), rtol=1e-3, atol=1e-4)


# --- served ---


@pytest.mark.long("Triton: exports and a server")
@pytest.mark.parametrize("name", MODELS)
def test_served_as_trained(tmp_path: Path, name: str) -> None:
    frame = pl.DataFrame(
        {
            "user": ["ann", "bob", "cleo", "ann"],
            "movie": [1, 2, 3, 2],
            "genres": [["a", "b"], [], ["b"], ["c", "a", "b"]],
            "clicks": [0, 3, 10, 2],
        }
    )
    workflow = Workflow(Categorify("user", "movie", "genres"), Log("clicks")).fit(frame, progress=False)
    sizes = {column: vocabulary.size for column, vocabulary in workflow.vocabularies.items()}
    kinds: dict[str, Any] = {
        "dlrm": lambda: DLRM(sizes, ["clicks"], embedding_dim=8),
        "dcnv2": lambda: DCNv2(sizes, ["clicks"], embedding_dim=8),
        "low rank": lambda: DCNv2(sizes, ["clicks"], embedding_dim=8, low_rank=2),
        "deepfm": lambda: DeepFM(sizes, ["clicks"], embedding_dim=8),
    }
    torch.manual_seed(0)
    model = kinds[name]().eval()
    columns = [*sizes, "clicks"]
    options = {"columns": columns, "output": "logit", "fill": False}
    ensemble = export_ensemble(workflow, model, tmp_path / "repository", "clicks_model", **options)
    assert ensemble.inputs == {"user": "string", "movie": "int64", "genres": "list[string]", "clicks": "int64"}
    onnx = onnxruntime.InferenceSession(tmp_path / "repository" / "clicks_model_model" / "1" / "model.onnx")
    (batch,) = MemoryLoader(workflow.transform(frame, columns).collect(), len(frame))
    longest = torch.nn.utils.rnn.pad_sequence(
        batch["genres"].values.split(batch["genres"].lengths.tolist()), batch_first=True, padding_value=-1
    )
    inputs = {column: longest if column == "genres" else batch[column][:, None] for column in columns}
    (answers,) = onnx.run(["logit"], {column: tensor.numpy() for column, tensor in inputs.items()})
    with torch.no_grad():
        np.testing.assert_allclose(answers[:, 0], model(batch).numpy(), rtol=1e-4, atol=1e-5)
