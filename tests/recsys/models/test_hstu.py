"""HSTU computes what its paper says, sees nothing later, and learns from times what the order does not show."""

from __future__ import annotations

import concurrent.futures
import math
from typing import Any

import numpy as np
import onnxruntime
import polars as pl
import pytest
import torch
import tritonclient.grpc
from conftest import Sessions
from torch.nn.functional import cross_entropy
from tritonclient.utils import np_to_triton_dtype

from nbdist.recsys.etl import Categorify, Workflow
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.models import HSTU
from nbdist.recsys.sharding import replicate, shard
from nbdist.recsys.training import fit
from nbdist.recsys.triton import Ensemble, export_ensemble, serve, serving
from nbdist.recsys.triton.served.preprocess import Preprocessing

LISTS = [[5, 6, 7], [5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9, 10, 11], []]
TIMES = [[0, 50, 9_000], [7, 7, 7, 8, 5_000], [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000], []]


def ragged(lists: list[list[int]]) -> Ragged:
    offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
    return Ragged(torch.tensor([value for one in lists for value in one], dtype=torch.int64), offsets)


def batch_of(lists: list[list[int]], times: list[list[int]], now: list[int] | None = None) -> dict[str, Any]:
    batch: dict[str, Any] = {"history": ragged(lists), "times": ragged(times)}
    return batch if now is None else {**batch, "now": torch.tensor(now)}


def normal(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5)


