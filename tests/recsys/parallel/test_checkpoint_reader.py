"""A checkpoint from elsewhere runs no code: its description, and its entries that are no tensors, are restricted."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo

from nbdist.recsys.parallel import checkpoint


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def _state() -> dict[str, Any]:
    return {"model": {"weight": torch.ones(3)}, "dense": {"step": 3, "betas": (0.9, 0.99), "name": "adam"}}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    checkpoint.save("saved", _state())
    return tmp_path / "saved"


def test_a_checkpoint_is_loaded(saved: Path) -> None:
    state = {"model": {"weight": torch.zeros(3)}, "dense": {"step": 0, "betas": None, "name": ""}}
    checkpoint.load(saved, state)
    assert state["model"]["weight"].tolist() == [1, 1, 1]
    assert state["dense"] == _state()["dense"]
    assert set(checkpoint.contents(saved)) == {"model.weight", "dense.step", "dense.betas", "dense.name"}


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("value", [Bomb(), [Bomb()], {"state_dict_metadata": Bomb()}])
def test_a_description_that_is_code_is_refused(saved: Path, value: Any, protocol: int) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(value, protocol))
    with pytest.raises(ValueError, match=r"\.metadata: not the description of a checkpoint: .*mkdir"):
        checkpoint.load(saved, _state())
    with pytest.raises(ValueError, match="has no place in a checkpoint"):
        checkpoint.contents(saved)
    assert not Path("exploded").exists()


def test_an_entry_that_is_code_is_refused(saved: Path) -> None:
    dcp.save({"model": {"weight": torch.ones(3)}, "dense": {"step": Bomb()}}, checkpoint_id="evil")
    with pytest.raises(CheckpointException, match=r"dense\.step: the checkpoint holds no plain value"):
        checkpoint.load("evil", {"model": {"weight": torch.zeros(3)}, "dense": {"step": 0}})
    assert not Path("exploded").exists()


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", "..", "", 3])
def test_a_description_that_leads_elsewhere_is_refused(saved: Path, name: Any) -> None:
    metadata = dcp.FileSystemReader(saved).read_metadata()
    metadata.storage_data = {key: _StorageInfo(name, 0, 9) for key in metadata.storage_data}
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="is not the name of a file in the folder"):
        checkpoint.load(saved, _state())


@pytest.mark.parametrize("content", [b"", b"x", pickle.dumps({"a": 1}), pickle.dumps(None)])
def test_an_invalid_description_is_refused(saved: Path, content: bytes) -> None:
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="not the description of a checkpoint"):
        checkpoint.contents(saved)
