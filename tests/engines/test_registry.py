"""Engines are found by name, also those that other packages register."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import sums
from cells import cells

import nbdist
from nbdist import NbdistError, Session, engines, in_ddp, parallel_map

PACKAGE = Path(nbdist.__file__).parent


@pytest.fixture
def moon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of an installed package that registers the engine "moon", and one that it does not have."""
    (tmp_path / "moon_engine.py").write_text(cells("engines/cells/registry.py")["moon"])
    about = tmp_path / "moon_engine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: moon-engine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[nbdist.engines]\nmoon = moon_engine:make\nmars = mars_engine:make\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("moon_engine")
    engines.use("local")
    del sys.modules["moon_engine"]


def test_an_engine_of_another_package_runs_calls(moon: Any) -> None:
    options = moon.MoonOptions("tycho")
    with Session(2, engine="moon") as session:
        assert session.run(sums) == 2.0
    with Session(1, engine=options) as session:
        assert session.run(int) == 0
    nbdist.use(options)
    assert in_ddp(2, sums) == 2.0
    with pytest.raises(ValueError, match="workers must be a number on a cluster"):
        parallel_map(int, [1])
    assert parallel_map(int, ["1", "2"], 1, progress=False) == [1, 2]
    assert moon.started == [(None, 2), (options, 1), (options, 2)]


def test_an_engines_refusal_is_raised(moon: Any) -> None:
    with pytest.raises(ValueError, match="no start='spawn' on the moon"):
        Session(1, engine="moon", start="spawn")
    with pytest.raises(NbdistError, match=r"'mars', which is mars_engine:make, cannot be imported: No module named"):
        nbdist.use("mars")


@pytest.mark.parametrize("unknown", ["venus", 3, nbdist.RayOptions, None.__class__])
def test_the_error_for_an_unknown_engine_lists_the_engines(moon: Any, unknown: Any) -> None:
    with pytest.raises(ValueError, match=r"one of 'local', 'ray', 'mars', 'moon', or options such as .*, got "):
        Session(1, engine=unknown)
    assert engines.in_use() == "local"


def test_no_other_room_names_an_engines_class() -> None:
    classes = {"LocalEngine", "LocalRanks", "RayEngine", "RayRanks", "RayOptions"}
    for path in PACKAGE.rglob("*.py"):
        if path.is_relative_to(PACKAGE / "engines") or path == PACKAGE / "__init__.py":
            continue
        nodes = ast.walk(ast.parse(path.read_text()))
        named = {
            getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None) for node in nodes
        }
        assert not named & classes, path


def test_the_default_is_this_machine_and_unknown_engines_are_refused() -> None:
    with pytest.raises(ValueError, match="'local', 'ray'"):
        Session(2, engine="slurm")
    with pytest.raises(ValueError, match="'local', 'ray'"):
        nbdist.use("slurm")
    with Session(1) as own:
        assert own.run(lambda: os.environ["MASTER_ADDR"]) == "127.0.0.1"
