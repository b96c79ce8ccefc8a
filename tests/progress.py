"""Show the progress of a run of tests, the time left, each failure at once, and at the end what was left out.

`seconds.json` holds for each file the seconds without its long tests, the seconds of these alone, and the number of the
others (`make suite` writes it). Files that take longest begin first. The time left follows from these seconds and from
the speed so far. Tests that share a JupyterLab, or a cluster, run in one process. Where a test of a file takes more
than `SLOW` seconds on average, all tests of the file are slow: `make quick` has two minutes.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SECONDS: dict[str, tuple[float, float, int]] = json.loads((HERE / "seconds.json").read_text())
#: Seconds of a file that is not in `SECONDS`.
UNKNOWN = 2.0
#: Seconds of a test, on average over its file, above which it is slow.
SLOW = 0.2
#: Patterns of tests that share what takes long to start, or needs CPU time as long as it runs: a JupyterLab and a
#: browser; the cluster of Ray of conftest.py.
SHARED = "/browser/", r"/test_ray\.py|\[ray\b|/test_named_clusters\.py|_on_a_cluster$"
#: Lines of an error that are shown at once.
WHY = 6
#: Seconds between two lines about the progress.
INTERVAL = 15.0


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def reason(item: pytest.Item) -> str:
    """Why a test is not in `make test`, or else not in `make quick`."""
    long = item.get_closest_marker("long")
    return str(long.args[0]) if long is not None else "takes more than a few seconds"


def expected(config: pytest.Config) -> dict[str, float]:
    """Return the seconds of each file, for the tests that `-m` selects."""
    selected = config.option.markexpr
    wanted = slice(0, 1) if selected.startswith("not long") else slice(1, 2) if selected == "long" else slice(0, 2)
    return {file: sum(seconds[wanted]) for file, seconds in SECONDS.items()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; the order within a file stays. Mark what is slow."""
    seconds = expected(config)
    order = {file: rank for rank, file in enumerate(sorted(seconds, key=lambda file: -seconds[file]))}
    items.sort(key=lambda item: order.get(file_of(item.nodeid), len(order)))
    for item in items:
        taken, _, tests = SECONDS.get(file_of(item.nodeid), (0.0, 0.0, 0))
        if taken > SLOW * tests:
            item.add_marker("slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, run all tests that share something in one process, and keep the order of the files:
    pytest-xdist would begin with those that hold most tests."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((shared for shared in SHARED if re.search(shared, nodeid)), file_of(nodeid))

    return Scheduling(config, log)


class Progress:
    """Lines about a run, and its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds = expected(config)
        self._begin = self._shown = time.monotonic()
        self._left: dict[str, int] = {}
        self._sizes: Counter[str] = Counter()
        self._failed = 0
        self._left_out: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._expect(ids)

    def _expect(self, ids: list[str]) -> None:
        if ids and not self._sizes:
            self._sizes = Counter(map(file_of, ids))
            self._left = dict(self._sizes)
            self._begin = self._shown = time.monotonic()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        if self._config.option.markexpr:
            marked = [item for item in items if {"slow", "long"} & {mark.name for mark in item.iter_markers()}]
            self._left_out.update(map(reason, marked))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker has left out: each worker leaves out the same."""
        self._left_out = Counter(getattr(node, "workeroutput", {}).get("left_out", self._left_out))

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["left_out"] = dict(self._left_out)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Any:
        """Show no letter for each test."""
        category, _, word = yield
        return category, "", word

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed += 1
            self._say(f"FAILED {report.nodeid}" + f" in {report.when}" * (report.when != "call"))
            crash = getattr(report.longrepr, "reprcrash", None)
            why = report.longrepr if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
            for line in str(why).splitlines()[:WHY]:  # a run that is stopped shows no more
                self._say(f"    {line[:300]}")
        if report.when == "teardown":
            file = file_of(report.nodeid)
            self._left[file] = self._left.get(file, 1) - 1
            if time.monotonic() - self._shown >= INTERVAL:
                self._shown = time.monotonic()
                self._say(self.line())

    def line(self) -> str:
        """Return the number of tests that have run, and the time left."""

        def seconds(counts: dict[str, int]) -> float:
            return sum(self._seconds.get(file, UNKNOWN) * count / self._sizes[file] for file, count in counts.items())

        whole, left = seconds(self._sizes), seconds({file: n for file, n in self._left.items() if file in self._sizes})
        passed = time.monotonic() - self._begin
        total, open_ = self._sizes.total(), sum(self._left.values())
        text = f"{passed / 60:4.1f} min: {total - open_:,} of {total:,} tests"
        text += f", {self._failed} failed" * bool(self._failed)
        if whole > left:
            text += f", about {passed * left / (whole - left) / 60:.1f} min left"
        return text

    def _say(self, text: str) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and not hasattr(self._config, "workerinput"):
            reporter.ensure_newline()
            reporter.write_line(text)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._left_out:
            terminalreporter.section("left out")
            for why, count in sorted(self._left_out.items()):
                terminalreporter.write_line(f"{count:5,} tests: {why}")
            terminalreporter.write_line("`make test-all` runs them.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Progress(config), "nbdist-progress")
