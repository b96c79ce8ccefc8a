"""Exported ensembles answer as the notebook's model does: in this process, and from a real Triton server."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import polars as pl
import psutil
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from conftest import living, poll, shared_memory_names
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from nbdist import Session
from nbdist.recsys.etl import (
    Bucketize,
    Categorify,
    Clip,
    Compute,
    Drop,
    FillMissing,
    Filter,
    HashedCross,
    Join,
    JoinGroupby,
    ListSlice,
    Log,
    Normalize,
    NormalizeMinMax,
    TargetEncoding,
    Workflow,
    fill_unknown,
)
from nbdist.recsys.etl.unknown import unknown_filled
from nbdist.recsys.loader import MemoryLoader, keyed_jagged
from nbdist.recsys.triton import (
    NULL,
    NULL_FLOAT_BITS,
    NULL_STRING,
    NULL_UNSIGNED,
    PADDING,
    Ensemble,
    export_ensemble,
    serve,
    serving,
)
from nbdist.recsys.triton.onnx import looked_up, write_onnx
from nbdist.recsys.triton.request import Feature, served_steps
from nbdist.recsys.triton.served.preprocess import Preprocessing
from nbdist.system.connections import sockets

server_needed = pytest.mark.skipif(not serving.exists_for_this_machine(), reason="no Triton server for this machine")

CODES = ["user", "movie", "genres", "tags", "studio"]
SCHEMA = {"user": pl.String, "movie": pl.Int32, "tags": pl.List(pl.Int16), "age": pl.Float32, "kids": pl.Boolean}


def movies() -> pl.DataFrame:
    """Return movies with genres, without, with unknown ones, and with a null among them."""
    genres = [["drama", "war"], [], None, ["comedy", None], ["drama"], ["war", "comedy", "drama", "äpfel"]]
    studios = [True, None, False, True, False, None]
    return pl.DataFrame(
        {"movie": [10, 20, 30, 40, 50, 60], "genres": genres, "studio": studios},
        schema={"movie": pl.Int32, "genres": pl.List(pl.String), "studio": pl.Boolean},
    )


def impressions(rows: int, seed: int) -> pl.DataFrame:
    """Raw rows, with what a workflow fitted on others has never seen, nulls, and lists of all lengths."""
    draw = np.random.default_rng(seed)
    users = [None, "", "ünseen", *(f"u{i}" for i in range(40))]
    tags = [
        None if n == 5 else [None if t == 9 else int(t) for t in draw.integers(0, 10, n)]
        for n in draw.integers(0, 6, rows)
    ]
    return pl.DataFrame(
        {
            "user": [users[i] for i in draw.integers(0, len(users), rows)],
            "movie": [None if m == 0 else int(m) * 10 for m in draw.integers(0, 8, rows)],
            "tags": tags,
            "age": draw.normal(40, 10, rows).tolist(),
            "kids": draw.integers(0, 2, rows).astype(bool).tolist(),
        },
        schema=SCHEMA,
    )


def steps() -> list[Any]:
    return [
        Join(movies(), on="movie"),
        Categorify(*CODES, min_count={"user": 2}),
        Compute(label=pl.col("rating") > 3),
        Drop("rating"),
    ]


@pytest.fixture(scope="module")
def workflow() -> Workflow:
    seen = impressions(400, seed=1).filter(pl.col("user").is_null() | (pl.col("user") != "ünseen"))
    return Workflow(*steps()).fit(seen.with_columns(rating=pl.lit(4.0)), progress=False)


class Model(nn.Module):
    """Pooled embeddings, by sum and by mean, and what is no code, through two layers."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        pooling = {"tags": PoolingType.MEAN}
        configs = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=size,
                embedding_dim=8,
                feature_names=[name],
                pooling=pooling.get(name, PoolingType.SUM),
                init_fn=nn.init.normal_,
            )
            for name, size in sizes.items()
        ]
        self.tables = EmbeddingBagCollection(tables=configs)
        self.dense = nn.Sequential(nn.Linear(8 * len(sizes) + 2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Any) -> torch.Tensor:
        pooled = self.tables(keyed_jagged(batch, CODES)).values()
        rest = torch.stack([batch["age"] / 40, batch["kids"].float()], dim=1)
        return self.dense(torch.cat([pooled, rest], dim=1)).squeeze(1)


def click(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).sigmoid()


@pytest.fixture(scope="module")
def model(workflow: Workflow) -> nn.Module:
    torch.manual_seed(3)
    model = Model({name: workflow.vocabularies[name].size for name in CODES}).eval()
    fill_unknown(model, workflow)  # as exported models are
    return model


def expected(workflow: Workflow, model: nn.Module, frame: pl.DataFrame) -> np.ndarray:
    """Return the predictions of the notebook's model, by way of the workflow and a loader."""
    (batch,) = MemoryLoader(workflow.transform(frame, [*CODES, "age", "kids"]).collect(), len(frame))
    with torch.no_grad():
        return click(model, batch).numpy()


@pytest.fixture(scope="module")
def ensemble(workflow: Workflow, model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Ensemble:
    path = tmp_path_factory.mktemp("triton") / "repository"
    columns = [*CODES, "age", "kids"]
    return export_ensemble(
        workflow,
        model,
        path,
        "ctr",
        columns=columns,
        predict=click,
        output="click",
        backend="python",
        max_batch_size=512,
    )


@pytest.fixture(scope="module")
def served(workflow: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Ensemble:
    """The same ensemble as far as its preprocessing: the export of a model takes ten seconds."""
    path = tmp_path_factory.mktemp("preprocessing")
    result = served_steps(workflow, [*CODES, "age", "kids"])
    result.write(path)
    return Ensemble(path, "", result.inputs, "")


@pytest.fixture(scope="module")
def server(ensemble: Ensemble) -> Iterator[serving.Server]:
    with serve(ensemble.path) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: serving.Server) -> Iterator[Any]:
    """A client of each protocol, with `module` to make its inputs from."""
    module = tritonclient.http if request.param == "http" else tritonclient.grpc
    client = module.InferenceServerClient(getattr(server, request.param))
    client.module = module
    yield client
    client.close()


def tensors(client: Any, arrays: dict[str, np.ndarray]) -> list[Any]:
    inputs = []
    for name, array in arrays.items():
        inputs.append(client.module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def ask(client: Any, arrays: dict[str, np.ndarray], name: str = "ctr") -> np.ndarray:
    return client.infer(name, tensors(client, arrays)).as_numpy("click")


# --- what the server does with a request, in this process -------------------------------------------------------------

texts = st.sampled_from(["", "u1", "u2", "u3", "ü", "drama", "comedy", "a\0", "\0", "x" * 300])


@given(
    rows=st.lists(
        st.tuples(
            st.none() | texts,
            st.none() | st.integers(-(2**31), 2**31 - 1) | st.sampled_from([10, 20, 30, 40, 50, 60]),
            st.none() | st.lists(st.none() | st.integers(-5, 12), max_size=6),
            st.floats(width=32, allow_nan=False),
            st.booleans(),
        ),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=25, deadline=None)
def test_preprocessing_in_numpy_is_the_workflow(workflow: Workflow, served: Ensemble, rows: list[Any]) -> None:
    frame = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    codes = Preprocessing(served.path)(served.request(frame))
    for name, column in workflow.transform(frame, [*CODES, "age", "kids"]).collect().to_dict().items():
        found = codes[name].tolist()
        if name in ("genres", "tags"):
            assert [[code for code in row if code != -1] for row in found] == column.to_list()
            assert all(-1 not in row[: row.index(-1) if -1 in row else None] for row in found)
        else:
            assert [value for (value,) in found] == column.to_list()
            assert codes[name].dtype == column.to_numpy().dtype


def test_joins_by_several_columns_and_of_a_joined_column(tmp_path: Path) -> None:
    prices = pl.DataFrame(
        {"shop": ["a", "a", "b"], "article": [1, 2, 1], "price": [1.5, 2.5, 3.5], "brand": ["x", "y", "x"]}
    )
    brands = pl.DataFrame({"brand": ["x", "z"], "country": [7, 8]})
    seen = pl.DataFrame({"shop": ["a", "a", "b", "b"], "article": [1, 2, 1, 1]})
    steps = Join(prices, ["shop", "article"]), Join(brands, "brand"), Categorify("country", "brand", "article")
    workflow = Workflow(*steps).fit(seen, progress=False)
    frame = pl.DataFrame({"shop": ["a", "b", "b", None, "c"], "article": [2, 1, 2, 1, 1]})
    wanted = ["country", "brand", "article"]
    result = served_steps(workflow, wanted)
    result.write(tmp_path)
    ensemble = Ensemble(tmp_path, "", result.inputs, "")
    codes = Preprocessing(tmp_path)(ensemble.request(frame))
    for name, column in workflow.transform(frame, wanted).collect().to_dict().items():
        assert codes[name][:, 0].tolist() == column.to_list()


@pytest.mark.parametrize("dtype", [pl.Float32, pl.Float64])
def test_floats_of_a_joined_table(tmp_path: Path, dtype: Any) -> None:
    prices = pl.DataFrame(
        {"movie": [1, 2, 3], "price": [1.5, float("nan"), None], "genre": ["x", "y", "z"]},
        schema_overrides={"price": dtype},
    )
    workflow = Workflow(Join(prices, "movie"), Categorify("genre")).fit(pl.DataFrame({"movie": [1, 2]}), progress=False)
    result = served_steps(workflow, ["price", "genre"])
    result.write(tmp_path)
    run, request = Preprocessing(tmp_path), Ensemble(tmp_path, "", result.inputs, "").request
    found = run(request(pl.DataFrame({"movie": [2, 1, 1]})))
    assert found["price"].dtype == (np.float32 if dtype == pl.Float32 else np.float64)
    np.testing.assert_array_equal(found["price"], [[np.nan], [1.5], [1.5]])
    for without in (3, 7, None):  # null in the table, not in the table, no key: no model could be trained on these
        with pytest.raises(ValueError, match="price is null, which it never was in training"):
            run(request(pl.DataFrame({"movie": [1, without]})))
    result = served_steps(workflow, ["genre"])  # without the floats all of them are served
    result.write(tmp_path)
    assert Preprocessing(tmp_path)(request(pl.DataFrame({"movie": [3, 7, None]})))["genre"].tolist() == [[1], [0], [0]]


def test_requests_of_uint64_and_dates(tmp_path: Path) -> None:
    """Hashes (half of them are no int64) and dates, which requests carry as numbers."""
    day, moment = datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1, 12)
    rows = pl.DataFrame({"u": [2**64 - 1, 5, 2**63], "d": [day, None, day], "t": [moment, moment, None]})
    rows = rows.cast({"u": pl.UInt64, "t": pl.Datetime("us")})
    workflow = Workflow(Categorify("u", "d", "t")).fit(rows, progress=False)
    result = served_steps(workflow, None)
    result.write(tmp_path)
    request = Ensemble(tmp_path, "", result.inputs, "").request
    asked = pl.concat([rows, pl.DataFrame({"u": [2**63 + 1, None], "d": [None, day], "t": [None, None]}, rows.schema)])
    for frame in (asked, asked.to_arrow(), asked.cast({"t": pl.Datetime("ms")}), asked.cast({"t": pl.Datetime("ns")})):
        found = Preprocessing(tmp_path)(request(frame))
        for name, column in workflow.transform(asked).collect().to_dict().items():
            assert found[name][:, 0].tolist() == column.to_list(), name
    assert request(asked)["u"].dtype == np.uint64
    with pytest.raises(ValueError, match="stand for null and padding"):
        request(rows[:1].with_columns(u=pl.lit(NULL_UNSIGNED, pl.UInt64)))


class Plain(nn.Module):
    """Plain tables of PyTorch: of users, twice; of movies, with a row for nothing; of shops, by other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.wide, self.shop = (nn.Embedding(4, 1) for _ in range(3))
        self.movie = nn.EmbeddingBag(4, 1, mode="sum", padding_idx=0, include_last_offset=True)
        with torch.no_grad():
            for table in (self.user, self.wide, self.shop, self.movie):
                table.weight.copy_(torch.tensor([[1000.0], [1000.0], [2.0], [4.0]]))

    def forward(self, batch: Any) -> torch.Tensor:
        seen = self.movie(batch["seen"].values, batch["seen"].offsets)
        return (self.user(batch["user"]) + self.wide(batch["user"]) + seen + self.shop(3 - batch["shop"]))[:, 0]  # type: ignore[no-any-return]


def test_unknown_ids_of_plain_tables() -> None:
    rows = pl.DataFrame({"user": ["ann", "bob"], "seen": [["x"], ["y"]], "shop": ["a", "b"]})
    workflow = Workflow(Categorify("user", "seen", "shop")).fit(rows, progress=False)
    model, features = Plain(), served_steps(workflow, None).outputs
    tables = looked_up(model, features, lambda model, batch: model(batch))
    names = {
        path: next(columns for one, columns in tables if one is module)
        for path, module in model.named_modules()
        if any(one is module for one, _ in tables)
    }
    assert names == {"user": ["user"], "wide": ["user"], "movie": ["seen"]}
    warned = pytest.warns(UserWarning, match=r"in shop, and the model's tables for these columns.*fill_unknown")
    with warned, unknown_filled(model, workflow, list(features), tables):
        weights = [table.weight[:, 0].tolist() for table in (model.user, model.wide, model.shop, model.movie)]
    assert weights == [[3, 3, 2, 4], [3, 3, 2, 4], [1000, 1000, 2, 4], [1000, 3, 2, 4]]
    assert model.user.weight[:, 0].tolist() == [1000, 1000, 2, 4]


def test_a_value_that_training_cannot_have_had_is_an_error(workflow: Workflow, tmp_path: Path) -> None:
    result = served_steps(
        Workflow(Drop("b")).fit(
            pl.DataFrame({"a": [1, 2], "b": [1, 2]}, schema={"a": pl.Int8, "b": pl.Int8}), progress=False
        ),
        ["a"],
    )
    result.write(tmp_path)
    run = Preprocessing(tmp_path)
    assert run({"a": np.array([[-128], [5]])})["a"].dtype == np.int8
    with pytest.raises(ValueError, match="a has the value that stands for padding"):
        run({"a": np.array([[1], [PADDING]])})
    with pytest.raises(ValueError, match="a is null"):
        run({"a": np.array([[1], [NULL]])})
    with pytest.raises(ValueError, match="a is 200, which does not fit into int8"):
        run({"a": np.array([[1], [200]])})


@pytest.mark.parametrize("strings", [[b"\xff"], [b"ok", b"\xc3", b"\xa9"]])
def test_strings_that_are_not_utf8_are_an_error(served: Ensemble, strings: list[bytes]) -> None:
    arrays = served.request(impressions(len(strings), seed=0))
    arrays["user"] = np.array(strings, dtype=object)[:, None]
    with pytest.raises(ValueError, match="user has a string that is not UTF-8"):
        Preprocessing(served.path)(arrays)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_request_from_any_kind_of_frame(served: Ensemble) -> None:
    rows = {"user": ["u1", None], "movie": [10, 20], "tags": [[1, 2], []], "age": [1.0, 2.0], "kids": [True, False]}
    requests = [served.request(frame) for frame in (rows, pl.DataFrame(rows), pl.DataFrame(rows).to_arrow())]
    for request in requests:
        assert list(request) == ["user", "movie", "tags", "age", "kids"]
        assert request["user"].tolist() == [[b"u1"], [NULL_STRING]]
        assert request["tags"].tolist() == [[1, 2], [PADDING, PADDING]]
        assert request["age"].dtype == np.float32 and request["kids"].dtype == np.int64
    frame = pl.DataFrame(rows).drop("tags").to_pandas()
    frame["tags"] = rows["tags"]
    assert all((served.request(frame)[name] == requests[0][name]).all() for name in rows)
    nothing = served.request({name: [None] for name in ("user", "movie", "tags")} | {"age": [1.0], "kids": [None]})
    assert [nothing[name].tolist() for name in ("user", "movie", "tags")] == [[[NULL_STRING]], [[NULL]], [[NULL]]]
    null = served.request({**{name: [None] for name in served.inputs}})["age"]
    assert null.view(np.uint32).tolist() == [[NULL_FLOAT_BITS[4]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"movie": None}, "no column 'movie': a request has user, movie"),
        ({"movie": ["ten"]}, "column 'movie' is .*string.*int64"),
        ({"movie": [-(2**63)]}, "stand for null and padding"),
        ({"user": ["\x1a"]}, "stand for null and padding"),
        ({"age": ["old"]}, "column 'age' is .*string.*float"),
    ],
)
def test_frames_that_no_request_can_be_made_of(served: Ensemble, change: dict[str, Any], message: str) -> None:
    rows = {"user": ["u1"], "movie": [10], "tags": [[1]], "age": [1.0], "kids": [True], **change}
    with pytest.raises(ValueError, match=message):
        served.request({name: values for name, values in rows.items() if values is not None})


# --- what cannot be exported ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Workflow:
    frame = pl.DataFrame({"user": [1, 2, 3], "when": [5, 6, 7], "note": ["a", "b", "c"]})
    return Workflow(Compute(hour=pl.col("when") % 24), Categorify("user")).fit(frame, progress=False)


class Scores(nn.Module):
    """A score per user, for as many users as are given."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.table(batch["user"])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "a/b"}, ValueError, "`name` must have .* got 'a/b'"),
        ({"name": ".."}, ValueError, "`name` must have .* got '..'"),
        ({"name": ""}, ValueError, "`name` must have .* got ''"),
        ({"backend": "tensorrt"}, ValueError, "`backend` must be one of onnxruntime, python, got 'tensorrt'"),
        ({"max_batch_size": 0}, ValueError, "`max_batch_size` must be at least 1 .* got 0"),
        ({"output": "user"}, ValueError, "`output` must not be the name of a column, got 'user'"),
        ({"columns": ["user", "rating"]}, ValueError, "'rating' is not among the outputs"),
        ({"columns": ["user", "hour"]}, ValueError, "column 'hour' is computed by a polars expression"),
        ({"columns": ["user", "note"]}, ValueError, "column 'note' is string, which no model can take"),
        ({"columns": ["when"]}, ValueError, "cannot take the workflow's when: KeyError"),
        ({"model": Scores(4)}, ValueError, "cannot take the workflow's user: IndexError"),
        ({"model": Scores}, TypeError, "the model is a type: give the plain module"),
        ({"predict": lambda model, batch: model(batch).sum()}, ValueError, r"one tensor of shape \(rows,\) or"),
        ({"predict": lambda model, batch: model(batch).sum().view(1)}, ValueError, "not an answer per row"),
        ({"predict": lambda model, batch: [model(batch)]}, ValueError, "the model's answer is a list"),
        pytest.param(
            {"predict": lambda model, batch: model(batch) if batch["user"].sum() else 0},
            ValueError,
            "cannot export the model",
            marks=pytest.mark.long("Triton: exports and a server"),
        ),
        pytest.param(
            {"predict": lambda model, batch: model(batch) + torch.rand(1)},
            ValueError,
            "answers differ",
            marks=pytest.mark.long("Triton: exports and a server"),
        ),
    ],
)
def test_models_that_cannot_be_exported(
    small: Workflow, tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"workflow": small, "model": Scores(5), "path": tmp_path / "repository", "name": "some", **arguments}
    with pytest.raises(error, match=message):
        export_ensemble(**given)
    assert not list(tmp_path.iterdir())


def test_a_workflow_that_is_not_fitted(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not fitted"):
        export_ensemble(Workflow(Categorify("user")), Scores(5), tmp_path / "repository", "some")


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 3, include_last_offset=True, **options)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.bag(batch["tags"].values, batch["tags"].offsets)


@pytest.mark.long("Triton: exports and a server")
def test_bags_of_torch_alone(tmp_path: Path) -> None:
    features = {"tags": Feature("int64", True, 6)}
    for mode in ("sum", "mean"):
        answer = write_onnx(
            Bags(mode=mode), features, lambda model, batch: model(batch), "out", tmp_path / "model.onnx"
        )
        assert answer.shape == (64, 3)
    with pytest.raises(ValueError, match=r"bag: an EmbeddingBag with mode='max'"):
        write_onnx(Bags(mode="max"), features, lambda model, batch: model(batch), "out", tmp_path / "model.onnx")

    def lengths(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch) * batch["tags"].lengths[:, None]

    with pytest.raises(ValueError, match=r"answers differ .* depends on the length"):
        write_onnx(Bags(mode="sum"), features, lengths, "out", tmp_path / "model.onnx")


@pytest.mark.long("Triton: exports and a server")
def test_the_model_is_left_as_it_was(small: Workflow, tmp_path: Path) -> None:
    model = Scores(5).train()
    weight = model.table.weight
    export_ensemble(small, model, tmp_path / "repository", "some")
    assert model.training and model.table.weight is weight and weight.requires_grad


# --- the repository ---------------------------------------------------------------------------------------------------


@pytest.mark.long("Triton: exports and a server")
def test_a_repository_takes_the_place_of_its_own_kind_only(small: Workflow, tmp_path: Path) -> None:
    path = tmp_path / "repository"
    path.mkdir()
    export_ensemble(small, Scores(5), path, "some")
    assert {file.name for file in path.iterdir()} == {"some", "some_model", "some_preprocess"}
    before = (path / "some_model" / "1" / "model.onnx").stat().st_mtime_ns
    for options in ({}, {"overwrite": True, "name": "other"}):
        with pytest.raises(FileExistsError, match="repository"):
            export_ensemble(small, Scores(5), **{"path": path, "name": "some", **options})
    with pytest.raises(ValueError, match="cannot take"):
        export_ensemble(small, Scores(4), path, "some", overwrite=True)
    assert (path / "some_model" / "1" / "model.onnx").stat().st_mtime_ns == before
    export_ensemble(small, Scores(5), path, "some", overwrite=True)
    assert (path / "some_model" / "1" / "model.onnx").stat().st_mtime_ns != before
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Workflow], dict[int, Scores]]:
    """A repository with two versions, whose workflows code the users in another order each; and these, and models."""
    path = tmp_path_factory.mktemp("versions") / "repository"
    workflows, models = {}, {}
    for number, users in ((2, [1, 2, 2]), (1, [1, 1, 2])):
        workflows[number] = Workflow(Categorify("user")).fit(pl.DataFrame({"user": users}), progress=False)
        models[number] = Scores(4)
        options: dict[str, Any] = {"backend": "python", "version": number, "fill": False}
        export_ensemble(workflows[number], models[number], path, "some", **options)
    return path, workflows, models


