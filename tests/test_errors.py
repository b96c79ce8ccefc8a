"""Errors of ranks in the cell: their own exception type, the lines that failed, how a process ended."""

from __future__ import annotations

import asyncio
import builtins
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from calls import meet
from cells import cells
from conftest import NUMBERS_CELLS, Kernel, Result
from hypothesis import given
from hypothesis import strategies as st

from nbdist import CaptureError, NbdistError, RankDied, RankTimeout, in_ddp
from nbdist.deaths import describe_status
from nbdist.errors import RemoteTraceback, render, stand_ins

ROOT = Path(__file__).parent.parent
CELLS = cells("cells/errors.py")
#: How tracebacks of kernels name a file of nbdist.
OURS = "site-packages/nbdist/"

# ------------------------------------------------------------------------------------------------ what each one says


def test_the_tree() -> None:
    for error in (CaptureError, RankDied, RankTimeout):
        assert issubclass(error, NbdistError)
    assert issubclass(RankTimeout, TimeoutError)
    assert not issubclass(RemoteTraceback, NbdistError)


@pytest.mark.parametrize("signum", list(signal.Signals), ids=lambda signum: signum.name)
def test_a_signal_has_its_name(signum: signal.Signals) -> None:
    text = describe_status(-signum)
    assert f"killed by {signum.name}" in text
    hints = {signal.SIGKILL: "out of memory?", signal.SIGBUS: "/dev/shm full?", signal.SIGSEGV: "compiled code"}
    for number, hint in hints.items():
        assert (hint in text) is (number == signum)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "left with exit code 0 before its function returned"),
        (7, "exit code 7"),
        (255, "exit code 255"),
        (None, "fork server killed?"),
        (-120, "killed by signal 120"),
    ],
)
def test_statuses_are_described_in_words(status: int | None, text: str) -> None:
    assert text in describe_status(status)


@given(
    st.integers(0, 99),
    st.none() | st.integers(1),
    st.none() | st.integers(-64, 255),
    st.text(alphabet="ab \n€", max_size=99),
)
def test_rank_died_travels_whole(rank: int, pid: int | None, status: int | None, output: str) -> None:
    error = RankDied(rank, pid, status, output)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.rank, copy.pid, copy.status, copy.output) == (rank, pid, status, output)
    who = f"rank {rank}" if pid is None else f"rank {rank} (pid {pid})"
    assert str(copy) == str(error) and str(error).startswith(who)
    assert output.rstrip() in str(error)


class Strict(UnicodeDecodeError):
    pass


class Special(KeyError):
    pass


class OfTheNotebook(KeyError):
    __module__ = "__main__"


