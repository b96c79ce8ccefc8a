"""The map from ids to rows, against a dict."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.recsys.raw_ids import id_map
from nbdist.recsys.raw_ids.id_map import IdMap
from nbdist.recsys.raw_ids.mixing import initial_rows, mixed, owners

IDS = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 40) | st.sampled_from([-(2**63), 2**63 - 1])


def check(ids: IdMap, expected: dict[int, int], absent: list[int]) -> None:
    rows = ids.find(torch.tensor([*expected, *absent], dtype=torch.int64)).tolist()
    assert rows == [*expected.values(), *([-1] * len(absent))]
    assert ids.size == len(expected) == len(set(rows) - {-1})
    assert sorted(ids.rows().tolist()) == sorted(expected.values())
    assert ids.ids_of(ids.rows()).tolist() == [key for key, _ in sorted(expected.items(), key=lambda one: one[1])]
    assert all(0 <= row < ids.allocated for row in expected.values())


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.lists(IDS, max_size=40), st.randoms(use_true_random=False)), max_size=12), st.booleans())
def test_any_sequence_of_batches_is_a_dict(batches: list, crowded: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if crowded:  # all ids belong to four of the buckets: most of them come to lie in another one
            patch.setattr(id_map, "mixed", lambda ids: ids & 3)
        ids, expected, gone = IdMap(), {}, set()
        for batch, random in batches:
            new = [one for one in dict.fromkeys(batch) if one not in expected]
            expected |= zip(new, ids.add(torch.tensor(new, dtype=torch.int64)).tolist(), strict=True)
            leaving = random.sample(sorted(expected), random.randint(0, len(expected)))
            ids.remove(torch.tensor([expected.pop(one) for one in leaving], dtype=torch.int64))
            gone |= {*leaving}
            check(ids, expected, [*gone - {*expected}])


def test_it_grows_and_shrinks_without_losing_an_id() -> None:
    torch.manual_seed(0)
    ids = IdMap()
    some = torch.randint(-(2**63), 2**63 - 1, (20_000,))
    rows = ids.add(some)
    assert torch.equal(ids.find(some), rows)
    for _ in range(20):  # buckets are used again and again
        ids.remove(ids.find(some[:10_000]))
        assert torch.equal(ids.find(some) >= 0, torch.arange(20_000) >= 10_000)
        ids.add(some[:10_000])
        assert sorted(ids.find(some).tolist()) == list(range(20_000))
    assert ids.bytes < 20_000 * 120
    assert ids.allocated < 40_000


def test_numbers_of_ids_are_those_of_the_workflow_s_hashes_and_evenly_spread() -> None:
    pl = pytest.importorskip("polars")
    from nbdist.recsys.etl.hashing import hashed

    some = torch.randint(-(2**63), 2**63 - 1, (1_000,))
    theirs = pl.DataFrame({"id": some.numpy()}).select(hashed(pl.col("id"), pl.Int64()).reinterpret(signed=True))
    assert mixed(some).tolist() == theirs["id"].to_list()
    near = owners(torch.arange(30_000), 3).bincount()
    assert (near - 10_000).abs().max() < 400
    rows = initial_rows(torch.arange(2_000), 8, 0.5)
    assert rows.abs().max() < 0.5 and rows.mean().abs() < 0.01 and abs(rows.std() - 0.5 / 3**0.5) < 0.01
    assert torch.equal(rows[7:9], initial_rows(torch.tensor([7, 8]), 8, 0.5))
