"""Findings, each appended to a file as soon as it is known, so that a run that is cut off keeps what it has found."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Where the findings go, and which part is running: set by the command for the process of each part.
FILE, PART = "NBDIST_GPU_NOTES", "NBDIST_GPU_PART"
#: The end of a traceback that is kept.
_CHARACTERS = 1500


def note(what: str, value: Any = None, *, met: bool | None = None, bar: str = "", **more: Any) -> None:
    """Append a finding.

    Args:
        what: Of what, in words.
        value: The finding: a number with its unit as text, or anything that JSON holds.
        met: Whether it is as promised; None where nothing is promised.
        bar: What is promised, in words.
        more: Anything else that belongs to it.
    """
    line = {"part": os.environ.get(PART, ""), "what": what, "value": value, "met": met, "bar": bar, **more}
    text = json.dumps(line, default=str)
    print(text[:600], flush=True)
    if path := os.environ.get(FILE):
        with open(path, "a") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def attempt(what: str) -> Iterator[None]:
    """Note the failure of a step, and let the next one begin."""
    try:
        yield
    except Exception as error:
        cause = f"\n{error.__cause__}" if error.__cause__ else ""
        end = (traceback.format_exc() + cause)[-_CHARACTERS:]
        note(what, f"{type(error).__name__}: {error}"[:400], met=False, traceback=end)


def read(path: Path) -> list[dict[str, Any]]:
    """The findings in a file; a last line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def seconds(action: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def median(measure: Callable[[], float], turns: int = 5) -> float:
    """The median of some measurements, after one that does not count."""
    measure()
    return statistics.median(measure() for _ in range(turns))