@pytest.mark.long("Triton: exports and a server")
def test_each_version_answers_with_its_own_codes_and_model(versions: Any) -> None:
    path, workflows, models = versions
    users = pl.DataFrame({"user": [1, 2, 3]})
    inputs = tritonclient.http.InferInput("user", (3, 1), "INT64")
    inputs.set_data_from_numpy(users.to_numpy())
    with serve(path) as server:
        client = tritonclient.http.InferenceServerClient(server.http)
        answers = {name: client.infer(name, [inputs]).as_numpy("output") for name in ("some", "some.1", "some.2")}
        client.close()
    for number in (1, 2):
        codes = torch.from_numpy(workflows[number].transform(users).collect()["user"].to_numpy())
        expected = models[number]({"user": codes}).detach().numpy()
        np.testing.assert_allclose(answers[f"some.{number}"], expected, rtol=1e-6)
    assert (answers["some"] == answers["some.2"]).all() and (answers["some"] != answers["some.1"]).any()


@pytest.mark.long("Triton: exports and a server")
def test_versions_come_and_go_by_themselves(versions: Any) -> None:
    path, workflows, _ = versions
    assert sorted(one.name for one in path.iterdir()) == ["some", "some.1", "some.2", "some_model", "some_preprocess"]
    for part, kept in (("some", ["2"]), ("some.1", ["1"]), ("some.2", ["2"]), ("some_model", ["1", "2"])):
        assert sorted(one.name for one in (path / part).iterdir() if one.is_dir()) == kept
    first, second = (path / "some_model" / number / "model.onnx" for number in "12")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    inode = second.stat().st_ino
    options: dict[str, Any] = {"path": path, "name": "some", "backend": "python"}
    for error, message, more in (
        (FileExistsError, "has version 2 of some already", {"version": 2}),
        (FileExistsError, r"holds some\.[12], which is no", {"overwrite": True}),
        (ValueError, "some_model: the output of version 3 of some is not that of", {"output": "score", "version": 3}),
        (ValueError, "`version` must be at least 1, got 0", {"version": 0}),
    ):
        with pytest.raises(error, match=message):
            export_ensemble(workflows[1], Scores(4), **options, **more)
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    export_ensemble(workflows[1], Scores(4), **options, version=1, overwrite=True)
    assert second.stat().st_ino == inode, "what other versions have is not written again"
    assert first.read_bytes() != before[first] and list(path.parent.iterdir()) == [path]


