"""Calls of all sorts one after the other: nothing grows. soak.py makes them by a seeded schedule."""

from __future__ import annotations

import contextlib

import pytest
from conftest import poll
from soak import Soak


@pytest.mark.long("many calls of all sorts")
def test_random_calls_leave_nothing_behind() -> None:
    with contextlib.closing(Soak(seed=0)) as soak:
        for _ in range(30):
            soak.step()
        before = soak.held()
        for _ in range(60):
            soak.step()
        assert poll(lambda: soak.held()[:3] <= before[:3]), (before, soak.held(), soak.done)
        after = soak.held()
        assert after.server_descriptors <= before.server_descriptors
        assert after.memory < before.memory + 50 and after.server_memory < before.server_memory + 50
