"""A new day is taken under load: no answer mixes two days, and none is lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import polars as pl
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from conftest import poll
from torch import nn

from nbdist import in_ddp
from nbdist.recsys.etl import Categorify, Workflow
from nbdist.recsys.triton import Ensemble, export_ensemble, serve, serving
from nbdist.recsys.triton.config import read_config
from nbdist.recsys.triton.served.preprocess import Preprocessing

pytestmark = pytest.mark.long("Triton: exports and a server")

USERS, DAYS = 50, 4
FRAME = pl.DataFrame({"user": np.arange(USERS)})


class Told(nn.Module):
    """A model whose answer says day and user, if it is given the codes of its own day."""

    def __init__(self, workflow: Workflow, day: int) -> None:
        super().__init__()
        codes = workflow.transform(FRAME, ["user"]).collect()["user"].to_torch()
        weight = torch.full((workflow.vocabularies["user"].size, 1), -1.0)
        weight[codes] = torch.arange(USERS)[:, None] + 1000.0 * day
        self.table = nn.Embedding.from_pretrained(weight)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.table(batch["user"])  # type: ignore[no-any-return]


def export(path: Path, day: int) -> Ensemble:
    """Add a day to a repository; each codes the users in another order."""
    rows = FRAME.with_columns(times=(pl.col("user") * (2 * day + 1)) % USERS + 1)
    rows = rows.select(pl.col("user").repeat_by("times").explode())
    workflow = Workflow(Categorify("user")).fit(rows, progress=False)
    return export_ensemble(workflow, Told(workflow, day), path, "ctr", backend="python", version=day, fill=False)


@contextlib.contextmanager
def asking(asks: list[Callable[[], np.ndarray]]) -> Iterator[list[list[int]]]:
    """Ask on a thread each, one question after the other, and check that each answer is of one day."""
    days: list[list[int]] = [[] for _ in asks]
    failed: list[BaseException] = []
    end = threading.Event()

    def run(ask: Callable[[], np.ndarray], found: list[int]) -> None:
        try:
            while not end.is_set():
                answers = ask()[:, 0]
                day = int(answers[0] // 1000)
                np.testing.assert_array_equal(answers, np.arange(USERS) + 1000 * day)
                found.append(day)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=one) for one in zip(asks, days, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield days
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert not failed, failed


def answered(days: list[list[int]], day: int) -> bool:
    """Wait until each thread has answers of a day, or is over."""
    return poll(lambda: all(found and found[-1] >= day for found in days))


@pytest.mark.skipif(not serving.exists_for_this_machine(), reason="no Triton server for this machine")
def test_a_server_takes_each_day_under_load(tmp_path: Path) -> None:
    path = tmp_path / "repository"
    first = export(path, 1)
    arrays = first.request(FRAME)["user"]
    with serve(path) as server, contextlib.ExitStack() as stack:

        def asks(module: Any, address: str) -> Callable[[], np.ndarray]:
            client = stack.enter_context(module.InferenceServerClient(address))
            given = module.InferInput("user", arrays.shape, "INT64")
            given.set_data_from_numpy(arrays)
            return lambda: client.infer("ctr", [given]).as_numpy("output")

        kinds = [(tritonclient.http, server.http), (tritonclient.grpc, server.grpc)] * 2
        with asking([asks(*one) for one in kinds]) as days:
            assert answered(days, 1)
            with tritonclient.http.InferenceServerClient(server.http) as client:
                for day in range(2, DAYS + 1):
                    export(path, day).load(client)
                    assert answered(days, day)
        for found in days:
            assert sorted(found) == found, "no thread goes back to an earlier day"
            assert set(found) == set(range(1, DAYS + 1))


def test_what_is_read_of_a_repository_is_of_one_day(tmp_path: Path) -> None:
    """The code that a server runs, loaded again and again from a repository that gets new days meanwhile."""
    path = tmp_path / "repository"
    arrays = export(path, 1).request(FRAME)

    def ask() -> np.ndarray:
        first, second = read_config(path / "ctr").ensemble_scheduling.step
        codes = Preprocessing(path / first.model_name / str(first.model_version))(arrays)
        model = path / second.model_name / str(second.model_version) / "model.onnx"
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        return session.run(None, codes)[0]  # type: ignore[no-any-return]

    with asking([ask]) as days:
        for day in range(1, 3):
            if day > 1:
                # In another process: in Python 3.11 two threads may not parse at once (CPython issue 106905);
                # the export does, and NumPy for the header of an array.
                in_ddp(1, export, path, day)
            assert answered(days, day)
    assert sorted(days[0]) == days[0] and set(days[0]) == {1, 2}