@pytest.mark.long("Triton: exports and a server")
def test_the_configuration_of_both_backends_fits_the_onnx_model(
    workflow: Workflow, model: nn.Module, ensemble: Ensemble, tmp_path: Path
) -> None:
    saved = tmp_path / "workflow"
    workflow.save(saved)
    path = tmp_path / "repository"
    columns = [*CODES, "age", "kids"]
    export_ensemble(saved, model, path, "ctr", columns=columns, predict=click, output="click", max_queue_delay=2e-3)
    configs = {}
    for one in ("ctr_preprocess", "ctr_model", "ctr"):
        configs[one] = text_format.Parse((path / one / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
        assert configs[one].name == one and configs[one].max_batch_size == 4096 and (path / one / "1").is_dir()
    config = configs["ctr_model"]
    assert config.backend == "onnxruntime" and config.default_model_filename == "model.onnx"
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert not (path / "ctr_model" / "1" / "model.py").exists()
    # What the ONNX Runtime backend compares when it loads a model.
    session = onnxruntime.InferenceSession(path / "ctr_model" / "1" / "model.onnx")
    types = {"TYPE_INT64": "tensor(int64)", "TYPE_FP32": "tensor(float)", "TYPE_BOOL": "tensor(bool)"}
    for tensors, nodes in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        assert [one.name for one in tensors] == [node.name for node in nodes]
        for one, node in zip(tensors, nodes, strict=True):
            assert types[model_config_pb2.DataType.Name(one.data_type)] == node.type
            dims = [-1 if isinstance(dim, str) else dim for dim in node.shape]
            assert dims == [-1, *one.dims] and not getattr(one, "allow_ragged_batch", False)
    first, second = configs["ctr"].ensemble_scheduling.step
    assert dict(first.output_map) == {value: key for key, value in {f"ctr_preprocess.{c}": c for c in columns}.items()}
    assert dict(second.input_map) == dict(first.output_map) and dict(second.output_map) == {"click": "click"}


@pytest.mark.long("Triton: exports and a server")
def test_sharded_tables_are_gathered_and_exported(tmp_path: Path) -> None:
    def train() -> Any:
        from nbdist.recsys.sharding import shard

        model = Bagged()
        sharded = shard(model, {"*": "row_wise"}, batch_size=8)
        with pytest.raises(RuntimeError, match="works in the notebook"):
            export_ensemble(None, nn.Linear(1, 1), tmp_path / "never", "never")
        return sharded.gather()

    class Bagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [EmbeddingBagConfig(name=n, num_embeddings=50, embedding_dim=4, feature_names=[n]) for n in "ab"]
            self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))

        def forward(self, features: Any) -> torch.Tensor:
            pooled = self.tables(features).to_dict()
            return (pooled["a"] * pooled["b"]).sum(1)

    with Session(2, devices="cpu") as session:
        model = session.run(train)
    features = {"a": Feature("int64", False, 50), "b": Feature("int64", True, 50)}
    write_onnx(model, features, lambda model, batch: model(keyed_jagged(batch, "ab")), "out", tmp_path / "model.onnx")


