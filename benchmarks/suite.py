"""Measure where the CPU seconds of a test run go: `python -m benchmarks.suite NAME -- make test`, or `make suite`.

The command runs under this process, which becomes the reaper of all its orphans, so the total is exact: it comes from
the kernel's accounts of ended children. Several times a second the CPU seconds of each living process below are read,
and what was added is booked on the kind of process and on the file of tests that its nearest pytest worker was running.
CPU seconds that no look saw, of processes that began and ended between two looks, are shown as "not seen".

As a pytest plugin (`-p benchmarks.suite`, given by `PYTEST_ARGS`), this module notes which test a worker is running,
and keeps the seconds and the number of tests of each file in tests/seconds.json, by which `tests/progress.py` shows the
time left.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import ROOT, machine

#: Folder in which each pytest worker keeps the name of its running test, in a file named after its process id.
NOTES = "NBDIST_SUITE_NOTES"
TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36
#: Kinds of process, by a regular expression that the command line must match; the first match counts.
KINDS = {
    "Triton servers": r"tritonserver|triton_python_backend",
    "Ray: drivers": r"nbdist\.engines\.ray\.driver",
    "Ray: nodes and their agents": r"raylet|gcs_server|ray/dashboard|ray/_private|ray/autoscaler|log_monitor|bin/ray|"
    r"ray::(Dashboard|RuntimeEnv)Agent",
    "Ray: workers": r"ray::|default_worker\.py|setup_worker\.py",
    "fork servers and ranks": r"nbdist\.server\.main",
    "browsers": r"chrom|playwright",
    "Jupyter servers": r"jupyter",
    "notebooks and site": r"zensical|notebooks/\w+\.py|nbconvert",
    "templates that programs are forked from": r"from warm import main",
    "kernels": r"ipykernel_launcher",
    "ruff and mypy": r"\bruff\b|\bmypy\b",
    "installation: pip, uv, nox, builds": r"\bpip\b|\buv\b|\bnox\b|ensurepip|\bbuild\b",
    "pytest workers (test code itself)": r"execnet|-m pytest|-c import sys;exec",
    "other Python interpreters": r"python",
    "other programs": r"",
}


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note the test that begins."""
    folder = os.environ.get(NOTES)
    if folder:
        Path(folder, str(os.getpid())).write_text(nodeid)


#: By file, and by whether the test is long.
_seconds: Counter[tuple[str, bool]] = Counter()
#: By file: the number of tests that are not long.
_tests: Counter[str] = Counter()


def pytest_runtest_logreport(report: Any) -> None:
    """Add what a phase of a test took."""
    file, long = report.nodeid.partition("::")[0], "long" in report.keywords
    _seconds[file, long] += report.duration
    _tests[file] += report.when == "setup" and not long


def pytest_sessionfinish(session: Any) -> None:
    """Keep the seconds of each file. The seconds of a file that was not run stay."""
    if not hasattr(session.config, "workerinput") and _seconds:
        path = ROOT / "tests" / "seconds.json"
        seconds = json.loads(path.read_text())
        for (file, long), taken in _seconds.items():
            seconds.setdefault(file, [0.0, 0.0, 0])[long] = round(taken, 1)
            seconds[file][2] = _tests[file] or seconds[file][2]
        lines = [f" {json.dumps(file)}: {json.dumps(taken)}" for file, taken in sorted(seconds.items())]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@dataclass
class Process:
    """A process: its parent, its command line, its CPU seconds so far, and whether it imported torch."""

    parent: int
    command: str
    seconds: float = 0.0
    torch: bool = False


@dataclass
class Account:
    """CPU seconds by kind and by file, and the interpreters that imported torch."""

    kinds: Counter[str] = field(default_factory=Counter)
    files: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    processes: Counter[str] = field(default_factory=Counter)
    torch: Counter[str] = field(default_factory=Counter)


