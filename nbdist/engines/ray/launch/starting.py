"""Starting a Ray node on a machine that may be busy: light imports, no wait for Ray's agents, and the reason for a
failure.

A raylet asks its agents, two Python processes, for their ports, waits 15 seconds for each answer, and then ends. An
agent that shares two cores with other programs may need longer for its imports, and no option changes the limit (Ray
2.52 to 2.60; ray-project/ray#65983). So nbdist chooses the ports. Ray passes three of them on to the raylet. nbdist
writes the fourth to the file to which the agent would write it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .stopping import family, kill

#: On the path of Ray's processes: modules that stand in for others whose import takes seconds.
LIGHT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "light")
#: Ports of a node's agents, as parameters of Ray's node, and as options of `ray start`.
_PORTS = {
    "metrics_agent_port": "--dashboard-agent-grpc-port",
    "metrics_export_port": "--metrics-export-port",
    "runtime_env_agent_port": "--runtime-env-agent-port",
    "dashboard_agent_listen_port": "--dashboard-agent-listen-port",
}
#: Below it are the ports of Ray's workers, from 10002 (`--min-worker-port` and `--max-worker-port` of `ray start`).
_ABOVE_WORKERS = 20000
_ANSWERED_BY_FILE = "dashboard_agent_listen_port"
#: How long a raylet waits otherwise, for an agent's answers and for a worker: by default half a minute and a minute.
_PATIENCE = {"RAY_agent_register_timeout_ms": "600000", "RAY_worker_register_timeout_seconds": "600"}
#: Work of Ray that nbdist has no use for: a worker for each CPU at the first connection, where one is used, and reports
#: about the node every 5 seconds, in milliseconds here. The reports are for the dashboard, which nbdist does not start.
_LESS_WORK = {"RAY_prestart_worker_first_driver": "0", "REPORTER_UPDATE_INTERVAL_MS": "60000"}
#: How often a node is started that is not there after Ray's half minute.
ATTEMPTS = 4
#: What the raylet writes before it ends because an agent was slow.
_SLOW = re.compile(r"Timed out waiting for file \S*/(\w+?)_port_\w+")
#: Where Ray's processes say why they end.
_FATAL = re.compile(r"^\[.*? [CF] .*?\] *(?:\(\w+\) )?(?:\S+:\d+: +)?(.+)|^(\w+(?:Error|Exception): .+)")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with further variables for Ray's processes, which make their imports faster and Ray more
    patient, and spare it work that nbdist has no use for.
    """
    path = os.pathsep.join(filter(None, [LIGHT, environ.get("PYTHONPATH", "")]))
    added = {**_PATIENCE, **_LESS_WORK}
    return {**{name: value for name, value in added.items() if name not in environ}, "PYTHONPATH": path}


def free_ports(count: int) -> list[int]:
    """Return different ports of this machine at which no process listens.

    It takes seconds until Ray listens at them. Until then, the system gives other processes any port of its range for
    processes that ask for none in particular. gRPC would share a port with such a process. So ports outside that range
    are taken where there are enough of them.
    """
    candidates = _not_given_out()
    random.SystemRandom().shuffle(candidates)  # a notebook may have seeded the other generator
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        while len(sockets) < count:
            port = candidates.pop() if candidates else 0
            try:
                sockets.append(stack.enter_context(socket.create_server(("", port))))
            except OSError:
                if not port:  # for which the system finds a free one
                    raise
        return [sock.getsockname()[1] for sock in sockets]


def _not_given_out() -> list[int]:
    """Return the ports above the range of Ray's workers that the system gives no process by itself."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            first, last = map(int, file.read().split())
    except (OSError, ValueError):  # not Linux
        return []
    return [*range(_ABOVE_WORKERS, first), *range(last + 1, 1 << 16)]


def agent_ports() -> dict[str, int]:
    """Free ports for the agents of a node, by the names of the parameters of Ray's node."""
    return dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))


def as_options(ports: Mapping[str, int]) -> list[str]:
    """Return the ports of agents as options of `ray start`."""
    return [f"{_PORTS[name]}={port}" for name, port in ports.items()]


@contextlib.contextmanager
def announced(ports: Mapping[str, int]) -> Iterator[None]:
    """In the `with` block, write the port that Ray does not pass on for each raylet that a child of this process
    starts.
    """
    over = threading.Event()
    thread = threading.Thread(target=_announce, args=(ports[_ANSWERED_BY_FILE], over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _announce(port: int, over: threading.Event) -> None:
    import psutil

    known: set[int] = set()
    while not over.wait(0.1):
        with contextlib.suppress(psutil.Error):  # a process that has ended while it was looked at
            for process in psutil.Process().children(recursive=True):
                if process.pid in known or process.name() != "raylet":
                    continue
                if command := process.cmdline():  # empty while Linux loads the program
                    known.add(process.pid)
                    _write_port(port, dict(word[2:].split("=", 1) for word in command if "=" in word))


def _write_port(port: int, options: Mapping[str, str]) -> None:
    if {"session_dir", "node_id"} <= options.keys() and options.get(_ANSWERED_BY_FILE, "0") == "0":
        path = os.path.join(options["session_dir"], f"{_ANSWERED_BY_FILE}_{options['node_id']}")
        with open(f"{path}.nbdist", "w") as file:
            file.write(str(port))
        os.rename(file.name, path)


def patiently(start: Callable[[], Any], fatal: Callable[[], object] = lambda: None) -> Any:
    """Start a node, once more if it was not ready after Ray's 30 seconds, unless `fatal` returns an error.

    Returns the value of `start`.
    """
    import psutil

    for attempt in range(ATTEMPTS):
        before = set(psutil.Process().children())
        try:
            return start()
        except Exception as exc:
            if attempt + 1 == ATTEMPTS or "timed out during startup" not in str(exc) or fatal():
                raise
            kill(family(process.pid for process in set(psutil.Process().children()) - before))
    raise AssertionError("unreachable")


def why(session: str, said: str) -> str:
    """Return the reason why a node does not start, and what to do.

    Args:
        session: The folder of this start, such as /tmp/ray/session_2026-…; it may be missing.
        said: Ray's own message about the failure.
    """
    if _slow(session):
        cores, load = os.cpu_count() or 1, os.getloadavg()[0]
        return (
            f"an agent of Ray was not ready after the 15 seconds that Ray waits for it: this machine is busy (load "
            f"average {load:.1f} on {cores} core{'s' * (cores > 1)}). Try again when other programs have ended, or use "
            f"a Ray that runs already: RayOptions(address=...)"
        )
    logs = f" (Ray's logs: {session}/logs)" if os.path.isdir(session) else ""
    return f"{(fatal(session) or said.strip() or 'Ray says nothing')[:500]}{logs}"


def fatal(session: str) -> str:
    """Return the error with which a process of a node has ended, from the node's logs; empty if the node was only
    slow."""
    if _slow(session):
        return ""
    found = [next(filter(None, one.groups())) for line in _lines(session, "*") if (one := _FATAL.search(line))]
    return found[-1].strip() if found else ""


def _slow(session: str) -> bool:
    return any(_SLOW.search(line) for line in _lines(session, "raylet*"))


def _lines(session: str, name: str) -> list[str]:
    lines: list[str] = []
    for path in sorted(glob.glob(os.path.join(session, "logs", f"{name}.[eo][ru][rt]"))):
        with open(path, errors="replace") as file:
            lines += file.readlines()
    return lines