# --- served -----------------------------------------------------------------------------------------------------------


@pytest.mark.long("Triton: exports and a server")
@server_needed
def test_answers_are_the_models(workflow: Workflow, model: nn.Module, ensemble: Ensemble, client: Any) -> None:
    """Batches of all sizes up to the largest, and rows by themselves; thousands in all."""
    for seed, rows in enumerate([512, 512, 511, 300, 100, 64, 7, 2, 1]):
        frame = impressions(rows, seed=seed + 100)
        answers = ask(client, ensemble.request(frame))
        assert answers.shape == (rows, 1) and answers.dtype == np.float32
        assert np.abs(answers[:, 0] - expected(workflow, model, frame)).max() < 1e-5
    frame = frame.with_columns(tags=pl.lit([], SCHEMA["tags"]))
    answers = ask(client, {**ensemble.request(frame), "tags": np.empty((len(frame), 0), np.int64)})
    assert np.abs(answers[:, 0] - expected(workflow, model, frame)).max() < 1e-5
    frame = impressions(300, seed=99)
    answers = np.concatenate([ask(client, ensemble.request(frame[i])) for i in range(len(frame))])
    assert np.abs(answers[:, 0] - expected(workflow, model, frame)).max() < 1e-5


def purchases(rows: int, seed: int) -> pl.DataFrame:
    """Rows for all steps that are served: strangers, missing values, lists of all lengths, and what is cut off."""
    draw = np.random.default_rng(seed)
    ages = [float("nan") if age < 5 else float(age) for age in draw.integers(0, 90, rows)]
    return pl.DataFrame(
        {
            "user": [None if one == 0 else f"u{one}" for one in draw.integers(0, 30 + seed, rows)],
            "movie": draw.integers(0, 12 + seed, rows) * 10,
            "history": [(draw.integers(0, 12 + seed, n) * 10).tolist() for n in draw.integers(0, 6, rows)],
            "age": ages,
            "height": draw.normal(170, 30, rows),
            "price": draw.integers(0, 1000, rows),
            "score": draw.normal(3, 3, rows),
            "spent": draw.normal(50, 20, rows),
        },
        schema_overrides={"movie": pl.Int32, "history": pl.List(pl.Int32), "age": pl.Float32, "score": pl.Float32},
    )


