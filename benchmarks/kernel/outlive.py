"""Named sessions: their cost compared with sessions without a name, and notebooks that are lost during a call."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jupyter_client
import psutil

from benchmarks import ROOT
from benchmarks.machine import conditions, save
from nbdist import Session, attach, in_ddp, warm
from nbdist.kernel.named import recorded
from nbdist.wire.session_folder import SessionFolder, names

#: The most that a named session may take, as a multiple of what one without a name takes.
TARGET = 1.3

#: A cell that makes a call: its seed and the number of lines are filled in.
CELL = """
from nbdist import attach

def train(seed, lines):
    import random, time, torch
    for line in range(lines):
        print("line", seed, line)
        time.sleep(random.Random(seed * lines + line).random() / 50)
    return seed, torch.arange(lines)

session = attach("killed")
session.run(train, SEED, LINES)
"""
#: A program that attaches: it writes how long that took, the value and the output.
AGAIN = """
import sys, time
from nbdist import attach
begin = time.perf_counter()
session = attach("killed")
took = time.perf_counter() - begin
value = session.result()
while session._turns.busy():  # what `attach` shows in the background
    time.sleep(0.01)
sys.stdout.flush()
print(took, value[0], value[1].sum().item(), file=sys.stderr)
print("replayed")
session.replay()
"""
#: What is done to the notebook, in turn; in every second run the keeper stands still meanwhile.
KINDS = ("kernel killed", "page closed", "page closed, then kernel killed")
LINES = 60


def noop() -> None:
    """Do nothing."""


def loop(batches: int) -> None:
    """Train a small model, and print a line a batch."""
    import torch

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(400, 400))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(64, 400)
    for batch in range(batches):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        print(f"batch {batch}: loss {loss.item():.6f}")


def seconds(fn: Callable[..., Any], *args: Any) -> float:
    """Return the time that a call takes."""
    begin = time.perf_counter()
    fn(*args)
    return time.perf_counter() - begin


def wait_for_imports() -> None:
    """Wait until the fork server of the keeper that is ready has imported torch, and does nothing more."""
    known: list[float] = []
    while len(known) < 5 or not known[-1] or len(set(known[-5:])) > 1:
        time.sleep(0.3)
        known.append(sum(map(_used_by_server, psutil.process_iter())))


def _used_by_server(process: psutil.Process) -> float:
    """Return the seconds of CPU that a process has used, if it is a keeper's fork server with torch; 0 for others."""
    with contextlib.suppress(psutil.Error, OSError):
        parent = process.parent()
        ours = process.environ().get("XDG_STATE_HOME") == os.environ["XDG_STATE_HOME"]
        of_keeper = ours and parent is not None and any("nbdist.keeper.main" in part for part in parent.cmdline())
        if of_keeper and "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text():
            return float(sum(process.cpu_times()[:2]))
    return 0.0


def compared(turns: int, batches: int) -> list[str]:
    """Return rows of medians, without and with a name, that were measured in turns."""
    found: dict[str, tuple[list[float], list[float]]] = {}

    def note(row: str, number: int, value: float) -> None:
        found.setdefault(row, ([], []))[number].append(1000 * value)

    in_ddp(2, noop)
    for turn in range(turns):
        note("warm launch of 2 ranks, called, closed", 0, seconds(in_ddp, 2, noop))
        warm(named=True)
        wait_for_imports()
        note("warm launch of 2 ranks, called, closed", 1, seconds(in_ddp.options(name=f"launch{turn}"), 2, noop))
    with Session(2, threads=1) as plain, Session(2, threads=1, name="compared") as named:
        sessions = plain, named
        for session in sessions:
            session.run(noop)
        for _ in range(50 * turns):
            for number, session in enumerate(sessions):
                note("no-op call", number, seconds(session.run, noop))
        for _ in range(turns):
            for number, session in enumerate(sessions):
                with contextlib.redirect_stdout(io.StringIO()):
                    took = seconds(session.run, loop, batches)
                note(f"{batches} batches that print a line each", number, took)
    rows = []
    for row, times in found.items():
        without, with_name = map(statistics.median, times)
        rows.append(f"| {row} | {without:.1f} ms | {with_name:.1f} ms | {with_name / without:.2f} × |")
    return rows


class Disturbed(NamedTuple):
    """The outcome of a call whose notebook was lost."""

    kind: str
    whole: bool
    """True if value and output were the undisturbed ones."""
    attached: float
    """Seconds of `attach` in a new process without its imports."""


