"""Calls of all sorts in one process, by a random schedule that a seed repeats; and what must not grow by them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import psutil
import torch
import torch.distributed as dist
from calls import boom, on, sums

from nbdist import RankDied, RankTimeout, Session, in_ddp
from nbdist.engines import forkserver


class Held(NamedTuple):
    """Resources held at one moment between two calls; memory in MB, of the process and of its fork server."""

    descriptors: int
    threads: int
    ranks: int
    memory: float
    server_descriptors: int
    server_memory: float


class Soak:
    """A process with a session of two ranks, in which anything may happen next."""

    #: Actions, and how often each comes in proportion to the others.
    WEIGHTS: ClassVar = {
        "value": 40,
        "data": 8,
        "raises": 12,
        "one_rank": 8,
        "background": 8,
        "cancelled": 4,
        "interrupted": 2,
        "timeout": 1,
        "killed": 2,
        "restarted": 2,
        "dropped": 2,
        "launch": 4,
        "child": 1,
    }

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._session = Session(2)
        self.done: dict[str, int] = dict.fromkeys(self.WEIGHTS, 0)

    def step(self) -> None:
        """Do what comes next."""
        (name,) = self._random.choices(list(self.WEIGHTS), weights=list(self.WEIGHTS.values()))
        action: Callable[[], None] = getattr(self, name)
        action()
        self.done[name] += 1

    def held(self) -> Held:
        """Return what this process and its server hold now."""
        gc.collect()
        me, server = psutil.Process(), psutil.Process(forkserver.server().process.pid)
        assert self._session.run(sums) == 2.0
        return Held(
            me.num_fds(),
            me.num_threads(),
            len(server.children(recursive=True)),
            me.memory_full_info().uss / 1e6,
            server.num_fds(),
            server.memory_full_info().rss / 1e6,
        )

    def close(self) -> None:
        self._session.close()

    # ---------------------------------------------------------------------------------------------- what may happen

    def value(self) -> None:
        assert self._session.run(sums) == 2.0

    def data(self) -> None:
        size = self._random.choice([10, 100_000, 500_000])
        values = self._session.run_all(lambda x: x + dist.get_rank(), torch.ones(size))
        assert [float(value.mean()) for value in values] == [1.0, 2.0]

    def raises(self) -> None:
        rank = self._random.randrange(2)
        with contextlib.suppress(ValueError):
            self._session.run(on, rank, boom)
            raise AssertionError("it did not raise")

    def one_rank(self) -> None:
        rank = self._random.randrange(2)
        assert self._session.call(dist.get_rank, ranks=[rank]) == [rank]

    def background(self) -> None:
        futures = [self._session.submit(sums) for _ in range(self._random.randint(1, 3))]
        assert [future.result() for future in futures] == [2.0] * len(futures)

    def cancelled(self) -> None:
        running, waiting = self._session.submit(time.sleep, 1000), self._session.submit(sums)
        time.sleep(self._random.uniform(0.0, 0.05))
        for future in (waiting, running):
            future.cancel()
        for future in (waiting, running):
            with contextlib.suppress(concurrent.futures.CancelledError):
                future.result()

    def interrupted(self) -> None:
        me = threading.main_thread().ident
        assert me is not None
        interrupt = threading.Timer(self._random.uniform(0.02, 0.1), signal.pthread_kill, [me, signal.SIGINT])
        try:
            interrupt.start()
            self._session.run(time.sleep, 1000)
        except KeyboardInterrupt:
            interrupt.join()
        else:
            raise AssertionError("it was not interrupted")

    def timeout(self) -> None:
        with Session(2, timeout=0.2) as session, contextlib.suppress(RankTimeout):
            session.run(time.sleep, 1000)
            raise AssertionError("it took no time")

    def killed(self) -> None:
        rank = self._random.randrange(2)
        with contextlib.suppress(RankDied):
            self._session.run(on, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))
            raise AssertionError("it did not die")
        self._session.restart()

    def restarted(self) -> None:
        before = self._session.run_all(os.getpid)
        self._session.restart()
        assert set(self._session.run_all(os.getpid)).isdisjoint(before)

    def dropped(self) -> None:
        self._session = Session(2)
        self._session.run(sums)

    def launch(self) -> None:
        assert in_ddp(self._random.randint(1, 3), sums) >= 1.0

    def child(self) -> None:
        """A child of this process, which leaves as children do that are forked behind a library's back."""
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                self._session.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
