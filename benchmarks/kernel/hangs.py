"""60 seeded deadlocks of all classes on 2 to 4 CPU ranks: how many are named with the line of the culprit, and when."""

from __future__ import annotations

import argparse
import fcntl
import inspect
import multiprocessing
import os
import queue
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.machine import conditions, save
from nbdist import RankStuck, Session

#: Verdicts of 60 that must be right, and seconds until each.
TARGET, SOON = 57, 30.0


def steps(count: int) -> None:
    """Collectives that go well."""
    for _ in range(count):
        dist.all_reduce(torch.ones(3))


def one_returns(culprit: int, count: int) -> None:
    steps(count)
    if dist.get_rank() != culprit:
        dist.barrier()  # here


def under_an_if(culprit: int, count: int) -> None:
    steps(count)
    if dist.get_rank() == culprit:
        dist.broadcast(torch.ones(2), culprit)  # here
    steps(1)


def unequal_batches(culprit: int, count: int) -> None:
    for _ in range(count + (dist.get_rank() == culprit)):
        dist.all_reduce(torch.ones(count + 1))  # here


def other_functions(culprit: int, count: int) -> None:
    steps(count)
    if dist.get_rank() == culprit:
        dist.barrier()  # here
    else:
        dist.all_reduce(torch.ones(1))


def other_sizes(culprit: int, count: int) -> None:
    steps(count)
    dist.all_reduce(torch.ones(2 + (dist.get_rank() == culprit)))  # here


def no_rank_sends(culprit: int, count: int) -> None:
    steps(count)
    if dist.get_rank() == culprit:
        dist.recv(torch.ones(1), (culprit + 1) % dist.get_world_size())  # here


def a_group_that_some_never_make(culprit: int, count: int) -> None:
    steps(count)
    if dist.get_rank() != culprit:
        dist.new_group(list(range(dist.get_world_size())))  # here


