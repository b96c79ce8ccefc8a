"""The examples in the docstrings of public names of `nbdist.recsys` run as they stand, and there is one in each."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from test_docstrings import check_example

from nbdist import recsys, warm
from nbdist.recsys.triton.serving import exists_for_this_machine

#: Values and the names of types, which have no docstrings.
VALUES = {
    *("NULL", "NULL_FLOAT_BITS", "NULL_STRING", "NULL_UNSIGNED", "PADDING", "PADDING_STRING", "PADDING_UNSIGNED"),
    *("OPTIMIZERS", "STRATEGIES", "Schedule"),
}
SERVED = {"Server", "serve"}


def public() -> dict[str, Any]:
    """Every public name, with its room's before it."""
    found = {}
    for name in recsys._PACKAGES:
        room = importlib.import_module(f"nbdist.recsys.{name}")
        found |= {f"{name}.{one}": getattr(room, one) for one in set(room.__all__) - VALUES}
    return found


PUBLIC = public()


@pytest.fixture(scope="module", autouse=True)
def warmed() -> None:
    warm("import torchrec.distributed, torchmetrics, polars, pandas")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples write into a folder of their own, and neither find data sets on this machine nor reach GroupLens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NBDIST_DATA", raising=False)
    monkeypatch.setenv("FASTAI_HOME", str(tmp_path / "fastai"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no program listens at this port
    monkeypatch.setenv("no_proxy", "127.0.0.1")


#: Start a server, or export a model, which takes ten seconds.
TRITON = pytest.mark.long("Triton: exports and a server")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=TRITON if name.startswith("triton.") else ()) for name in sorted(PUBLIC)]
)
def test_example(name: str) -> None:
    if name.partition(".")[2] in SERVED and not exists_for_this_machine():
        pytest.skip("no Triton server for this machine")
    check_example(name, PUBLIC[name], {})
