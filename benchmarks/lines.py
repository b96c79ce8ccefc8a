"""Report the lines of nbdist that a command executes, in all of its processes.

python -m benchmarks.lines make test

Needs Python 3.12. All processes map one file with a byte for each line of nbdist, and a line marks its byte when a
process first executes it: a fork costs nothing. coverage 7.17.5 takes 0.1 s of CPU for each fork.
"""

from __future__ import annotations

import mmap
import os
import sys

NAME = "nbdist_lines"


def mark(folder: str) -> None:
    """Mark the lines of nbdist that this process and its forks execute, in the file `lines` of the folder.

    Each row of the file `names` is the path of a module in nbdist's folder, and the position of its line 0.
    """
    monitoring, known = sys.monitoring, dict[str, int]()  # type: ignore[attr-defined]
    with open(os.path.join(folder, "names")) as names, open(os.path.join(folder, "lines"), "r+b") as file:
        positions = {name: int(position) for name, position in (row.rsplit(" ", 1) for row in names)}
        marks = mmap.mmap(file.fileno(), 0)

    def begin(code: object, offset: int) -> object:
        path = code.co_filename  # type: ignore[attr-defined]
        name = path.rpartition("/nbdist/")[2]
        if name != path and "/tests/" not in path and name in positions:
            known[path] = positions[name]
            monitoring.set_local_events(monitoring.COVERAGE_ID, code, monitoring.events.LINE)
        return monitoring.DISABLE

    def execute(code: object, number: int) -> object:
        marks[known[code.co_filename] + number] = 1  # type: ignore[attr-defined]
        return monitoring.DISABLE

    monitoring.use_tool_id(monitoring.COVERAGE_ID, NAME)
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.PY_START, begin)
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, execute)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.PY_START)


def main() -> int:
    """Run the command with a module in the environment that marks lines. Return the command's exit status."""
    import shutil  # here, as the module in the environment is this file, which each interpreter imports
    import subprocess
    import sysconfig
    from pathlib import Path

    if not hasattr(sys, "monitoring"):
        have = sys.version.split()[0]
        sys.exit(f"Python must be 3.12 or newer, got {have}: make clean, then make lines PYTHON=/path/to/python3.12")
    root = Path(__file__).resolve().parent.parent
    folder, packages = root / "build" / "lines", Path(sysconfig.get_path("purelib"))
    texts = {str(path.relative_to(root / "nbdist")): path.read_text() for path in (root / "nbdist").rglob("*.py")}
    positions, size = dict[str, int](), 0
    for name, text in texts.items():
        positions[name] = size
        size += len(text.splitlines()) + 2
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "names").write_text("".join(f"{name} {position}\n" for name, position in positions.items()))
    (folder / "lines").write_bytes(bytes(size))
    module, begins = packages / f"{NAME}.py", packages / f"{NAME}.pth"
    try:
        shutil.copy(__file__, module)
        begins.write_text(f"import {NAME}; {NAME}.mark({str(folder)!r})\n")
        status = subprocess.run(sys.argv[1:]).returncode
    finally:
        begins.unlink(missing_ok=True)
        module.unlink(missing_ok=True)
    report(texts, positions, (folder / "lines").read_bytes())
    return status


def report(texts: dict[str, str], positions: dict[str, int], marks: bytes) -> None:
    """Print the lines without a mark of each module, and the share of statements that have one."""
    total = missed = 0
    for name in sorted(texts):
        lines = statements(texts[name])
        missing = sorted(line for line in lines if not marks[positions[name] + line])
        total, missed = total + len(lines), missed + len(missing)
        if missing:
            print(f"nbdist/{name} {len(missing)} of {len(lines)} missing:", *missing)
    print(f"{total - missed:,} of {total:,} statements, {100 * (1 - missed / total):.1f} %")


def statements(text: str) -> set[int]:
    """Return the first lines of all statements of a module, without those that execute nothing."""
    import ast

    found = set()
    for node in ast.walk(ast.parse(text)):
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # a docstring, or `...`
        if isinstance(node, ast.stmt) and not constant and not isinstance(node, (ast.Global, ast.Nonlocal)):
            found.add(node.lineno)
    return found


if __name__ == "__main__":
    sys.exit(main())