class Columns(nn.Module):
    """Return all inputs, in columns; of lists the sum. So an answer shows what each step has made."""

    def __init__(self, movies: int) -> None:
        super().__init__()
        codes = torch.arange(movies, dtype=torch.float32)[:, None]
        self.sums = nn.EmbeddingBag.from_pretrained(codes, mode="sum", include_last_offset=True)

    def forward(self, batch: Any) -> torch.Tensor:
        lists = self.sums(batch["history"].values, batch["history"].offsets)
        others = [column.float()[:, None] for name, column in sorted(batch.items()) if name != "history"]
        return torch.cat([*others, lists], dim=1)


@server_needed
@pytest.mark.long("Triton: exports and a server")
def test_every_step_that_can_be_served_answers_as_polars_does(tmp_path: Path) -> None:
    table = pl.DataFrame(
        {"movie": range(0, 200, 10), "genre": [f"g{i % 4}" for i in range(20)], "year": range(1980, 2000)},
        schema_overrides={"movie": pl.Int32},
    )
    workflow = Workflow(
        Filter(pl.col("price") >= 10),
        Join(table, on="movie"),
        FillMissing("age", "year", value=40),
        Log("price"),
        Clip("score", min_value=0, max_value=5),
        Bucketize("height", boundaries=[150, 170, 190]),
        HashedCross("user", "genre", name="taste", num_buckets=40),
        TargetEncoding("movie", ("user", "genre"), target="label", folds=3),
        JoinGroupby("user", ("user", "genre"), columns="spent", stats=["count", "mean"]),
        ListSlice("history", last=3),
        Categorify("user", ("movie", "history"), "genre", num_buckets={"user": 3}),
        Normalize("price", "spent", "user_spent_mean"),
        NormalizeMinMax("age", "year"),
    )
    seen = purchases(400, seed=1)
    workflow.fit(seen.with_columns(label=pl.int_range(pl.len()) % 3 == 0), progress=False)
    columns = sorted(set(workflow.outputs) - {"label"})
    model = Columns(workflow.vocabularies["movie"].size)

    def everything(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch)

    ensemble = export_ensemble(
        workflow,
        model,
        tmp_path / "served",
        "all",
        columns=columns,
        predict=everything,
        output="click",
        backend="python",
        fill=False,
    )
    with serve(ensemble.path) as server, tritonclient.http.InferenceServerClient(server.http) as client:
        client.module = tritonclient.http
        for rows in (200, 1):
            frame = purchases(rows, seed=8)
            answers = ask(client, ensemble.request(frame), "all")
            wanted = workflow.transform(frame, columns).collect()
            single = [name for name in columns if name != "history"]
            sums = wanted.select(pl.col("history").list.sum())
            expected = wanted.select(pl.col(single).cast(pl.Float32)).hstack(sums).to_numpy()
            np.testing.assert_array_equal(answers, expected.astype(np.float32))
    assert wanted.width == 17