def silu(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x / (1 + np.exp(-x))


def query_in_loops(model: HSTU, codes: list[int], times: list[int], now: int) -> np.ndarray[Any, Any]:
    """The equations of the paper (section 3.2), a position, a head and a pair at a time."""
    count, asked = len(codes), [*times[1:], now]
    width = model.positions.weight.shape[1]
    table = model.embeddings.embeddings["history"].weight.detach().double().numpy()
    positions = model.positions.weight.detach().double().numpy()
    x = np.stack([table[code] * width**0.5 + positions[count - 1 - place] for place, code in enumerate(codes)])
    for block in model.blocks:
        weights: Any = {name: value.detach().double().numpy() for name, value in block.named_parameters()}
        parts = [np.split(silu(normal(row) @ weights["inputs"]), 4) for row in x]
        size = width // block.heads
        result = np.zeros_like(x)
        for i in range(count):
            seen = np.zeros(width)
            for head in range(block.heads):
                own = slice(head * size, (head + 1) * size)
                for j in range(i + 1):
                    bucket = int(math.log(max(1, abs(asked[i] - times[j]))) / 0.301)
                    bias = weights["by_distance"][i - j] + weights["by_time"][bucket]
                    weight = silu(parts[i][2][own] @ parts[j][3][own] + bias) / model.length
                    seen[own] += weight * parts[j][1][own]
            gated = parts[i][0] * normal(seen)
            result[i] = x[i] + weights["output.weight"] @ gated + weights["output.bias"]
        x = result
    return x[-1] / np.linalg.norm(x[-1])


@pytest.mark.parametrize("heads", [1, 2])
def test_the_equations_of_the_paper(heads: int) -> None:
    torch.manual_seed(0)
    model = HSTU(30, times="times", length=6, embedding_dim=8, blocks=2, heads=heads).eval()
    with torch.no_grad():
        for block in model.blocks:  # large enough that each bias counts
            block.by_time.normal_()
            block.by_distance.normal_()
    codes, times = [5, 6, 7, 8], [0, 40, 41, 90_000]
    found = model.query(batch_of([codes], [times], [100_000]))[0].detach().numpy()
    np.testing.assert_allclose(found, query_in_loops(model, codes, times, 100_000), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("timed", [True, False])
def test_nothing_later_is_seen(timed: bool) -> None:
    torch.manual_seed(0)
    model = HSTU(30, times="times" if timed else None, length=6, embedding_dim=8, blocks=2).eval()
    negatives = torch.tensor([3, 20])
    with torch.no_grad():
        logits, _ = model(batch_of(LISTS, TIMES), negatives)
        assert len(logits) == 2 + 4 + 6, "a place for each item that has one before it"
        # The last place of each is what is asked, at the time of the last item, about the history without that item.
        before, ends = [one[-7:-1] for one in LISTS[:3]], torch.tensor([1, 5, 11])
        asked = batch_of(before, [one[-7:-1] for one in TIMES[:3]], [one[-1] for one in TIMES[:3]])
        following = torch.tensor([one[-1] for one in LISTS[:3]])
        expected = (model.query(asked) * model.item(following)).sum(1) / 0.05
        torch.testing.assert_close(logits[ends, 0], expected)
        changed, _ = model(batch_of([LISTS[0], [5, 6, 7, 21, 9], LISTS[2]], TIMES[:3]), negatives)
        same = (changed == logits).all(1)
        assert same.tolist() == [True] * 4 + [False] * 2 + [True] * 6
        assert not model.query(batch_of(LISTS, TIMES))[3].any(), "an empty history has no vector"
        later = model.query(batch_of(LISTS[:1], TIMES[:1], [10**9]))
        assert torch.equal(later, model.query(batch_of(LISTS[:1], TIMES[:1]))) is not timed


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"`embedding_dim` must be a multiple of `heads` \(3\), got 8"):
        HSTU(30, embedding_dim=8, heads=3)
    with pytest.raises(ValueError, match="`temperature` must be None or a number above 0, got 0"):
        HSTU(30, temperature=0)
    with pytest.raises(ValueError, match="`length` must be at least 1, got 0"):
        HSTU(30, length=0)
    with pytest.raises(TypeError, match=r"`items` must be .* got .*item"):
        HSTU("item")  # type: ignore[arg-type]
    model = HSTU(30, times="times", length=6, embedding_dim=8)
    with pytest.raises(ValueError, match="`times` must have lists of the same lengths as `history`"):
        model.query(batch_of([[5, 6]], [[1]]))
    with pytest.raises(KeyError, match="times"):
        model.query({"history": ragged([[5]])})
    nothing = batch_of([], [])
    logits, _ = model(nothing, torch.tensor([3, 7]))
    assert logits.shape == (0, 3) and model.query(nothing).shape == (0, 8)


ITEMS = 12


def walks(count: int, length: int = 8) -> dict[str, Ragged]:
    """After a short time comes the next item, after a long one the third next: the order alone shows neither."""
    generator = torch.Generator().manual_seed(0)
    slow = torch.rand(count, length, generator=generator) < 0.5
    codes = torch.randint(ITEMS, (count, 1), generator=generator) + torch.where(slow, 3, 1).cumsum(1)
    times = torch.where(slow, 100_000, 60).cumsum(1)
    offsets = torch.arange(count + 1) * length
    return {"history": Ragged((2 + codes % ITEMS).flatten(), offsets), "times": Ragged(times.flatten(), offsets)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replicated", "row_wise"])
def test_the_time_shows_what_comes_next(sessions: Sessions, how: str) -> None:
    rows = walks(150)

    def predict(model: Any, batch: Any) -> Any:
        return model(batch, torch.arange(2, 2 + ITEMS))

    def train(times: str | None) -> Any:
        torch.manual_seed(0)
        model: Any = HSTU(2 + ITEMS, times=times, length=8, embedding_dim=16, dropout=0.0)
        adam = lambda parameters: torch.optim.Adam(parameters, lr=0.02)  # noqa: E731
        if how == "replicated":
            model = replicate(model, adam)
        else:
            model = shard(model, {"history": how}, batch_size=15, optimizer="adagrad", lr=0.1, dense_optimizer=adam)
        loader = MemoryLoader(rows, 15, shuffle=True, seed=0)
        return fit(model, predict, loader, epochs=20, loss=cross_entropy, progress=False)[-1].loss

    timed, ordered = (sessions[2].run(train, times) for times in ("times", None))
    assert timed < 0.2 and ordered > 0.6, "a coin has a cross entropy of 0.69"


def rows_to_serve(count: int, seed: int) -> pl.DataFrame:
    """Histories, some of them empty, some longer than the model reads, some of items that training did not have."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 12, count)
    lists = {
        "history": [draw.choice(list("abcdefg" if seed == 1 else "abcdefgxyz"), length).tolist() for length in lengths],
        "times": [(draw.integers(0, 10**7, length).cumsum() - 10**6).tolist() for length in lengths],
    }
    schema = {"history": pl.List(pl.String), "times": pl.List(pl.Int64)}
    return pl.DataFrame(lists, schema=schema).with_columns(now=pl.col("times").list.last().fill_null(0) + 3_600)


@pytest.fixture(scope="module", params=[True, False], ids=["timed", "untimed"])
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Workflow, HSTU, Ensemble]:
    timed = request.param
    torch.manual_seed(0)
    workflow = Workflow(Categorify("history")).fit(rows_to_serve(150, 1), progress=False)
    size = workflow.vocabularies["history"].size
    model = HSTU(size, times="times" if timed else None, length=4, embedding_dim=8, blocks=2, heads=2).eval()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.normal_()  # so that each bias counts
    columns = ["history", "times", "now"] if timed else ["history"]
    ensemble = export_ensemble(
        workflow,
        model,
        tmp_path_factory.mktemp("repository"),
        "next",
        columns=columns,
        predict=lambda model, batch: model.query(batch),
        output="vector",
        backend="python",
        fill=False,
    )
    return workflow, model, ensemble


def queries(workflow: Workflow, model: HSTU, rows: pl.DataFrame) -> np.ndarray[Any, Any]:
    (batch,) = MemoryLoader(workflow.transform(rows).collect(), len(rows))
    with torch.no_grad():
        return model.query(batch).numpy()


@pytest.mark.long("Triton: exports and a server")
def test_a_history_is_served(exported: tuple[Workflow, HSTU, Ensemble]) -> None:
    workflow, model, ensemble = exported
    rows = rows_to_serve(150, 1)  # more rows, and longer lists, than an export tries
    assert rows["times"].list.min().min() < 0, "some times are before 1970"
    session = onnxruntime.InferenceSession(ensemble.path / "next_model" / "1" / "model.onnx")
    asked = Preprocessing(ensemble.path / "next_preprocess" / "1")(ensemble.request(rows))
    (answers,) = session.run(["vector"], asked)
    np.testing.assert_allclose(answers, queries(workflow, model, rows), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not serving.exists_for_this_machine(), reason="no Triton server for this machine")
@pytest.mark.long("Triton: exports and a server")
def test_a_triton_server_answers_as_the_model(exported: tuple[Workflow, HSTU, Ensemble]) -> None:
    """Many rows and long histories, single rows, and requests that the server puts together."""
    workflow, model, ensemble = exported

    def inputs(rows: pl.DataFrame) -> list[Any]:
        found = []
        for name, array in ensemble.request(rows).items():
            found.append(tritonclient.grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            found[-1].set_data_from_numpy(array)
        return found

    with serve(ensemble.path) as server, tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        for count in (1_000, 65, 64, 3, 1):
            rows = rows_to_serve(count, 10 + count)
            answers = client.infer("next", inputs(rows)).as_numpy("vector")
            np.testing.assert_allclose(answers, queries(workflow, model, rows), rtol=1e-4, atol=1e-5)
        rows = rows_to_serve(300, 5)
        asked: list[concurrent.futures.Future[Any]] = [concurrent.futures.Future() for _ in range(len(rows))]
        for number, future in enumerate(asked):
            client.async_infer(
                "next", inputs(rows[number]), lambda result, error, future=future: future.set_result((result, error))
            )
        found = [future.result() for future in asked]
        assert [error for _, error in found if error] == []
        answers = np.concatenate([result.as_numpy("vector") for result, _ in found])
        np.testing.assert_allclose(answers, queries(workflow, model, rows), rtol=1e-4, atol=1e-5)
