"""Stacks of ranks: asked of a running call, shown when a call takes too long, read from faulthandler's text."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clocks import CallClock, one_answered
from conftest import Kernel, living, poll, ranks_of
from hypothesis import given
from hypothesis import strategies as st

from nbdist import RankTimeout, Session
from nbdist.kernel.calls import stacks
from nbdist.kernel.calls.stacks import Frame, describe, main_thread, report
from nbdist.kernel.session import executor_of
from nbdist.system.source_files import is_library
from nbdist.wire import stacks as wire

HERE = Path(__file__).name

# --------------------------------------------------------------------------------------------------- reading a stack

LOADER = """\
Thread 0x00007f624cada6c0 (most recent call first):
  File "/usr/lib/python3/threading.py", line 331 in wait
  File "/usr/lib/python3/threading.py", line 1016 in _bootstrap_inner
  File "/usr/lib/python3/threading.py", line 973 in _bootstrap

"""
MAIN = f"""\
  File "/tmp/ipykernel_1/2 3.py", line 5 in helper
  File "/tmp/ipykernel_1/2 3.py", line 3 in <lambda>
  File "{stacks._OWN[0]}", line 230 in _call
  File "{stacks._OWN[0]}", line 150 in serve
  File "/usr/lib/python3/site-packages/nbdist/rank/main.py", line 40 in main
  File "<string>", line 1 in <module>
