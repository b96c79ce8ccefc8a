"""An interrupt comes once, and it does come."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from calls import press
from cells import cells
from torch.nn.modules import module as modules
from torch.optim import optimizer

from nbdist import Session
from nbdist.numerics.alone import alone
from nbdist.numerics.call import checked
from nbdist.numerics.nan import active
from nbdist.rank import interrupts as interrupts_module
from nbdist.rank.interrupts import Interrupts

#: A signal that Python handles between two of its steps, with a system call in between that does not end for it.
UNHEARD = cells("rank/cells/interrupts.py")["unheard"]


def test_an_interrupt_just_before_a_system_call_is_handled() -> None:
    done = subprocess.run([sys.executable, "-c", UNHEARD], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def save(path: str, name: str, event: str) -> None:
    """Interrupted where `torch.save` calls this, or returns from it."""

    def profile(frame: FrameType, happens: str, _: Any) -> None:
        if (happens, frame.f_code.co_name, frame.f_globals.get("__name__")) == (event, name, "torch.serialization"):
            sys.setprofile(None)
            press()

    sys.setprofile(profile)
    with open(path, "wb") as file:
        torch.save(torch.ones(3), file)
    time.sleep(1000)


@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize("name", ["__init__", "__enter__", "__exit__", "_save"])
def test_an_interrupt_during_torch_save_costs_no_rank(name: str, event: str, tmp_path: Path) -> None:
    """torch ends the process where a file is closed that it has not ended."""
    path = tmp_path / "saved.pt"
    with Session(1, devices="cpu") as session:
        pid = session.run(os.getpid)
        with pytest.raises(KeyboardInterrupt):
            session.run(save, str(path), name, event)
        assert session.run(os.getpid) == pid
    if name == "__exit__":
        assert torch.load(path).equal(torch.ones(3))


class Presses(logging.Filter):
    """A filter of the notebook, which interrupts a rank that receives it."""

    __module__ = "__main__"

    def __reduce__(self) -> tuple[Any, ...]:
        return _pressed, ()


def _pressed() -> logging.Filter:
    press()
    return logging.Filter()


def test_an_interrupt_while_settings_are_set_loses_none() -> None:
    logger = logging.getLogger("interrupted")
    with Session(1, devices="cpu") as session:
        pid = session.run(os.getpid)
        logger.setLevel(33)
        logger.addFilter(presses := Presses())
        try:
            with pytest.raises(KeyboardInterrupt):
                session.run(time.sleep, 30)
            assert session.run(lambda: (os.getpid(), logging.getLogger("interrupted").level)) == (pid, 33)
        finally:
            logger.removeFilter(presses)
            logger.setLevel(0)


class Leftovers:
    """The hooks, functions and modes that blocks leave in torch, to be compared with those before."""

    def __init__(self) -> None:
        from torch._C import _distributed_c10d as c10d

        self._now = {
            "hooks of modules": len(modules._global_forward_hooks),
            "hooks before steps": len(optimizer._global_optimizer_pre_hooks),
            "hooks after steps": len(optimizer._global_optimizer_post_hooks),
            "finders": len(sys.meta_path),
            "backward": torch.autograd.backward,
            "collectives": vars(c10d.ProcessGroup)["allreduce"],
            "checks": active(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "blocks of autocast": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
            "anomalies": torch.is_anomaly_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "gradients": torch.is_grad_enabled(),
        }

    def since(self, before: Leftovers) -> list[str]:
        return [name for name, value in before._now.items() if self._now[name] != value]


def interrupt_everywhere(contexts: Callable[[], AbstractContextManager[Any]]) -> tuple[int, list[str]]:
    """Interrupt a `with` block of these contexts at each of its steps, until something stays. Returns the last step."""
    kernels, interrupts = signal.getsignal(signal.SIGINT), Interrupts()
    before = Leftovers()
    interrupts.install()
    interrupts_module.PAUSE = 0.002  # of this rank, which is the test's own
    try:
        for number in itertools.count():
            steps = itertools.count()

            def profile(_: FrameType, event: str, *__: Any, at: int = number, steps: Iterator[int] = steps) -> None:
                if event in ("call", "return") and next(steps) == at:
                    sys.setprofile(None)
                    signal.raise_signal(signal.SIGINT)

            interrupted = False
            try:
                with interrupts.allowed():
                    sys.setprofile(profile)
                    with contexts():
                        pass
                    if sys.getprofile() is None:
                        time.sleep(1000)  # until it comes again
                    sys.setprofile(None)
            except KeyboardInterrupt:
                interrupted = True
            stayed = Leftovers().since(before)
            if stayed or not interrupted:
                return number, stayed
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, kernels)
    raise AssertionError


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "checks": lambda: checked(["nan", "ranks:1"]),
    "alone": alone,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly": torch.autograd.detect_anomaly,
    "inference": torch.inference_mode,
    "grad": torch.no_grad,
}


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_an_interrupt_leaves_no_half_of_a_block(block: str) -> None:
    """Ranks that find a fault at the same time are interrupted by the first one's error where their checks end."""
    with Session(1, devices="cpu") as session:
        steps, left = session.run(interrupt_everywhere, BLOCKS[block])
    assert steps > 3 and not left, steps
