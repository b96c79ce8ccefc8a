"""The connection of Ray's driver to a cluster: what is asked again, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist import RayOptions
from nbdist.engines.ray.driver import connecting

pytest.importorskip("ray", reason="needs Ray")


@pytest.mark.parametrize("wait", [60.0, 0.0])
def test_a_busy_cluster_is_asked_again(monkeypatch: pytest.MonkeyPatch, wait: float) -> None:
    answers = [
        ConnectionAbortedError(f"Initialization failure from server:\n{reason}")
        for reason in (
            "RuntimeError: Starting Ray client server failed. See logs",
            "ray client connection timeout",
            "psutil.ZombieProcess: PID still exists but it's a zombie (pid=31494)",
        )
    ]

    def init(**options: Any) -> None:
        if answers:
            raise answers.pop(0)

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(connecting.time, "sleep", lambda seconds: None)
    said: list[str] = []
    if wait:
        connecting.connect(RayOptions(address="auto", wait=wait), said.append)
        assert len(said) == 3 and "busy (Starting Ray client server failed); trying again" in said[0]
    else:
        with pytest.raises(connecting.Refused, match=r"(?s)no connection to Ray at 'auto': .*Starting Ray client"):
            connecting.connect(RayOptions(address="auto", wait=wait), said.append)


def test_ray_is_not_asked_again_after_a_version_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise RuntimeError("version mismatch")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(connecting.Refused, match="version mismatch"):
        connecting.connect(RayOptions(address="auto"), print)
