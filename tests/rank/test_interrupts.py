"""An interrupt comes once, and it does come."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from calls import press
from cells import cells

from nbdist import Session

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
