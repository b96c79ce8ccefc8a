"""An interrupt comes once, and it does come."""

from __future__ import annotations

import subprocess
import sys

#: A signal of which Python hears between two of its steps, with a system call in between that does not end for it.
UNHEARD = """
import _thread, threading, time
from nbdist.rank.interrupts import Interrupts

interrupts = Interrupts()
interrupts.install()
begin = time.monotonic()

def signal_that_wakes_nobody():
    time.sleep(0.2)
    _thread.interrupt_main()
    interrupts.insist(interrupts.block)

threading.Thread(target=signal_that_wakes_nobody).start()
try:
    with interrupts.allowed():
        time.sleep(60)
except KeyboardInterrupt:
    assert time.monotonic() - begin < 30
    time.sleep(0.3)  # it is not told again
    print("interrupted")
"""


def test_one_that_came_right_before_a_system_call() -> None:
    done = subprocess.run([sys.executable, "-c", UNHEARD], capture_output=True, text=True, timeout=90)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")