@server_needed
@pytest.mark.long("Triton: exports and a server")
def test_a_server_fills_nulls_of_all_kinds(tmp_path: Path) -> None:
    """Nulls among floats, of a joined table and of normalized integers; hashes that are no int64; dates."""
    prices = pl.DataFrame({"movie": [1, 2, 3], "price": [1.5, None, math.nan]})
    steps = (
        Join(prices, on="movie"),
        Normalize("age", "price"),
        FillMissing("age", "price", "gain", value=7),
        Categorify("user", "day"),
    )
    day = datetime.date(2024, 1, 1)
    schema = {"movie": pl.Int32, "age": pl.Int64, "gain": pl.Float64, "user": pl.UInt64, "day": pl.Date}
    rows = [
        (1, 20, 1.0, 2**63, day),
        (2, None, None, 2**64 - 1, None),
        (9, 40, math.nan, None, day),
        (3, 3, 2.0, 1, day),
    ]
    frame = pl.DataFrame(rows, schema, orient="row")
    workflow = Workflow(*steps).fit(frame, progress=False)
    columns = ["age", "price", "gain", "user", "day"]

    class Together(nn.Module):
        def forward(self, batch: Any) -> torch.Tensor:
            return torch.stack([batch[name].float() for name in columns], 1)

    path = tmp_path / "repository"
    options: dict[str, Any] = {"output": "click", "backend": "python", "fill": False}
    ensemble = export_ensemble(workflow, Together(), path, "all", columns=columns, **options)
    asked = pl.concat([frame, pl.DataFrame([(None, None, None, 2**63 + 1, None)], schema, orient="row")])
    with serve(ensemble.path) as server:
        for module, address in ((tritonclient.http, server.http), (tritonclient.grpc, server.grpc)):
            with module.InferenceServerClient(address) as client:
                client.module = module
                answers = ask(client, ensemble.request(asked), "all")
            expected = workflow.transform(asked, columns).collect().cast(pl.Float32).to_numpy()
            np.testing.assert_allclose(answers, expected, rtol=1e-6)
            assert not np.isnan(answers).any()


