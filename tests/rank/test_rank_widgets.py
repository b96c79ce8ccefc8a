"""Messages of the page to widgets of a rank."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import poll

from nbdist.rank import widgets


def test_events_before_the_widget_exists_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    here = {"first"}

    def handle_comm_message(content: dict[str, Any], buffers: Any) -> bool:
        asked.append(content["comm_id"])
        return content["comm_id"] in here

    monkeypatch.setattr(widgets, "handle_comm_message", handle_comm_message)
    monkeypatch.setattr(widgets, "PATIENCE", 10_000.0)
    widgets.receive({"comm_id": "later"}, [])
    widgets.receive({"comm_id": "first"}, [])
    assert poll(lambda: asked.count("later") > 3) and asked.count("first") == 1
    here.add("later")
    seen = asked.count("later")
    assert poll(lambda: asked.count("later") > seen)
    widgets.receive({"comm_id": "first"}, [])
    seen = asked.count("later")
    assert poll(lambda: asked.count("first") == 2) and asked.count("later") <= seen + 1, "it is told once"
