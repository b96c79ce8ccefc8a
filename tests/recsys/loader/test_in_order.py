"""Batches in the order of rows: each row once, step after step, for any number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.loader.in_order import InOrder, InOrderLoader


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 4))
def test_each_step_has_the_rows_that_follow_on_any_number_of_ranks(rows: int, batch: int, ranks: int) -> None:
    try:
        divided = InOrder(rows, ranks, batch)
    except ValueError:
        assert rows // -(-rows // batch) < ranks
        return
    alone, found = InOrder(rows, 1, batch), []
    for step in range(divided.steps):
        parts = [divided.rows_of(rank, step) for rank in range(ranks)]
        assert all(len(part) > 0 for part in parts) and sum(map(len, parts)) <= batch
        assert [len(part) for part in parts] == [divided.size(rank, step) for rank in range(ranks)]
        together = [row for part in parts for row in part]
        assert together == list(alone.rows_of(0, step)), "a step does not depend on the number of ranks"
        found += together
    assert found == list(range(rows))


def test_batches_are_the_rows_in_order() -> None:
    loader = InOrderLoader({"x": torch.arange(10)}, 4)
    assert isinstance(loader, MemoryLoader)
    assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_a_step_without_a_row_for_each_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a row for each of 3 ranks, got 7 rows in steps of at most 2"):
        InOrder(7, 3, 2)
