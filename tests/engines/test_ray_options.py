"""The options of Ray, checked without a cluster."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbdist
from nbdist import NbdistError, RayOptions, Session
from nbdist.engines.ray.options import placed_together, resources_of


def test_options_that_make_no_sense() -> None:
    for wrong in (
        {"placement": "anywhere"},
        {"gpus": 2},
        {"ranks_per_node": 0},
        {"cpus": -1.0},
        {"cpus": 0.0},
        {"wait": -1.0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RayOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"devices='cuda'.*RayOptions\(gpus=1\)"):
        Session(2, engine=RayOptions(), devices="cuda")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NbdistError, match=r'pip install "nbdist\[ray\]"'):
        Session(2, engine="ray")
    with pytest.raises(NbdistError, match=r'pip install "nbdist\[ray\]"'):
        nbdist.use("ray")


@given(st.integers(1, 500), st.integers(1, 9))
def test_ranks_are_placed_together(world_size: int, together: int) -> None:
    places = placed_together(RayOptions(ranks_per_node=together), world_size)
    assert sum(places) == world_size and set(places[:-1]) <= {together} and 0 < places[-1] <= together


def test_resources_are_summed_over_ranks() -> None:
    options = RayOptions(cpus=0.5, gpus=1, resources={"memory": 8e9, "nothing": 0})
    assert resources_of(options, 3) == {"CPU": 1.5, "GPU": 3.0, "memory": 24e9}
