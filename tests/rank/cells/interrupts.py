"""The script of test_interrupts.py."""

# %% unheard
import _thread
import threading
import time

from nbdist.rank.interrupts import Interrupts

interrupts = Interrupts()
interrupts.install()


def signal_that_wakes_nobody():
    while not interrupts.possible:
        time.sleep(0.01)
    time.sleep(0.2)
    _thread.interrupt_main()
    interrupts.resend(interrupts.block)


threading.Thread(target=signal_that_wakes_nobody).start()
try:
    with interrupts.allowed():
        time.sleep(1000)
except KeyboardInterrupt:
    time.sleep(0.3)  # no further interrupt comes
    print("interrupted")