"""
FRAMES = [
    Frame("/tmp/ipykernel_1/2 3.py", "5", "helper"),
    Frame("/tmp/ipykernel_1/2 3.py", "3", "<lambda>"),
    Frame(stacks._OWN[0], "230", "_call"),
]


@pytest.mark.parametrize(
    "dump",
    [
        pytest.param(
            LOADER + "Current thread 0x00007f624d430b80 (most recent call first):\n" + MAIN, id="3.10 to 3.13"
        ),
        pytest.param("Thread 0x00007f624d430b80 (most recent call first):\n" + MAIN + "\n" + LOADER, id="not current"),
        pytest.param("Stack (most recent call first):\n" + MAIN, id="one thread"),
        pytest.param(
            LOADER + "Current thread 0x00007f624d430b80 (most recent call first):\n  Garbage-collecting\n" + MAIN,
            id="garbage collection",
        ),
        pytest.param(
            "Thread 0x00007f62 (most recent call first):\n  <no Python frame>\n\n"
            "Current thread 0x00007f63 (most recent call first):\n" + MAIN,
            id="a thread without frames",
        ),
        pytest.param(
            "Thread 0x00007f5 [pt_autograd_0] (most recent call first):\n  <no Python frame>\n\n"
            "Current thread 0x00007f6 [python] (most recent call first):\n" + MAIN + "\n"
            "Current thread's C stack trace (most recent call first):\n"
            '  Binary file "/usr/bin/python", at _Py_DumpStack+0x48 [0x5c]\n',
            id="3.14",
        ),
    ],
)
def test_the_main_thread_down_to_the_loop_of_the_rank(dump: str) -> None:
    assert main_thread(dump) == FRAMES


def test_a_line_that_is_not_known() -> None:
    (frame, _) = main_thread(f'  File "mine.py", line ??? in f\n  File "{stacks._OWN[0]}", line 1 in _call\n')
    assert frame == Frame("mine.py", "???", "f") and "mine.py:???" in describe([frame, FRAMES[-1]])


@given(
    st.text() | st.lists(st.sampled_from([LOADER, MAIN, "  ...\n", "Thread", "\n", '  File "', "Current"])).map("".join)
)
def test_any_text_can_be_read(dump: str) -> None:
    assert main_thread(dump) in ([], FRAMES) or "File" in dump


@pytest.mark.parametrize(
    "there", ["/opt/env/lib/python3.12/site-packages", "/opt/python/lib/python3.12", "/tmp/ray/py_modules/1"]
)
def test_a_rank_on_another_machine_may_have_its_libraries_in_other_folders(there: str) -> None:
    lines = [f"{there}/nbdist/shm/collectives.py", "/opt/python/lib/python3.12/threading.py", "/home/me/train.py"]
    lines += [f"{there}/nbdist/rank/loop.py"]
    frames = main_thread("".join(f'  File "{file}", line 3 in f\n' for file in lines))
    assert [frame.file for frame in frames] == lines
    assert (
        describe(frames).endswith("at train.py:3") and is_library(lines[0]) and not is_library("/home/me/nbdist/my.py")
    )


OWN = Frame(stacks._OWN[0], "230", "_call")
MINE = Frame("/home/me/train.py", "33", "train")
LIBRARY = Frame(torch.distributed.__file__, "3252", "all_reduce")
WRAPPER = Frame(torch.distributed.__file__, "83", "wrapper")


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        (None, "has returned"),
        ([], "has not started yet, or does not answer"),
        ([Frame(stacks._OWN[0], "150", "serve")], "waits for a call"),
        ([Frame("/nbdist/wire/channel.py", "55", "send"), Frame(stacks._OWN[0], "150", "serve")], "has returned"),
        ([LIBRARY, Frame(stacks._OWN[0], "90", "_join")], "is joining the process group"),
        ([OWN], "is in the function"),
        ([LIBRARY, OWN], "is in all_reduce"),
        ([MINE, OWN], "is in train at train.py:33"),
        ([WRAPPER, MINE, OWN], "is in train at train.py:33"),
        ([LIBRARY, WRAPPER, MINE, OWN], "waits in all_reduce at train.py:33"),
        ([WRAPPER, LIBRARY, MINE, Frame("/home/me/main.py", "1", "main"), OWN], "waits in all_reduce at train.py:33"),
    ],
)
def test_a_stack_in_a_few_words(frames: list[Frame] | None, words: str) -> None:
    assert describe(frames) == words


def test_a_report() -> None:
    first, *rest = report({0: [LIBRARY, MINE, OWN], 1: None}).splitlines()
    assert first == "rank 0 waits in all_reduce at train.py:33; rank 1 has returned"
    assert rest == [
        "",
        "Stack of rank 0 (most recent call last):",
        "  train.py:33 in train",
        "  __init__.py:3252 in all_reduce",
    ]


# -------------------------------------------------------------------------------------------------- of running ranks


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


def in_a_collective() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(1000)


def in_python_code() -> None:
    x = 0
    while True:
        x += 1


def in_c_code() -> None:
    sum(itertools.repeat(1))  # holds the GIL, and runs no signal handler of Python


def in_a_loader() -> None:
    from torch.utils.data import DataLoader

    for _ in DataLoader([1], num_workers=1, collate_fn=lambda batch: time.sleep(1000)):
        pass


@contextmanager
def running(fn: Callable[[], Any], **kwargs: Any) -> Iterator[Session]:
    """A session whose ranks are in `fn`, which somebody else waits for."""
    with Session(2) as session:
        session.run(int)

        def call() -> None:
            with suppress(BaseException):  # its ranks will be taken from it
                session.run(fn, **kwargs)

        caller = threading.Thread(target=call)
        caller.start()
        try:
            yield session
        finally:
            group = executor_of(session).group
            if group is not None:
                for rank in range(2):
                    group.ranks.signal(rank, 9)
            caller.join()


def says(session: Session, *parts: str) -> bool:
    text = session.stacks()
    return all(part in text for part in parts)


@pytest.mark.parametrize(
    ("fn", "rank_0"),
    [
        (in_a_collective, f"rank 0 waits in all_reduce at {line_of(in_a_collective, 2)}"),
        (in_python_code, f"rank 0 is in in_python_code at {HERE}:"),
        (in_c_code, f"rank 0 is in in_c_code at {line_of(in_c_code, 1)}"),
        (in_a_loader, f"rank 0 waits in __next__ at {line_of(in_a_loader, 3)}"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_stacks_show_where_a_running_call_is(fn: Callable[[], Any], rank_0: str) -> None:
    with running(fn) as session:
        assert poll(lambda: says(session, rank_0)), session.stacks()
        text = session.stacks()
        assert "Stack of rank 0 (most recent call last):" in text and not re.search(r"\bloop\.py", text)
        if fn is in_a_collective:
            rank_1 = f"rank 1 is in in_a_collective at {line_of(in_a_collective, 4)}"
            assert poll(lambda: says(session, rank_1)), session.stacks()


def test_in_the_import_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\n\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with running(int, imports="import slow_to_import") as session:
        assert poll(lambda: says(session, "rank 0 is in <module> at slow_to_import.py:3")), session.stacks()


def test_an_import_in_compiled_code() -> None:
    inner = [Frame("<frozen importlib._bootstrap>", "1", name) for name in ("create_module", "_find_and_load")]
    own = Frame("call.py", "9", "run")
    assert describe([*inner, Frame("/home/me/train.py", "3", "train"), own]) == "is importing a module at train.py:3"
    assert describe([*inner, own]) == "is importing a module"


def test_stacks_without_a_call() -> None:
    with Session(2) as session:
        assert session.stacks() == ""  # there are no ranks yet
        session.run(int)
        assert poll(lambda: says(session, "rank 0 waits for a call; rank 1 waits for a call"))
        assert session.run(int) == 0  # they were not disturbed
    assert session.stacks() == ""


def test_asking_again_and_again_disturbs_nothing() -> None:
    def work() -> float:
        total = torch.ones(1)
        for _ in range(2000):
            dist.all_reduce(total)
            total /= 2
        time.sleep(0.2)
        return total.item()

    with Session(2) as session:
        session.run(int)
        values: list[float] = []
        caller = threading.Thread(target=lambda: values.append(session.run(work)))
        caller.start()
        asked = 0
        while caller.is_alive():
            session.stacks()
            asked += 1
        assert values == [1.0] and asked > 1


def calls_and_returns() -> None:
    def deep(n: int) -> int:
        return n if n == 0 else deep(n - 1) + 1

    while True:
        deep(20)


@pytest.mark.long("ranks that are asked again and again")
def test_many_reads_of_ranks_busy_in_python_code_kill_none() -> None:
    """Ten thousand of them, and of others: benchmarks/rank/stacks.py."""
    with running(calls_and_returns) as session:
        ranks = executor_of(session).group.ranks  # type: ignore[union-attr]
        assert poll(lambda: all("in calls_and_returns" in text for text in ranks.stacks((0, 1)).values()))
        assert all("in calls_and_returns" in ranks.stacks([number % 2])[number % 2] for number in range(300))
        assert len(living(ranks_of())) >= 2


def test_a_stack_that_comes_too_late_is_not_that_of_the_next_question() -> None:
    asks, answers = socket.socketpair()
    with asks, answers:
        asks.setblocking(False)
        answers.send(wire._ANSWER.pack(b"\0", b"\x01", 4) + b"late")
        signaled = []

        def send_signal() -> None:
            signaled.append(True)
            answers.send(b"written by ")
            answers.send(wire._ANSWER.pack(b"\0", b"\x01", 4) + b"late" + b"faulthandler")

        assert wire.ask(asks, 2, send_signal) == "written by faulthandler" and signaled
        assert answers.recv(10) == b"\x02"


def test_asking_while_the_ranks_end() -> None:
    """Another thread may ask at any time, also while the call fails and its ranks are taken away."""

    def boom() -> None:
        time.sleep(0.2)
        raise ValueError("boom")

    problems: list[BaseException] = []
    done = threading.Event()
    with Session(2) as session:

        def ask() -> None:
            try:
                while not done.is_set():
                    session.stacks()
            except BaseException as exc:
                problems.append(exc)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for _ in range(5):
                with pytest.raises(ValueError):
                    session.run(boom)
        finally:
            done.set()
            asking.join()
    assert not problems


# ------------------------------------------------------------------------------------------------------ too much time


def test_timeout_says_what_everyone_does() -> None:
    places = (
        f"rank 0 waits in all_reduce at {line_of(in_a_collective, 2)}",
        f"rank 1 is in in_a_collective at {line_of(in_a_collective, 4)}",
    )
    with Session(2, timeout=1000) as session:
        with CallClock(lambda: says(session, *places)), pytest.raises(RankTimeout) as caught:
            session.run(in_a_collective)
        first, *rest = str(caught.value).splitlines()
        assert first == f"not done after 1000 s: {'; '.join(places)}"
        assert f"  {line_of(in_a_collective, 2)} in in_a_collective" in rest
        assert isinstance(caught.value, TimeoutError)
        assert session.run(int) == 0


def test_timeout_of_a_call_that_a_rank_does_not_take() -> None:
    text = "x" * 60_000
    with Session(2, timeout=1000) as session:
        pids = session.run_all(os.getpid)
        ranks: Any = executor_of(session).group.ranks
        sock = ranks.channels[1].sock
        assert struct.unpack("ll", sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16))[0] == 1000
        ranks.limit_sending(0.2)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the call does not fit
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(RankTimeout, match=r"rank 1 reads nothing; .*rank 1 has not started yet, or does"):
            session.run(len, text)
        assert session.run(len, text) == len(text)


def test_timeout_of_one_that_has_returned() -> None:
    def one_returns() -> None:
        if dist.get_rank() == 0:
            in_c_code()

    with (
        Session(2, timeout=1000) as session,
        CallClock(lambda: one_answered(session) and says(session, "rank 0 is in in_c_code at")),
        pytest.raises(RankTimeout, match=r"rank 0 is in in_c_code at .*; rank 1 has returned"),
    ):
        session.run(one_returns)


def test_a_notice_shows_where_ranks_are_that_do_not_begin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nbdist.kernel.calls.notices.LONG_START", 1000.0)
    with Session(2) as session:
        pids = session.run_all(os.getpid)
        session.run(lambda: dist.destroy_process_group())  # so that they have to join
        capsys.readouterr()
        os.kill(pids[1], signal.SIGSTOP)
        said = ""

        def told() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return "rank 0 is joining" in said and "rank 1 has not started yet, or does not answer" in said

        with CallClock(lambda: says(session, "rank 0 is joining")):
            call = session.submit(dist.get_world_size)
            assert poll(told), said
            os.kill(pids[1], signal.SIGCONT)
            assert call.result() == 2
        assert said.count("not begun after 1000 s: rank 0") == 1


def test_timeout_in_a_notebook_names_the_cell(kernel: Kernel) -> None:
    kernel.ok(f"import sys; sys.path.append({str(Path(__file__).parent.parent)!r})")
    code = """import time, torch, torch.distributed as dist
from clocks import CallClock
from nbdist import Session
def f():
    if dist.get_rank() == 0:
        return dist.all_reduce(torch.ones(1))
    time.sleep(1000)
session = Session(2, timeout=1000)
with CallClock(lambda: "all_reduce" in session.stacks() and "rank 1 is in f" in session.stacks()):
    session.run(f)"""
    result = kernel.run(code)
    assert result.error == "RankTimeout"
    words = "rank 0 waits in all_reduce at Cell In[2], line 6; rank 1 is in f at Cell In[2], line 7"
    assert words in result.message and words in result.plain_traceback
