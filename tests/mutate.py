"""Put the faults of mutations.toml into a copy of the code, one at a time, and see whether `make test` catches each.

python tests/mutate.py [--root CHECKOUT] [NAME ...]

`--root` is a checkout whose tests are asked, this one by default. Only the tests that a fault names are run, without
those that `make test` leaves out, until the first fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nox.project

HERE = Path(__file__).resolve().parent


def caught(root: Path, mutation: dict[str, Any], copy: Path) -> str:
    """Run the tests over a faulty copy. Returns the test that failed; empty where none did."""
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".venv*", ".git", "build", "__pycache__", ".nox"))
    path = copy / "nbdist" / mutation["file"]
    text = path.read_text()
    assert text.count(mutation["line"]) == 1, f"{mutation['file']} holds the line {text.count(mutation['line'])} times"
    path.write_text(text.replace(mutation["line"], mutation["fault"]))
    env = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not long", "--no-header"]
    tests = [test for test in mutation["tests"].split() if (copy / test).exists()]
    done = subprocess.run([*command, *tests], cwd=copy, env=env, capture_output=True, text=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[-1].split(" - ")[0].split(maxsplit=1)[1] if done.returncode == 1 and failed else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=HERE.parent)
    parser.add_argument("names", nargs="*", help="files of the faults to try; all by default")
    asked = parser.parse_args()
    mutations = nox.project.load_toml(HERE / "mutations.toml")["mutation"]
    missed = []
    for mutation in mutations:
        if asked.names and mutation["file"] not in asked.names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            test = caught(asked.root.resolve(), mutation, Path(folder) / "copy")
        print(f"| `{mutation['file']}` | `{mutation['fault']}` | {test or '**not caught**'} |", flush=True)
        if not test:
            missed.append(mutation["file"])
    sys.exit(f"not caught: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