@server_needed
@pytest.mark.long("Triton: exports and a server")
@pytest.mark.parametrize("client", ["grpc"], indirect=True)
def test_requests_that_come_together_are_batched_whatever_their_lists(
    workflow: Workflow, model: nn.Module, ensemble: Ensemble, client: Any
) -> None:
    frame = impressions(1000, seed=7)
    arrays = [tensors(client, ensemble.request(frame[i])) for i in range(len(frame))]
    assert len({one.shape()[1] for inputs in arrays for one in inputs if one.name() == "tags"}) == 4
    before = statistics(client)
    futures: list[concurrent.futures.Future[Any]] = [concurrent.futures.Future() for _ in arrays]
    for inputs, future in zip(arrays, futures, strict=True):
        client.async_infer("ctr", inputs, lambda result, error, future=future: future.set_result((result, error)))
    answered = [future.result() for future in futures]
    assert [error for _, error in answered if error] == []
    results = [result for result, _ in answered]
    answers = np.concatenate([result.as_numpy("click") for result in results])
    assert np.abs(answers[:, 0] - expected(workflow, model, frame)).max() < 1e-5
    # The server counts a run after it has answered.
    assert poll(lambda: all(rows - before[name][0] == 1000 for name, (rows, _) in statistics(client).items()))
    for name, (_, runs) in statistics(client).items():
        assert runs - before[name][1] < 900, name  # the lists of neighbors differ in length nearly always


def statistics(client: Any) -> dict[str, tuple[int, int]]:
    """Rows and runs of the two models."""
    found = {}
    for name in ("ctr_preprocess", "ctr_model"):
        (one,) = client.get_inference_statistics(name, as_json=True)["model_stats"]
        found[name] = int(one.get("inference_count", 0)), int(one.get("execution_count", 0))
    return found


@server_needed
@pytest.mark.long("Triton: exports and a server")
def test_a_malformed_request_gets_an_error_and_the_server_lives_on(
    workflow: Workflow, model: nn.Module, ensemble: Ensemble, client: Any
) -> None:
    good = impressions(3, seed=5)
    arrays = ensemble.request(good)
    text = np.array([[b"\xff\xfe"]] * 3, dtype=object)
    malformed: list[tuple[dict[str, Any], str]] = [
        ({"movie": arrays["movie"].astype(np.int32)}, "INT32"),
        ({"movie": np.array([[b"10"]] * 3, dtype=object)}, "BYTES"),
        ({"user": None}, "missing required input.*user"),
        ({"more": arrays["movie"]}, "expected 5 inputs but got 6"),
        ({"movie": arrays["movie"][:, 0]}, "unexpected shape"),
        ({"movie": np.repeat(arrays["movie"], 2, axis=1)}, "unexpected shape"),
        ({"movie": arrays["movie"][:2]}, "batch size does not match"),
        (ensemble.request(impressions(513, seed=5)), "batch-size must be <= 512"),
        ({name: array[:0] for name, array in arrays.items()}, "byte size mismatch"),
        ({"user": text}, "user has a string that is not UTF-8"),
    ]
    for change, message in malformed:
        bad = {name: array for name, array in {**arrays, **change}.items() if array is not None}
        with pytest.raises(InferenceServerException, match=message):
            ask(client, bad)
    with pytest.raises(InferenceServerException, match="nosuch"):
        ask(client, arrays, "nosuch")
    assert np.abs(ask(client, arrays)[:, 0] - expected(workflow, model, good)).max() < 1e-5


