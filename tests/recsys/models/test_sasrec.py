"""Histories are in the order of time and of nothing later; SASRec learns from them what their last item cannot show."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import polars as pl
import pytest
import torch
import torch.distributed as dist
from conftest import Sessions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from nbdist.recsys.datasets import synthetic_sequences
from nbdist.recsys.etl import Categorify, Workflow, leave_one_out, sequences, with_history, write_history
from nbdist.recsys.loader import MemoryLoader, ParquetLoader, Ragged
from nbdist.recsys.metrics import ranking_metrics
from nbdist.recsys.models import SASRec, calibrated_bce, draw_rows, padded
from nbdist.recsys.retrieval import top_k
from nbdist.recsys.sharding import replicate, shard
from nbdist.recsys.training import fit
from nbdist.recsys.triton import export_ensemble

WARM = "import torchrec.distributed"

# --- histories ---

rows = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.one_of(st.none(), st.integers(0, 9)), st.integers(0, 5)),
    max_size=40,
)


@given(rows, st.integers(1, 6), st.booleans())
@settings(max_examples=25, deadline=None)
def test_histories_as_a_naive_reference_has_them(rows: list[Any], length: int, texts: bool) -> None:
    frame = pl.DataFrame(rows, schema={"user": pl.Int64, "movie": pl.Int64, "timestamp": pl.Int64}, orient="row")
    if texts:
        frame = frame.with_columns(pl.col("movie").cast(pl.String))
    taken: dict[Any, list[Any]] = {}
    before: dict[int, list[Any]] = {}
    movies = frame["movie"].to_list()
    for row in sorted(range(len(rows)), key=lambda row: rows[row][2]):
        mine = taken.setdefault(rows[row][0], [])
        before[row] = mine[-length:]
        mine.append(movies[row])
    found = with_history(frame, "movie", length=length)
    assert found.drop("history").equals(frame)
    assert found["history"].to_list() == [before[row] for row in range(len(rows))]
    expected = {user: mine[-length:] for user, mine in taken.items()}
    whole = sequences(frame, "movie", length=length)
    assert dict(whole.iter_rows()) == expected
    assert whole["user"].to_list() == list(dict.fromkeys(row[0] for row in rows))
    assert sequences(frame.lazy(), "movie", length=length).collect().equals(whole)
    assert dict(sequences(frame, "movie").iter_rows()) == taken


@pytest.mark.parametrize("kind", ["files", "frame", "lazy"])
@pytest.mark.parametrize("memory", [3000, 1 << 30])
def test_histories_of_rows_that_do_not_fit(tmp_path: Path, kind: str, memory: int) -> None:
    rng = np.random.default_rng(1)
    movies = pl.Series([None if one == 9 else f"movie {one}" for one in rng.integers(0, 10, 700)], dtype=pl.Categorical)
    users = [None if one == 8 else f"user {one}" for one in rng.geometric(0.2, 700)]
    times = [None if one == 5 else int(one) for one in rng.integers(0, 20, 700)]
    frame = pl.DataFrame({"user": users, "rating": range(700), "movie": movies, "timestamp": times})
    expected = with_history(frame, "movie", length=5)
    source: Any = {"frame": frame, "lazy": frame.lazy(), "files": tmp_path / "in"}[kind]
    (tmp_path / "in").mkdir()
    for number, (start, stop) in enumerate([(0, 10), (10, 10), (10, 500), (500, 700)]):
        frame[start:stop].write_parquet(tmp_path / "in" / f"{number}.parquet", row_group_size=100)
    options: dict[str, Any] = {
        "length": 5,
        "num_files": 3,
        "row_group_size": 60,
        "memory_bytes": memory,
        "progress": False,
    }
    files = write_history(source, tmp_path / "out", "movie", **options)
    assert [str(file.relative_to(tmp_path)) for file in files] == [f"out/part-0000{i}.parquet" for i in range(3)]
    found = pl.concat(map(pl.read_parquet, files))
    assert found.columns == expected.columns and found.rows() == expected.rows()
    assert sorted(os.listdir(tmp_path)) == ["in", "out"], "nothing else is left"
    with pytest.raises(FileExistsError, match="out already exists"):
        write_history(source, tmp_path / "out", "movie", **options)
    few = write_history(frame[:2], tmp_path / "out", "movie", num_files=8, overwrite=True, progress=False)
    assert (
        len(few) == 2
        and pl.read_parquet(few)["history"].to_list() == with_history(frame[:2], "movie")["history"].to_list()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"column": "film"}, "no column 'film'"),
        ({"by": "who"}, "no column 'who'"),
        ({"name": "user"}, "a column 'user' already"),
        ({"length": 0}, "`length` must be at least 1, got 0"),
        ({"num_files": 0}, "`num_files` must be at least 1, got 0"),
        ({"compression": "zip"}, "`compression` must be one of .* got 'zip'"),
    ],
)
def test_histories_that_cannot_be_written(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    frame = pl.DataFrame({"user": [1], "movie": [1], "timestamp": [1]})
    with pytest.raises(ValueError, match=message):
        write_history(frame, tmp_path / "out", **{"column": "movie", **arguments})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda frame: sequences(frame), "must name at least one column"),
        (lambda frame: sequences(frame, "movie", length=0), "`length` must be at least 1, got 0"),
        (lambda frame: with_history(frame, "film"), "no column 'film'"),
        (lambda frame: with_history(frame, "movie", name="user"), "a column 'user' already"),
    ],
)
def test_invalid_arguments_of_sasrec_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(pl.DataFrame({"user": [1], "movie": [1], "timestamp": [1]}))


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=8), st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_padded_rows(lists: list[list[int]], length: int) -> None:
    offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
    codes, there = padded(Ragged(torch.tensor([v for one in lists for v in one], dtype=torch.int64), offsets), length)
    last = [one[-length:] for one in lists]
    assert codes.tolist() == [one + [0] * (length - len(one)) for one in last]
    assert there.sum(1).tolist() == [len(one) for one in last]
    # As a server has them: filled up to the longest with -1.
    longest = max(map(len, lists))
    filled = torch.tensor([v for one in lists for v in one + [-1] * (longest - len(one))], dtype=torch.int64)
    again, same = padded(Ragged(filled, torch.arange(len(lists) + 1) * longest), length)
    assert torch.equal(again, codes) and torch.equal(same, there)


# --- the planted rule ---


def test_the_last_two_items_determine_the_next() -> None:
    lists = sequences(synthetic_sequences(300, 30, 12), "movie")["movie"].to_list()
    after_one: dict[Any, set[int]] = {}
    after_two: dict[Any, set[int]] = {}
    for one in lists:
        for a, b, c in zip(one, one[1:], one[2:], strict=False):
            after_one.setdefault(b, set()).add(c)
            after_two.setdefault((a, b), set()).add(c)
    assert sum(len(known) == 1 for known in after_two.values()) > 0.95 * len(after_two)
    assert sum(len(known) == 2 for known in after_one.values()) > 0.9 * len(after_one), "one item alone does not"


ITEMS, LENGTH = 20, 8


@pytest.fixture(scope="module")
def split() -> Any:
    return leave_one_out(synthetic_sequences(400, ITEMS, LENGTH))


@pytest.fixture(scope="module")
def workflow(split: Any) -> Workflow:
    rows = (
        sequences(split.train, "movie").rename({"movie": "history"}).with_columns(movie=pl.col("history").list.last())
    )
    return Workflow(Categorify(("movie", "history"))).fit(rows, progress=False)


def histories(workflow: Workflow, rows: pl.DataFrame) -> pl.DataFrame:
    return workflow.transform(sequences(rows, "movie").rename({"movie": "history"}), ["history"]).collect()


@pytest.mark.long("larger trainings")
@pytest.mark.parametrize("how", ["row_wise", "replicated"])
def test_the_rule_of_synthetic_histories_is_learned(
    sessions: Sessions, split: Any, workflow: Workflow, tmp_path: Path, how: str
) -> None:
    """A model of the last item alone would be right half of the time; the learned model must know the rule."""
    size = workflow.vocabularies["movie"].size
    histories(workflow, split.train).write_parquet(tmp_path / "train.parquet")
    catalogue = {"movie": torch.arange(2, size)}

    def predict(model: Any, batch: Any) -> Any:
        return model(batch, draw_rows(catalogue, 40)["movie"])

    def train() -> Any:
        torch.manual_seed(0)
        model: Any = SASRec(size, length=LENGTH, embedding_dim=32, blocks=2, dropout=0.0)
        adam = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
        if how == "replicated":
            model = replicate(model, adam)
        else:
            model = shard(model, {"history": how}, batch_size=16, optimizer="adagrad", lr=0.1, dense_optimizer=adam)
        rows = ParquetLoader(tmp_path / "train.parquet", 16, shuffle=True, seed=0)
        fit(model, predict, rows, epochs=20, loss=cross_entropy, progress=False)
        return model.gather()

    model = sessions[2].run(train).eval()
    held = sequences(split.train, "movie")["user"].to_frame().join(split.valid, on="user", maintain_order="left")
    codes = workflow.vocabularies["movie"].mapping()
    (batch,) = MemoryLoader(histories(workflow, split.train), len(held))
    with torch.no_grad():
        _, places = top_k(model.query(batch), model.item(catalogue["movie"]), 1)
    wanted = torch.tensor([codes[movie] for movie in held["movie"]])
    found = ranking_metrics(places + 2, Ragged(wanted, torch.arange(len(wanted) + 1)))
    assert found["hit_rate@1"] > 0.85, found


@pytest.mark.parametrize(
    ("layers", "temperature"), [("transformer", None), ("transformer", 0.05), ("ligr", None), ("ligr", 0.05)]
)
def test_attention_sees_no_later_items(layers: Any, temperature: float | None) -> None:
    torch.manual_seed(0)
    model = SASRec(30, length=6, embedding_dim=8, blocks=2, heads=2, layers=layers, temperature=temperature).eval()
    lists = [[5, 6, 7], [5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9, 10, 11], []]

    def ragged(lists: list[list[int]]) -> dict[str, Any]:
        offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
        return {"history": Ragged(torch.tensor([v for one in lists for v in one], dtype=torch.int64), offsets)}

    negatives = torch.tensor([3, 7, 20])
    with torch.no_grad():
        query = model.query(ragged(lists))
        assert not query[3].any(), "an empty history has no vector"
        for row, one in enumerate(lists[:3]):
            torch.testing.assert_close(query[row : row + 1], model.query(ragged([one[-6:]])), msg="whatever the batch")
        logits, first = model(ragged(lists), negatives)
        assert not first.any() and len(logits) == 2 + 4 + 6, "a place for each item that has one before it"
        # The last place of each is what is asked about the history without its last item.
        ends = torch.tensor([1, 5, 11])
        states = model.query(ragged([one[-7:-1] for one in lists[:3]]))
        following = torch.tensor([one[-1] for one in lists[:3]])
        scale = temperature or 1.0
        torch.testing.assert_close(logits[ends, 0], (states * model.item(following)).sum(1) / scale)
        others = states @ model.item(negatives).T / scale
        if temperature:
            torch.testing.assert_close(states.norm(dim=1), torch.ones(3))
        others[following[:, None] == negatives] = -torch.inf
        torch.testing.assert_close(logits[ends, 1:], others)
        # Another item changes what comes at its place and later, and nothing before it.
        changed, _ = model(ragged([[5, 6, 7], [5, 6, 7, 21, 9], lists[2]]), negatives)
        same = (changed == logits).all(1)
        assert same.tolist() == [True] * 4 + [False] * 2 + [True] * 6
    with pytest.raises(ValueError, match="a column of lists is needed"):
        model.query({"history": torch.tensor([1])})


def test_items_of_the_history_are_no_negatives_where_they_are_excluded() -> None:
    torch.manual_seed(0)
    model = SASRec(30, length=4, embedding_dim=8, blocks=1).eval()
    lists = Ragged(torch.tensor([20, 5, 6, 7, 8, 9, 3]), torch.tensor([0, 6, 7, 7]))  # 20 is too old to be read
    batch, negatives = {"history": lists}, torch.tensor([3, 7, 20, 7, 11])
    with torch.no_grad():
        plain, _ = model(batch, negatives)
        logits, first = model(batch, negatives, exclude=lists)
    left_out = torch.tensor([False, False, True, True, True, False]).expand(4, -1)  # in all four places of the row
    assert not first.any() and torch.equal(logits, plain.masked_fill(left_out, -torch.inf))
    assert plain.isinf().nonzero().tolist() == [[1, 2], [1, 4]], "only where 7 is the next item"
    with pytest.raises(ValueError, match="`exclude` must have a list for each of 3 rows, got 1"):
        model(batch, negatives, exclude=Ragged(negatives, torch.tensor([0, 5])))


def test_a_batch_without_rows() -> None:
    torch.manual_seed(0)
    model = SASRec(30, length=6, embedding_dim=8, blocks=2, heads=2)
    nothing = {"history": Ragged(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))}
    logits, first = model(nothing, torch.tensor([3, 7, 20]))
    assert logits.shape == (0, 4) and first.shape == (0,)
    assert model(nothing, torch.tensor([3, 7, 20]), exclude=nothing["history"])[0].shape == (0, 4)
    assert model.eval().query(nothing).shape == (0, 8)
    logits.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_gated_layers_are_those_of_the_equations() -> None:
    """x + sigmoid(x G) * f(norm(x)): f is attention over what came before, then SwiGLU; a normalization at the end."""
    torch.manual_seed(0)
    model = SASRec(30, length=3, embedding_dim=4, blocks=1, heads=2, layers="ligr").eval()
    parts = {name.removeprefix("blocks."): value for name, value in model.state_dict().items()}
    mine = {name.removeprefix("layers.0."): value for name, value in parts.items()}
    read = torch.randn(1, 3, 4)

    def affine(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ mine[f"{name}.weight"].T + mine[f"{name}.bias"]

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    x = read[0]
    h = norm(x, mine["norms.0.weight"], mine["norms.0.bias"])
    queries, keys, values = (h @ mine["attention.in_proj_weight"].T + mine["attention.in_proj_bias"]).split(4, dim=1)
    heads = []
    for part in (slice(0, 2), slice(2, 4)):
        products = queries[:, part] @ keys[:, part].T / 2**0.5
        weights = products.masked_fill(torch.ones(3, 3).triu(1) > 0, -torch.inf).softmax(1)
        heads.append(weights @ values[:, part])
    x = x + affine(x, "gates.0").sigmoid() * affine(torch.cat(heads, dim=1), "attention.out_proj")
    gate, value = affine(norm(x, mine["norms.1.weight"], mine["norms.1.bias"]), "wide").split(16, dim=1)
    x = x + affine(x, "gates.1").sigmoid() * affine(gate * gate.sigmoid() * value, "narrow")
    with torch.no_grad():
        torch.testing.assert_close(model._states(read, None)[0], norm(x, parts["norm.weight"], parts["norm.bias"]))


def test_layers_of_another_name_are_refused() -> None:
    with pytest.raises(ValueError, match="`layers` must be one of 'transformer', 'ligr', got 'lstm'"):
        SASRec(30, layers="lstm")  # type: ignore[arg-type]


# --- the loss of gSASRec ---


@given(st.integers(1, 6), st.integers(2, 40), st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_calibrated_bce_is_that_of_the_paper(negatives: int, items: int, calibration: float) -> None:
    logits = torch.randn(5, 1 + negatives, dtype=torch.float64)
    logits[0, 1] = -torch.inf  # an item that comes next is no negative
    share = min(negatives / (items - 1), 1)
    beta = share * (calibration * (1 - 1 / share) + 1 / share)
    expected = 0.0
    for first, *others in logits.sigmoid().tolist():
        expected -= math.log(first**beta) + sum(math.log(1 - other) for other in others)
    found = calibrated_bce(logits, torch.zeros(5, dtype=torch.int64), items=items, calibration=calibration)
    assert float(found) == pytest.approx(expected / (5 * (1 + negatives)))


def test_calibrated_probabilities_are_those_of_training_with_all_negatives() -> None:
    """With one user, four items and one negative, the best probability of the next item is its true one, 1/2."""
    logits = torch.zeros(4, requires_grad=True)
    others = torch.tensor([[i, j] for i in range(4) for j in range(4) if i != j])  # each negative as often
    times = torch.tensor([3.0, 1.0, 1.0, 1.0])  # item 0 comes next half of the time
    optimizer = torch.optim.LBFGS([logits], max_iter=200)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        each = [calibrated_bce(logits[pair][None], torch.tensor([0]), items=4, calibration=1.0) for pair in others]
        loss = (torch.stack(each) * times[others[:, 0]]).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(logits.detach().sigmoid(), times / times.sum(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"items": 1}, "`items` must be at least 2, got 1"),
        ({"items": 9, "calibration": 1.5}, "`calibration` must be from 0 to 1, got 1.5"),
        ({"items": 9, "calibration": -0.5}, "`calibration` must be a finite number of at least 0, got -0.5"),
    ],
)
def test_invalid_arguments_of_calibrated_bce_are_refused(options: Any, message: str) -> None:
    own = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        calibrated_bce(torch.zeros(1, 2), own, **options)
    with pytest.raises(ValueError, match="a column of the next item and one for each negative, got one column"):
        calibrated_bce(torch.zeros(1, 1), own, items=9)


@pytest.mark.slow
def test_a_rank_without_rows_trains_on(sessions: Sessions) -> None:
    """The gradient is the mean of the ranks': half of the gradient of the rank which has some."""
    negatives = torch.tensor([2, 5, 11])

    def step(rows: int, share: float, parallel: Any) -> torch.Size:
        lists = Ragged(torch.tensor([2, 3, 4, 5, 6, 7])[: 3 * rows], torch.arange(rows + 1) * 3)
        logits, first = parallel.model({"history": lists}, negatives)
        parallel.optimizer.zero_grad()
        (share * cross_entropy(logits, first) if rows else logits.sum()).backward()
        parallel.optimizer.step()
        return logits.shape

    def train() -> Any:
        torch.manual_seed(0)
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        model = SASRec(12, length=4, embedding_dim=8, blocks=1, dropout=0.0)
        model = shard(model, {"history": "row_wise"}, batch_size=2, optimizer="sgd", lr=0.1, dense_optimizer=sgd)
        rows, share = (2, 1.0) if dist.get_world_size() == 1 or dist.get_rank() == 0 else (0, 0.0)
        shape = step(rows, share / (2 if dist.get_world_size() == 1 else 1), model)
        return shape, model.gather()

    (shape, model), (empty, _) = sessions[2].run_all(train)
    _, alone = sessions[1].run(train)
    assert shape == (4, 4) and empty == (0, 4)
    torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=0, atol=1e-6)


@pytest.mark.long("Triton: exports and a server")
def test_a_history_is_served(workflow: Workflow, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SASRec(workflow.vocabularies["movie"].size, length=4, embedding_dim=8, blocks=1)

    def vector(model: SASRec, batch: Any) -> torch.Tensor:
        return model.query(batch)

    export_ensemble(
        workflow, model, tmp_path / "served", "next", columns=["history"], predict=vector, output="vector", fill=False
    )
    session = onnxruntime.InferenceSession(tmp_path / "served" / "next_model" / "1" / "model.onnx")
    some = np.array([[5, 6, -1, -1, -1, -1], [2, 3, 4, 5, 6, 7], [9, -1, -1, -1, -1, -1]])
    asked = np.tile(some, (50, 1))  # more values than an export tries
    (answers,) = session.run(["vector"], {"history": asked})
    lists = [row[row >= 0] for row in asked]
    offsets = torch.tensor([0, *np.cumsum([len(one) for one in lists])])
    batch = {"history": Ragged(torch.from_numpy(np.concatenate(lists)), offsets)}
    with torch.no_grad():
        np.testing.assert_allclose(answers, model.eval().query(batch).numpy(), rtol=1e-4, atol=1e-5)
