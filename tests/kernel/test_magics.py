"""`%ddp` and `%%ddp` in a real kernel."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cells import cells
from conftest import NUMBERS_CELLS, Kernel, living, poll, ranks_of, typed
from hypothesis import given
from hypothesis import strategies as st
from IPython.core import completer

import nbdist
from nbdist.kernel.magics.command_line import numbers

CELLS = cells("kernel/cells/magics.py")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook with three ranks started by `%ddp start 3`."""
    kernel = Kernel(tmp_path_factory.mktemp("magic"))
    try:
        kernel.ok("%load_ext nbdist")
        assert "3 ranks on cpu, gloo, running" in kernel.ok("%ddp start 3 --devices cpu").text
        yield kernel
    finally:
        kernel.close()


def test_a_cell_runs_on_every_rank_and_shows_its_last_expression(notebook: Kernel) -> None:
    notebook.ok("%%ddp\nimport torch, torch.distributed as dist\nx = torch.full((2,), dist.get_rank() + 1.0)")
    assert notebook.ok("%%ddp\ndist.all_reduce(x)\nx").text == "tensor([6., 6.])\n"
    assert notebook.ok("%%ddp\nx;").text == "" and notebook.ok("%%ddp\nNone").text == ""
    assert notebook.ok("%%ddp\nprint('printed')\ndist.get_rank()").text == "printed\n0\n"
    assert "Did you mean the line magic %ddp" in notebook.ok("%%ddp\n").text


def test_the_notebook_and_the_ranks_have_variables_of_their_own(notebook: Kernel) -> None:
    notebook.ok("only_here = 1")
    result = notebook.run("%%ddp\nonly_here")
    assert result.error == "NameError" and "only_here" in result.message
    notebook.ok("%%ddp\nonly_there = 2")
    assert notebook.run("only_there").error == "NameError"


def test_output_of_all_and_of_some_ranks(notebook: Kernel) -> None:
    notebook.ok("%%ddp\nimport torch.distributed as dist")
    every = notebook.ok("%%ddp --output all\nprint('I am', dist.get_rank())").text.splitlines()
    assert sorted(every) == [f"[rank {rank}] I am {rank}" for rank in range(3)]
    assert notebook.ok("%%ddp --ranks 1-2\ndist.get_rank()").text == "1\n"
    assert notebook.ok("%%ddp --output none\nprint(5)").text == ""
    assert notebook.ok("%%ddp --ranks 0,2 --output all\nprint('some')").text.count("some") == 2
    html = notebook.ok("%%ddp --output all\nfrom IPython.display import HTML\nHTML('<b>%d</b>' % dist.get_rank())")
    shown = [o["data"]["text/html"] for o in html.outputs if o["kind"] == "display_data"]
    assert sorted(shown) == ["<b>0</b>", "<b>1</b>", "<b>2</b>"]


def test_need_imports_push_and_pull(notebook: Kernel) -> None:
    notebook.ok("import pandas as pd\nratings, factor = pd.DataFrame({'rating': [1.0, 2.0]}), 3")
    command = '%%ddp --need "ratings factor" --imports "import math"\nmath.floor((ratings.rating * factor).sum())'
    assert notebook.ok(command).text == "9\n"
    notebook.ok("pushed = {'a': 1}\n%ddp push pushed factor")
    assert notebook.ok("%%ddp\npushed['a'] + factor").text == "4\n"
    notebook.ok("%%ddp\nresult = [len(ratings), 'two']\nclass Own:\n    size = 5\nmade = Own()")
    assert notebook.ok("%ddp pull result made\nprint(result, made.size)").text == "[2, 'two'] 5\n"
    missing = notebook.run("%ddp pull no_such")
    assert missing.error == "NameError" and "no_such" in missing.message
    assert notebook.run("%ddp push no_such").error == "NameError"
    assert notebook.run('%%ddp --imports "1 + 1"\n1').error == "ValueError"