@server_needed
@pytest.mark.long("Triton: exports and a server")
def test_garbage_over_http(workflow: Workflow, model: nn.Module, ensemble: Ensemble, server: serving.Server) -> None:
    def post(body: bytes, header: int | None = None) -> tuple[int, str]:
        headers = {} if header is None else {"Inference-Header-Content-Length": str(header)}
        address = f"http://{server.http}/v2/models/ctr/infer"
        try:
            with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    # As JSON, which any client can write: what a null is can be, too.
    values = {"user": ["u1", "\x1a"], "movie": [10, NULL], "tags": [1, 2], "age": [30.5, 40.0], "kids": [1, 0]}
    kinds = {"user": "BYTES", "age": "FP32"}
    inputs = [{"name": n, "shape": [2, 1], "datatype": kinds.get(n, "INT64"), "data": v} for n, v in values.items()]
    status, text = post(json.dumps({"inputs": inputs}).encode())
    frame = pl.DataFrame(
        {"user": ["u1", None], "movie": [10, None], "tags": [[1], [2]], "age": [30.5, 40], "kids": [True, False]},
        schema=SCHEMA,
    )
    assert status == 200
    assert np.allclose(json.loads(text)["outputs"][0]["data"], expected(workflow, model, frame), atol=1e-5)

    bodies = [b"", b"{", b"[]", b"\x00" * 1000, json.dumps({"inputs": inputs[:2]}).encode(), b'{"inputs": 5}']
    inputs[0]["data"] = ["u1"]
    bodies.append(json.dumps({"inputs": inputs}).encode())
    for body in bodies:
        assert 400 <= post(body)[0] < 600
    # Strings in binary, whose lengths go beyond the end.
    binary = b"\xff\xff\xff\x7fu1"
    inputs[0] = {"name": "user", "shape": [2, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(binary)}}
    head = json.dumps({"inputs": inputs}).encode()
    assert 400 <= post(head + binary, len(head))[0] < 600
    client = tritonclient.http.InferenceServerClient(server.http)
    client.module = tritonclient.http
    assert np.allclose(ask(client, ensemble.request(frame))[:, 0], expected(workflow, model, frame), atol=1e-5)
    client.close()


# --- the server comes and goes ----------------------------------------------------------------------------------------


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def regions(pid: int | None = None) -> set[str]:
    """In shared memory, of servers that a process (this one) has started."""
    return {name for name in shared_memory_names() if name.startswith(f"nbdist-triton-{pid or os.getpid()}-")}


def closed(server: serving.Server) -> bool:
    for address in (server.http, server.grpc):
        host, port = address.split(":")
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return False
    return True


@pytest.fixture(scope="module")
def exported(small: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "repository"
    return export_ensemble(small, Scores(5), path, "some", backend="python").path


@pytest.fixture
def repository(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "repository")


@server_needed
@pytest.mark.long("Triton: exports and a server")
@pytest.mark.parametrize("end", ["well", "exception", "killed", "stub killed"])
def test_a_server_leaves_no_processes_or_memory(repository: Path, end: str) -> None:
    before = regions()
    error = pytest.raises(KeyError) if end == "exception" else contextlib.nullcontext()
    with error, serve(repository) as server:
        processes = family(server.pid)
        assert len(processes) == 3 and len(regions() - before) == 2
        assert not closed(server)
        listening = [c.laddr.ip for c in sockets(processes[0]) if c.status == psutil.CONN_LISTEN]
        assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
        if end == "exception":
            raise KeyError
        if end == "killed":
            os.kill(server.pid, signal.SIGKILL)
        if end == "stub killed":
            processes[1].kill()
    assert poll(lambda: not living(processes))
    assert closed(server) and regions() == before and not server.log_file.exists()


@server_needed
@pytest.mark.long("Triton: exports and a server")
def test_a_server_ends_with_the_process_that_started_it(repository: Path) -> None:
    code = f"""
from nbdist.recsys.triton.serving import serve
with serve({str(repository)!r}) as server:
    print(server.pid, flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        processes = family(int(owner.stdout.readline()))
        assert len(regions(owner.pid)) == 2
        owner.kill()
    assert poll(lambda: not living(processes))
    assert poll(lambda: not regions(owner.pid))


@server_needed
@pytest.mark.long("Triton: exports and a server")
def test_a_port_that_somebody_else_got_is_not_the_end(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, asked = serving.free_ports, []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def ports() -> tuple[int, int]:
            one, other = free()
            asked.append(one)
            port = taken.getsockname()[1]
            return [(port, other), (one, port), (one, other)][len(asked) - 1]

        monkeypatch.setattr(serving, "free_ports", ports)
        with serve(repository) as server:
            assert len(asked) == 3 and server.http == f"127.0.0.1:{asked[-1]}"


@server_needed
@pytest.mark.long("Triton: exports and a server")
def test_a_model_that_cannot_be_loaded_is_shown(repository: Path) -> None:
    (repository / "some_model" / "1" / "model.onnx").write_bytes(b"no model")
    before = regions()
    with (
        pytest.raises(RuntimeError, match=r"(?s)Triton ended with exit code 1. It wrote:.*some_model"),
        serve(repository),
    ):
        pass
    assert regions() == before


@server_needed
@pytest.mark.long("Triton: exports and a server")
def test_a_server_that_is_not_ready_in_time(repository: Path) -> None:
    before = regions()
    model = repository / "some_model" / "1" / "model.py"
    model.write_text(f"{model.read_text()}\nimport time\n\ntime.sleep(1000)\n")
    with pytest.raises(TimeoutError, match="not ready after 2 s"), serve(repository, timeout=2):
        pass
    assert regions() == before


def test_the_error_without_a_server_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_TRITON", str(tmp_path / "nowhere"))
    with (
        pytest.raises(FileNotFoundError, match=r"nowhere(?s:.*)-m venv(?s:.*)requirements/triton.txt"),
        serve(tmp_path),
    ):
        pass
    with pytest.raises(FileNotFoundError, match="no model repository"), serve(tmp_path / "none"):
        pass
