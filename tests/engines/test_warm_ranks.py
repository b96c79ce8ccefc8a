"""Ranks that wait for the next launch, here without GPUs: `tests/gpu/test_warm_ranks.py` has their contexts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest
from conftest import poll

from nbdist import Session, devices, in_ddp, warm
from nbdist.devices import Place
from nbdist.engines import warm_ranks
from nbdist.engines.local import LocalEngine

CPU = Place("", "cpu")


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    warm_ranks.stop()


def waiting() -> list[int]:
    """The pids of the ranks that wait, once they have started."""
    found = warm_ranks._waiting
    assert found is not None
    assert poll(lambda: not found._ranks.exits() and all(found._ranks.pids))
    return [pid for pid in found._ranks.pids if pid is not None]


def test_launches_take_the_ranks_that_wait_and_others_wait_after_it() -> None:
    warm_ranks.start(LocalEngine(), [CPU, CPU], 60.0)
    seen = set()
    for _ in range(2):
        pids = waiting()
        with Session(2, devices="cpu") as session:
            assert session.run_all(os.getpid) == pids
            assert in_ddp.options(devices="cpu")(2, os.getpid) not in pids
        seen |= {*pids}
    assert len(seen) == 4
    pids = waiting()
    warm_ranks.stop()
    assert not any(map(psutil.pid_exists, pids))


def test_ranks_of_other_engines_do_not_wait() -> None:
    with pytest.raises(ValueError, match=r"gpus must be False with this engine, .* only ranks of the engine 'local'"):
        warm_ranks.require_local(object())


def test_ranks_that_do_not_fit_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(**options: object) -> bool:
        [pid] = waiting()
        return bool(in_ddp.options(devices="cpu", **options)(1, os.getpid) == pid)

    warm_ranks.start(LocalEngine(), [CPU], 60.0)
    assert taken() and taken(env={"MINE": "1"})
    assert not taken(env={"CUDA_LAUNCH_BLOCKING": "1"}) and taken(), "CUDA has read its variables"
    assert not taken(start="spawn") and taken()
    [pid] = waiting()
    assert in_ddp.options(devices="cpu")(2, os.getpid) != pid and [pid] == waiting()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert not taken() and taken()
    [pid] = waiting()
    os.kill(pid, 9)
    assert poll(lambda: not psutil.pid_exists(pid))
    assert in_ddp.options(devices="cpu")(1, int) == 0


def test_a_rank_without_its_gpu_ends_and_the_launch_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank of this torch can have a GPU."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: 1)
    monkeypatch.setattr(devices, "gpu_names", lambda: ["GPU-a"])
    monkeypatch.setattr(devices, "has_nccl", lambda: True)
    warm(gpus=True)
    found = warm_ranks._waiting
    assert found is not None and found.places == [Place("0", "cuda:0")]
    assert poll(lambda: bool(found._ranks.exits()))
    with pytest.raises(Exception, match=r"(?i)cuda|NVIDIA"):
        in_ddp(1, int)


def test_the_ranks_end_after_a_time_without_use() -> None:
    warm_ranks.start(LocalEngine(), [CPU], 0.5)
    assert poll(lambda: warm_ranks._waiting is None)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"gpus": True}, ValueError, "gpus must be False without a GPU, got True: 0 GPUs are visible"),
        ({"gpus": 2}, ValueError, "gpus must be False without a GPU, got 2: 0 GPUs are visible"),
        ({"gpus": -1}, ValueError, "gpus must be at least 0, got -1"),
        ({"gpus": "all"}, TypeError, "gpus must be an integer, got 'all'"),
    ],
)
def test_gpus_that_cannot_be_had(
    options: dict[str, object], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    with pytest.raises(error, match=says):
        warm(**options)  # type: ignore[arg-type]


def test_a_keeper_has_no_ranks_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 1)
    monkeypatch.setattr(devices, "has_nccl", lambda: True)
    with pytest.raises(ValueError, match="gpus must be False with named=True, got both"):
        warm(gpus=True, named=True)
