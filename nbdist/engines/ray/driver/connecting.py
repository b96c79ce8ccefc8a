"""The connection to a cluster, in Ray's driver."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable

from ..options import RayOptions

#: What a `ray://` address answers while its machine is too busy to start the client's server in its 30 seconds, or the
#: client to be informed of it (`proxier.py` and `worker.py` of ray/util/client); the last two where that server just
#: ended.
_TOO_BUSY = (
    "Starting Ray client server failed",
    "Proxy failed to Connect to backend",
    "ray client connection timeout",
    "psutil.ZombieProcess",
    "psutil.NoSuchProcess",
)


class Refused(Exception):
    """The cluster cannot fulfill the request; the text says why and what to do."""


def connect(options: RayOptions, say: Callable[[str], None]) -> None:
    """Connect this process to the cluster.

    A cluster that is too busy to answer is asked again until `options.wait` is over; `say` shows this to the user.

    Raises:
        Refused: There is no connection.
    """
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    deadline = time.monotonic() + options.wait
    while True:
        try:
            _reach(str(options.address))
            ray.init(
                address=options.address,
                runtime_env=dict(options.runtime_env) or None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            return
        except Exception as exc:
            reason = next((words for words in _TOO_BUSY if words in str(exc)), None)
            if reason is None or time.monotonic() > deadline:
                raise Refused(f"no connection to Ray at {options.address!r}: {exc}") from exc
            ray.shutdown()
            say(f"the Ray cluster at {options.address} is busy ({reason}); trying again")
            time.sleep(1)


def _reach(address: str) -> None:
    """Raise `OSError` if no process listens at the address: Ray itself would notice only after minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # not "auto"
        socket.create_connection((host.strip("[]"), int(port)), 10.0).close()
