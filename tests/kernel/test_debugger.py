"""Breakpoints and input in ranks, typed in the cell's input box."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Kernel, Result, poll, typed

from nbdist import NbdistError, Session, in_ddp, post_mortem

ROOT = str(Path(__file__).parent.parent.parent)

#: From Python 3.13 on, pdb stops at the very line of `breakpoint()`, and not at the one after it.
TO_THE_NEXT = ["n"] if sys.version_info >= (3, 13) else []


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("debugger"))
    try:
        kernel.ok(
            "import sys, time, torch, torch.distributed as dist\nfrom nbdist import Session, in_ddp\n"
            "session = Session(2)\nsession.run(int)"
        )
        yield kernel
    finally:
        kernel.close()


def test_a_breakpoint_in_one_rank_while_the_other_waits(notebook: Kernel) -> None:
    code = """
    def train():
        x = torch.full((1,), dist.get_rank() + 1.0)
        dist.barrier()
        if dist.get_rank() == 1:
            breakpoint()
            x += 5
        dist.all_reduce(x)
        return x.item()
    print("returned", session.run(train))
    """
    lines = ["p x.item()", "n", "p x.item(), dist.get_rank()", "x.zero_()", "w", "rank 0", "print('printed')", "c"]
    prompts, text = typed(notebook, textwrap.dedent(code), *TO_THE_NEXT, *lines)
    assert prompts == ["(rank 1) "] * len([*TO_THE_NEXT, *lines])
    assert "-> x += 5" in text and "2.0\n" in text and "(7.0, 1)\n" in text and "printed\n" in text
    assert "rank 1 stands still; meanwhile rank 0 waits in all_reduce at" in text
    assert "rank 0 is at no breakpoint" in text and text.endswith("returned 1.0\n")
    assert "nbdist/rank" not in text, "the frames are those of the function"


def test_breakpoints_in_both_ranks(notebook: Kernel) -> None:
    code = """
    def stops():
        own = 10 + dist.get_rank()
        dist.barrier()
        breakpoint()
        return own
    print(session.run_all(stops))
    """
    prompts: list[str] = []
    while prompts != ["(rank 0) "] * 2 + ["(rank 1) "] * 3 + ["(rank 0) "] * 2:
        # Only when both stand still is it sure that one can change over.
        prompts, text = typed(
            notebook, textwrap.dedent(code), "p own", "rank 1", "p own", "own = 99", "c", "own = 88", "c"
        )
    assert "10\n" in text and "11\n" in text and text.endswith("[88, 99]\n"), text


def test_stepping_to_the_end_and_quitting(notebook: Kernel) -> None:
    code = "def f():\n    breakpoint()\n    return 5\nprint('returned', session.run(f, ranks=[0]))"
    _, text = typed(notebook, code, *TO_THE_NEXT, "n", "n")
    assert text.endswith("returned 5\n") and "--Return--" in text
    _, text = typed(notebook, code, "q")
    assert "returned" not in text and notebook.ok("session.run(max, 1, 2)").text == "2\n"


def test_interact_keeps_the_frames(notebook: Kernel) -> None:
    code = "def f(x):\n    breakpoint()\n    return x\nprint('returned', session.run(f, 6, ranks=[1]))"
    prompts, text = typed(notebook, code, "interact", "x * 7", "1 / 0", "exit()", "p x + 1", "c")
    assert prompts == ["(rank 1) ", "(rank 1) >>> ", "(rank 1) >>> ", "(rank 1) >>> ", "(rank 1) ", "(rank 1) "]
    assert "42\n" in text and "ZeroDivisionError" in text and "7\n" in text and text.endswith("returned 6\n")


def test_the_time_at_a_breakpoint_does_not_count(notebook: Kernel) -> None:
    notebook.ok(LATER)
    code = "def f():\n    breakpoint()\n    return 5\nprint('returned', short.run(f))"
    said: list[str] = []

    def answer(message: dict) -> None:  # type: ignore[type-arg]
        (notebook.cwd / "later").touch()
        notebook.client.input("c")

    def output(message: dict) -> None:  # type: ignore[type-arg]
        said.append(message["content"].get("text", ""))

    notebook.client.allow_stdin = True
    notebook.client.execute_interactive(code, allow_stdin=True, stdin_hook=answer, output_hook=output)
    assert "returned 5\n" in "".join(said)
    notebook.ok("short.close(); waiting.time = time")


#: A session with a timeout that is over from the moment on at which there is a file `later`.
LATER = """
import os
from types import SimpleNamespace
from nbdist.kernel import waiting
short = Session(1, timeout=1000)
short.run(int)
waiting.time = SimpleNamespace(monotonic=lambda: time.monotonic() + 4000 * os.path.exists("later"))
"""


def test_input(notebook: Kernel) -> None:
    code = """
    def asks():
        first = input("name? ")
        return first, sys.stdin.readline()
    print(session.run(asks, ranks=[1]))
    """
    prompts, text = typed(notebook, textwrap.dedent(code), "Ada", "Grace")
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
    code = "def asks():\n    return getpass('key? '), read('name? ')\nprint(*map(len, session.run(asks, ranks=[0])))"
    notebook.client.allow_stdin = True
    notebook.client.execute_interactive(code, allow_stdin=True, stdin_hook=answer, output_hook=output)
    assert "".join(said) == "6 6\n"
    assert hidden == [("(rank 0) key? ", True), ("(rank 0) name? ", False)]


def asked(notebook: Kernel) -> bool:
    """Whether the kernel has asked for a line, once for each time."""
    with contextlib.suppress(queue.Empty):
        return bool(notebook.client.get_stdin_msg(timeout=0.2))
    return False


def test_stop_at_a_breakpoint(notebook: Kernel) -> None:
    notebook.client.allow_stdin = True
    cell = notebook.start("def f():\n    breakpoint()\n    return 5\nsession.run(f)", watched=True)
    assert poll(lambda: asked(notebook))
    notebook.interrupt()
    result: Result = notebook.finish(cell)
    most = 16 if sys.version_info >= (3, 11) else 20  # lines: before, the frame that is stopped is there twice
    assert result.error == "KeyboardInterrupt" and len(result.plain_traceback.splitlines()) < most, result.traceback
    while asked(notebook):
        pass
    assert notebook.ok("print(session.run_all(dist.get_rank))").text == "[0, 1]\n"


def test_where_nobody_can_type(notebook: Kernel) -> None:
    for code in ("breakpoint()", "input('name? ')"):
        result = notebook.run(f"def f():\n    {code}\nsession.run(f)")
        assert result.error == "NbdistError" and "nobody can type here" in result.message, result.message
    result = notebook.run("session.submit(breakpoint).result()")
    assert result.error == "NbdistError" and "a call in the background" in result.message
    code = """
    from concurrent.futures import ThreadPoolExecutor
    session.run(lambda: ThreadPoolExecutor().submit(input).result())
    """
    result = notebook.run("from getpass import getpass\nsession.run(getpass, 'key? ')")
    assert result.error == "NbdistError" and "nobody can type here" in result.message, result.message
    assert "only the main thread" in notebook.run(textwrap.dedent(code)).message


def test_pdb_opens_where_a_cell_raises(notebook: Kernel) -> None:
    notebook.ok("%load_ext nbdist\n%ddp start 2 --devices cpu")
    code = "%%ddp --pdb\nimport torch.distributed as dist\ny = dist.get_rank()\nif y == 1:\n    y / 0\ndist.barrier()"
    prompts, text = typed(notebook, code, "p y + 41, dist.get_world_size()", "q")
    assert prompts == ["(rank 1) "] * 2 and "(42, 2)" in text and "-> y / 0" in text
    assert "rank 1 (pid" in text and "raised ZeroDivisionError" in text
    assert notebook.ok("%%ddp\ny").text == "0\n"
    notebook.ok("%unload_ext nbdist")


def test_an_error_names_the_way_to_look_inside(notebook: Kernel) -> None:
    seen = notebook.run("in_ddp(1, lambda: 1 / 0, hold_on_error=True)").plain_traceback
    assert re.search(r"raised ZeroDivisionError \(%debug or post_mortem\(\) looks inside\)", seen), seen
    seen = notebook.run("in_ddp(1, lambda: 1 / 0)").plain_traceback
    assert "raised ZeroDivisionError (hold_on_error=True, then %debug or post_mortem() looks inside)" in seen


def test_debug_opens_in_the_frame_of_the_rank(notebook: Kernel) -> None:
    notebook.ok("session.close(); session = Session(2, hold_on_error=True)")
    notebook.run("def train(x):\n    return x / (x - x)\ndef caller(mine):\n    session.run(train, mine)\ncaller(41)")
    prompts, text = typed(notebook, "%debug", "p x + 1", "q")
    assert "42\n" in text and "-> return x / (x - x)" in text and "nbdist/" not in text, text
    assert set(prompts) == {"(rank 0) "} or set(prompts) == {"(rank 1) "}
    _, text = typed(notebook, "%debug", "p x + 2", "q")
    assert "43\n" in text, "again, as often as one likes"
    notebook.run("own = 6\nown / 0")
    _, text = typed(notebook, "%debug", "p own + 1", "q")
    assert "7\n" in text, "another exception is looked at as ever"
    notebook.run("caller(1)")
    notebook.ok("try:\n    session.run(int, 'x')\nexcept ValueError:\n    session.run(int)")
    _, text = typed(notebook, "%debug", "p mine", "q")
    assert "1\n" in text, "the frames of the rank are gone with the next call, those of the notebook are not"


def test_debug_opens_in_the_cell_that_called(notebook: Kernel) -> None:
    notebook.run("1 / 0")
    notebook.run("def caller(mine):\n    in_ddp(1, lambda: 1 / 0)\ncaller(41)")
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
    code = """
    from nbdist import in_ddp
    def f(x):
        breakpoint()
        return input("name? "), x
    if __name__ == "__main__":
        print("returned", in_ddp(1, f, 6))
    """
    script.write_text(textwrap.dedent(code))
    environ = {**os.environ, "PYTHONPATH": ROOT}
    typed_in = "p x * 7\nc\nAda\n"
    command = [sys.executable, str(script)]
    done = subprocess.run(command, input=typed_in, capture_output=True, text=True, env=environ)
    assert "42\n" in done.stdout and "returned ('Ada', 6)\n" in done.stdout, done.stdout + done.stderr


def test_the_end_of_the_input(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from nbdist import in_ddp\nif __name__ == '__main__':\n    in_ddp(1, input)\n")
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
