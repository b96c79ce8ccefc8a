"""Breakpoints and input in ranks, typed in the cell's input box."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cells import cells
from conftest import Kernel, Result, poll, typed

from nbdist import NbdistError, Session, in_ddp, post_mortem

ROOT = str(Path(__file__).parent.parent.parent)
CELLS = cells("kernel/cells/debugger.py")

#: From Python 3.13 on, pdb stops at the very line of `breakpoint()`, and not at the one after it.
TO_THE_NEXT = ["n"] if sys.version_info >= (3, 13) else []


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("debugger"))
    try:
        kernel.ok(CELLS["first cell"])
        yield kernel
    finally:
        kernel.close()


def test_a_breakpoint_in_one_rank_while_the_other_waits(notebook: Kernel) -> None:
    lines = ["p x.item()", "n", "p x.item(), dist.get_rank()", "x.zero_()", "w", "rank 0", "print('printed')", "c"]
    prompts, text = typed(notebook, CELLS["a breakpoint in one rank"], *TO_THE_NEXT, *lines)
    assert prompts == ["(rank 1) "] * len([*TO_THE_NEXT, *lines])
    assert "-> x += 5" in text and "2.0\n" in text and "(7.0, 1)\n" in text and "printed\n" in text
    assert "rank 1 is paused; meanwhile rank 0 waits in all_reduce at" in text
    assert "rank 0 is not at a breakpoint" in text and text.endswith("returned 1.0\n")
    assert "nbdist/rank" not in text, "the frames are those of the function"


def test_breakpoints_in_both_ranks(notebook: Kernel) -> None:
    code = CELLS["breakpoints in both ranks"]
    prompts: list[str] = []
    while prompts != ["(rank 0) "] * 2 + ["(rank 1) "] * 3 + ["(rank 0) "] * 2:
        # Only when both stand still is it sure that one can change over.
        prompts, text = typed(notebook, code, "p own", "rank 1", "p own", "own = 99", "c", "own = 88", "c")
    assert "10\n" in text and "11\n" in text and text.endswith("[88, 99]\n"), text


def test_stepping_to_the_end_and_quitting(notebook: Kernel) -> None:
    code = CELLS["stepping to the end"]
    _, text = typed(notebook, code, *TO_THE_NEXT, "n", "n")
    assert text.endswith("returned 5\n") and "--Return--" in text
    _, text = typed(notebook, code, "q")
    assert "returned" not in text and notebook.ok("session.run(max, 1, 2)").text == "2\n"


def test_interact_keeps_the_frames(notebook: Kernel) -> None:
    code = CELLS["interact"]
    prompts, text = typed(notebook, code, "interact", "x * 7", "1 / 0", "exit()", "p x + 1", "c")
    assert prompts == ["(rank 1) ", "(rank 1) >>> ", "(rank 1) >>> ", "(rank 1) >>> ", "(rank 1) ", "(rank 1) "]
    assert "42\n" in text and "ZeroDivisionError" in text and "7\n" in text and text.endswith("returned 6\n")


def test_the_time_at_a_breakpoint_does_not_count(notebook: Kernel) -> None:
    notebook.ok(CELLS["a timeout that is over once there is a file"])
    code = CELLS["a breakpoint under a timeout"]
    said: list[str] = []

    def answer(message: dict) -> None:  # type: ignore[type-arg]
        (notebook.cwd / "later").touch()
        notebook.client.input("c")

    def output(message: dict) -> None:  # type: ignore[type-arg]
        said.append(message["content"].get("text", ""))

    notebook.client.allow_stdin = True
    notebook.client.execute_interactive(code, allow_stdin=True, stdin_hook=answer, output_hook=output)
    assert "returned 5\n" in "".join(said)
    notebook.ok("short.close(); ending.time = time")


def test_input(notebook: Kernel) -> None:
    prompts, text = typed(notebook, CELLS["input"], "Ada", "Grace")
    assert prompts == ["(rank 1) name? ", "(rank 1) "] and text == "('Ada', 'Grace\\n')\n"


def test_a_password_is_not_shown(notebook: Kernel) -> None:
    hidden: list[tuple[str, bool]] = []
    said: list[str] = []

    def answer(message: dict) -> None:  # type: ignore[type-arg]
        hidden.append((message["content"]["prompt"], message["content"]["password"]))
        notebook.client.input("secret")

    def output(message: dict) -> None:  # type: ignore[type-arg]
        said.append(message["content"].get("text", "") + "".join(message["content"].get("traceback", ())))

    notebook.ok("from getpass import getpass\nread = input")
    code = CELLS["a password"]
    notebook.client.allow_stdin = True
    notebook.client.execute_interactive(code, allow_stdin=True, stdin_hook=answer, output_hook=output)
    assert "".join(said) == "6 6\n"
    assert hidden == [("(rank 0) key? ", True), ("(rank 0) name? ", False)]


def asked(notebook: Kernel) -> bool:
    """Return whether the kernel has asked for a line, once for each time."""
    with contextlib.suppress(queue.Empty):
        return bool(notebook.client.get_stdin_msg(timeout=0.2))
    return False


def test_stop_at_a_breakpoint(notebook: Kernel) -> None:
    notebook.client.allow_stdin = True
    cell = notebook.start(CELLS["stop at a breakpoint"], watched=True)
    assert poll(lambda: asked(notebook))
    notebook.interrupt()
    result: Result = notebook.finish(cell)
    most = 16 if sys.version_info >= (3, 11) else 20  # lines: before, the frame that is stopped is there twice
    assert result.error == "KeyboardInterrupt" and len(result.plain_traceback.splitlines()) < most, result.traceback
    while asked(notebook):
        pass
    assert notebook.ok("print(session.run_all(dist.get_rank))").text == "[0, 1]\n"


def test_input_without_a_user_is_an_error(notebook: Kernel) -> None:
    for code in ("breakpoint()", "input('name? ')"):
        result = notebook.run(f"def f():\n    {code}\nsession.run(f)")
        assert result.error == "NbdistError" and "no input is possible here" in result.message, result.message
    result = notebook.run("session.submit(breakpoint).result()")
    assert result.error == "NbdistError" and "a call in the background" in result.message
    result = notebook.run("from getpass import getpass\nsession.run(getpass, 'key? ')")
    assert result.error == "NbdistError" and "no input is possible here" in result.message, result.message
    assert "only the main thread" in notebook.run(CELLS["input in a thread"]).message


def test_pdb_opens_where_a_cell_raises(notebook: Kernel) -> None:
    notebook.ok("%load_ext nbdist\n%ddp start 2 --devices cpu")
    code = "%%ddp --pdb\nimport torch.distributed as dist\ny = dist.get_rank()\nif y == 1:\n    y / 0\ndist.barrier()"
    prompts, text = typed(notebook, code, "p y + 41, dist.get_world_size()", "q")
    assert prompts == ["(rank 1) "] * 2 and "(42, 2)" in text and "-> y / 0" in text
    assert "rank 1 (pid" in text and "raised ZeroDivisionError" in text
    assert notebook.ok("%%ddp\ny").text == "0\n"
    notebook.ok("%unload_ext nbdist")


def test_an_error_names_the_way_to_look_inside(notebook: Kernel) -> None:
    seen = notebook.run("in_ddp.options(hold_on_error=True)(1, lambda: 1 / 0)").plain_traceback
    assert re.search(r"raised ZeroDivisionError \(%debug or post_mortem\(\) opens a debugger there\)", seen), seen
    seen = notebook.run("in_ddp(1, lambda: 1 / 0)").plain_traceback
    assert "raised ZeroDivisionError (with hold_on_error=True, %debug or post_mortem() opens a debugger there)" in seen


def test_debug_opens_in_the_frame_of_the_rank(notebook: Kernel) -> None:
    notebook.ok("session.close(); session = Session(2, hold_on_error=True)")
    notebook.run(CELLS["debug in the frame of the rank"])
    prompts, text = typed(notebook, "%debug", "p x + 1", "q")
    assert "42\n" in text and "-> return x / (x - x)" in text and "nbdist/" not in text, text
    assert set(prompts) == {"(rank 0) "} or set(prompts) == {"(rank 1) "}
    _, text = typed(notebook, "%debug", "p x + 2", "q")
    assert "43\n" in text, "again, as often as one likes"
    notebook.run("own = 6\nown / 0")
    _, text = typed(notebook, "%debug", "p own + 1", "q")
    assert "7\n" in text, "another exception is looked at as ever"
    notebook.run("caller(1)")
    notebook.ok(CELLS["a call after a failure"])
    _, text = typed(notebook, "%debug", "p mine", "q")
    assert "1\n" in text, "the frames of the rank are gone with the next call, those of the notebook are not"


def test_debug_opens_in_the_cell_that_called(notebook: Kernel) -> None:
    notebook.run("1 / 0")
    notebook.run(CELLS["debug in the cell that called"])
    _, text = typed(notebook, "%debug", "p mine + 1", "q")
    assert "42\n" in text and "errors.py" not in text, text


# ------------------------------------------------------------------------------------------------- after an exception


def test_the_rank_can_be_asked_for_its_number_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    import torch.distributed as dist

    def fails() -> None:
        assert dist.get_rank() == 0

    with Session(2, hold_on_error=True) as session:
        with pytest.raises(AssertionError):
            session.run(fails)
        session.post_mortem(
            commands=["p dist.get_rank(), dist.get_world_size()", "interact", "6 * 7", "exit()", "p 'back'"]
        )
        out = capsys.readouterr().out
        assert "(1, 2)\n" in out and "42\n" in out and "'back'\n" in out
        assert session.run(dist.get_world_size) == 2
    with pytest.raises(NbdistError, match="no rank is held"):
        post_mortem()


# --------------------------------------------------------------------------------------------------- in a terminal


def test_in_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CELLS["in a terminal"])
    environ = {**os.environ, "PYTHONPATH": ROOT}
    typed_in = "p x * 7\nc\nAda\n"
    command = [sys.executable, str(script)]
    done = subprocess.run(command, input=typed_in, capture_output=True, text=True, env=environ)
    assert "42\n" in done.stdout and "returned ('Ada', 6)\n" in done.stdout, done.stdout + done.stderr


def test_the_end_of_standard_input_ends_the_debugger(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CELLS["the end of the input"])
    environ = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, input="", capture_output=True, text=True, env=environ)
    assert done.stderr.rstrip().endswith("EOFError") and done.returncode == 1


def test_a_stream_of_the_functions_own() -> None:
    def reads() -> str:
        import io

        sys.stdin = io.StringIO("line\n")
        return input()

    assert in_ddp(1, reads) == "line"