class Meter:
    """Reads the processes below this one, over and over."""

    def __init__(self, notes: Path) -> None:
        self.account = Account()
        self._notes = notes
        self._seen: dict[tuple[int, int], Process] = {}
        self._last_file: dict[int, str] = {}

    def look(self) -> None:
        """Read each living process below this one, and book what it used since the last look."""
        living: dict[int, tuple[int, int, float]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    stat = Path("/proc", name, "stat").read_bytes()
                except OSError:
                    continue
                fields = stat[stat.rindex(b")") + 2 :].split()
                living[int(name)] = int(fields[1]), int(fields[19]), (int(fields[11]) + int(fields[12])) / TICKS
        ours = self._below(living)
        for pid in ours:
            parent, start, seconds = living[pid]
            process = self._seen.get((pid, start))
            command = read(pid, "cmdline")
            if process is None:
                process = self._seen[pid, start] = Process(parent, command)
                forked = parent in living and self._command(parent, living) == command
                process.torch = forked  # a forked process imported nothing itself
                self.account.processes[kind_of(command)] += 1
            if command:
                process.command = command
            if not process.torch and seconds > 0.7 and "python" in process.command:
                process.torch = "libtorch_cpu" in read(pid, "maps")
                self.account.torch[kind_of(process.command)] += process.torch
            self._book(pid, process, seconds - process.seconds, living)
            process.seconds = seconds

    def _command(self, pid: int, living: dict[int, tuple[int, int, float]]) -> str:
        process = self._seen.get((pid, living[pid][1]))
        return process.command if process else ""

    @staticmethod
    def _below(living: dict[int, tuple[int, int, float]]) -> list[int]:
        children = defaultdict(list)
        for pid, (parent, _, _) in living.items():
            children[parent].append(pid)
        found, queue = [], [os.getpid()]
        while queue:
            queue += (more := children[queue.pop()])
            found += more
        return found

    def _book(self, pid: int, process: Process, seconds: float, living: dict[int, tuple[int, int, float]]) -> None:
        if seconds <= 0:
            return
        kind, file = kind_of(process.command), ""
        while pid in living and pid != os.getpid():
            try:
                file = self._notes.joinpath(str(pid)).read_text().partition("::")[0]
            except OSError:
                pid = living[pid][0]
            else:
                break
        self.account.kinds[kind] += seconds
        self.account.files[file or "(outside tests)"][kind] += seconds


def read(pid: int, what: str) -> str:
    """A file of /proc about a process; empty if that process is gone."""
    try:
        return Path("/proc", str(pid), what).read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kind_of(command: str) -> str:
    """The first kind in `KINDS` that a command line matches."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, command))


def measure(command: list[str], folder: Path, interval: float) -> dict[str, Any]:
    """Run a command under the meter.

    Returns its exit status, wall seconds, CPU seconds by kind and by file.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    folder.mkdir(parents=True, exist_ok=True)
    for note in folder.iterdir():
        note.unlink()
    meter, begin = Meter(folder), time.monotonic()
    child = subprocess.Popen(command, env={**os.environ, NOTES: str(folder)})
    status = None
    while status is None:
        time.sleep(interval)
        meter.look()
        status = child.poll()
        while status is None:  # reap orphans, but leave the command itself to `poll`
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == child.pid:
                break
            os.waitpid(ended.si_pid, 0)
    wall = time.monotonic() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    account = meter.account
    return {
        "command": command,
        "status": status,
        "wall": wall,
        "total": used.ru_utime + used.ru_stime,
        "kinds": dict(account.kinds),
        "files": {file: dict(kinds) for file, kinds in account.files.items()},
        "processes": dict(account.processes),
        "torch": dict(account.torch),
    }


def row(name: object, values: list[float]) -> str:
    return f"| {name} | {' | '.join(f'{value:,.0f}' for value in values)} |"


def report(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Lay out runs side by side: CPU seconds by kind of process and by file."""
    head = ["", f"| CPU seconds | {' | '.join(runs)} |", f"|---|{'---:|' * len(runs)}"]
    found = list(runs.values())
    lines = [
        "# Where the CPU seconds of the tests go",
        *head,
        row("all", [run["total"] for run in found]),
        row("wall time, seconds", [run["wall"] for run in found]),
        "",
        "By kind of process; in brackets the number of processes of the kind, and of those that imported torch:",
        *head,
    ]
    for kind in KINDS:
        cells = [
            f"{run['kinds'].get(kind, 0):,.0f} ({run['processes'].get(kind, 0):,}, {run['torch'].get(kind, 0):,})"
            for run in found
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines.append(row("not seen", [run["total"] - sum(run["kinds"].values()) for run in found]))
    lines += ["", "Files of tests that took 10 CPU seconds or more:", *head]
    sums = [{file: sum(kinds.values()) for file, kinds in run["files"].items()} for run in found]
    for file in sorted(set().union(*sums), key=lambda file: -max(one.get(file, 0.0) for one in sums)):
        if max(one.get(file, 0.0) for one in sums) >= 10:
            lines.append(row(f"`{file}`", [one.get(file, 0.0) for one in sums]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="name of the run, a column of results/suite.md")
    parser.add_argument("--interval", type=float, default=0.4, help="seconds between two looks")
    parser.add_argument("command", nargs="+", help="the command that runs the tests")
    asked = parser.parse_args()
    found = measure(asked.command, Path("build/suite").resolve(), asked.interval)
    kept = ROOT / "benchmarks" / "results" / "suite.json"
    runs = json.loads(kept.read_text()) if kept.exists() else {}
    kept.write_text(json.dumps({**runs, asked.name: found}, indent=1) + "\n")
    machine.save("suite", [*report({**runs, asked.name: found}), "", *machine.conditions(("torch", "pytest", "ray"))])
    print(f"{found['wall']:.0f} s, {found['total']:.0f} s of CPU, exit status {found['status']}")
    sys.exit(found["status"])


if __name__ == "__main__":
    main()
