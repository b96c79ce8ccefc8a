"""Show and measure on NVIDIA GPUs what was written for them: `make gpu`, or `python -m benchmarks.gpu`.

What proves most comes first. Each part is a process with a limit; its findings are appended to a file at once, from
which `results/gpu.md` is made, here or later and elsewhere (`--render FILE`). A part whose packages are not installed
is left out, and the results say so. `--dry-run` runs on CPU ranks what can be: it shows whether the command works, and
nothing of GPUs. On a machine without network a clone is enough, with a torch that has CUDA and the wheels of
`make gpu-wheels`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import ROOT
from benchmarks.machine import save

from . import notes
from .rendering import conditions_of, table

PARTS = (
    "truth",
    "pair",
    "launch",
    "notebook",
    "clicks",
    "sharded",
    "loader",
    "waits",
    "suite",
)
NO_GPU = 2
"""The exit status where there is no GPU."""
SLOWER = 20
"""The factor by which a part may exceed its time limit in a dry run."""


def run_part(name: str, device: str, path: Path, left: float) -> bool:
    """Run one part in a process of its own for `left` seconds at most; whether it came to its end."""
    part = importlib.import_module(f"benchmarks.gpu.{name}")
    lacking = [module for module in part.NEEDS if importlib.util.find_spec(module) is None]
    os.environ[notes.PART] = name
    if lacking:
        notes.note("left out", f"{', '.join(lacking)} not installed")
        return True
    limit = min(part.LIMIT * (SLOWER if device == "cpu" else 1), left)
    if limit < 8:
        notes.note("left out", "the time for all parts is over")
        return True
    command = [sys.executable, "-m", "benchmarks.gpu", "--inside", name, "--device", device]
    child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    begin = time.monotonic()
    try:
        status = child.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # ranks end with the process that they were forked for
        child.wait()
        notes.note("cut off", f"after its limit of {limit:.0f} s", met=False)
        return False
    if status:
        notes.note("ended", f"with status {status}", met=False)
    notes.note("took", f"{time.monotonic() - begin:.0f} s")
    return status == 0


def missing() -> str:
    """Why nothing can be run here; empty where there is a GPU."""
    import torch

    if torch.version.cuda is None:
        return f"no GPU: this torch ({torch.__version__}) is built for CPUs"
    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} (CUDA {torch.version.cuda}) finds no NVIDIA GPU that it can use"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some parts")
    parser.add_argument("--notes", type=Path, default=ROOT / "build" / "gpu.jsonl", help="the file of the findings")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for all parts together")
    parser.add_argument("--add", action="store_true", help="add to the findings of an earlier command")
    parser.add_argument("--dry-run", action="store_true", help="on CPU ranks, to see whether this command works")
    parser.add_argument("--render", type=Path, metavar="FILE", help="make results/gpu.md from findings, run nothing")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a command in the background ignores
        importlib.import_module(f"benchmarks.gpu.{arguments.inside}").run(arguments.device)
        return 0
    if arguments.render:
        save("gpu", table(notes.read(arguments.render)))
        return 0
    if arguments.dry_run:
        os.environ["NBDIST_GPU_DRY_RUN"] = "1"
    elif why := missing():
        print(f"{why}. Nothing was run; results/gpu.md is as it was.", file=sys.stderr)
        return NO_GPU
    device = "cpu" if arguments.dry_run else "cuda"
    begin = time.monotonic()
    path = arguments.notes.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.add:
        path.unlink(missing_ok=True)
    os.environ[notes.FILE] = str(path)
    os.environ[notes.PART] = ""
    for line in conditions_of(device):
        notes.note("conditions", line)
    everything = 1e9 if arguments.dry_run else arguments.limit
    for name in arguments.only:
        run_part(name, device, path, everything - (time.monotonic() - begin))
    found = notes.read(path)
    failed = sum(one["met"] is False for one in found)
    save("gpu", table(found), keep=device == "cuda")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