def disturbed(session: Session, seed: int, keeper: psutil.Process) -> Disturbed:
    """Take a notebook away at a random moment of its call, and attach from a new process."""
    chance = random.Random(seed)
    kind, stops = KINDS[seed % len(KINDS)], seed // len(KINDS) % 2 == 1
    kernel = jupyter_client.KernelManager(kernel_name="python3")
    kernel.start_kernel(cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    page = kernel.client()
    try:
        page.start_channels()
        page.wait_for_ready(timeout=300)
        before = calls_begun(session)
        page.execute(CELL.replace("SEED", str(seed)).replace("LINES", str(LINES)))
        while calls_begun(session) == before:
            time.sleep(0.01)
        time.sleep(chance.random())
        if stops:
            keeper.send_signal(signal.SIGSTOP)
        if "page closed" in kind:
            page.stop_channels()
        if "kernel killed" in kind:
            os.kill(kernel.provisioner.pid, signal.SIGKILL)  # shutdown_kernel would interrupt the call before
        time.sleep(chance.random() / 10)
        if stops:
            keeper.send_signal(signal.SIGCONT)
        done = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, cwd=ROOT)
    finally:
        page.stop_channels()
        kernel.shutdown_kernel(now=True)
    if done.returncode:
        raise RuntimeError(f"seed {seed}, {kind}: {done.stderr}")
    took, seed_found, total = done.stderr.split()[-3:]
    shown, _, replayed = done.stdout.partition("replayed\n")
    lines = [f"line {seed} {line}" for line in range(LINES)]
    same = (int(seed_found), int(total)) == (seed, sum(range(LINES)))
    whole = same and shown.splitlines() == lines and replayed.splitlines() == lines
    return Disturbed(f"{kind}{', keeper stopped and continued' if stops else ''}", whole, float(took))


def calls_begun(session: Session) -> int:
    """Return the number of calls in the journal."""
    found = recorded._find(SessionFolder(str(session.name)).path, None)
    return 0 if found is None else int(found[1]["number"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="notebooks that are lost; 0: none")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no more are lost")
    parser.add_argument("--turns", type=int, default=5, help="of each comparison; 0: none")
    parser.add_argument("--batches", type=int, default=300, help="of a training that prints")
    options = parser.parse_args()
    lines = ["# Named sessions", ""]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        if options.turns:
            lines += comparison(options.turns, options.batches)
        if options.kills:
            lines += disturbances(options.first, options.kills, options.minutes)
    save("outlive", lines + conditions(("torch",)))


def comparison(turns: int, batches: int) -> list[str]:
    """Return the part of the page that compares sessions."""
    return [
        f"A session with a name compared with one without; required: at most {TARGET} ×. Medians, measured in turns.",
        "",
        "| | without a name | with a name | |",
        "|---|---|---|---|",
        *compared(turns, batches),
        "",
    ]


def disturbances(first: int, kills: int, minutes: float) -> list[str]:
    """Return the part of the page about notebooks that are lost."""
    session = Session(2, name="killed")
    session.run(noop)
    keeper = psutil.Process(SessionFolder("killed").about()["pid"])
    family = [keeper, *keeper.children(recursive=True)]
    results: list[Disturbed] = []
    deadline = time.monotonic() + 60 * minutes
    while len(results) < kills and time.monotonic() < deadline:
        results.append(disturbed(session, first + len(results), keeper))
        print(len(results), results[-1], flush=True)
    attach("killed").close()
    left, left_names = psutil.wait_procs(family, timeout=60)[1], names()
    took = sorted(one.attached for one in results)
    return [
        f"{len(results)} notebooks lost at a random moment of a call of {LINES} lines (seeds {first} to "
        f"{first + len(results) - 1}). Right: the value is the undisturbed one, and no line is lost or doubled, both "
        f"in what `attach` shows and in `replay`.",
        "",
        "| | runs | right |",
        "|---|---|---|",
        *(
            f"| {kind} | {len(own)} | {sum(one.whole for one in own)} |"
            for kind in sorted({one.kind for one in results})
            if (own := [one for one in results if one.kind == kind])
        ),
        "",
        f"Time of `attach` in a new process, without its imports: median {1000 * statistics.median(took):.0f} ms, "
        f"longest {1000 * took[-1]:.0f} ms. After `close`, {len(left)} processes and {len(left_names)} folders were "
        f"left.",
        "",
    ]


if __name__ == "__main__":
    main()