def the_lock_of_a_file(culprit: int, count: int) -> None:
    if dist.get_rank() != culprit:
        steps(1)
    with open(os.path.join(tempfile.gettempdir(), "nbdist-benchmark-lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if dist.get_rank() == culprit:
            steps(1)
        dist.barrier()  # here


def a_lock_of_a_thread(culprit: int, count: int) -> None:
    steps(count)
    lock, held = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            dist.barrier()  # here

    if dist.get_rank() == culprit:
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        lock.acquire()
    dist.all_reduce(torch.ones(1))


def a_full_pipe(culprit: int, count: int) -> None:
    steps(count)
    if dist.get_rank() == culprit:
        child = subprocess.Popen([sys.executable, "-c", "print('x' * 1_000_000)"], stdout=subprocess.PIPE)
        try:
            child.wait()  # here
        finally:
            child.kill()
            child.wait()
    dist.barrier()


def sends_to_each_other(culprit: int, count: int) -> None:
    steps(count)
    rank, other = dist.get_rank(), (culprit + 1) % dist.get_world_size()
    if rank in (culprit, other):
        dist.send(torch.ones(1 << 23), other if rank == culprit else culprit)  # here
    dist.barrier()


def objects_under_an_if(culprit: int, count: int) -> None:
    steps(count)
    if dist.get_rank() == culprit:
        dist.all_gather_object([None] * dist.get_world_size(), "mine")  # here


def a_step_more_of_ddp(culprit: int, count: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    for _ in range(1 + count + (dist.get_rank() == culprit)):
        model(torch.ones(2, 3)).sum().backward()  # here


def another_group(culprit: int, count: int) -> None:
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
    steps(count)
    dist.all_reduce(torch.ones(1), group=groups[dist.get_rank() == culprit])  # here


class Locked(torch.utils.data.Dataset[int]):
    """Rows behind a lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> int:
        with self.lock:
            return row


def the_lock_of_a_loader(culprit: int, count: int) -> None:
    steps(count)
    if dist.get_rank() == culprit:
        lock = threading.Lock()
        rows = torch.utils.data.DataLoader(Locked(lock), num_workers=1, multiprocessing_context="fork")
        with lock:
            list(rows)  # here
    dist.barrier()


def an_empty_pipe(culprit: int, count: int) -> None:
    steps(count)
    here, there = multiprocessing.Pipe()
    if dist.get_rank() == culprit:
        here.recv()  # here
    there.close()
    dist.barrier()


def an_empty_queue(culprit: int, count: int) -> None:
    steps(count)
    if dist.get_rank() == culprit:
        queue.Queue[int]().get()  # here
    dist.barrier()


def a_lock_taken_twice(culprit: int, count: int) -> None:
    steps(count)
    lock = threading.Lock()
    with lock:
        if dist.get_rank() == culprit:
            lock.acquire()  # here


def a_key_that_no_rank_sets(culprit: int, count: int) -> None:
    steps(count)
    if dist.get_rank() == culprit:
        dist.distributed_c10d._get_default_store().get("mine")  # here
    dist.barrier()


def a_polled_collective(culprit: int, count: int) -> None:
    steps(count)
    if dist.get_rank() == culprit:
        work = dist.all_reduce(torch.ones(1), async_op=True)  # here
        while work is not None and not work.is_completed():
            time.sleep(0.05)


CLASSES = [
    one_returns,
    under_an_if,
    unequal_batches,
    other_functions,
    other_sizes,
    no_rank_sends,
    a_group_that_some_never_make,
    the_lock_of_a_file,
    a_lock_of_a_thread,
    a_full_pipe,
    sends_to_each_other,
    objects_under_an_if,
    a_step_more_of_ddp,
    another_group,
    the_lock_of_a_loader,
    an_empty_pipe,
    an_empty_queue,
    a_lock_taken_twice,
    a_key_that_no_rank_sets,
    a_polled_collective,
]


def line_of(fn: Callable[..., None]) -> int:
    """The number of the line marked as the culprit's."""
    lines, first = inspect.getsourcelines(fn)
    return first + next(number for number, line in enumerate(lines) if line.rstrip().endswith("# here"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="how many deadlocks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    right: dict[str, list[bool]] = {fn.__name__: [] for fn in CLASSES}
    seconds = []
    for number in range(options.count):
        fn, size = CLASSES[number % len(CLASSES)], drawn.randint(2, 4)
        culprit, count = drawn.randrange(size), drawn.randint(0, 20)
        with Session(size, devices="cpu", on_hang="raise", timeout=120) as session:
            session.run(dist.get_rank)
            begin = time.perf_counter()
            try:
                session.run(fn, culprit, count)
                said = "it has returned"
            except RankStuck as error:
                said = str(error)
            except Exception as error:
                said = f"{type(error).__name__}: {error}".splitlines()[0]
            seconds.append(time.perf_counter() - begin)
        three = "\n".join(said.splitlines()[:3])
        found = "this call hangs" in three and re.search(rf"hangs\.py:{line_of(fn)}\b", three) is not None
        right[fn.__name__].append(found and seconds[-1] < SOON)
        if not right[fn.__name__][-1]:
            print(f"{fn.__name__}, {size} ranks, culprit {culprit}, {seconds[-1]:.0f} s: {three}", file=sys.stderr)
    total = sum(map(sum, right.values()))
    lines = [
        "# Hangs",
        "",
        f"{options.count} deadlocks on 2 to 4 CPU ranks, seed {options.seed}: verdicts that name the culprit's line "
        f"within {SOON:g} s of the call; {total} of {options.count} are right ({TARGET} of 60 must be). Seconds from "
        f"the call to the verdict: {statistics.median(seconds):.0f} in the median, {max(seconds):.0f} at most.",
        "",
        "| class | right | of |",
        "|---|--:|--:|",
        *(f"| {name.replace('_', ' ')} | {sum(own)} | {len(own)} |" for name, own in right.items() if own),
    ]
    save("hangs", [*lines, "", *conditions(("torch",))], keep=not options.print)


if __name__ == "__main__":
    main()
