"""Conditions of a benchmark (machine, versions, command, load), to be kept with its figures."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import ROOT

PACKAGES = ("torch", "ipykernel", "ipython", "jupyter_client")


def cpu() -> str:
    """The CPU's model, and how many of its cores this process may use."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores"


def name_of(source: str) -> str:
    """Return what `movielens` says of its data, without addresses and this machine's folders."""
    return re.split(": http| from the folder", source)[0]


def title_of(size: str, source: str) -> str:
    """Return the title of a section about ratings of a size of MovieLens, such as "1m": whether they are the real
    ones."""
    real = not source.startswith("Synthetic")
    return f"MovieLens {size}, the real one" if real else f"Invented ratings, as many as in MovieLens {size}"


def conditions(packages: Iterable[str] = PACKAGES) -> list[str]:
    """Command, machine and versions, as a Markdown list."""
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
    main: Any = sys.modules["__main__"]
    # Where the folder of another version lies is no matter, but which version that is.
    others = [argument for argument in sys.argv[1:] if Path(argument, ".git").exists()]
    arguments = ["OTHER" if argument in others else argument for argument in sys.argv[1:]]
    command = " ".join(["python", "-m", main.__spec__.name.removesuffix(".__main__"), *arguments])
    return [
        f"- command: `{command}`",
        f"- date: {datetime.now(timezone.utc):%Y-%m-%d}",
        f"- machine: {cpu()}, {platform.system()}; load average {os.getloadavg()[1]:.1f} in the last five minutes",
        f"- versions: {', '.join(versions)}",
        *(f"- OTHER: commit {_commit(other)}" for other in others),
    ]


def _commit(folder: str) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def save(name: str, lines: list[str], keep: bool = True) -> None:
    """Print a table, and keep it as `results/<name>.md`."""
    text = "\n".join(lines) + "\n"
    print(text)
    if keep:
        (ROOT / "benchmarks" / "results" / f"{name}.md").write_text(text)


def save_section(name: str, title: str, lines: list[str], keep: bool = True) -> None:
    """Print a section, and keep it in `results/<name>.md`, in place of the one with this title, or at the end."""
    section = "\n".join([f"## {title}", "", *lines]) + "\n"
    print(section)
    if keep:
        path = ROOT / "benchmarks" / "results" / f"{name}.md"
        head, *others = path.read_text().split("\n## ")
        there = {other.partition("\n")[0]: f"## {other.rstrip()}\n" for other in others}
        path.write_text("\n".join([head.rstrip() + "\n", *{**there, title: section}.values()]))
