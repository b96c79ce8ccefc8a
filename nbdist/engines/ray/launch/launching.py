"""Ray on machines that are reached by ssh or srun, started from the notebook's process and ended with it.

`machine.py` runs on each machine until its standard input ends, which ssh and srun pass on: at the end of the notebook.
Clients of this Ray need a token, which is sent through standard input, too.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import secrets
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....errors import NbdistError
from ....system.processes import redirect_to_devnull, register_after_fork
from ..driver.cluster import versions
from ..kernel import driver_process as process
from ..options import RayOptions
from . import machine
from .starting import free_ports

#: Seconds from one word to the user to the next, while machines start.
WORD = 5.0
#: Seconds that machines get to end Ray by themselves.
GRACE = 15.0
#: The command that runs on a machine: the program comes by standard input.
_BEGIN = "import json, sys; config = json.loads(sys.stdin.readline()); there = {'__name__': 'machine'}; " + (
    "exec(config.pop('program'), there); there['main'](config)"
)


def engine_options(gpus: int, fields: Mapping[str, Any]) -> RayOptions:
    """Return the engine's options for machines with `gpus` GPUs each. `fields` are the options that the user gave.

    Raises `ValueError` or `TypeError` for invalid fields.
    """
    return RayOptions(**{"gpus": min(gpus, 1), **fields})


class Machines:
    """Ray on several machines.

    Attributes:
        address: The address for clients on this machine.

    Args:
        commands: Commands by name. Each runs the command that follows it on one machine or, like srun, on several.
        size: The number of machines.
        gpus: GPUs of each machine.
        python: The interpreter on the machines.
        arguments: Further arguments of `ray start`.
        wait: The longest time of the start, in seconds.
        say: Shows the user the progress.
        tunnel: Returns the command that forwards a port of this machine to an address at the head. None: this machine
            can connect to the head directly.

    Raises:
        NbdistError: A machine cannot be reached, lacks Ray or has a different version, or takes too long.
    """

    def __init__(
        self,
        commands: Sequence[tuple[str, Sequence[str]]],
        size: int,
        *,
        gpus: int,
        python: str,
        arguments: Sequence[str],
        wait: float,
        say: Callable[[str], None],
        tunnel: Callable[[int, str], Sequence[str]] | None = None,
    ) -> None:
        self._names = [name for name, _ in commands]
        self._programs = [command[0] for _, command in commands]
        self._processes: list[subprocess.Popen[str]] = []
        self._lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._last = [collections.deque[str](maxlen=10) for _ in commands]  # lines of other output
        self.address = ""
        self._tunnel: subprocess.Popen[str] | None = None
        self.lent = False
        """True if another process has the descriptors that keep the machines after the end of this process."""
        process.check_token_support()
        token = process.token_variables(secrets.token_hex(32))
        config = {
            "program": Path(machine.__file__).read_text(),
            "versions": versions(()),
            "gpus": gpus,
            "env": dict(token),
            "arguments": list(arguments),
            "folder": f"/tmp/ray-{secrets.token_hex(4)}",
        }
        register_after_fork(self)
        try:
            there = [python, "-c", _BEGIN]
            for number, (_, command) in enumerate(commands):
                self._start(number, [*command, *there] if tunnel is None else [*command, shlex.join(there)])
                self._send(number, {**config, "number": number})
            head = self._wait(size, wait, say)
            ip, port = head["ip"], head["client"]
            if tunnel is not None:
                ip, port = "127.0.0.1", self._dig(tunnel, f"{ip}:{port}", wait)
            self.address = f"ray://{ip}:{port}"
            process.opened_by[self.address], process.kept_by[self.address] = token, self._lend
        except BaseException:
            self.close()
            raise

    def after_fork(self) -> None:
        """Forget the machines in a child of this process: they belong to the parent."""
        redirect_to_devnull(
            *(one.stdin.fileno() for one in self._processes if one.stdin is not None and not one.stdin.closed)
        )
        self._processes, self._tunnel = [], None

    def _start(self, number: int, command: Sequence[str]) -> None:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # A session of its own: the notebook's interrupts do not reach it.
        one = subprocess.Popen(list(command), text=True, start_new_session=True, **pipes)
        self._processes.append(one)
        for stream in (one.stdout, one.stderr):
            threading.Thread(target=self._read, args=(number, stream), name="nbdist: machines", daemon=True).start()

    def _read(self, number: int, stream: Any) -> None:
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in stream:
                self._lines.put((number, line.rstrip()))
        self._lines.put((number, None))

    def _send(self, number: int, what: Any) -> None:
        stdin = self._processes[number].stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone, and its end is reported
            stdin.write(json.dumps(what) + "\n")
            stdin.flush()

    def _wait(self, size: int, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
        """Wait until all machines run Ray. Returns the message of the head."""
        begin = time.monotonic()
        word = begin + WORD
        ready: dict[int, dict[str, Any]] = {}
        begun: set[int] = set()
        ends = [0] * len(self._names)
        while len(ready) < size:
            now = time.monotonic()
            if now - begin > seconds:
                raise NbdistError(f"{self._so_far(size, begun, ready)} after {seconds:g} s. {self._words()}".strip())
            if now >= word:
                say(f"{self._so_far(size, begun, ready)} ({now - begin:.0f} s)")
                word = now + WORD
            try:
                number, line = self._lines.get(timeout=0.5)
            except queue.Empty:
                continue
            if line is None:
                ends[number] += 1
                if ends[number] == 2:  # standard output and standard error
                    raise NbdistError(self._why_ended(number))
            elif not line.startswith(machine.MARK):
                self._last[number].append(line)
            else:
                message = json.loads(line.removeprefix(machine.MARK))
                begun.add(message["number"])
                if message["kind"] in ("refused", "ended"):
                    raise NbdistError(f"{self._name(number, message)} cannot run Ray: {message['text']}")
                if message["kind"] == "ready":
                    ready[message["number"]] = message
                    if message["number"] == 0:
                        for other in range(len(self._processes)):
                            self._send(other, {"address": message["address"]})
        return ready[0]

    def _name(self, number: int, message: dict[str, Any]) -> str:
        return self._names[number] if len(self._names) > 1 else str(message["host"])

    def _so_far(self, size: int, begun: set[int], ready: dict[int, Any]) -> str:
        reached = f", {len(begun)} are reached" if len(begun) > len(ready) else ""
        return f"Ray runs on {len(ready)} of {size} machine{'s' * (size > 1)}{reached}"

    def _words(self) -> str:
        """Return the last line of output of each command."""
        texts = [f"{name}: {lines[-1]}" for name, lines in zip(self._names, self._last, strict=True) if lines]
        return "; ".join(texts[:3])

    def _why_ended(self, number: int) -> str:
        status, text = self._processes[number].wait(), " ".join(self._last[number]).strip()
        name, program = self._names[number], self._programs[number]
        if program == "ssh" and status == 255:
            reason = text or "ssh says nothing"
            return f"{name} cannot be reached: {reason}. `ssh {name} true` has to work without a question"
        if status in (126, 127):
            return f"{name} does not find its Python: {text}. Give python=, the path of the one with Ray and nbdist"
        return f"{program} for {name} ended with exit code {status} before Ray ran: {text or 'it says nothing'}"

    def _dig(self, tunnel: Callable[[int, str], Sequence[str]], address: str, seconds: float) -> int:
        """Forward a port of this machine, and return its number."""
        [port] = free_ports(1)
        self._names.append(f"the tunnel to {address}")
        self._last.append(collections.deque[str](maxlen=10))
        self._start(len(self._processes), tunnel(port, address))
        self._tunnel = self._processes[-1]
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return port
            except OSError:
                if self._tunnel.poll() is not None or time.monotonic() > deadline:
                    raise NbdistError(f"no port could be forwarded to Ray at {address} by ssh") from None
                time.sleep(0.1)

    def alive(self) -> bool:
        """Return whether all commands are running."""
        return bool(self._processes) and all(one.poll() is None for one in self._processes)

    def _lend(self) -> list[int]:
        """Return the descriptors by which another process keeps the machines after the end of this one."""
        self.lent = True
        streams = [stream for one in self._processes for stream in (one.stdin, one.stdout, one.stderr)]
        return [stream.fileno() for stream in streams if stream is not None]

    def leave(self) -> None:
        """Stop keeping the machines. Ray on them goes on while another process keeps them."""
        processes, self._processes = self._processes, []
        self._let_go(processes)

    def _let_go(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        process.release_at(self.address)
        process.opened_by.pop(self.address, None)
        process.kept_by.pop(self.address, None)
        for one in processes:
            assert one.stdin is not None
            with contextlib.suppress(OSError):
                one.stdin.close()

    def close(self) -> None:
        """End Ray on all machines, also where another process keeps them."""
        processes, self._processes = self._processes, []
        for one in processes:
            assert one.stdin is not None
            with contextlib.suppress(OSError, ValueError):  # it has ended
                one.stdin.write("\n")
                one.stdin.flush()
        self._let_go(processes)
        if self._tunnel is not None:
            self._tunnel.terminate()
        deadline = time.monotonic() + GRACE
        for one in processes:
            try:
                one.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(5)
                one.kill()
                one.wait()
        self._forget(processes)

    def _forget(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        for one in processes:
            for stream in (one.stdout, one.stderr):
                if stream is not None:
                    stream.close()


def by_ssh(hosts: Sequence[str], options: Sequence[str], **about: Any) -> Machines:
    """Start Ray on these hosts. Raises `NbdistError`, for example without ssh on this machine."""
    if shutil.which("ssh") is None:
        raise NbdistError("there is no ssh on this machine, by which the hosts are reached: install OpenSSH's client")
    ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15", *options]

    def tunnel(port: int, address: str) -> Sequence[str]:
        forward = ["-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{port}:{address}"]
        return [*ssh, *forward, hosts[0], "cat"]  # it ends with its input; with -N it would outlive this process

    return Machines([(host, [*ssh, host]) for host in hosts], len(hosts), tunnel=tunnel, **about)


def by_slurm(nodes: int, options: Sequence[str], gpus: int, **about: Any) -> Machines:
    """Start Ray on nodes of Slurm. Raises `NbdistError`, for example without srun on this machine."""
    if shutil.which("srun") is None:
        raise NbdistError(
            'there is no srun on this machine: nbdist.cluster("slurm") starts from one of a Slurm cluster, such as its '
            "login node"
        )
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--unbuffered"]
    srun += [f"--gpus-per-node={gpus}"] * bool(gpus)
    srun += ["--overlap"] * ("SLURM_JOB_ID" in os.environ)  # within an allocation, while the notebook's own step runs
    return Machines([("slurm", [*srun, *options])], nodes, gpus=gpus, **about)
