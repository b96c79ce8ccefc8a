"""Exact search is exact whatever the blocks; two towers find what was planted; an index is what was put into it."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from conftest import Sessions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from nbdist import Session, in_ddp, warm
from nbdist.recsys.etl import Categorify, Workflow
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.metrics import ranking_metrics
from nbdist.recsys.models import Tower, TwoTower, draw_rows, hard_negatives, softmax_logits
from nbdist.recsys.retrieval import ItemIndex, top_k
from nbdist.recsys.sharding import replicate, shard
from nbdist.recsys.training import fit
from nbdist.recsys.triton import export_ensemble

# --- search ---


@given(st.integers(0, 9), st.integers(1, 30), st.integers(1, 35), st.integers(1, 80), st.integers(0, 99), st.booleans())
@settings(max_examples=30, deadline=None)
def test_exact_in_blocks_of_any_size(queries: int, items: int, k: int, block: int, seed: int, left_out: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    q, v = torch.randn(queries, 3, generator=draw), torch.randn(items, 3, generator=draw)
    lengths = torch.randint(0, items + 1, (queries,), generator=draw)
    lists = [torch.randperm(items, generator=draw)[:length] for length in lengths]
    exclude = Ragged(
        torch.cat([torch.empty(0, dtype=torch.int64), *lists]), torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
    )
    scores, places = top_k(q, v, k, exclude=exclude if left_out else None, block=block)
    assert scores.shape == places.shape == (queries, k)
    for row in range(queries):
        allowed = [i for i in range(items) if not left_out or i not in lists[row].tolist()]
        expected = sorted(allowed, key=lambda i: -float(q[row] @ v[i]))[:k]
        assert places[row].tolist() == expected + [-1] * (k - len(expected))
        torch.testing.assert_close(scores[row, : len(expected)], v[expected] @ q[row])
        assert (scores[row, len(expected) :] == -torch.inf).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "`k` and `block` must be integers, at least 1, got 0 and"),
        ({"k": 1.0}, "`k` and `block` must be integers, at least 1, got 1.0 and"),
        ({"queries": torch.ones(2)}, r"must be of shape \(rows, width\), got \(2,\) and \(4, 2\)"),
        ({"items": torch.ones(4, 3)}, "the same width, got 2 and 3"),
        ({"exclude": Ragged(torch.tensor([1]), torch.tensor([0, 1]))}, "a list for each of 2 queries, got 1 lists"),
        ({"items": torch.tensor([[1.0, 1.0], [torch.nan, 1.0]])}, "item 1 must be finite"),
        ({"queries": torch.tensor([[1.0, 1.0], [torch.inf, 1.0]])}, "query 1 must be finite"),
        ({"queries": torch.full((2, 2), 1e30), "items": torch.full((4, 2), 1e30)}, "the products of query 0"),
    ],
)
def test_searches_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        top_k(**{"queries": torch.ones(2, 2), "items": torch.ones(4, 2), "k": 1, **options})


# --- the index ---


@pytest.fixture
def index() -> ItemIndex:
    draw = torch.Generator().manual_seed(0)
    return ItemIndex(pl.Series([f"movie {i}" for i in range(200)]), torch.randn(200, 8, generator=draw))


def test_an_index_is_searched_by_raw_ids(index: ItemIndex) -> None:
    queries = torch.randn(5, 8)
    best = (queries @ index.vectors.T).argsort(1, descending=True)
    found = index.search(queries, 4)
    assert found["items"].to_list() == [[f"movie {i}" for i in row[:4].tolist()] for row in best]
    exclude = [found["items"][0].to_list(), ["nowhere"], [], None, found["items"][4].to_list()[:1] * 2]
    again = index.search(queries, 4, exclude=exclude)["items"].to_list()
    assert again[0] == [f"movie {i}" for i in best[0, 4:8].tolist()]
    assert again[1:4] == found["items"].to_list()[1:4] and again[4] == [f"movie {i}" for i in best[4, 1:5].tolist()]
    short = index.search(queries[:2], 300, exclude=[index.ids[:199].to_list(), index.ids.to_list()])
    assert short["items"].to_list() == [["movie 199"], []] and short["scores"].list.len().to_list() == [1, 0]


def test_faiss_finds_the_same(index: ItemIndex) -> None:
    queries = torch.randn(20, 8)
    exact = index.search(queries, 10)["items"].to_list()
    _, places = index.to_faiss("Flat").search(queries.numpy(), 10)
    assert [index.ids.gather(row).to_list() for row in places] == exact
    _, places = index.to_faiss("HNSW32").search(queries.numpy(), 10)  # not exact
    near = [len({*index.ids.gather(row).to_list()} & {*there}) for row, there in zip(places, exact, strict=True)]
    assert sum(near) > 150


def test_an_index_is_kept(index: ItemIndex, tmp_path: Path) -> None:
    index.save(tmp_path / "index")
    loaded = ItemIndex.load(tmp_path / "index")
    assert loaded.ids.equals(index.ids) and torch.equal(loaded.vectors, index.vectors)
    assert pl.read_parquet(tmp_path / "index" / "items.parquet").columns == ["id", "vector"]
    with pytest.raises(FileExistsError):
        index.save(tmp_path / "index")
    numbers = ItemIndex(pl.Series([5, 3], dtype=pl.Int32), torch.eye(2))
    numbers.save(tmp_path / "index", overwrite=True)
    assert ItemIndex.load(tmp_path / "index").search(torch.tensor([[0.0, 1.0]]), 1)["items"].to_list() == [[3]]
    with pytest.raises(FileNotFoundError):
        ItemIndex.load(tmp_path / "nowhere")
    (tmp_path / "index" / "items.parquet").write_text("no Parquet")
    with pytest.raises(ValueError, match="not a saved index"):
        ItemIndex.load(tmp_path / "index")


@pytest.mark.parametrize(
    ("ids", "message"), [([1, 2, 3], "a row for each of 3 ids"), ([1, None], "null"), ([1, 1], "unique")]
)
def test_invalid_ids_of_an_index_are_refused(ids: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ItemIndex(pl.Series(ids), torch.eye(2))


def test_vectors_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 of 2 vectors are not finite, the first belongs to id 'broken' in row 1"):
        ItemIndex(pl.Series(["good", "broken"]), torch.tensor([[1.0, 0.0], [torch.nan, 0.0]]))


def test_ids_that_the_index_lacks_are_counted() -> None:
    index = ItemIndex(pl.Series([10, 20]), torch.eye(2))
    found = index.places(pl.Series([[10, 999, 10, 999, 998, None], [], None, [20]]))
    assert found.values.tolist() == [0, -1, -1, 1] and found.lengths.tolist() == [3, 0, 0, 1]
    narrow = ItemIndex(pl.Series([10, 20], dtype=pl.Int8), torch.eye(2))
    assert narrow.places(pl.Series([[20, 999], [2**63 + 5]], dtype=pl.List(pl.UInt64))).values.tolist() == [1, -1, -1]
    # As pandas has integers where one is missing; what is no whole number is unknown.
    floats = index.places([[20.0, math.nan, 10.0], [10.5, math.inf], [None]])
    assert floats.values.tolist() == [1, 0, -1, -1] and floats.lengths.tolist() == [2, 2, 0]
    places = top_k(torch.eye(2), index.vectors, 1, exclude=index.places([[999], [20]]))[1]
    assert places.tolist() == [[0], [0]]
    measured = ranking_metrics(torch.tensor([[0], [1]]), index.places([[10], [999]]))
    assert measured["hit_rate@1"] == 0.5 and measured["unknown_items"] == 1


# --- the loss ---

MORE = pytest.mark.long("larger trainings")


@pytest.mark.parametrize(
    ("negatives", "corrected", "power", "hard"),
    [
        (0, True, None, None),
        (64, True, 0.75, 20),
        pytest.param(64, True, 0.75, None, marks=MORE),
        pytest.param(0, True, None, 20, marks=MORE),
        pytest.param(64, True, None, None, marks=MORE),
        pytest.param(64, False, None, None, marks=MORE),
        pytest.param(64, False, 0.75, None, marks=MORE),
        pytest.param(64, False, 0.75, 20, marks=MORE),
    ],
)
def test_the_correction_gives_the_shares_of_the_items(
    negatives: int, corrected: bool, power: float | None, hard: int | None
) -> None:
    """Everybody takes items by the same shares: then the right score of an item is the logarithm of its share."""
    draw = torch.Generator().manual_seed(0)
    shares = torch.arange(1, 61).float() ** -0.7
    shares /= shares.sum()
    weights = None if power is None else shares**power
    score = torch.zeros(60, 1, requires_grad=True)
    optimizer = torch.optim.Adam([score], lr=0.1)
    for _ in range(200):
        ids = torch.multinomial(shares, 128, replacement=True, generator=draw)
        drawn = draw_rows({"item": torch.arange(60)}, negatives, draw, weights=weights)["item"]
        every = torch.cat([ids, drawn])
        correction: dict[str, Any] = {"shares": shares, "drawn": weights} if corrected else {}
        logits, own = softmax_logits(torch.ones(128, 1), score[every], every, **correction)
        if hard:
            logits, own = hard_negatives(logits, own, hard)
        optimizer.zero_grad()
        cross_entropy(logits, own).backward()
        optimizer.step()
    slope = np.polyfit(shares.log().numpy(), score.detach()[:, 0].numpy(), 1)[0]
    if corrected:
        assert slope == pytest.approx(1, abs=0.15)
    elif not negatives:
        assert slope < 0.3, "what is popular is pushed down for being popular"
    else:
        assert slope < 0.85


def test_rows_are_drawn_by_their_weights() -> None:
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0])
    draw = torch.Generator().manual_seed(0)
    counts = draw_rows({"item": torch.arange(4)}, 40_000, draw, weights=weights)["item"].bincount(minlength=4)
    assert counts[0] == counts[3] == 0 and float(counts[1] / counts[2]) == pytest.approx(3, rel=0.05)
    for wrong, message in (
        (weights[:3], r"shape \(4,\)"),
        (-weights, "at least 0"),
        (weights * 0, "one of them above"),
        (weights * math.inf, "finite"),
        (weights / 0.0, "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_rows({"item": torch.arange(4)}, 3, weights=wrong)
    with pytest.raises(ValueError, match="`table` must have rows to draw, got none"):
        draw_rows({"item": torch.arange(0)}, 3)
    with pytest.raises(ValueError, match="`count` must be at least 0, got -1"):
        draw_rows({"item": torch.arange(4)}, -1)
    with pytest.raises(ValueError, match="`shares` must be given with `drawn`, got None"):
        softmax_logits(torch.ones(3, 1), torch.ones(4, 1), torch.arange(4), drawn=weights)


def test_the_own_item_is_no_negative() -> None:
    ids = torch.tensor([7, 8, 7, 7])  # the last is a negative
    logits, own = softmax_logits(torch.ones(3, 1), torch.ones(4, 1), ids)
    assert torch.isinf(logits).nonzero().tolist() == [[0, 2], [0, 3], [2, 0], [2, 3]] and own.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="3 ids for 4 items"):
        softmax_logits(torch.ones(3, 1), torch.ones(4, 1), ids[:3])


def test_what_a_user_has_taken_is_no_negative() -> None:
    ids = torch.tensor([7, 8, 9, 9, 5])  # the last two are negatives
    taken = Ragged(torch.tensor([9, 7, 3, 5, 100]), torch.tensor([0, 3, 3, 5]))  # [9, 7, 3], [] and [5, 100]
    logits, _ = softmax_logits(torch.ones(3, 1), torch.ones(5, 1), ids, exclude=taken)
    assert torch.isinf(logits).nonzero().tolist() == [[0, 2], [0, 3], [2, 3], [2, 4]]
    with pytest.raises(ValueError, match="`exclude` must have a list for each of 2 rows, got 3 lists"):
        softmax_logits(torch.ones(2, 1), torch.ones(5, 1), ids, exclude=taken)


@given(st.integers(0, 6), st.integers(1, 9), st.integers(1, 12), st.sampled_from([None, 0.0, 0.5]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_hardest_negatives_are_those_of_a_sort(
    rows: int, candidates: int, count: int, margin: float | None, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, candidates, generator=draw)
    own = torch.randint(candidates, (rows,), generator=draw)
    logits[torch.rand(rows, candidates, generator=draw) < 0.3] = -torch.inf  # no negatives
    logits[torch.arange(rows), own] = torch.randn(rows, generator=draw)
    logits.requires_grad_()
    found, zeros = hard_negatives(logits, own, count, margin=margin)
    width = min(count, candidates - 1)
    assert found.shape == (rows, 1 + width) and zeros.tolist() == [0] * rows
    for row, right in enumerate(own.tolist()):
        one = logits[row].tolist()
        others = sorted(
            (x for place, x in enumerate(one) if place != right and (margin is None or x <= one[right] - margin)),
            reverse=True,
        )
        assert found[row].tolist() == [one[right], *(others + [-math.inf] * width)[:width]]
    loss = cross_entropy(found, zeros, reduction="sum")
    loss.backward()
    assert loss.isfinite() and logits.grad is not None and logits.grad.isfinite().all()
    if count >= candidates - 1 and margin is None:
        torch.testing.assert_close(loss, cross_entropy(logits, own, reduction="sum"), msg="all of them: no mining")


def test_hard_negatives_that_make_no_sense() -> None:
    logits, own = torch.zeros(2, 3), torch.tensor([0, 1])
    for wrong, message in (
        ((logits, own, 0), "`count` must be at least 1, got 0"),
        ((logits, own[:1], 1), r"got \(2, 3\) and \(1,\)"),
        ((logits[0], own, 1), r"`logits` must be of shape \(rows, candidates\)"),
    ):
        with pytest.raises(ValueError, match=message):
            hard_negatives(*wrong)
    with pytest.raises(ValueError, match="`margin` must be a finite number of at least 0, got -1"):
        hard_negatives(logits, own, 1, margin=-1)


def test_negatives_of_all_ranks_are_those_of_one_process_with_all_rows(sessions: Sessions) -> None:
    """The same logits, and the same gradients, also of the hardest; ranks have different numbers of rows and of
    negatives."""
    rows = 3, 2
    draw = torch.Generator().manual_seed(0)
    queries, items = torch.randn(5, 4, generator=draw), torch.randn(10, 4, generator=draw)
    ids = torch.tensor([1, 2, 3, 2, 4, 5, 1, 2, 3, 4])  # rank 0: three items and a negative, rank 1: two and four
    shares = torch.tensor([0.0, 0.4, 0.3, 0.2, 0.05, 0.05])
    taken = [[2, 4], [], [1], [5], [5, 1]]

    def lists(some: list[list[int]]) -> Ragged:
        offsets = torch.tensor([0, *map(len, some)]).cumsum(0)
        return Ragged(torch.tensor([code for one in some for code in one], dtype=torch.int64), offsets)

    def of_rank() -> tuple[torch.Tensor, ...]:
        rank = torch.distributed.get_rank()
        mine = queries.split(rows)[rank].clone().requires_grad_()
        every = items.split([4, 6])[rank].clone().requires_grad_()
        options: dict[str, Any] = {"drawn": shares**0.5, "across_ranks": True}
        options["exclude"] = lists(taken[:3] if rank == 0 else taken[3:])
        logits, own = softmax_logits(mine, every, ids.split([4, 6])[rank], shares, **options)
        hard, first = hard_negatives(logits, own, 3)
        (cross_entropy(logits, own, reduction="sum") + cross_entropy(hard, first, reduction="sum")).backward()
        return logits.detach(), hard.detach(), mine.grad, every.grad

    found = sessions[2].run_all(of_rank)
    queries.requires_grad_(), items.requires_grad_()
    chance = 5 * shares + 5 * shares**0.5 / (shares**0.5).sum()
    logits = queries @ items.T - (chance[ids] / 10).log()
    own = torch.tensor([0, 1, 2, 4, 5])
    other = torch.tensor([[code in some for code in ids.tolist()] for some in taken]) | (ids[own, None] == ids)
    logits = logits.masked_fill(other.scatter(1, own[:, None], False), -torch.inf)
    hard, first = hard_negatives(logits, own, 3)
    (cross_entropy(logits, own, reduction="sum") + cross_entropy(hard, first, reduction="sum")).backward()
    for number, expected in enumerate((logits.detach(), hard.detach(), queries.grad, items.grad)):
        torch.testing.assert_close(torch.cat([one[number] for one in found]), expected)


# --- two towers ---


def test_towers_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="`cardinalities` must have a column"):
        Tower({})
    with pytest.raises(ValueError, match="'movie' is in both towers"):
        TwoTower({"user": 2, "movie": 3}, {"movie": 3})


GROUPS, USERS, MOVIES = 4, 80, 40


def planted() -> pl.DataFrame:
    """Users of each group take movies of that group alone, half of them: the other half is to be found."""
    draw = np.random.default_rng(0)
    rows = [
        (f"user {user}", f"movie {movie}", [f"genre {movie % GROUPS}"])
        for user in range(USERS)
        for movie in draw.permutation(np.arange(user % GROUPS, MOVIES, GROUPS))[:5].tolist()
    ]
    return pl.DataFrame(rows, schema=["user", "movie", "genres"], orient="row")


@pytest.fixture(scope="module")
def workflow() -> Workflow:
    return Workflow(Categorify("user", "movie", "genres")).fit(planted(), progress=False)


def build(workflow: Workflow, layers: list[int]) -> TwoTower:
    sizes = {name: vocabulary.size for name, vocabulary in workflow.vocabularies.items()}
    query, item = {"user": sizes["user"]}, {name: sizes[name] for name in ("movie", "genres")}
    return TwoTower(query, item, embedding_dim=16, mlp=layers)


@pytest.mark.long("larger trainings")
@pytest.mark.parametrize(("how", "layers"), [("row_wise", []), ("table_wise", [32, 8]), ("replicated", [8])])
def test_two_towers_find_the_movies_of_synthetic_groups(workflow: Workflow, how: str, layers: list[int]) -> None:
    rows, taken = workflow.transform(planted()).collect(), planted()
    movies = taken.select("movie", "genres").unique("movie", maintain_order=True)
    catalogue = workflow.transform(movies, ["movie", "genres"]).collect()
    shares = workflow.vocabularies["movie"].shares()

    def train() -> Any:
        torch.manual_seed(1)
        model: Any = build(workflow, layers)
        if how == "replicated":
            model = replicate(model, lambda parameters: torch.optim.Adam(parameters, lr=0.03))
        else:
            dense = (lambda parameters: torch.optim.Adam(parameters, lr=0.03)) if layers else None
            options = {"optimizer": "adagrad", "lr": 0.3, "dense_optimizer": dense}
            model = shard(model, {"*": how}, batch_size=50, **options)
        (table,) = MemoryLoader(catalogue, len(catalogue), rank=0, world_size=1)

        def predict(module: Any, batch: Any) -> Any:
            negatives = draw_rows(table, 16)
            ids = torch.cat([batch["movie"], negatives["movie"]])
            return softmax_logits(*module(batch, negatives), ids, shares)

        loader = MemoryLoader(rows, 50, shuffle=True, seed=1)
        fit(model, predict, loader, epochs=10, loss=cross_entropy, progress=False)
        return model.gather()

    warm("import torchrec.distributed")
    with Session(2) as session:
        model = session.run(train)
    index = ItemIndex.of(model.item.eval(), catalogue, movies["movie"], batch_size=7)
    users = taken.group_by("user", maintain_order=True).agg("movie")
    (batch,) = MemoryLoader(workflow.transform(users, ["user"]).collect(), len(users))
    with torch.no_grad():
        found = index.search(model.query(batch), 5, exclude=users["movie"])
    right = 0
    for user, seen, items in zip(users["user"], users["movie"], found["items"], strict=True):
        group = {f"movie {movie}" for movie in range(int(user.split()[1]) % GROUPS, MOVIES, GROUPS)}
        assert not set(items) & set(seen)
        right += len(set(items) & group)
    assert right > 0.97 * 5 * USERS, "by chance it were one of seven"


@pytest.mark.long("Triton: exports and a server")
@pytest.mark.parametrize("layers", [[], [8]])
def test_the_tower_of_who_asks_is_served(workflow: Workflow, tmp_path: Path, layers: list[int]) -> None:
    torch.manual_seed(0)
    model = build(workflow, layers)

    def vector(model: TwoTower, batch: Any) -> torch.Tensor:
        return model.query(batch)

    ensemble = export_ensemble(
        workflow, model, tmp_path / "repository", "query", columns=["user"], predict=vector, output="vector", fill=False
    )
    assert ensemble.inputs == {"user": "string"}
    session = onnxruntime.InferenceSession(tmp_path / "repository" / "query_model" / "1" / "model.onnx")
    codes = torch.tensor([2, 5, 0])
    (answers,) = session.run(["vector"], {"user": codes[:, None].numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(answers, model.query({"user": codes}).numpy(), rtol=1e-4, atol=1e-6)


def test_the_loss_of_a_rank_uses_only_its_own_rows() -> None:
    """Uneven batches do no harm, as documented."""

    def shapes() -> list[Any]:
        model = TwoTower({"user": 9}, {"movie": 9}, embedding_dim=4)
        rows = {"user": torch.arange(7), "movie": torch.arange(7)}
        loader = MemoryLoader(rows, 3)
        return [softmax_logits(*model(batch), batch["movie"])[0].shape for batch in loader]

    assert in_ddp(2, shapes) == [(3, 3), (1, 1)]


# --- what people have ---


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop = torch.nn.Embedding(50, 16), torch.nn.Dropout(0.5)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.drop(self.table(batch["movie"]))  # type: ignore[no-any-return]

    def encode(self, batch: Any) -> torch.Tensor:
        return self(batch)  # type: ignore[no-any-return]


def test_the_index_of_a_tower_in_training_mode() -> None:
    tower, movies = Dropping(), pl.DataFrame({"movie": range(50)})
    tower.table.eval()
    both = torch.nn.ModuleDict({"item": tower})

    def item(model: Any, batch: Any) -> torch.Tensor:
        return model["item"](batch)  # type: ignore[no-any-return]

    for one in (tower, tower.encode, lambda batch: tower(batch), functools.partial(item, both)):
        assert torch.equal(ItemIndex.of(one, movies, movies["movie"]).vectors, tower.table.weight)
    assert tower.training and tower.drop.training and not tower.table.training


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64])
def test_vectors_and_ids_of_other_kinds(dtype: Any) -> None:
    vectors = np.array([[1, 0], [0, 1]], dtype)
    for ids in (["a", "b"], np.array(["a", "b"]), pd.Series(["a", "b"]), pa.array(["a", "b"]), pl.Series(["a", "b"])):
        index = ItemIndex(ids, vectors)  # type: ignore[arg-type]
        assert index.vectors.dtype == torch.float32
        assert index.search(torch.tensor([[0.25, 1.0]], dtype=torch.float64), 1)["items"].to_list() == [["b"]]
    index = ItemIndex(pl.Series([1, 2], dtype=pl.Int32), vectors)  # type: ignore[arg-type]
    for lists in ([[2, 2**40], [1]], pd.Series([[2, 3], [1]]), pl.Series([[2, 3], [1]], dtype=pl.List(pl.Int16))):
        assert index.places(lists).values.tolist() == [1, -1, 0]  # type: ignore[arg-type]
        assert index.search(np.eye(2), 2, exclude=lists)["items"].to_list() == [[1], [2]]  # type: ignore[arg-type]
    scores, places = top_k(torch.tensor([[0.25, 1.0]]), torch.from_numpy(vectors), 1)
    assert places.tolist() == [[1]] and scores.tolist() == [[1.0]]
    tower = lambda batch: torch.nn.functional.one_hot(batch["movie"], 2).double()  # noqa: E731
    for items in ({"movie": [0, 1]}, pd.DataFrame({"movie": [0, 1]}), pa.table({"movie": [0, 1]})):
        assert ItemIndex.of(tower, items, ["a", "b"]).vectors.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(TypeError, match="ids must be a column of ids and vectors a matrix of numbers"):
        ItemIndex(["a"], [["x"]])  # type: ignore[arg-type]


def test_an_index_without_items(tmp_path: Path) -> None:
    made = ItemIndex.of(
        Dropping(), pl.DataFrame({"movie": []}, schema={"movie": pl.Int64}), pl.Series([], dtype=pl.String)
    )
    made.save(tmp_path / "index")
    for index in (made, ItemIndex.load(tmp_path / "index")):
        assert index.vectors.shape == (0, 16)
        found = index.search(torch.ones(2, 16), 3, exclude=[["a"], []])
        assert found.rows() == [([], []), ([], [])] and found.schema["items"] == pl.List(pl.String)
        assert [part.tolist() for part in index.places([["a"], []])] == [[-1], [0, 1, 1]]
        assert index.search(torch.ones(0, 16), 3).height == 0
