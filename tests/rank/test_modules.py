"""The user's own modules, edited and reloaded while a session lives."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Kernel

from nbdist import NbdistError, Session, in_ddp

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules, each time with another length: Python does not look closer within a second."""
    monkeypatch.syspath_prepend(tmp_path)
    lengths = itertools.count()

    def write(**modules: str) -> None:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text) + "#" * next(lengths) + "\n")
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def answer() -> Any:
    return sys.modules["own_a"].answer()


def test_a_reloaded_module_is_new_in_the_ranks_too(write: Write) -> None:
    write(own_a="def answer(): return 1")
    import own_a  # type: ignore[import-not-found]

    with Session(2) as session:
        assert session.run_all(own_a.answer) == [1, 1]
        pids = session.run_all(os.getpid)
        write(own_a="def answer(): return 2")
        assert session.run(answer) == own_a.answer() == 1, "not reloaded here, not there"
        importlib.reload(own_a)
        assert session.run_all(own_a.answer) == [2, 2] == session.run_all(answer, imports="import own_a")
        del sys.modules["own_a"]
        write(own_a="def answer(): return 3")
        import own_a

        assert session.run_all(own_a.answer) == [3, 3] and session.run_all(os.getpid) == pids


def test_a_module_that_only_ranks_have_is_as_its_file_is(write: Write) -> None:
    write(own_a="def answer(): return 1")
    with Session(1) as session:
        assert session.run(answer, imports="import own_a") == 1 and "own_a" not in sys.modules
        write(own_a="def answer(): return 2")
        assert session.run(answer, imports="from own_a import answer") == 2
        write(own_a="def answer(): return 3")
        import own_a

        assert session.run(own_a.answer) == 3


def test_a_module_that_a_package_replaces(write: Write, tmp_path: Path) -> None:
    write(own_replaced="VALUE = 1")

    def value() -> int:
        import own_replaced  # type: ignore[import-not-found]

        return int(own_replaced.VALUE)

    with Session(1) as session:
        assert session.run(value) == 1
        (tmp_path / "own_replaced.py").unlink()
        assert session.run(value) == 1, "a module whose file is gone stays, as in any process"
        (tmp_path / "own_replaced").mkdir()
        (tmp_path / "own_replaced" / "__init__.py").write_text("VALUE = 2\n")
        assert session.run(value) == 2


def limits() -> list[int]:
    """Return a constant as three modules have it: as the first takes it from the second, which takes it from a third,
    which is imported last."""
    own_a, own_c = importlib.import_module("own_a"), importlib.import_module("own_c")
    return [own_a.LIMIT, own_c.LIMIT, sys.modules["own_b"].LIMIT, len(sys.modules["own_times"].all)]


CHAIN = {
    "own_a": "from own_c import LIMIT\nimport own_times; own_times.all.append(1)",
    "own_c": "import own_b\nLIMIT = own_b.LIMIT",
    "own_times": "all = []",
}


def test_a_constant_that_another_module_has_imported_is_new_where_ranks_alone_have_it(write: Write) -> None:
    write(**CHAIN, own_b="LIMIT = 1")
    with Session(1) as session:
        assert session.run(limits) == [1, 1, 1, 1]
        write(own_b="LIMIT = 2")
        assert session.run(limits) == [2, 2, 2, 2] == session.run(limits)
        write(own_b="LIMIT = 3", own_a=CHAIN["own_a"])
        assert session.run(limits) == [3, 3, 3, 3]


def test_a_constant_that_another_module_has_imported_is_as_in_the_notebook(write: Write) -> None:
    write(**CHAIN, own_b="LIMIT = 1")
    own_a, own_b, own_c = map(importlib.import_module, ("own_a", "own_b", "own_c"))
    with Session(1) as session:
        assert session.run(limits) == limits() == [1, 1, 1, 1]
        write(own_b="LIMIT = 2")
        assert session.run(limits) == limits() == [1, 1, 1, 1], "not reloaded here, not there"
        for reloaded, value in (
            ([own_b], [1, 1, 2, 1]),
            ([own_c], [1, 2, 2, 1]),
            ([own_a], [2, 2, 2, 2]),
            ([own_c], [2, 2, 2, 2]),
        ):
            for module in reloaded:
                importlib.reload(module)
            assert session.run(limits) == limits() == value
        write(own_b="LIMIT = 3")
        for module in (own_a, own_b):  # in an order that does not help
            importlib.reload(module)
        assert session.run(limits)[:3] == limits()[:3] == [2, 2, 3]
        for module in (own_c, own_a):
            importlib.reload(module)
        assert session.run(limits)[:3] == limits()[:3] == [3, 3, 3]


