"""The capture of a call: imports=, need=, and everything that the function uses without an argument that says so."""

from __future__ import annotations

import glob
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from cells import cells
from conftest import Cell
from hypothesis import given
from hypothesis import strategies as st

from nbdist import CaptureError, in_ddp
from nbdist.capture.call import capture_call
from nbdist.capture.imports import modules_named, names_given, parse_imports, run_imports
from nbdist.capture.need import resolve_need
from nbdist.wire.cache import SentCache

CELLS = cells("capture/cells/call.py")

# ------------------------------------------------------------------------------------------------------ imports=

IMPORTS: list[tuple[str | list[str], set[str]]] = [
    ("import os", {"os"}),
    ("import os, sys as system", {"os", "system"}),
    ("import xml.dom.minidom", {"xml"}),
    ("import xml.dom.minidom as dom", {"dom"}),
    ("from os import path", {"path"}),
    ("from os import (path,  # where\n    sep as separator,\n)", {"path", "separator"}),
    ("from os import \\\n    path", {"path"}),
    ("from string import *", {"ascii_letters", "Template"}),
    ("import os; import sys", {"os", "sys"}),
    ("# nothing yet", set()),
    ("", set()),
    ("\n    import os\n\n    # and\n    from os import path  # this\n", {"os", "path"}),
    (["import os", "    from os import path", "from os import (\n    sep,\n)"], {"os", "path", "sep"}),
]


@pytest.mark.parametrize(("block", "names"), IMPORTS)
def test_all_of_the_import_syntax(block: str | list[str], names: set[str]) -> None:
    parsed = parse_imports(block)
    namespace: dict[str, Any] = {}
    assert run_imports(parsed, namespace) >= names
    assert names_given(parsed) == set(namespace)


MODULES = "os os.path sys math json collections collections.abc xml.dom.minidom string".split()
STATEMENTS = st.one_of(
    st.builds("import {}".format, st.sampled_from(MODULES)),
    st.builds("import {} as {}".format, st.sampled_from(MODULES), st.sampled_from("abc")),
    st.builds("from os import path as {}{}".format, st.sampled_from("abc"), st.sampled_from(["", "  # why"])),
    st.builds("from os import (\n  sep,{}\n  path{}\n)".format, st.sampled_from(["", "# why"]), st.sampled_from(",#")),
    st.builds("from {} import *".format, st.sampled_from(MODULES)),
)


@given(st.lists(STATEMENTS), st.sampled_from(["", "  ", "\t"]), st.sampled_from(["\n", "\n\n", "\n# so\n"]))
def test_names_given_are_the_names_that_running_gives(lines: list[str], indent: str, between: str) -> None:
    block = "".join(indent + line + "\n" for line in between.join(lines).splitlines())
    assert names_given(parse_imports(block)) == run_imports(parse_imports(block), {})
    assert names_given(parse_imports(lines)) == run_imports(parse_imports(lines), {})


@given(st.text() | st.text(alphabet="import from*()\n;,. #\\'\"=x"))
def test_any_text_is_imports_or_a_value_error(text: str) -> None:
    try:
        block = parse_imports(text)
    except ValueError:
        return
    assert modules_named(block) or not re.sub(r"#.*|\\|[\s;]", "", block)


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ("x = 1", "x = 1"),
        ("import os\nos.getcwd()", "os.getcwd()"),
        ("import os; print(os)", "import os; print(os)"),
        ("import os\n\ndef f():\n    import sys", "def f():"),
        ("try:\n    import os\nexcept ImportError:\n    pass", "try:"),
        ("if True: import os", "if True: import os"),
        ("'just text'", "'just text'"),
        ("imprt os", "imprt os"),
        ("import os\nfrom os import", "from os import"),
        ("import os\n  import sys", "import sys"),
        ("from . import x", "from . import x"),
        (["import os", "print(1)"], "print(1)"),
    ],
)
def test_anything_but_imports_is_an_error_that_shows_the_line(block: str | list[str], line: str) -> None:
    with pytest.raises(ValueError, match=f"imports must be.*line.*{re.escape(line)}"):
        parse_imports(block)


