"""Time to capture a call: `python -m benchmarks.capture.call [OTHER]`.

With OTHER, the folder of another version of nbdist, both are measured in turns, each in processes of its own, and the
table has both. The notebook's settings (log levels, options of libraries and so on), which go with each call and are
looked through for it, are left out of one column. Capture is what happens between the call and the first byte that a
rank gets; the buffers of big data are found again in the session's cache, as in every call but the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import ROOT
from benchmarks.machine import conditions, save

ROUNDS = 5

# Runs in a process of its own, with the version to measure first on its path; no file of its own, so that what it
# defines is in `__main__` as in a notebook.
MEASURE = """
import json, sys, time
import numpy as np, pandas as pd, torch

try:
    from nbdist.capture.call import capture_call
    from nbdist.wire.cache import SentCache as Cache
except ImportError:  # the flat layout
    from nbdist.capture import capture_call
    from nbdist.transport import Shelf as Cache

options = json.loads(sys.argv[1])
SCALE = 2
class Config:
    def __init__(self): self.lr = 0.1
def helper(x): return x * SCALE
def small(config, epochs): return helper(config.lr) * epochs
def reads(table): return len(table)

arrays = {f"key {i}": np.arange(8) + i for i in range(10_000)}
frame = pd.DataFrame({f"c{i}": np.random.default_rng(i).random(200_000) for i in range(10)})
frame["title"] = [f"title {i % 1000}" for i in range(len(frame))]
calls = {"small call": (small, (Config(), 3)), "10,000 arrays in a dict": (reads, (arrays,)), "frame": (reads, [frame])}
times = {}
for name, (fn, args) in calls.items():
    cache = Cache()
    def once():
        begin = time.perf_counter()
        capture_call(fn, args, {}, "", {}, cache, **options).parcel.close()
        return time.perf_counter() - begin
    once()
    count = 200 if name == "small call" else 15
    times[name] = sorted(once() for _ in range(count))[count // 4]
print(json.dumps(times))
"""


def measure(folder: Path, options: dict[str, bool]) -> dict[str, float]:
    """Seconds for each call with these arguments of `capture_call`: the lower quartile of its repetitions."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", MEASURE, json.dumps(options)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    versions: dict[str, tuple[Path, dict[str, bool]]] = {
        "now, without settings": (ROOT, {"settings": False}),
        "now": (ROOT, {}),
    }
    if len(sys.argv) > 1:
        versions = {"before": (Path(sys.argv[1]).resolve(), {}), **versions}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    for _ in range(ROUNDS):
        for name, (folder, options) in versions.items():
            rounds[name].append(measure(folder, options))
    best = {name: {call: min(times[call] for times in found) for call in found[0]} for name, found in rounds.items()}
    lines = [
        "# Capture of a call",
        "",
        f"Milliseconds, the best of {ROUNDS} processes, versions in turns.",
        "",
        "| call | " + " | ".join(versions) + " |",
        "|---|" + "---:|" * len(versions),
    ]
    for call in best["now"]:
        lines.append(f"| {call} | " + " | ".join(f"{best[name][call] * 1000:.2f}" for name in versions) + " |")
    save("capture", [*lines, "", *conditions()])


if __name__ == "__main__":
    main()
