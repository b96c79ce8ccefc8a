"""A Ray of this machine alone, as a process of its own."""

from __future__ import annotations

import logging
import os
import select
import signal
from typing import Any


def main(kernel: str) -> None:
    """Be a Ray of this machine alone, until standard input ends. Prints its address.

    `kernel` is a descriptor that tells the end of the process that it is for, whose children may hold the input.
    """
    import ray

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    context: Any = ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    print(context.address_info["gcs_address"], flush=True)
    ends = select.poll()
    for fd in (0, int(kernel)):
        if fd >= 0:
            ends.register(fd, select.POLLIN)
    ends.poll()
    ray.shutdown()