@pytest.mark.parametrize("block", [3, [3], None, b"import os"])
def test_imports_of_another_type(block: Any) -> None:
    with pytest.raises(TypeError, match="imports must be import statements"):
        parse_imports(block)


def test_a_star_gives_what_the_module_makes_public() -> None:
    assert {"glob", "iglob"} <= names_given("from glob import *") <= set(glob.__all__)
    assert "deque" in names_given("from collections import *") and "_chain" not in names_given(
        "from collections import *"
    )
    assert names_given("from not_yet_loaded import *") == set()


# --------------------------------------------------------------------------------------------------------- need=

ratings, movies = [3, 4, 5], ["Alien"]


def uses_nothing() -> None:
    """A function of a module."""


def reads_ratings() -> int:
    return len(ratings)


@pytest.mark.parametrize(
    "need", ["ratings movies", "ratings, movies", "\n ratings,\n movies,\n", ["ratings", "movies"]]
)
def test_need_names_variables(need: Any) -> None:
    assert resolve_need(need, uses_nothing) == {"ratings": ratings, "movies": movies}


def test_need_may_give_values() -> None:
    assert resolve_need({"ratings": [1], "new": 2}, uses_nothing) == {"ratings": [1], "new": 2}
    assert in_ddp(1, reads_ratings, need={"ratings": [1]}) == 1
    assert ratings == [3, 4, 5]


@pytest.mark.parametrize(
    ("need", "error"),
    [(3, TypeError), ([3], TypeError), ({3: 4}, TypeError), ("a.b", ValueError), ("class", ValueError)],
)
def test_need_of_another_kind(need: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="need must be names of variables"):
        resolve_need(need, uses_nothing)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(NameError, match=r"'ratngs'.*Did you mean 'ratings'") as caught:
        resolve_need("movies ratngs", uses_nothing)
    assert caught.value.name == "ratngs"
    with pytest.raises(NameError, match=r"got 'zzzzzz'$"):
        resolve_need("zzzzzz", uses_nothing)


@pytest.mark.started  # no child that waits to become a server
def test_mistakes_are_found_before_any_process_starts(tmp_path: Path) -> None:
    out = run_python(["-c", CELLS["mistakes"]], tmp_path)
    assert out.splitlines() == ["NameError []", "ValueError []", "TypeError []", "CaptureError []"]


# --------------------------------------------------------------------------------------------- what a function uses


def test_functions_classes_and_closures_bring_what_they_use(cell: Cell) -> None:
    cell(CELLS["functions, classes and closures"])


def test_callables_of_all_kinds(cell: Cell) -> None:
    cell(CELLS["callables of all kinds"])


def test_generators_coroutines_recursion_and_global_statements(cell: Cell) -> None:
    cell(CELLS["generators, coroutines, recursion and global statements"])


def test_functions_share_the_same_globals_in_the_rank(cell: Cell) -> None:
    cell(CELLS["what functions share"])


def test_a_redefined_class_is_the_one_in_use_on_every_rank_and_in_what_returns(cell: Cell) -> None:
    cell(CELLS["a class"])
    cell(CELLS["the class redefined"])


BY_VALUE = cells("capture/cells/by_value.py")


@pytest.mark.parametrize("case", BY_VALUE)
def test_objects_of_the_notebook(cell: Cell, case: str) -> None:
    cell(BY_VALUE[case])


# ------------------------------------------------------------------------------------------- imports= against need=


def test_names_that_the_import_block_gives_are_not_captured(cell: Cell) -> None:
    # A generator cannot be captured: were it tried, the call would fail.
    cell(CELLS["names that the import block gives"])


def test_a_warning_names_an_import_that_hides_a_function_of_the_notebook(cell: Cell) -> None:
    result = cell(CELLS["an import that shadows"])
    assert "2.0" in result.text and "'sqrt' is defined in the notebook" in result.text and "need=" in result.text


