"""A Ray for this machine only, as a process of its own."""

from __future__ import annotations

import glob
import json
import logging
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from ....wire.channel import readable
from . import folders
from .starting import agent_ports, announced, fatal, patiently, why
from .stopping import family, kill


def main(kernel: str) -> None:
    """Run a Ray for this machine until standard input ends.

    Print a line of JSON, `{"address": ...}`, or `{"refused": ...}` if Ray does not start.

    `kernel` is a descriptor that is closed when the process that uses this Ray ends. It is needed because children of
    that process may keep the standard input open.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    logging.disable(logging.WARNING)  # Ray's notices about its start
    ports = agent_ports()
    folder = sessions = ""
    try:
        folder = folders.temporary_folder()
        threading.Thread(target=_end_with, args=(int(kernel), folder), daemon=True).start()
        sessions = folders.sessions(folder)
        with announced(ports):
            node = patiently(lambda: _start(sessions, ports), lambda: fatal(_session(sessions)))
    except Exception as exc:
        print(json.dumps({"refused": why(_session(sessions), str(exc))}), flush=True)
        sys.exit(1)
    try:
        _serve(node)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end_with(kernel: int, folder: str) -> None:
    """End Ray and this process once `kernel` has ended, even if Ray is about to start, which takes up to minutes."""
    if kernel >= 0 and readable(kernel, math.inf):
        kill(family([os.getpid()])[1:])  # what the other thread starts now is ended by Ray's reaper
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _serve(node: Any) -> None:
    """Report the address, wait for the end of standard input, and end Ray."""
    print(json.dumps({"address": node.gcs_address}), flush=True)
    readable(0, math.inf)
    processes = family([os.getpid()])[1:]
    node.kill_all_processes(check_alive=False)
    kill(processes)


def _start(sessions: str, ports: Mapping[str, Any]) -> Any:
    """Start Ray as `ray.init(address="local")` does, without arguments for ports."""
    import ray._private.node
    import ray._private.parameter

    parameters = ray._private.parameter.RayParams(
        include_dashboard=False, no_monitor=True, temp_dir=sessions, **folders.store(sessions), **ports
    )
    return ray._private.node.Node(parameters, head=True, spawn_reaper=True, ray_init_cluster=True)


def _session(sessions: str) -> str:
    """Return the folder in `sessions` of the Ray that this process has started; empty if it has none.

    The name that Ray gives the folder ends with the process id.
    """
    found = glob.glob(os.path.join(glob.escape(sessions), f"session_*_{os.getpid()}"))
    return max(found, key=os.path.getmtime, default="")