def test_a_ddp_cell_can_do_what_a_notebook_cell_can(notebook: Kernel) -> None:
    cell = "%%ddp\nimport asyncio\nasync def later():\n    await asyncio.sleep(0)\n    return 'later'\nawait later()"
    assert notebook.ok(cell).text == "'later'\n"
    assert "hello" in notebook.ok("%%ddp\n!echo hello").text
    plot = "%%ddp\nimport matplotlib.pyplot as plt\n%matplotlib inline\nplt.plot([1, 2]);"
    assert any("image/png" in o.get("data", {}) for o in notebook.ok(plot).outputs)
    update = "%%ddp\nfrom IPython.display import display\nh = display(1, display_id=True)\nh.update(2)"
    assert [o["kind"] for o in notebook.ok(update).outputs] == ["display_data", "update_display_data"]


def test_errors_show_the_cell_and_leave_the_ranks(notebook: Kernel) -> None:
    notebook.ok("%%ddp\nimport torch, torch.distributed as dist\nkept = 1")
    code = "%%ddp\nif dist.get_rank() == 1:\n    1 / 0\ndist.all_reduce(torch.ones(1))"
    result = notebook.run(code)
    assert result.error == "ZeroDivisionError"
    seen = result.plain_traceback
    assert "rank 1 (pid" in seen and "----> 3     1 / 0" in seen, seen
    assert f"Cell In[{result.number}], line 3" in seen or not NUMBERS_CELLS, seen
    assert "site-packages" not in seen and "shell.py" not in seen, seen
    assert notebook.ok("%%ddp\nt = torch.ones(1)\ndist.all_reduce(t)\nkept + t.item()").text == "4.0\n"
    syntax = notebook.run("%%ddp\nx = = 1")
    assert syntax.error == "SyntaxError" and "x = = 1" in syntax.plain_traceback + syntax.message
    assert notebook.ok("%%ddp\nkept").text == "1\n"


def test_exit_ends_the_call_as_sys_exit_does(notebook: Kernel) -> None:
    meet = "import torch.distributed as dist\ndist.barrier()"  # an exit interrupts ranks that have not begun
    for code in ("exit()", "quit()", "exit", f"kept = 5\n{meet}\nif kept: exit(3)"):
        result = notebook.run(f"%%ddp\n{code}")
        assert "called sys.exit(" in result.text, (code, result)
    assert notebook.ok("%%ddp\nkept").text == "5\n"
    assert notebook.run("from nbdist import in_ddp\nin_ddp(2, lambda: exit(4))").error in ("SystemExit", None)
    assert notebook.ok("in_ddp(2, lambda: 5)").text == "5\n"


def test_interrupt(notebook: Kernel) -> None:
    cell = notebook.start("%%ddp\nimport time\nprint('begun', flush=True)\ntime.sleep(1000)")
    notebook.finish(cell, until=lambda result: "begun" in result.text)
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"
    assert notebook.ok("%%ddp\n1 + 1").text == "2\n"


def test_status_stacks_logs(notebook: Kernel) -> None:
    notebook.ok("%%ddp\nimport torch.distributed as dist\nprint('line of', dist.get_rank())")
    status = notebook.ok("%ddp status")
    assert status.text.count("cpu     idle") == 3 and "line of 2" in status.text
    assert any("<table>" in o.get("data", {}).get("text/html", "") for o in status.outputs)
    assert notebook.ok("%ddp stacks").text.count("waits for a call") == 3
    assert "line of 1\n" in notebook.ok("%ddp logs 1").text
    notebook.ok("%%ddp\nimport torch\ndist.all_reduce(torch.ones(5))")
    shown = notebook.ok("%ddp collectives")
    assert "all_reduce of 5 float32" in shown.text
    assert any("<svg" in o.get("data", {}).get("text/html", "") for o in shown.outputs)


def test_help_of_the_commands(notebook: Kernel) -> None:
    """Without a command or with `help`: each command with a sentence; with the name of one: its options."""
    shown = notebook.ok("%ddp").text
    assert shown == notebook.ok("%ddp help").text
    for command in ["start", "status", "stacks", "logs", "push", "pull", "post-mortem", "who", "history", "use"]:
        assert re.search(rf"^    {command}\s+[a-z]\w+ ", shown, re.M), command
    assert "--devices" in notebook.ok("%ddp help start").text


