"""Batches of fastai's tabular loaders, which ranks gather from columns: the very ones that fastai makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.collab import CollabDataLoaders
from fastai.tabular.core import (
    Categorify,
    FillMissing,
    Normalize,
    TabDataLoader,
    TabularPandas,
    TabWeightedDL,
    _TabIloc,
)
from fastai.torch_core import set_seed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nbdist.fastai.patches import patched


@pytest.fixture
def no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selecting rows of a frame fails."""

    def select(self: Any, rows: Any) -> None:
        raise AssertionError("a frame was made for a batch")

    monkeypatch.setattr(_TabIloc, "__getitem__", select)


def frame(rows: int = 100) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    made = pd.DataFrame(
        {
            "colour": draw.choice(list("abc"), rows),
            "shop": draw.integers(0, 9, rows),
            "size": draw.random(rows).astype(np.float32),
            "age": draw.random(rows),
            "sold": draw.integers(0, 2, rows),
            "price": draw.random(rows),
        }
    )
    made.loc[::7, "age"] = np.nan
    return made


def tabular(targets: list[str], cont: list[str]) -> TabularPandas:
    procs = [Categorify, FillMissing, Normalize] if cont else [Categorify]
    splits = (list(range(80)), list(range(80, 100)))
    return TabularPandas(frame(), procs, ["colour", "shop"], cont, y_names=targets, splits=splits)


def batches(loader: Any) -> list[list[torch.Tensor]]:
    """Return the batches of two epochs, drawn from the same seed each time."""
    set_seed(3)
    loader.rng.seed(3)
    return [list(batch) for _ in range(2) for batch in loader]


def equal(own: list[list[torch.Tensor]], original: list[list[torch.Tensor]]) -> bool:
    pairs = [(x, y) for a, b in zip(own, original, strict=True) for x, y in zip(a, b, strict=True)]
    return all(x.dtype == y.dtype and type(x) is type(y) and torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("kind", [TabDataLoader, TabWeightedDL])
@pytest.mark.parametrize("targets", [["price"], ["sold"], ["price", "sold"], []])
@pytest.mark.parametrize("cont", [["size", "age"], ["age"], []])
def test_batches_equal_those_of_fastai(kind: Any, targets: list[str], cont: list[str], request: Any) -> None:
    rows = tabular(targets, cont)
    loaders = [
        kind(rows.train, bs=32, shuffle=True, drop_last=True),
        kind(rows.train, bs=32, shuffle=True),
        kind(rows.valid, bs=7),
        kind(rows.valid.new_empty() if kind is TabDataLoader else rows.valid, bs=7),
    ]
    theirs = [batches(loader) for loader in loaders]
    request.getfixturevalue("no_frames")
    with patched():
        assert all(map(equal, map(batches, loaders), theirs))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=25)
@given(rows=st.integers(1, 5000), seed=st.integers(0, 2**32 - 1))
def test_weighted_batches_draw_as_numpy_does(rows: int, seed: int) -> None:
    weighted = TabWeightedDL.__new__(TabWeightedDL)
    weighted.__dict__.update(n=rows, shuffle=True, wgts=np.ones(rows) / np.ones(rows).sum())
    np.random.seed(seed)
    theirs = TabWeightedDL.get_idxs(weighted)
    np.random.seed(seed)
    with patched():
        assert TabWeightedDL.get_idxs(weighted) == theirs


def test_weights_are_kept() -> None:
    weights = np.arange(80) % 2 + 0.0
    loader = TabWeightedDL(tabular(["price"], ["age"]).train, bs=16, wgts=weights, shuffle=True)
    theirs = batches(loader)
    with patched():
        assert equal(batches(loader), theirs)
        assert {number % 2 for number in loader.get_idxs()} == {1}


def test_rows_that_were_changed_are_seen(request: Any) -> None:
    loader = TabDataLoader(tabular(["price"], ["age"]).train, bs=16)
    request.getfixturevalue("no_frames")
    with patched():
        before = batches(loader)
        loader.dataset.items["price"] += 1
        torch.testing.assert_close(batches(loader)[0][2], before[0][2] + 1)


def text(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(price=rows["price"].astype(str))


class Own(TabDataLoader):
    def create_batch(self, b: list[int]) -> Any:
        return super().create_batch([*b, *b])


@pytest.mark.parametrize("case", ["own method", "function", "transform", "workers", "truths"])
def test_loaders_with_their_own_methods_are_left_to_fastai(case: str) -> None:
    rows = tabular(["price"], ["age"]).train
    made: dict[str, Any] = {
        "own method": lambda: Own(rows, bs=16),
        "function": lambda: TabDataLoader(rows, bs=16, before_batch=lambda numbers: numbers[::-1]),
        "transform": lambda: TabDataLoader(rows, bs=16, after_item=lambda number: 79 - number),
        "workers": lambda: TabDataLoader(rows, bs=16, num_workers=1),
        "truths": lambda: TabDataLoader(rows, bs=16),
    }
    loader = made[case]()
    if case == "truths":
        loader.dataset.items["age"] = loader.dataset.items["age"] > 0
    theirs = batches(loader)
    with patched():
        assert equal(batches(loader), theirs)


def test_other_loaders_are_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    ratings = pd.DataFrame({"user": [1, 2] * 50, "item": [*range(10)] * 10, "rating": [1.0, 5.0] * 50})
    dls = CollabDataLoaders.from_df(ratings, bs=8, seed=1)
    original: Iterator[Any] = TabDataLoader.create_batches
    with patched():
        dls.show_batch(unique=True)
        assert len(dls.one_batch()[0]) == 8
        assert dls.test_dl(ratings[["user", "item"]]).one_batch()[0].shape == (8, 2)
    assert TabDataLoader.create_batches is original
    assert "HTML object" in capsys.readouterr().out
