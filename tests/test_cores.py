"""Shares of cores: every core used, shares even, nodes kept together."""

from __future__ import annotations

import os

import pytest
from conftest import LINUX
from hypothesis import given
from hypothesis import strategies as st

from nbdist import Session
from nbdist.system.cores import near, parse_cores, shares, usable_cores


def test_parse_cores() -> None:
    assert parse_cores("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cores("") == []


@given(
    cores=st.sets(st.integers(0, 255), min_size=1, max_size=64),
    nranks=st.integers(1, 80),
    nodes=st.integers(0, 4),
)
def test_shares(cores: set[int], nranks: int, nodes: int) -> None:
    node_lists = [[core for core in range(256) if core % nodes == node] for node in range(nodes)]
    result = shares(sorted(cores), node_lists, nranks)
    assert len(result) == nranks and all(result)
    if len(cores) >= nranks:
        assert sorted(core for share in result for core in share) == sorted(cores)  # each core once
        assert max(map(len, result)) - min(map(len, result)) <= 1
    else:
        assert {core for share in result for core in share} == cores


def test_a_rank_stays_on_a_node() -> None:
    assert shares(range(8), [[0, 2, 4, 6], [1, 3, 5, 7]], 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_ranks_are_near_their_gpus() -> None:
    own = [[0, 1], [2, 3], [4, 5], [6, 7]]
    first, second = range(4), range(4, 8)
    assert near(own, [second, first, second, first]) == [[4, 5], [0, 1], [6, 7], [2, 3]]
    assert near(own, [second, second, second, first]) == [[4, 5], [6, 7], [2, 3], [0, 1]], "there are only two there"
    assert near(own, [[], [], [], []]) == own
    assert near(own, [[], second, [], first]) == [[2, 3], [4, 5], [6, 7], [0, 1]]


@pytest.mark.skipif(not LINUX, reason="only Linux binds processes to cores")
def test_bound_ranks() -> None:
    with Session(2, devices="cpu", threads="bind") as session:
        bound = session.run_all(lambda: sorted(os.sched_getaffinity(0)))
    cores = usable_cores()
    if len(cores) >= 2:
        assert sorted(bound[0] + bound[1]) == cores
    else:
        assert bound == [cores, cores]