@pytest.mark.parametrize(
    ("line", "shows"),
    [
        ("%ddp", "usage: %ddp"),
        ("%ddp no_such", "invalid choice: 'no_such'"),
        ("%ddp no_such", "%ddp help says what each command does"),
        ("%ddp strat", "Did you mean 'start'?"),
        ("%ddp start 2 --devcies cpu", "Did you mean '--devices'?"),
        ("%ddp help strat", "Did you mean 'start'?"),
        ("%ddp start", "%ddp start"),
        ("%ddp start two", "invalid int value: 'two'"),
        ("%ddp start 2", "run already"),
        ("%ddp start 2 --output some", "invalid choice: 'some'"),
        ("%ddp logs 'x", "quotation"),
        ("%%ddp --ranks 1,x\n1", "write them like 0,2-3"),
        ("%%ddp --ranks 3-1\n1", "names no rank"),
        ("%%ddp --no-such\n1", "unrecognized arguments: --no-such"),
    ],
)
def test_arguments_that_make_no_sense(notebook: Kernel, line: str, shows: str) -> None:
    result = notebook.run(line)
    assert result.error == "UsageError" or shows in result.text, result
    assert shows in result.text + result.message + result.traceback, result


def test_ddp_who_and_history(notebook: Kernel) -> None:
    notebook.ok("%%ddp --ranks 0,2\nlives_there = {'a': 1}\ndef of_rank(): pass")
    who = notebook.ok("%ddp who").text.splitlines()
    assert [line.split() for line in who if "lives_there" in line or "of_rank" in line] == [
        ["lives_there", "dict"],
        ["of_rank", "function"],
    ]
    assert not [line for line in who if line.split()[0] in ("exit", "quit", "get_ipython", "open")], who
    history = notebook.ok("%ddp history").text
    assert history.rstrip().endswith("--ranks 0,2\nlives_there = {'a': 1}\ndef of_rank(): pass")


def test_inspection_from_the_ranks(notebook: Kernel) -> None:
    notebook.ok('%%ddp\ndef only_there(amount):\n    """Tells how much."""')

    def told(text: str) -> str | None:
        reply = notebook.client.inspect(text, len(text), reply=True)["content"]
        return reply["data"].get("text/plain", "") if reply["found"] else None

    assert "Tells how much." in str(told("%%ddp\nonly_there"))
    assert "amount" in str(told("%%ddp --ranks 1\nx = only_there("))
    assert told("only_there") is None, "the notebook has no such name"
    assert "Return the absolute value" in str(told("%%ddp\nabs")) and told("%%ddp\nnowhere") is None
    assert "Ranks that stay" in str(told("%%ddp"))
    assert "Tells how much." in notebook.ok("%%ddp\nonly_there?").text


def test_completion_of_nbdist_offers_what_is_public(notebook: Kernel) -> None:
    notebook.ok("import nbdist")
    offered = notebook.client.complete("nbdist.", 7, reply=True)["content"]["matches"]
    public = {name for name in dir(nbdist) if not name.startswith("_")}
    assert {name.rpartition(".")[2] for name in offered} == public


@pytest.mark.skipif(not hasattr(completer, "context_matcher"), reason="IPython before 8.6 cannot be given a matcher")
def test_tab_knows_what_lives_in_the_ranks(notebook: Kernel) -> None:
    notebook.ok("%%ddp\nonly_in_ranks = {'a': 1}.keys()")
    for text, offered in (
        ("%%ddp\nonly_in", "only_in_ranks"),
        ("%%ddp --ranks 1\nprint(only_in", "only_in_ranks"),
        ("%%ddp\nonly_in_ranks.isdis", "isdisjoint"),
    ):
        reply = notebook.client.complete(text, len(text), reply=True)["content"]
        assert any(match.endswith(offered) for match in reply["matches"]), reply
    reply = notebook.client.complete("only_in", 7, reply=True)["content"]
    assert not reply["matches"], "the notebook itself has no such variable"


