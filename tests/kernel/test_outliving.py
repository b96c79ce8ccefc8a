"""Calls of named sessions outlive the programs that have made them, killed at any moment, and a full disk."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import living, poll
from users import as_another_user, needs_root

from nbdist import Session, attach
from nbdist.wire.channel import Channel
from nbdist.wire.session_folder import SessionFolder, names

ROOT = str(Path(__file__).parent.parent.parent)
#: Of the program that makes a call and is killed. It prints when it is about to.
CLIENT = """
import sys, time
from nbdist import attach

def train(seed, lines):
    import random, time, torch
    for line in range(lines):
        print("line", seed, line)
        time.sleep(random.Random(seed * lines + line).random() / 50)
    return seed, torch.arange(lines)

session = attach(sys.argv[1])
print("begins", flush=True)
session.run(train, int(sys.argv[2]), 60)
"""
#: Of the program that makes short calls until it is killed, or its keeper is. It prints each value.
SHORT_CALLS = """
import sys
from nbdist import attach

session, number = attach(sys.argv[1]), 0
while True:
    print(session.run(abs, number), flush=True)
    number += 1
"""


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    for name in names():
        attach(name).close()


@pytest.mark.long("twenty programs that are killed")
def test_a_program_that_is_killed_at_any_moment(capsys: pytest.CaptureFixture[str]) -> None:
    """The value is the undisturbed one, and no line is lost or doubled; also where the keeper stood still meanwhile."""
    session = Session(2, name="killed", devices="cpu", timeout=500)
    session.run(int)
    keeper = psutil.Process(SessionFolder("killed").about()["pid"])
    family = [keeper, *keeper.children(recursive=True)]
    environ = {**os.environ, "PYTHONPATH": ROOT}
    for seed in range(20):
        chance = random.Random(seed)
        before = session_calls(session)
        command = [sys.executable, "-c", CLIENT, "killed", str(seed)]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        assert client.stdout is not None
        while client.stdout.readline() not in ("begins\n", ""):
            pass
        assert poll(lambda before=before: session_calls(session) > before), "the call has begun"
        time.sleep(chance.random())
        stops = chance.random() < 0.5
        if stops:
            keeper.send_signal(signal.SIGSTOP)
        client.kill()
        client.communicate()
        if stops:
            time.sleep(chance.random() / 10)
            keeper.send_signal(signal.SIGCONT)
        capsys.readouterr()
        again = attach("killed")
        value = again.result()
        assert value[0] == seed and value[1].tolist() == list(range(60))
        assert poll(again.is_idle)
        shown = capsys.readouterr().out
        again.replay()
        lines = [f"line {seed} {line}" for line in range(60)]
        assert capsys.readouterr().out.splitlines() == lines
        assert shown.splitlines() == lines
    session.close()
    assert poll(lambda: not living(family)) and names() == []


@pytest.mark.long("programs and keepers that are killed between short calls")
@pytest.mark.parametrize("of_keeper", [False, True])
def test_short_calls_until_a_program_or_its_keeper_is_killed(of_keeper: bool) -> None:
    """The journal has all values. Where the keeper is killed, it may lack the last one, which the program has got."""
    for seed in range(3):
        chance, name = random.Random(seed), f"short{seed}"
        session = Session(1, name=name, devices="cpu")
        command = [sys.executable, "-c", SHORT_CALLS, name]
        environ = {**os.environ, "PYTHONPATH": ROOT}
        client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ)
        assert client.stdout is not None
        values = [int(client.stdout.readline())]
        time.sleep(chance.random() / 3)
        os.kill(SessionFolder(name).about()["pid"] if of_keeper else client.pid, signal.SIGKILL)
        with client:
            values += map(int, client.stdout.read().split())
        assert values == list(range(len(values)))
        again = attach(name)
        if not of_keeper:
            assert again.result() in (values[-1], values[-1] + 1), "that of a call that had begun"
        calls = session_calls(session)
        assert calls - len(values) in ((-1, 0, 1) if of_keeper else (0, 1))
        assert [again.result(number + 1) for number in values[:-1]] == values[:-1]
        session.close()
    assert names() == []


def session_calls(session: Session) -> int:
    """The number of calls that have begun."""
    from nbdist.kernel.named.recorded import _find

    found = _find(SessionFolder(str(session.name)).path, None)
    return 0 if found is None else int(found[1]["number"])


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a file system in memory, of that size."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)])
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root, to mount a file system")
def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The call goes on and its value arrives; the journal says from where on it is cut."""

    def train(lines: int) -> Any:
        import torch

        for line in range(lines):
            print("line", line, "x" * 1000)
        return torch.arange(1 << 20)

    with small_disk(tmp_path / "state" / "nbdist", "4m"), Session(1, name="full", devices="cpu") as session:
        assert session.run(train, 8000).tolist() == list(range(1 << 20))
        assert "output is missing here: the disk was full" in capsys.readouterr().err
        assert session.run(int) == 0
        assert session.run(train, 10).tolist() == list(range(1 << 20)), "and so it goes on"


@pytest.mark.slow
@needs_root
def test_another_user_gets_neither_output_nor_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the folder; and where that and all in it are open to everyone, not from the keeper."""

    def ask(path: str) -> Any:
        with socket.socket(socket.AF_UNIX) as ours:
            ours.connect(path)
            channel = Channel(ours)
            channel.send(("ask", "state"))
            return channel.receive()

    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        monkeypatch.setenv("XDG_STATE_HOME", base)
        with Session(1, name="mine", devices="cpu") as session:
            session.run(print, "a secret")
            folder = SessionFolder("mine")
            files = [os.path.join(folder.path, name) for name in os.listdir(folder.path)]
            assert folder.socket in files and any("journal" in one for one in files)
            for one in files:
                assert as_another_user(lambda one=one: os.stat(one)) == "PermissionError"
            assert as_another_user(lambda: os.listdir(folder.path)) == "PermissionError"
            for one in (os.path.join(base, "nbdist"), os.path.dirname(folder.path), folder.path):
                os.chmod(one, 0o777)
            for one in files:
                assert as_another_user(Path(one).read_bytes) == "PermissionError", one
            assert as_another_user(lambda: ask(folder.socket)) == "PermissionError"
            os.chmod(folder.socket, 0o777)
            assert as_another_user(lambda: ask(folder.socket)) in (
                "EOFError",
                "ConnectionResetError",
                "BrokenPipeError",
            )
            assert session.run(int) == 0, "the keeper goes on"
