"""A node of Ray starts on a busy machine; where it does not, the error names the cause from Ray's own log."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import poll

from nbdist import NbdistError, RayOptions, in_ddp
from nbdist.engines.ray.kernel import driver_process as process
from nbdist.engines.ray.launch import starting
from nbdist.engines.ray.launch.starting import LIGHT, agent_ports, announced, as_options, environment, patiently, why

pytest.importorskip("ray", reason="needs Ray")

#: Program with the name of a raylet.
RAYLET = f"#!{sys.executable}\nimport time\ntime.sleep(1000)\n"
GAVE_UP = (
    "[2026-11-26 20:25:17,026 C 9747 9747] (raylet) node_manager.cc:3576:  An unexpected system state has occurred. "
    "Check failed: port.has_value() Timed out waiting for file /tmp/ray/session_1/dashboard_agent_listen_port_c0ffee\n"
)


def test_raylets_get_the_port_that_ray_does_not_pass_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = agent_ports()
    assert len(set(ports.values())) == 4 and all(option.startswith("--") for option in as_options(ports))
    program = tmp_path / "raylet"
    program.write_text(RAYLET)
    program.chmod(0o755)
    port = ports["dashboard_agent_listen_port"]
    files = {name: tmp_path / f"dashboard_agent_listen_port_{name}" for name in ("knows", "last")}
    looked, cmdline = set(), psutil.Process.cmdline

    def empty_at_first(process: psutil.Process) -> list[str]:
        """Return what Linux answers while a program is loaded: its name is there earlier than its arguments."""
        known = process.pid in looked
        looked.add(process.pid)
        return cmdline(process) if known else []

    monkeypatch.setattr(psutil.Process, "cmdline", empty_at_first)
    with announced(ports), contextlib.ExitStack() as stack:
        for own in (
            ["--other"],
            [f"--session_dir={tmp_path}", "--node_id=knows", f"--dashboard_agent_listen_port={port}"],
            [f"--session_dir={tmp_path}", "--node_id=last"],
        ):
            raylet = stack.enter_context(subprocess.Popen([program, *own]))
            stack.callback(raylet.kill)
        assert poll(files["last"].exists) and files["last"].read_text() == str(port)
        assert not files["knows"].exists()


@pytest.mark.skipif(not os.path.exists("/proc/sys/net/ipv4"), reason="only Linux says which ports it gives out")
def test_no_process_is_given_a_port_before_ray_listens_at_it() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first <= 20000 and last == 65535:
        pytest.skip("this machine gives out all ports")
    ports = starting.free_ports(50)
    assert len(set(ports)) == 50 and all(port > 19999 and not first <= port <= last for port in ports)


@pytest.mark.parametrize("free", [1, 0])
def test_a_port_that_is_taken_is_left_out(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    with socket.create_server(("", 0)) as sock:
        left = [sock.getsockname()[1]][:free]
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(3)]
        monkeypatch.setattr(starting, "_not_given_out", lambda: [*taken, *left])
        found = starting.free_ports(2)
    assert len(set(found)) == 2 and not set(found) & set(taken) and set(left) <= set(found)


def test_without_a_descriptor_there_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*address: object) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(socket, "create_server", no_socket)
    with pytest.raises(OSError, match="Too many open files"):
        starting.free_ports(1)


def test_the_reason_why_a_node_does_not_start_comes_from_its_logs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert why(str(tmp_path / "missing"), " Ray's own words \n") == "Ray's own words"
    assert why(str(tmp_path / "missing"), "") == "Ray says nothing"
    errors = tmp_path / "logs" / "gcs_server.err"
    errors.write_text(
        "[2026-11-26 20:25:17,026 I 1 1] (gcs_server) fine\nValueError: no such port\n*** StackTrace ***\n"
    )
    assert why(str(tmp_path), "timed out") == f"ValueError: no such port (Ray's logs: {tmp_path}/logs)"
    (tmp_path / "logs" / "raylet.1.out").write_text(GAVE_UP)
    found = why(str(tmp_path), "timed out")
    assert "15 seconds" in found and "load average" in found and "RayOptions(address=...)" in found


def test_processes_of_ray_do_not_build_a_parser_that_they_do_not_use() -> None:
    path = environment({"PYTHONPATH": "elsewhere", "RAY_agent_register_timeout_ms": "5"})
    assert path["PYTHONPATH"] == f"{LIGHT}:elsewhere" and "RAY_agent_register_timeout_ms" not in path
    assert path["RAY_prestart_worker_first_driver"] == "0" and path["REPORTER_UPDATE_INTERVAL_MS"] == "60000"
    code = (
        f"import sys; sys.path.insert(0, {LIGHT!r})\n"
        "import jsonschema, rfc3987_syntax\n"
        "assert 'lark' not in sys.modules, 'the parser was built'\n"
        "iri = jsonschema.Draft202012Validator({'format': 'iri'}, format_checker=jsonschema.FormatChecker())\n"
        "assert iri.is_valid('http://ä.de/x') and not iri.is_valid('::') and 'lark' in sys.modules\n"
        "assert rfc3987_syntax.is_valid_syntax('iri', 'http://ä.de/x') and rfc3987_syntax.parse\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    missing = (
        f"import sys; sys.path[:0] = [{LIGHT!r}]\ntry:\n    import rfc3987_syntax\nexcept ImportError: print('none')"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", missing], check=True, capture_output=True, text=True)
    assert done.stdout == "none\n"


def test_a_ray_of_this_machine_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "no-folder"
    file.touch()
    monkeypatch.setenv("RAY_TMPDIR", str(file))
    process.release()
    with pytest.raises(NbdistError, match=r"Ray does not start on this machine: RAY_TMPDIR must be .*no-folder"):
        in_ddp.options(engine=RayOptions())(1, int)


def test_a_node_that_has_ended_with_an_error_is_not_started_again() -> None:
    tries = []

    def start() -> None:
        tries.append(1)
        raise RuntimeError("The current node timed out during startup.")

    with pytest.raises(RuntimeError, match="timed out"):
        patiently(start, lambda: "no space left")
    assert len(tries) == 1


#: How the processes of a private Ray are started: with a descriptor of the kernel's process that ends with this one.
WAITING = {
    "a driver that waits": "from nbdist.engines.ray.driver import main; main.CLOSING = 0; main.main(*sys.argv[1:])",
    "a Ray that starts": (
        "from nbdist.engines.ray.launch import private; private._start = lambda *_: time.sleep(1000)\n"
        "private.agent_ports = dict; private.main(sys.argv[2])"
    ),
}


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs a descriptor of a process")
@pytest.mark.parametrize("code", WAITING.values(), ids=WAITING)
def test_what_is_about_to_start_ends_with_a_killed_kernel(code: str, tmp_path: Path) -> None:
    kernel = subprocess.Popen(["sleep", "1000"])
    ours, theirs = socket.socketpair()
    pidfd = os.pidfd_open(kernel.pid)
    command = [sys.executable, "-c", f"import sys, time; {code}", str(theirs.fileno()), str(pidfd)]
    started = subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno(), pidfd], env={**os.environ, "TMPDIR": "/tmp"}
    )
    try:
        assert poll(lambda: len(psutil.Process(started.pid).threads()) > 1)
        kernel.kill()
        assert started.wait() == 1
    finally:
        kernel.kill()
        kernel.wait()
        started.kill()
        started.communicate()
        ours.close()
        theirs.close()
        os.close(pidfd)
