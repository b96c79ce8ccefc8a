"""Sixty seeded deadlocks of all classes, on two to four ranks: each verdict names the line of the culprit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from conftest import LINUX, Sessions

from benchmarks.kernel.hangs import CLASSES, line_of
from nbdist import RankStuck
from nbdist.kernel.calls import hangs

OPTIONS = {"devices": "cpu", "on_hang": "raise"}
#: Deadlocks of each class.
EACH = 4


@pytest.mark.skipif(not LINUX, reason="only Linux says what a process waits for")
@pytest.mark.long("waits for one verdict after the other")
@pytest.mark.parametrize("fn", CLASSES, ids=lambda fn: fn.__name__)
def test_the_line_of_the_culprit_is_named(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, fn: Callable[[int, int], None]
) -> None:
    for name, seconds in {"LOOK_EVERY": 0.1, "QUIET": 0.5, "ASK_EVERY": 0.3, "ASK_RARELY": 0.3}.items():
        monkeypatch.setattr(hangs, name, seconds)
    drawn = random.Random(fn.__name__)
    for _ in range(EACH):
        size = drawn.randint(2, 4)
        culprit, count = drawn.randrange(size), drawn.randint(0, 20)
        with pytest.raises(RankStuck) as caught:
            sessions[size].run(fn, culprit, count)
        verdict = "\n".join(str(caught.value).splitlines()[:3])
        assert f"hangs.py:{line_of(fn)}" in verdict, (size, culprit, count, verdict)
