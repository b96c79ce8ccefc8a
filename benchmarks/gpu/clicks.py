"""Rows per second of `fit` on HugeCTR's click model, step by step and captured; whether both learn alike."""

from __future__ import annotations

import time
from typing import Any

from nbdist import Session

from . import click_model
from .notes import attempt, note

LIMIT = 170.0
NEEDS = ("pyarrow", "torchmetrics")
#: Title → rows per second that are promised on one H100 or H200.
BARS = {"captured, 2,048 x 16": 10e6, "captured, 65,536 x 16": 40e6}
#: How far captured training may end from eager training, in times the distance that one bit of the first weights makes.
CLOSE = 2.0


def finding(title: str, value: Any) -> dict[str, Any]:
    """Return the note of a part: its value in words, and whether it is as promised."""
    if isinstance(value, float):
        bar = BARS.get(title)
        words = {"value": f"{value / 1e6:.2f} M rows/s"}
        return words | ({"met": value >= bar, "bar": f"at least {bar / 1e6:.0f} M rows/s"} if bar else {})
    if "weights" in value:
        apart, yardstick = value["weights"], value["weights of eager, a bit away"]
        words = {"value": f"weights {apart:.1e} apart; {yardstick:.1e} where the first ones differ in the last bit"}
        return words | {"met": apart <= CLOSE * yardstick, "bar": f"at most {CLOSE:g} ×", "losses": value["losses"]}
    if "table" in value:
        return {"value": "", "table": value["table"]}
    return {"value": value}


def run(device: str) -> None:
    with Session(1, devices=device, timeout=60) as session:
        for title, measure, args, options in click_model.parts():
            with attempt(title):
                begin = time.monotonic()
                found = finding(title, session.run(measure, *args, **options))
                note(title, found.pop("value"), seconds=round(time.monotonic() - begin, 1), **found)