def test_every_cell_on_the_ranks(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    assert "no session is running" in kernel.run("%autoddp").text + kernel.run("%autoddp").message
    kernel.ok("%ddp start 2 --devices cpu")
    kernel.ok("here = 1\n%autoddp")
    assert kernel.run("here").error == "NameError"
    assert kernel.ok("import torch.distributed as dist\nthere = dist.get_rank()\nthere").text == "0\n"
    assert kernel.ok("\n%%local\nprint('there' in globals(), here)").text == "False 1\n"
    failing = kernel.run("x = 1\ny = 2\n1 / 0")
    assert f"Cell In[{failing.number}], line 3" in failing.plain_traceback or not NUMBERS_CELLS
    assert "----> 3 1 / 0" in failing.plain_traceback
    syntax = kernel.run("x = 1\ny = = 2")
    assert syntax.error == "SyntaxError" and "line 2" in syntax.plain_traceback
    assert kernel.ok("%ddp pull there\n").text == ""
    kernel.ok("%autoddp off")
    assert kernel.ok("print(here, there)").text == "1 0\n"
    kernel.ok("%autoddp\n%ddp stop")
    assert kernel.ok("print(here)").text == "1\n", "without ranks, cells are the notebook's again"
    assert kernel.ok("%%local\nhere").text == "1\n"


def test_cells_on_a_session_of_the_notebook(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist\nfrom nbdist import Session\nmine = Session(1)")
    kernel.ok("mine.run(exec, 'import __main__; __main__.x = 5')")
    assert "not an nbdist.Session" in kernel.run("%ddp use nothing").text + kernel.run("%ddp use nothing").message
    kernel.ok("%ddp use mine\n%ddp use mine")
    assert kernel.ok("%%ddp\nx + 1").text == "6\n"
    result = kernel.run("other = Session(1)\n%ddp use other")
    assert "run already" in result.text + result.message + result.traceback
    kernel.ok("%ddp stop")
    assert kernel.run("mine.run(int)").error == "NbdistError"


def test_a_rank_that_is_not_there(notebook: Kernel) -> None:
    result = notebook.run("%%ddp --ranks 0,7\n1")
    assert result.error == "ValueError" and "got 7: the session has 3 ranks" in result.message


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("%ddp ", {"start", "status", "push", "post-mortem"}),
        ("%ddp st", {"start", "status", "stacks", "stop"}),
        ("%ddp start 2 --", {"--output", "--devices"}),
        ("%ddp start 2 --o", {"--output"}),
        ("%ddp start 2 --output r", {"rank0"}),
        ("%ddp push rat", {"ratings_of_mine"}),
        ("%%ddp --r", {"--ranks"}),
        ("%%ddp --output a", {"all"}),
    ],
)
def test_tab_completes(notebook: Kernel, line: str, offered: set[str]) -> None:
    notebook.ok("ratings_of_mine = 1")
    reply = notebook.client.complete(line, len(line), reply=True)["content"]
    assert offered <= set(reply["matches"]), reply
    if hasattr(completer, "context_matcher"):
        assert len(reply["matches"]) < 30, "nothing else than what may come there"
        assert all(match.startswith(line[reply["cursor_start"] :]) for match in reply["matches"])


def test_help_lists_the_commands(notebook: Kernel) -> None:
    reply = notebook.client.inspect("%ddp", 4, reply=True)["content"]
    assert reply["found"] and "%ddp start N" in reply["data"]["text/plain"]