@pytest.mark.parametrize(
    ("error", "nearest"),
    [
        (Special("a"), Special),
        (OfTheNotebook("a"), KeyError),
        (FileNotFoundError(2, "gone"), FileNotFoundError),
        (Strict("utf-8", b"", 0, 1, "odd"), Strict),
        (SystemExit(3), SystemExit),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_stand_ins_are_its_own_type_then_the_bases_nearest_first(error: BaseException, nearest: type) -> None:
    found = stand_ins(error)
    assert type(found[0]) is nearest
    if nearest is type(error):
        assert found.pop(0).args == error.args
    assert all(type(stand_in) in type(error).__mro__[1:] for stand_in in found)
    assert all(f"{type(error).__name__}: " in str(stand_in) for stand_in in found)
    assert pickle.loads(pickle.dumps(found[0])).args == found[0].args


def test_every_builtin_exception_has_a_stand_in() -> None:
    for kind in vars(builtins).values():
        if isinstance(kind, type) and issubclass(kind, BaseException) and kind is not BaseException:
            error = kind("many", [ValueError()]) if "Group" in kind.__name__ else kind.__new__(kind)
            assert stand_ins(error), kind


def test_errors_are_rendered_without_a_notebook() -> None:
    error = ValueError("boom")
    remote = RemoteTraceback(3, 42, "Traceback\n  in f\nValueError: boom\n")
    remote.others = ["also failed: rank 1: KeyError: 'a'"]
    error.__cause__ = remote
    assert render(error) == [
        "rank 3 (pid 42) raised ValueError",
        "Traceback\n  in f\nValueError: boom",
        "also failed: rank 1: KeyError: 'a'",
    ]
    assert str(remote).startswith("on rank 3 (pid 42)\n\nTraceback\n") and str(remote).endswith(remote.others[0])
    assert render(NbdistError("alone")) == ["nbdist.errors.NbdistError: alone"]


# ------------------------------------------------------------------------------------------------ from ranks to here


def fails_as(error: BaseException) -> None:
    raise error


class NeedsTwo(Exception):
    def __init__(self, one: int, *, two: str) -> None:
        super().__init__(f"{one} and {two}")
        self.two = two


class NoRebuild(ConnectionError):
    def __reduce__(self) -> Any:
        return fails_as, (TypeError("not again"),)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom", 3),
        KeyError("k"),
        OSError(28, "No space left", "file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"),
        StopIteration(5),
        SystemExit(7),
        KeyboardInterrupt("mine"),
        GeneratorExit("x"),
        asyncio.CancelledError("c"),
        MemoryError(),
        ValueError("\ud800 \x00"),
        RankTimeout("one inside a rank"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_and_arguments_are_kept(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        in_ddp(1, fails_as, error)
    assert type(caught.value) is type(error) and caught.value.args == error.args
    assert str(caught.value) == str(error)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback) and cause.rank == 0 and cause.pid != os.getpid()
    assert "raise error" in cause.text and "loop.py" not in cause.text


def test_attributes_and_notes_are_kept() -> None:
    error = NeedsTwo(1, two="two")
    if sys.version_info >= (3, 11):
        error.add_note("a note")
    with pytest.raises(NeedsTwo, match="1 and two") as caught:
        in_ddp(1, fails_as, error)
    assert caught.value.two == "two"
    assert getattr(caught.value, "__notes__", ["a note"]) == ["a note"]


def test_an_exception_that_refers_to_itself() -> None:
    def fail() -> None:
        error = ValueError("a")
        error.__cause__ = error.me = error  # type: ignore[attr-defined]
        raise error

    with pytest.raises(ValueError, match="a") as caught:
        in_ddp(1, fail)
    assert getattr(caught.value, "me", None) is caught.value


def test_an_exception_that_cannot_be_rebuilt() -> None:
    with pytest.raises(ConnectionError, match="NoRebuild: lost") as caught:
        in_ddp(1, lambda: fails_as(NoRebuild("lost")))
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "NoRebuild: lost" in caught.value.__cause__.text


def test_a_class_that_only_the_rank_has() -> None:
    def f() -> None:
        class Local(ZeroDivisionError):
            pass

        raise Local("inside")

    with pytest.raises(ZeroDivisionError, match="inside") as caught:
        in_ddp(1, f)
    assert type(caught.value).__name__ == "Local"


def chained() -> None:
    try:
        {}["missing"]
    except KeyError:
        try:
            int("no number")
        except ValueError as exc:
            raise RuntimeError("outer") from exc


def test_the_chain_is_in_the_text() -> None:
    with pytest.raises(RuntimeError, match="outer") as caught:
        in_ddp(1, chained)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    text = caught.value.__cause__.text
    places = [
        text.index(part)
        for part in ("KeyError: 'missing'", "ValueError: invalid literal", "direct cause", "RuntimeError: outer")
    ]
    assert places == sorted(places)
    assert 'int("no number")' in text and "nbdist" not in text.replace(str(Path(__file__)), "")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the other ranks the time that they need to send their own errors."""
    monkeypatch.setattr("nbdist.kernel.calls.ending.GRACE_AFTER_FAILURE", 10_000.0)


def test_the_first_failure_and_the_others(patient: None, tmp_path: Path) -> None:
    def f() -> None:
        try:
            meet(tmp_path)
            if dist.get_rank() == 1:
                raise LookupError("boom\nmore")
            if dist.get_rank() == 2:
                dist.barrier()
            time.sleep(1000)
        except KeyboardInterrupt:
            if dist.get_rank() == 0:
                raise OSError("while leaving\nmore") from None

    with pytest.raises(LookupError, match="boom\nmore") as caught:
        in_ddp(3, f)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert cause.rank == 1
    assert cause.others == ["also failed: rank 0: OSError: while leaving"]


def test_other_failures_are_listed_in_the_order_of_the_ranks(patient: None, tmp_path: Path) -> None:
    def f() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        meet(tmp_path)
        time.sleep(0.05 * (dist.get_world_size() - dist.get_rank()))  # the last one first
        if dist.get_rank() == 2:
            os._exit(3)
        raise LookupError(str(dist.get_rank()))

    with pytest.raises((LookupError, RankDied)) as caught:
        in_ddp(5, f)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    numbers = [int(line.split()[3].rstrip(":")) for line in cause.others]
    assert numbers == sorted(numbers) and len(numbers) == 4


def test_rank_died_carries_the_last_50_lines() -> None:
    def f() -> None:
        if dist.get_rank() == 1:
            for i in range(120):
                print("line", i)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankDied, match="SIGKILL: out of memory") as caught:
        in_ddp(2, f)
    error = caught.value
    assert (error.rank, error.status) == (1, -signal.SIGKILL)
    assert error.output.splitlines() == [f"line {i}" for i in range(70, 120)]
    assert "line 119" in str(error) and "line 69" not in str(error)


# ---------------------------------------------------------------------------------------------------- in a notebook


FIRST_CELL = "import os, sys, time, torch.distributed as dist\nfrom nbdist import Session, in_ddp, RankDied"


def fails(kernel: Kernel, code: str, error: str) -> Result:
    result = kernel.run(code)
    assert result.error == error, result
    return result


def number(kernel: Kernel) -> int:
    """Return the number of the cell that ran last."""
    return int(kernel.ok("print(len(In) - 2)").text)


def test_the_failing_lines_of_all_cells(notebook: Kernel) -> None:
    notebook.ok(CELLS["inner"])
    first = number(notebook)
    result = fails(notebook, CELLS["outer"], "ZeroDivisionError")
    second = number(notebook)
    seen = result.plain_traceback
    assert re.search(r"rank [01] \(pid \d+\) raised ZeroDivisionError", seen)
    assert "----> 3     return y / 0" in seen
    assert "----> 2     return inner(x)" in seen
    assert f"Cell In[{second}], line 5\n----> 5 in_ddp(2, outer, 41)" in seen
    assert seen.rstrip().splitlines()[-1].startswith("also failed") or "division by zero" in seen.splitlines()[-1]
    # The launcher's own frames are left out, and what only IPython knows: the made-up names of cells' files.
    assert OURS not in seen
    if NUMBERS_CELLS:
        assert f"Cell In[{first}], line 3, in inner(x)" in seen and f"Cell In[{second}], line 2, in outer(x)" in seen
        assert "ipykernel_" not in seen
    else:
        assert " in inner(x)\n" in seen and " in outer(x)\n" in seen
    assert result.message == "division by zero"


def test_a_cell_that_was_edited_and_run_again(notebook: Kernel) -> None:
    for line in ("x = 1", "raise ValueError('old')", "pass\n    raise ValueError('new')"):
        notebook.ok(f"def f():\n    {line}")
    seen = fails(notebook, "in_ddp(1, f)", "ValueError").plain_traceback
    assert "----> 3     raise ValueError('new')" in seen and "'old'" not in seen


def test_frames_of_a_module_file(notebook: Kernel) -> None:
    (notebook.cwd / "mine.py").write_text("def broken():\n    return [][1]\n")
    seen = fails(notebook, CELLS["a module file"], "IndexError").plain_traceback
    assert re.search(r"mine\.py(:2,)? in broken\(\)", seen) and "----> 2     return [][1]" in seen


def test_a_traceback_is_made_without_a_look_at_the_files_of_all_modules(notebook: Kernel) -> None:
    notebook.ok(CELLS["files of modules"])
    seen = fails(notebook, "session.run(fails)", "KeyError").plain_traceback
    assert "JSONDecodeError" in seen and "direct cause" in seen
    assert int(notebook.ok("print(session.run(files))\nsession.close()").text) < 50


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("in_ddp(2)", "TypeError"),
        ("in_ddp.options(timeouts=3)(2, print)", "TypeError"),
        ("in_ddp(2, print, imports='import no_such_module')", "ModuleNotFoundError"),
    ],
)
def test_a_call_that_cannot_be_made_shows_no_frames_of_ours(notebook: Kernel, code: str, error: str) -> None:
    seen = fails(notebook, code, error).plain_traceback
    assert f"----> 1 {code}" in seen and OURS not in seen, seen


def test_a_timeout_in_a_function_that_is_not_in_python(notebook: Kernel) -> None:
    notebook.ok(f"import sys, time; sys.path.append({str(ROOT / 'tests')!r})\nfrom clocks import CallClock")
    notebook.ok("session = Session(1, timeout=1000)\nsession.run(int)")
    code = "with CallClock(lambda: 'is in the function' in session.stacks()):\n    session.run(time.sleep, 1000)"
    seen = fails(notebook, code, "RankTimeout").plain_traceback
    assert "rank 0 is in the function" in seen and "Stack of" not in seen, seen


def test_syntax_error_in_a_rank(notebook: Kernel) -> None:
    seen = fails(notebook, "def f(): exec('a b')\nin_ddp(1, f)", "SyntaxError").plain_traceback
    assert "a b" in seen and "rank 0" in seen


def test_except_clauses_work(notebook: Kernel) -> None:
    result = notebook.ok(CELLS["except clauses"])
    assert result.text.startswith("RemoteTraceback True\n")
    assert re.search(r"RemoteTraceback: on rank [01] \(pid \d+\)", result.text)
    assert result.text.rstrip().endswith("Mine: boom")


def test_an_exception_that_the_notebook_raises_again(notebook: Kernel) -> None:
    seen = fails(notebook, CELLS["raised again"], "RuntimeError").plain_traceback
    assert 'raise ValueError("boom")' in seen and "while training" in seen and "rank 0" in seen


def test_the_last_error_is_there_for_debugging(notebook: Kernel) -> None:
    fails(notebook, "def f(): raise ValueError('boom')\nin_ddp(1, f)", "ValueError")
    assert notebook.ok("print(type(sys.last_value).__name__, sys.last_value.__cause__.rank)").text == "ValueError 0\n"


def test_a_death_in_the_notebook(notebook: Kernel) -> None:
    result = fails(notebook, CELLS["a death"], "RankDied")
    assert "exit code 3" in result.message and "my last words" in result.message
    assert "----> 6 in_ddp(1, f)" in result.plain_traceback and OURS not in result.plain_traceback


# ------------------------------------------------------------------------------------------------------ in a script


def test_in_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CELLS["a script"])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert re.search(r"RemoteTraceback: on rank 1 \(pid \d+\)", done.stderr)
    assert f'File "{script}", line 8, in f\n    return {{}}["missing key"]' in done.stderr
    assert f'File "{script}", line 13, in <module>\n    in_ddp(2, f)' in done.stderr
    assert done.stderr.rstrip().endswith("KeyError: 'missing key'")