def test_modules_that_import_each_other_are_executed_again_once(write: Write) -> None:
    write(
        own_a="import own_b\nimport own_times; own_times.all.append(1)\nLIMIT = 1",
        own_b="import own_a",
        own_times="all = []",
    )

    def times() -> tuple[int, int]:
        import own_a
        import own_b  # noqa: F401

        return len(sys.modules["own_times"].all), own_a.LIMIT

    with Session(1) as session:
        assert session.run(times) == (1, 1)
        write(own_a="import own_b\nimport own_times; own_times.all.append(1)\nLIMIT = 2")
        assert session.run(times) == session.run(times) == (2, 2)


def test_classes_imported_from_a_reloaded_module_are_new_too(write: Write) -> None:
    write(
        own_a="def answer(): return 1", own_b="from own_a import answer\nclass Asks:\n  def ask(self): return answer()"
    )
    import own_a
    import own_b  # type: ignore[import-not-found]

    def make() -> None:
        sys.modules["__main__"].kept = own_b.Asks()  # type: ignore[attr-defined]

    def ask() -> Any:
        return sys.modules["__main__"].kept.ask()  # type: ignore[attr-defined]

    with Session(1) as session:
        session.run(make)
        assert session.run(ask) == 1
        write(
            own_a="def answer(): return 2", own_b="import own_a\nclass Asks:\n  def ask(self): return -own_a.answer()"
        )
        importlib.reload(own_a)
        importlib.reload(own_b)
        assert session.run(lambda: own_b.Asks().ask()) == -2


def test_a_module_is_executed_again_only_when_it_was_edited(write: Write) -> None:
    write(own_a="times = []\ndef answer(): times.append(1); return len(times)")
    import own_a

    with Session(1) as session:
        first = session.run(own_a.answer)
        importlib.reload(own_a)
        assert [session.run(own_a.answer) for _ in range(2)] == [first + 1, first + 2]


def test_a_module_written_just_before_its_import_is_not_executed_again(tmp_path: Path) -> None:
    def first(file: Path) -> None:
        sys.path.insert(0, str(file.parent))
        file.write_text("times = []")
        time.sleep(0.012)  # a tick of the clock that stamps files, which is 10 ms at most
        __import__(file.stem).times.append(1)

    with Session(1) as session:
        session.run(first, tmp_path / "own_a.py")
        assert session.run(lambda: sys.modules["own_a"].times) == [1]


def test_a_module_written_just_after_its_import_is_executed_again(tmp_path: Path) -> None:
    def first(file: Path) -> None:
        sys.path.insert(0, str(file.parent))
        file.write_text("answer = 1")
        __import__(file.stem)
        file.write_text("answer = 22")

    with Session(1) as session:
        session.run(first, tmp_path / "own_a.py")
        assert session.run(lambda: sys.modules["own_a"].answer) == 22


def test_a_reload_that_fails_is_seen(write: Write) -> None:
    write(own_a="def answer(): return 1")
    import own_a

    with Session(1) as session:
        assert session.run(own_a.answer) == 1
        write(own_a="1 / 0")
        with pytest.raises(ZeroDivisionError):
            importlib.reload(own_a)
        with pytest.raises(ZeroDivisionError):
            session.run(answer)
        write(own_a="def answer(): return 2")
        importlib.reload(own_a)
        assert session.run(answer) == 2


def test_a_file_that_is_not_what_the_notebook_has_reloaded_is_named(write: Write) -> None:
    write(own_a="def answer(): return 1")
    import own_a

    with Session(1) as session, Session(1) as other:
        assert session.run(answer, imports="import own_a") == other.run(answer, imports="import own_a") == 1
        write(own_a="def answer(): return 2")
        importlib.reload(own_a)
        assert other.run(answer) == 2
        write(own_a="def answer(): return 3")
        with pytest.raises(NbdistError, match=r"'own_a' .* stale .* restart\(\)"):
            session.run(answer)
        importlib.reload(own_a)
        assert session.run(answer) == other.run(answer) == 3


MORE = pytest.mark.long("more modes of %autoreload")


@pytest.mark.parametrize(
    "mode",
    ["%autoreload 2", pytest.param("%autoreload 3", marks=MORE), pytest.param("%autoreload 2 --full", marks=MORE)],
)
def test_autoreload(mode: str, kernel: Kernel, tmp_path: Path) -> None:
    module = tmp_path / "own_a.py"
    module.write_text("def answer(x): return x + 1\n")
    if kernel.run(f"%load_ext autoreload\n{mode}").error is not None:  # some only print it
        pytest.skip(f"this IPython has no {mode}")
    kernel.ok("from nbdist import Session\nimport own_a\nsession = Session(2)\ndef fn(): return own_a.answer(1)")
    assert kernel.ok("print(session.run_all(fn), own_a.answer(1))").text == "[2, 2] 2\n"
    module.write_text("def answer(x):\n    return x + 100\n")
    text = kernel.ok("print(session.run_all(fn), own_a.answer(1))").text
    if text == "[2, 2] 2\n":
        pytest.skip(f"this IPython has no {mode}, and does not say so")
    assert text == "[101, 101] 101\n"


