"""The tests that need GPUs, `tests/test_gpus.py`, without what the other tests need."""

from __future__ import annotations

import os
from typing import Any

from benchmarks import ROOT

from .notes import note

LIMIT = 240.0
NEEDS = ("pytest",)


class Reports:
    """A note for each test, when it is over."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.partition("::")[2].removeprefix("test_").replace("_", " ")
        if report.outcome == "skipped":
            note(name, f"left out: {str(report.longrepr[2]).removeprefix('Skipped: ')}")
        elif report.outcome == "failed":
            text = str(report.longrepr).strip()
            note(name, text.splitlines()[-1], met=False, traceback=text[-1500:])
        else:
            note(name, f"{report.duration:.1f} s", met=True)


def run(device: str) -> None:
    import pytest

    arguments = ["-q", "-c", os.devnull, "--rootdir", str(ROOT / "tests"), "--noconftest", "-p", "no:cacheprovider"]
    tests = str(ROOT / "tests" / "test_gpus.py")
    status = pytest.main([*arguments, tests], plugins=[Reports()])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        note("the tests themselves", f"could not be run: {status!r}", met=False)
