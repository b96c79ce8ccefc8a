"""Named sessions: their cost compared with sessions without a name, and programs that are killed during a call."""

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
from typing import Any

import psutil

from benchmarks import ROOT
from benchmarks.machine import conditions, save
from nbdist import Session, attach, in_ddp, warm
from nbdist.wire.session_folder import SessionFolder, names

#: The most that a named session may take, as a multiple of what one without a name takes.
TARGET = 1.3

#: The program that makes a call and is killed: the seed and the number of lines are its arguments.
CLIENT = """
import sys
from nbdist import attach

def train(seed, lines):
    import random, time, torch
    for line in range(lines):
        print("line", seed, line)
        time.sleep(random.Random(seed * lines + line).random() / 50)
    return seed, torch.arange(lines)

session = attach("killed")
print("begins", flush=True)
session.run(train, int(sys.argv[1]), int(sys.argv[2]))
"""
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


def compared(turns: int, batches: int) -> list[str]:
    """Return rows of medians, without and with a name, that were measured in turns."""
    found: dict[str, tuple[list[float], list[float]]] = {}

    def note(row: str, number: int, value: float) -> None:
        found.setdefault(row, ([], []))[number].append(1000 * value)

    in_ddp(2, noop)
    for turn in range(turns):
        note("warm launch of 2 ranks, called, closed", 0, seconds(in_ddp, 2, noop))
        warm(named=True)
        time.sleep(15)  # its fork server imports torch meanwhile
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


def killed(session: Session, seed: int, keeper: psutil.Process) -> tuple[bool, float]:
    """Kill a program at a random moment of its call; return whether nothing was lost, and the seconds to attach."""
    chance = random.Random(seed)
    command = [sys.executable, "-c", CLIENT, str(seed), str(LINES)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert client.stdout is not None
    while client.stdout.readline() not in ("begins\n", ""):
        pass
    while not str(session.status()).startswith("2 ranks, running"):
        time.sleep(0.01)
    time.sleep(chance.random())
    stopped = chance.random() < 0.5
    if stopped:
        keeper.send_signal(signal.SIGSTOP)
    client.kill()
    client.communicate()
    if stopped:
        keeper.send_signal(signal.SIGCONT)
    code = (
        "import nbdist, sys, time\nb = time.perf_counter()\ns = nbdist.attach('killed')\nt = time.perf_counter() - b\n"
    )
    code += (
        "value = s.result()\nsys.stdout.flush()\nprint(t, value[0], value[1].sum().item(), file=sys.stderr)\ns.replay()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    took, seed_found, total = done.stderr.split()[-3:]
    lines = [f"line {seed} {line}" for line in range(LINES)]
    shown = done.stdout.splitlines()
    whole = shown[-LINES:] == lines and (int(seed_found), int(total)) == (seed, sum(range(LINES)))
    return whole and set(shown) == set(lines), float(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="programs that are killed")
    parser.add_argument("--turns", type=int, default=5, help="of each comparison")
    parser.add_argument("--batches", type=int, default=300, help="of a training that prints")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        rows = compared(options.turns, options.batches)
        session = Session(2, name="killed")
        session.run(noop)
        keeper = psutil.Process(SessionFolder("killed").about()["pid"])
        family = [keeper, *keeper.children(recursive=True)]
        results = [killed(session, seed, keeper) for seed in range(options.kills)]
        attach("killed").close()
        left = [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        left_names = names()
    whole, took = [one for one, _ in results], sorted(one for _, one in results)
    lines = [
        "# Named sessions",
        "",
        f"A session with a name compared with one without; required: at most {TARGET} ×. Medians, measured in turns.",
        "",
        "| | without a name | with a name | |",
        "|---|---|---|---|",
        *rows,
        "",
        f"{len(whole)} programs killed by SIGKILL at a random moment of a call of {LINES} lines, half of them while "
        f"the keeper was stopped: value and lines as undisturbed in {sum(whole)}. Time of `attach` in a new process, "
        f"which includes imports: median {1000 * statistics.median(took):.0f} ms, longest {1000 * took[-1]:.0f} ms. "
        f"After `close`, {len(left)} processes and {len(left_names)} folders were left.",
        "",
    ]
    save("outlive", lines + conditions(("torch",)))


if __name__ == "__main__":
    main()