def test_autoreload_that_is_off_and_asked_for_once(kernel: Kernel, tmp_path: Path) -> None:
    module = tmp_path / "own_a.py"
    module.write_text("def answer(x): return x + 1\n")
    if kernel.run("%load_ext autoreload").error is not None:
        pytest.skip("IPython 7 needs a module for it that Python 3.12 has no more")
    kernel.ok("from nbdist import Session\nimport own_a")
    kernel.ok("session = Session(2)\ndef fn(): return own_a.answer(1)")
    ask = "print(session.run_all(fn), own_a.answer(1))"
    assert kernel.ok(ask).text == "[2, 2] 2\n"
    module.write_text("def answer(x):\n    return x + 100\n")
    assert kernel.ok(ask).text == "[2, 2] 2\n", "ranks run what the notebook has executed"
    kernel.ok("%autoreload")
    assert kernel.ok(ask).text == "[101, 101] 101\n"


def test_autoreload_after_a_cell_without_a_call(kernel: Kernel, tmp_path: Path) -> None:
    module = tmp_path / "own_a.py"
    module.write_text("def answer(): return 1\n")
    if kernel.run("%load_ext autoreload\n%autoreload 2").error is not None:
        pytest.skip("IPython 7 needs a module for it that Python 3.12 has no more")
    kernel.ok("from nbdist import Session\nsession = Session(1)")
    ask = "print(session.run(lambda: own_a.answer()), own_a.answer())"
    assert kernel.ok(f"import own_a\n{ask}").text == "1 1\n"
    kernel.ok("print('a plot')")
    module.write_text("def answer(): return 22\n")
    assert kernel.ok(ask).text == "22 22\n"


@pytest.mark.parametrize("way", ["move", "copy", "link"])
def test_a_module_that_an_older_file_replaces(way: str, tmp_path: Path) -> None:
    older, file = tmp_path / "older.txt", tmp_path / "own_a.py"
    older.write_text("answer = 22\n")
    os.utime(older, (10_000, 10_000))
    file.write_text("answer = 1\n")

    def ask() -> Any:
        sys.path.insert(0, str(tmp_path))
        return __import__("own_a").answer

    with Session(1) as session:
        assert session.run(ask) == 1
        if way == "move":
            os.replace(older, file)
        elif way == "copy":
            shutil.copy2(older, file)
        else:
            file.unlink()
            file.symlink_to(older)
        assert session.run(ask) == 22


def test_a_file_from_the_future_is_executed_once(tmp_path: Path) -> None:
    file = tmp_path / "own_a.py"
    file.write_text("times = []")
    os.utime(file, (time.time() + 86400,) * 2)
    time.sleep(0.012)  # a tick of the clock that stamps files

    def count() -> int:
        sys.path.insert(0, str(tmp_path))
        times = __import__("own_a").times
        times.append(1)
        return len(times)

    with Session(1) as session:
        assert [session.run(count) for _ in range(3)] == [1, 2, 3]


def test_modules_of_one_name_in_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second", "empty"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_a.py").write_text(f"def answer(): return {name!r}\n")
    (tmp_path / "empty" / "own_a.py").unlink()
    monkeypatch.syspath_prepend("")
    monkeypatch.chdir(tmp_path / "first")
    try:
        import own_a

        with Session(1) as session:
            assert session.run(own_a.answer) == in_ddp(1, own_a.answer) == "first"
            for folder in ("second", "empty"):
                monkeypatch.chdir(tmp_path / folder)
                assert in_ddp(1, own_a.answer) == session.run(own_a.answer) == "first"
            monkeypatch.chdir(tmp_path / "second")
            del sys.modules["own_a"]
            import own_a

            assert session.run(own_a.answer) == in_ddp(1, own_a.answer) == "second"
    finally:
        sys.modules.pop("own_a", None)


def test_a_notice_names_a_module_that_was_edited_before_fresh_ranks(
    write: Write, recwarn: pytest.WarningsRecorder
) -> None:
    write(own_a="def answer(): return 1")
    import own_a

    with Session(1) as session, Session(1) as other:
        assert session.run(own_a.answer) == 1
        write(own_a="def answer(): return 2")
        assert session.run(own_a.answer) == 1 and not session.logs(0)
        assert other.run(own_a.answer) == 2 and "edited after the notebook had imported it" in other.logs(0)
        importlib.reload(own_a)
        said = other.logs(0)
        assert session.run(own_a.answer) == other.run(own_a.answer) == 2 and other.logs(0) == said
