"""Changes that ranks make in fastai by themselves: the documentation lists them, and a switch leaves them out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastai.callback.schedule
import fastai.tabular.core  # noqa: F401 (one of the modules that are patched)
import pytest
from fastai.distributed import DistributedDL

import nbdist.fastai
from nbdist import Session, in_ddp
from nbdist.fastai.patches import VARIABLE, patched

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "fastai.md"


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    yield
    nbdist.fastai.patch_ranks(True)


def home() -> str:
    return DistributedDL._broadcast.__module__


def test_the_page_lists_what_is_replaced() -> None:
    rows = re.findall(r"^\| (`fastai\..*?) \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    with patched() as originals:
        replaced = [f"{name_of(owner)}.{attribute}" for owner, attribute, _ in originals]
        assert home() == "nbdist.fastai.distributed"
    assert sorted(re.findall(r"`([^`]+)`", " ".join(rows))) == sorted(replaced)
    assert home() == "fastai.distributed"


def name_of(owner: Any) -> str:
    return owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"


def test_ranks_that_leave_fastai_as_it_is() -> None:
    assert in_ddp(1, home) == in_ddp(0, home) == "nbdist.fastai.distributed"
    with Session(2, env={VARIABLE: "0"}) as session:
        assert session.run_all(home) == ["fastai.distributed"] * 2
    nbdist.fastai.patch_ranks(False)
    assert in_ddp(1, home) == in_ddp(0, home) == "fastai.distributed"
    nbdist.fastai.patch_ranks(True)
    assert in_ddp(1, home) == "nbdist.fastai.distributed"


def test_public_names() -> None:
    assert {name for name in dir(nbdist.fastai) if not name.startswith("_")} == {"RecordSteps", "fast", "patch_ranks"}
    assert nbdist.fastai.fast.__module__ == "nbdist.fastai.learners"
    with pytest.raises(AttributeError, match="no attribute 'fats'"):
        nbdist.fastai.fats  # noqa: B018


def test_cpu_ranks_do_not_use_the_gpu_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastai.torch_core as core

    monkeypatch.setattr(core, "_has_mps", lambda: True)
    assert str(core.default_device()) == "mps:0"
    with patched():
        assert str(core.default_device()) == "mps:0", "not in a rank"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with patched():
        assert str(core.default_device()) == "cpu"
    assert core.defaults.use_cuda is None
