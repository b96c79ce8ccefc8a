"""Scripts of test_terminal.py: each but the first is what a script does that begins with the first."""

# %% prelude
import os
import sys  # noqa: F401
import time

import torch.distributed as dist

from nbdist import Session, in_ddp


def work():
    try:
        open(f"began{dist.get_rank()}", "w").close()
        time.sleep(1000)
    finally:
        time.sleep(0.2)
        open(f"cleaned{dist.get_rank()}", "w").close()


# %% catches an interrupt
try:
    in_ddp(2, work)
except KeyboardInterrupt:
    print("interrupted", os.path.exists("cleaned0"), os.path.exists("cleaned1"))
print("again", in_ddp(2, dist.get_world_size))

# %% forgets its session
session = Session(2)
print(*session.run_all(os.getpid), os.getppid(), flush=True)
session.run(os.system, "sleep 300 &")

# %% leaves a thread training
import threading

threading.Thread(target=in_ddp, args=(2, work), daemon=True).start()
while not (os.path.exists("began0") and os.path.exists("began1")):
    time.sleep(0.01)
