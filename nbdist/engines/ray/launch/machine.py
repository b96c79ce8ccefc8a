"""A program that runs a Ray node on a machine of `nbdist.cluster`, until its standard input ends.

The notebook (`launching.py`) sends the text of this file by ssh or srun, when it is not known yet whether the machine
has nbdist. So it imports only the standard library until the versions are checked. It writes lines of JSON after
`MARK`; other lines come from the machine's shell.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import json
import os
import platform
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

MARK = "nbdist:"


def main(config: dict[str, Any]) -> None:
    """Run a Ray node until standard input ends, or has an empty line.

    Args:
        config: `number`, 0 for the head, unless Slurm gives one; `versions` that the machine must have; `gpus`; `env`
            for Ray, `arguments` of `ray start`; `folder` for its files.
    """
    number = int(os.environ.get("SLURM_PROCID", config["number"]))
    _say(number, "begun")
    if wrong := _differences(config["versions"]) or _missing_gpus(config["gpus"]):
        _say(number, "refused", text=wrong)
        return
    from nbdist.engines.ray.launch.folders import sessions
    from nbdist.engines.ray.launch.starting import agent_ports, as_options, environment, free_ports

    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    # By the interface at which ssh has reached this machine, others reach it, too.
    ip = os.environ["SSH_CONNECTION"].split()[2] if "SSH_CONNECTION" in os.environ else ""
    if number == 0:
        ip = ip or _own_ip()
        port, client = free_ports(2)
        first = ["--head", f"--port={port}", f"--ray-client-server-port={client}", "--include-dashboard=false"]
        first += [f"--temp-dir={sessions(config['folder'])}"]
    else:
        port, client = 0, 0
        joined = lines.get()
        if not joined:
            return
        first = ["--address=" + json.loads(joined)["address"]]
    os.makedirs(config["folder"], mode=0o700, exist_ok=True)  # several nodes of one machine share it
    ports = agent_ports()
    options = [f"--num-gpus={config['gpus']}", f"--num-cpus={len(os.sched_getaffinity(0))}", *as_options(ports)]
    options += [f"--node-ip-address={ip}"] * bool(ip)
    options += config["arguments"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *first, *options]
    ray = subprocess.Popen(
        [*command, "--disable-usage-stats", "--block"],
        env={**os.environ, **config["env"], **environment(os.environ), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    # Ray itself drains the node, notifies its ranks, and ends it half a minute later.
    signal.signal(signal.SIGTERM, lambda *_: ray.send_signal(signal.SIGTERM))
    about = {"address": f"{ip}:{port}", "ip": ip, "client": client}
    session = os.path.join(sessions(config["folder"]), "session_latest")
    threading.Thread(target=_watch, args=(ray, ports, session, number, about, lines), daemon=True).start()
    try:
        while lines.get().strip():  # a head gets its own line, too
            pass
    finally:
        _end(ray, config["folder"])


def _say(number: int, kind: str, **what: Any) -> None:
    line = MARK + json.dumps({"number": number, "host": socket.gethostname(), "kind": kind, **what}) + "\n"
    sys.stdout.write(line)  # at once: srun has one output for all machines
    sys.stdout.flush()


def _read(lines: queue.Queue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")


def _own_ip() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _watch(
    ray: subprocess.Popen[str],
    ports: Mapping[str, int],
    session: str,
    number: int,
    about: Mapping[str, Any],
    lines: queue.Queue[str],
) -> None:
    """Report that Ray has started, with `ports` for its agents, and how it ends; its logs are in `session`."""
    from nbdist.engines.ray.launch.starting import announced, why

    last: collections.deque[str] = collections.deque(maxlen=15)
    started = False
    assert ray.stdout is not None
    with contextlib.ExitStack() as starting:
        starting.enter_context(announced(ports))
        for line in ray.stdout:
            last.append(line)
            if "Ray runtime started." in line:
                started = True
                starting.close()  # the processes below this one are looked at until then only
                _say(number, "ready", **about)
    ray.wait()
    text = "".join(last).strip()
    _say(number, "ended", text=text if started else why(session, text))
    lines.put("")


def _differences(versions: Mapping[str, str]) -> str:
    """Return the differences between the versions here and the required versions."""
    found = {"Python": platform.python_version()}
    for name in versions.keys() - found.keys():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with contextlib.suppress(ImportError):  # a folder on PYTHONPATH does
        import nbdist

        found["nbdist"] = nbdist.__version__
    different = [name for name, version in versions.items() if _base(found.get(name)) != _base(version)]
    return "; ".join(
        f"{name} is {found.get(name) or 'not installed'} there ({sys.executable}), and {versions[name]} here"
        for name in different
    )


def _base(version: str | None) -> str | None:
    """Remove the build's name from a version, such as torch's `+cpu`."""
    return None if version is None else version.partition("+")[0]


def _missing_gpus(gpus: int) -> str:
    if not gpus:
        return ""
    from nbdist.devices import visible_gpus

    found = visible_gpus()
    return f"gpus={gpus}, and torch finds {found} there" if found < gpus else ""


def _end(ray: subprocess.Popen[str], folder: str) -> None:
    """End Ray and all its processes at once: the user cannot save anything any more."""
    import psutil

    from nbdist.engines.ray.launch.stopping import family, kill

    processes = family([ray.pid])[1:]
    ray.kill()
    for process in processes:
        if process.is_running() and process.name() in ("raylet", "gcs_server"):
            process.terminate()
    psutil.wait_procs(processes, timeout=3)
    kill(processes)
    ray.wait()
    shutil.rmtree(folder, ignore_errors=True)