def test_restart_and_stop(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    assert kernel.run("%%ddp\n1").error == "UsageError" or "%ddp start 2" in kernel.run("%%ddp\n1").text
    kernel.ok("session = %ddp start 2 --timeout 1000 --threads 1 --seed 3 --hold-on-error")
    kernel.ok("%%ddp\nkept = 1")
    before = {p.pid for p in ranks_of(kernel.pid)}
    kernel.ok("%ddp restart")
    assert kernel.run("%%ddp\nkept").error == "NameError"
    after = {p.pid for p in ranks_of(kernel.pid)}
    assert len(after) == 2 and not before & after
    assert kernel.ok("print(session.run(lambda: 5))").text == "5\n", "the magics' session is one like others"
    kernel.ok("%ddp stop")
    assert poll(lambda: not ranks_of(kernel.pid))
    kernel.ok("%ddp start 1")
    kernel.ok("%unload_ext nbdist")
    assert poll(lambda: not ranks_of(kernel.pid)) and kernel.run("%ddp status").text


def test_post_mortem_is_typed_in_the_notebook(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist\n%ddp start 2 --hold-on-error")
    assert kernel.run("%%ddp\ndef f(x):\n    return 1 / x\nf(0)").error == "ZeroDivisionError"
    prompts, text = typed(kernel, "%ddp post-mortem", "p x + 40", "u", "q")
    assert len(prompts) == 3 and all(re.fullmatch(r"\(rank [01]\) ", prompt) for prompt in prompts)
    assert "40\n" in text and "return 1 / x" in text
    assert kernel.ok("%%ddp\n1 + 1").text == "2\n"


def test_a_call_without_ranks_is_debugged_as_usual(kernel: Kernel) -> None:
    kernel.ok(CELLS["a function without ranks"])
    assert kernel.run("in_ddp(0, f, 41)").error == "ZeroDivisionError"
    prompts, text = typed(kernel, "%debug", "p y", "q")
    assert "42\n" in text and len(prompts) == 2
    kernel.ok("import os; os.environ['PYTHONBREAKPOINT'] = 'ray.util.rpdb._driver_set_trace'")  # as by `ray.init`
    prompts, text = typed(kernel, "print('returned', in_ddp(0, g, 6))", "p x * 7", "c")
    assert "42\n" in text and "returned 7" in text


def test_output_of_the_background_goes_to_its_own_cell(kernel: Kernel) -> None:
    cell, other = kernel.start(CELLS["training in the background"], watched=True), ""
    mine, others, kinds = "", "", []
    while "7\n" not in others:
        message = kernel.client.get_iopub_msg()
        parent, content = message["parent_header"].get("msg_id"), message["content"]
        text = content.get("text", "") + content.get("data", {}).get("text/plain", "")
        if parent == cell:
            kinds.append(message["msg_type"])
            mine += text
        elif parent == other:
            others += text
        if "epoch 2" in mine and not other:
            other = kernel.start("print('here', session.status())\nprint(future.result())")
        if "running  train" in others:
            (kernel.cwd / "seen").touch()
    assert [f"epoch {n}" in mine for n in range(5)] == [True] * 5 and "epoch 3" not in others
    assert "'end'" in mine and "'over'" in mine and {"display_data", "update_display_data"} <= set(kinds)
    assert others.endswith("7\n")


def test_a_live_status_follows_the_call(kernel: Kernel) -> None:
    kernel.ok(CELLS["a call that waits"])
    cell = kernel.start("future = session.submit(waits)\nsession.status()", watched=True)
    table = ""
    for state in ("<td>running", "<td>idle"):  # first the call may still be on its way to the rank
        while state not in table:
            message = kernel.client.get_iopub_msg()
            if message["parent_header"].get("msg_id") == cell and "data" in message["content"]:
                table = message["content"]["data"]["text/html"]
        (kernel.cwd / "seen").touch()


def test_the_kernel_can_end_while_the_background_works(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.ok(CELLS["a call in the background"])
    assert poll(lambda: len(ranks_of(kernel.pid)) == 2)
    family = psutil.Process(kernel.pid).children(recursive=True)
    kernel.manager.shutdown_wait_time = 10_000.0  # it would be killed after five seconds
    try:
        kernel.manager.shutdown_kernel(now=False)
        assert poll(lambda: not living(family))
    finally:
        kernel.close()


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 20)), min_size=1))
def test_rank_lists(parts: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in parts)
    assert numbers(text) == [rank for first, more in parts for rank in range(first, first + more + 1)]


@pytest.mark.parametrize("text", ["", ",", "a", "1-", "-1", "1--2", "2-1", "1.5"])
def test_no_rank_lists(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        numbers(text)
