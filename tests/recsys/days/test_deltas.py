"""A delta makes of one day's state the next one, bit for bit, whatever has changed; and is small."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.recsys.days import Delta
from nbdist.recsys.days.delta import digest_of, tensors_of
from nbdist.recsys.raw_ids import RawIds, RawTable

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1, 1).view(torch.uint8).flatten().tolist()


CHANGES = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=6), st.integers(-3, 4), st.integers(0, 1000)), min_size=1, max_size=4
)


def state_of(rows: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    found = {str(kind): torch.randint(0, 256, (rows, 3), generator=draw).to(kind) for kind in KINDS}
    odd = torch.tensor([torch.nan, -0.0, torch.inf])[torch.randint(3, (rows,), generator=draw)]
    return {**found, "odd": odd, "scalar": torch.tensor(float(seed)), "three": torch.randn(rows, 2, 2, generator=draw)}


@settings(max_examples=60, deadline=None)
@given(CHANGES)
def test_day_after_day_a_delta_makes_the_next_state(changes: list[tuple[list[int], int, int]]) -> None:
    """Rows change, come and go; numbers of any type, NaN and -0.0 among them."""
    today = state_of(5, seed=0)
    copy = today
    for places, more, seed in changes:
        rows = max(0, len(today["odd"]) + more)
        other, new = state_of(rows, seed), {}
        for name, value in today.items():
            if name == "scalar":
                new[name] = other[name]
                continue
            new[name] = torch.cat([value[:rows], other[name][len(value) :]])
            some = [place for place in places if place < rows]
            new[name][some] = other[name][some]
        copy = Delta.between(today, new).apply(copy)
        assert digest_of(copy) == digest_of(new)
        for name, value in new.items():
            assert copy[name].dtype == value.dtype and copy[name].shape == value.shape
            assert bytes_of(copy[name]) == bytes_of(value), name
        today = new


RECORDS = st.dictionaries(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), st.integers(1, 5), max_size=12)


def raw(rows: dict[int, int], waiting: dict[int, int]) -> dict[str, Any]:
    """Return the state of a module with a table of raw ids; an id's numbers follow from how often it has occurred."""
    table = RawTable(2, RawIds(unknown="learned"))
    (ids, counts), (others, times) = (
        (torch.tensor(list(one), dtype=torch.int64), torch.tensor(list(one.values()), dtype=torch.int64))
        for one in (rows, waiting)
    )
    state = {"ids": ids, "weight": torch.stack([counts / 3, counts / 7], 1), "counts": counts, "last": counts * 2}
    state |= {"waiting_ids": others, "waiting_counts": times, "waiting_last": times}
    table.add_state({**state, "batches": torch.tensor(sum(rows.values()))})
    return dict(torch.nn.ModuleDict({"user": table}).state_dict())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(RECORDS, RECORDS), min_size=2, max_size=4))
def test_raw_ids_come_and_go_in_deltas(days: list[tuple[dict[int, int], dict[int, int]]]) -> None:
    states = [raw(*day) for day in days]
    copy = states[0]
    for before, after in itertools.pairwise(states):
        copy = Delta.between(before, after).apply(copy)
        assert digest_of(copy) == digest_of(after)
    model = torch.nn.ModuleDict({"user": RawTable(2, RawIds(unknown="learned"))})
    model.load_state_dict(copy)
    assert digest_of(model.state_dict()) == digest_of(states[-1])


@pytest.mark.parametrize(("width", "step"), [(8, 1e-2), (16, 10.0), (64, 10.0)])
def test_a_day_that_touches_a_twentieth_takes_a_twentieth_of_the_bytes(tmp_path: Path, width: int, step: float) -> None:
    """Also where the new rows have nothing in common with the old ones."""
    draw = torch.Generator().manual_seed(1)
    dense = torch.randn(16, 16, generator=draw)
    before = {"table": torch.randn(20_000, width, generator=draw), "dense": dense}
    after = {name: value.clone() for name, value in before.items()}
    after["table"][torch.randperm(20_000, generator=draw)[:1_000]] += step * torch.randn(1_000, width, generator=draw)
    after["dense"] += step * torch.randn(16, 16, generator=draw)
    Delta.between(before, after).save(tmp_path / "delta.zst")
    share = (tmp_path / "delta.zst").stat().st_size / sum(one.nbytes for one in tensors_of(before))
    assert share <= 0.05
    if step < 1:
        assert share < 0.045, "small steps leave the first bits as they were"


def test_deltas_are_saved_and_refuse_what_does_not_fit(tmp_path: Path) -> None:
    first, second, third = ({"w": torch.full((3, 2), float(day))} for day in range(3))
    Delta.between(first, second).save(tmp_path / "one")
    Delta.between(second, third).save(tmp_path / "two")
    one, two = Delta.load(tmp_path / "one"), Delta.load(tmp_path / "two")
    assert one.after == two.before and one.rows == {"w": 3}
    assert torch.equal(two.apply(one.apply(first))["w"], third["w"])
    with pytest.raises(ValueError, match=r"`state` must have the digest .*apply the deltas of all days in order"):
        two.apply(first)
    with pytest.raises(ValueError, match=r"one model, but only one has v"):
        Delta.between(first, {"v": first["w"]})
    with pytest.raises(ValueError, match=r"w is torch.float32 of shape \(3, 2\) in the first and torch.float64 of"):
        Delta.between(first, {"w": torch.zeros(3, 3, dtype=torch.float64)})
    for damaged in (b"", b"\0" * 20, (tmp_path / "one").read_bytes()[:-3]):
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(ValueError, match="bad: not a saved delta"):
            Delta.load(tmp_path / "bad")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "one", "two"]