def test_need_goes_before_imports(cell: Cell) -> None:
    cell(CELLS["need before imports"])


def test_imports_and_need_serve_code_that_is_made_at_run_time(cell: Cell) -> None:
    cell(CELLS["code made at run time"])


def test_names_that_ipython_owns_are_no_obstacle(cell: Cell) -> None:
    cell(CELLS["names that IPython owns"])


def test_history_does_not_travel(cell: Cell) -> None:
    cell("(i for i in ())")  # now Out and _ hold what cannot be pickled
    cell("assert in_ddp(1, lambda: 1) == 1")


# ------------------------------------------------------------------------------------------ what cannot be captured


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def failure(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        capture_call(fn, args, kwargs, "", {}, SentCache())
    return str(caught.value)


def test_the_path_to_what_cannot_be_pickled() -> None:
    stuck = (i for i in ())
    data = {"a": [1, Holder(stream=stuck)]}
    assert failure(lambda: data).startswith("data['a'][1].stream cannot be sent")
    assert failure(uses_nothing, 0, data).startswith("argument 2['a'][1].stream cannot")
    assert failure(uses_nothing, rows=(0, stuck)).startswith("argument rows[1] cannot")
    assert failure(Holder(x=stuck).__init__).startswith("the function.__self__.x cannot")
    assert "of type generator" in failure(uses_nothing, stuck)
    with pytest.raises(CaptureError, match=r"^rows\[0\] cannot"):
        capture_call(uses_nothing, (), {}, "", {"rows": [stuck]}, SentCache())


def test_objects_of_this_process_cannot_be_captured(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file, socket.socket() as sock:
        for thing in (threading.Thread(), sys._getframe(), file, sock):
            assert failure(lambda: thing).startswith("thing")  # noqa: B023


def test_a_capture_error_in_the_notebook_names_the_variable(cell: Cell) -> None:
    cell(CELLS["a variable that cannot be captured"])


# --------------------------------------------------------------------------------------------- scripts, not notebooks

SCRIPT = CELLS["script"]
CALL = """answer, name, same = in_ddp(2, fn, Answer())
print(type(answer) is Answer, answer.value, name, same)
"""
GUARDED = SCRIPT + "if __name__ == '__main__':\n" + indent(CALL, "    ")


def run_python(arguments: list[str], cwd: Path, stdin: str | None = None) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", [SCRIPT + CALL, GUARDED], ids=["unguarded", "guarded"])
def test_a_script(tmp_path: Path, code: str) -> None:
    (tmp_path / "script.py").write_text(code)
    assert run_python(["script.py"], tmp_path) == "once\nTrue 20.0 __main__ True\n"


@pytest.mark.long("interpreters of their own")
def test_a_script_from_standard_input(tmp_path: Path) -> None:
    assert run_python(["-"], tmp_path, stdin=SCRIPT + CALL) == "once\nTrue 20.0 __main__ True\n"


def test_a_script_on_the_command_line(tmp_path: Path) -> None:
    assert run_python(["-c", SCRIPT + CALL], tmp_path) == "once\nTrue 20.0 __main__ True\n"


def test_a_module_that_is_run(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/script.py").write_text(GUARDED)
    assert run_python(["-m", "package.script"], tmp_path) == "once\nTrue 20.0 __main__ True\n"


def test_a_script_that_ipython_runs(cell: Cell, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(GUARDED)
    for how in ("", "-i"):
        assert "once\nTrue 20.0 __main__ True\n" in cell(f"%run {how} {tmp_path / 'script.py'}").text
    assert "20.0" in cell("print(in_ddp(2, fn, Answer())[0].value)").text  # what %run left in the notebook


def test_a_session_sees_what_later_cells_define(cell: Cell) -> None:
    cell("session = Session(1)\nstep = 1\ndef fn(): return step")
    cell("assert session.run(fn) == 1\nstep = 2")
    cell("assert session.run(fn) == 2\ndef step(): return 'function'\nassert session.run(fn)() == 'function'")
    cell("session.close()")
