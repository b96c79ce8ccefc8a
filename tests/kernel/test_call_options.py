"""Choices for one call: options, ranks, an argument for each rank, how it is waited for."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import os
import re
import sys
import time
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from calls import boom
from conftest import Kernel, poll
from IPython.core.error import UsageError

import nbdist
from nbdist import CaptureError, RankTimeout, Session, explain, in_ddp, per_rank
from nbdist.kernel.magics.command_line import line_parser, start_options
from nbdist.kernel.options import SessionOptions

RANKS = 3


# ----------------------------------------------------------------------------------------------------------- options


def test_sessions_in_ddp_and_the_magic_have_the_same_options() -> None:
    """With the same defaults and types, and all of them in the signatures that help() and completion show."""
    options = dict(inspect.signature(SessionOptions).parameters)
    assert list(options) == [field.name for field in dataclasses.fields(SessionOptions)]
    of_session = dict(inspect.signature(Session).parameters)
    assert of_session.pop("nranks").kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert of_session == options
    of_in_ddp = {name: p for name, p in inspect.signature(in_ddp).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert dict(inspect.signature(in_ddp.options).parameters) == options | of_in_ddp
    documented = re.findall(r"^    (\w+): ", (inspect.getdoc(Session) or "").partition("Raises:")[0], re.MULTILINE)
    assert documented == ["nranks", *options]


def test_each_option_can_be_said_to_the_magic() -> None:
    parser, _ = line_parser(MagicMock())
    said = {
        "--backend gloo": {"backend": "gloo"},
        "--devices cuda:0,cuda:2": {"devices": ["cuda:0", "cuda:2"]},
        "--threads bind": {"threads": "bind"},
        "--timeout 1.5": {"timeout": 1.5},
        "--output tabs": {"output": "tabs"},
        "--lines all": {"lines": None},
        "--env A=1 --env B=c=d": {"env": {"A": "1", "B": "c=d"}},
        "--seed 3": {"seed": 3},
        "--seed-ranks": {"seed_ranks": True},
        "--no-settings": {"settings": False},
        "--engine ray": {"engine": "ray"},
        "--start spawn": {"start": "spawn"},
        "--hold-on-error": {"hold_on_error": True},
        "--on-hang raise": {"on_hang": "raise"},
        "--check nan,ranks:5": {"check": ["nan", "ranks:5"]},
        "--restarts 2": {"restarts": 2},
        "--min-ranks 1": {"min_ranks": 1},
        "--name ratings": {"name": "ratings"},
        "--name ratings --idle 60": {"name": "ratings", "idle": 60.0},
        "--name ratings --keep 1048576": {"name": "ratings", "keep": 1 << 20},
    }
    for line, options in said.items():
        assert start_options(parser.parse_args(["start", "2", *line.split()])) == options, line
        SessionOptions(**options)
    names = {name: None for options in said.values() for name in options}
    assert list(names) == list(inspect.signature(SessionOptions).parameters)
    assert start_options(parser.parse_args(["start", "2"])) == {}, "a session knows its defaults itself"
    with pytest.raises(UsageError, match="--env must be NAME=VALUE, got 'A'"):
        parser.parse_args(["start", "2", "--env", "A"])


def named(
    restarts: int, settings: str, min_ranks: int, hold_on_error: str, ngpus: int, fn: int, self: int
) -> tuple[Any, ...]:
    return restarts, settings, min_ranks, hold_on_error, ngpus, fn, self


def test_a_functions_parameters_may_have_the_names_of_options(session: Session) -> None:
    given: Any = {"settings": "s", "min_ranks": 3, "hold_on_error": "h", "ngpus": 4, "fn": 5, "self": 6}
    expected = (2, "s", 3, "h", 4, 5, 6)
    for ngpus in (0, 1):
        assert in_ddp(ngpus, named, restarts=2, **given) == expected
    assert in_ddp.options(restarts=1, threads=1)(1, named, restarts=2, **given) == expected
    assert session.run(named, 2, **given) == session.submit(named, 2, **given).result() == expected
    assert session.run_all(named, 2, **given) == [expected] * RANKS
    assert session.explain(named, 2, **given).items


def test_a_functions_parameters_may_have_the_names_of_what_calls_take(session: Session) -> None:
    def taken(imports: int, need: int, ranks: int = 0) -> tuple[int, ...]:
        return imports, need, ranks

    assert in_ddp.options()(1, taken, imports=1, need=2, ranks=3) == (1, 2, 3)
    assert session.call(taken, kwargs={"imports": 1, "need": 2, "ranks": 3}) == [(1, 2, 3)]
    assert session.submit(functools.partial(taken, imports=1, need=2), ranks=[1]).result() == (1, 2, 0)


def test_each_way_to_call_has_the_same_keywords_of_its_own() -> None:
    def own(call: Any) -> list[str]:
        return [name for name, p in inspect.signature(call).parameters.items() if p.kind is p.KEYWORD_ONLY]

    assert own(in_ddp) == own(explain) == ["imports", "need"]
    for call in (Session.run, Session.run_all, Session.submit, Session.explain):
        assert own(call) == ["imports", "need", "ranks"], call
    assert own(Session.profile) == ["imports", "need", "ranks", "skip", "steps"]


def test_options_hold_in_the_call() -> None:
    def seen() -> tuple[Any, ...]:
        return torch.get_num_threads(), os.environ["OF_THIS_CALL"], torch.initial_seed(), dist.get_world_size()

    call = in_ddp.options(threads=2, env={"OF_THIS_CALL": "yes"}, seed=7, devices="cpu", backend="gloo")
    assert call(2, seen) == (2, "yes", 7, 2)
    begin = time.monotonic()
    with pytest.raises(RankTimeout):
        in_ddp.options(timeout=0.5)(1, time.sleep, 1000)
    assert time.monotonic() - begin >= 0.5


def test_the_timeout_of_collectives_is_a_sessions() -> None:
    def watch() -> None:
        init = dist.init_process_group

        def noted(*args: Any, **options: Any) -> None:
            import __main__

            __main__.options = options
            init(*args, **options)

        dist.destroy_process_group()  # so that the next call needs a new one
        dist.init_process_group = noted

    def noted() -> float:
        import __main__

        return float(__main__.options["timeout"].total_seconds())

    with Session(2, backend={"timeout": 1000}) as own:
        own.run_all(watch)
        assert own.run_all(noted) == [1000.0, 1000.0]


def test_all_arguments_are_the_functions() -> None:
    def takes(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    mine = {"imports": 1, "need": 2, "restarts": 3, "settings": 4, "timeout": 5, "fn": 6, "self": 7}
    for ngpus in (0, 1):
        assert in_ddp.options(imports="import math")(ngpus, takes, 8, **mine) == ((8,), mine)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"no_such": 1}, TypeError),
        ({"output": "some"}, ValueError),
        ({"timeout": 0}, ValueError),
        ({"restarts": -1}, ValueError),
        ({"check": "nans"}, ValueError),
        ({"check": "nan:5"}, ValueError),
        ({"check": ["nan", "ranks:0"]}, ValueError),
        ({"check": True}, TypeError),
        ({"check": ["nan", 1]}, TypeError),
        ({"restarts": 1, "min_ranks": 2}, ValueError),
        ({"restarts": 1, "min_ranks": 0}, ValueError),
        ({"restarts": 0, "min_ranks": 1}, ValueError),
        ({"restarts": 1, "min_ranks": "all"}, TypeError),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        in_ddp.options(**options)(1, int)


def test_per_rank_needs_all_ranks() -> None:
    with Session(2, restarts=1, min_ranks=1) as own:
        with pytest.raises(ValueError, match=r"argument 1: per_rank.* a restart may leave fewer \(min_ranks=\)"):
            own.run(int, per_rank([1, 2]))
        assert own.run_all(int, per_rank([1, 2]), ranks=[0, 1]) == [1, 2]


def test_output_of_one_call(kernel: Kernel) -> None:
    kernel.ok("import torch.distributed as dist\nfrom nbdist import in_ddp\ndef f(): print('I am', dist.get_rank())")
    seen = kernel.ok("in_ddp.options(output='all')(2, f)").text
    assert sorted(seen.splitlines()) == ["[rank 0] I am 0", "[rank 1] I am 1"]
    assert kernel.ok("in_ddp.options(output='none')(2, f)").text == ""


# ------------------------------------------------------------------------------------------------------------- ranks


def test_ranks_chooses_the_ranks_of_a_call(session: Session) -> None:
    assert session.run(dist.get_rank, ranks=[2, 1]) == 1
    assert session.run_all(dist.get_rank, ranks=(2, 0, 2)) == [0, 2]
    assert session.submit(dist.get_rank, ranks=[2]).result() == 2
    for ranks, error in (([3], ValueError), ([], ValueError), (["0"], TypeError)):
        with pytest.raises(error):
            session.run(int, ranks=ranks)


# ---------------------------------------------------------------------------------------------------------- per_rank


def test_each_rank_gets_its_own(session: Session) -> None:
    def given(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    parts = [torch.full((50_000,), float(rank)) for rank in range(3)]
    for rank, (args, kwargs) in enumerate(session.run_all(given, per_rank(parts), 5, name=per_rank("abc"))):
        assert torch.equal(args[0], parts[rank]) and args[1:] == (5,) and kwargs == {"name": "abc"[rank]}
    assert session.run_all(given, per_rank(range(2)), ranks=[0, 2]) == [((0,), {}), ((1,), {})]
    assert session.submit(given, per_rank([1, 2, 3])).result() == ((1,), {})
    assert in_ddp(0, given, per_rank(["only"])) == (("only",), {})


def test_per_rank_needs_an_item_for_each_rank(session: Session) -> None:
    for ranks, count in ((None, 3), ([1], 1)):
        with pytest.raises(
            ValueError, match=rf"argument 1: per_rank\(\) must have an item for each of {count} ranks, got 2"
        ):
            session.run(print, per_rank([1, 2]), ranks=ranks)
    with pytest.raises(ValueError, match=r"argument key: per_rank\(\) must have an item for each of 1 ranks, got 0"):
        in_ddp(0, sorted, [], key=per_rank([]))


def test_per_rank_is_an_argument_itself(session: Session) -> None:
    with pytest.raises(CaptureError, match=r"per_rank.* must be an argument of the function itself"):
        session.run(print, [per_rank([1, 2, 3])])
    assert [item.name for item in explain(print, per_rank([1, 2])).items] == ["print", "argument 1"]


# ------------------------------------------------------------------------------------------------------------- await


def test_a_call_in_the_background_can_be_awaited(session: Session) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(session.submit(max, 1, 2), session.submit(max, 3, 4))

    assert asyncio.run(both()) == [2, 4]

    async def fails() -> None:
        await session.submit(boom)

    with pytest.raises(ValueError, match="boom"):
        asyncio.run(fails())


def test_cancelling_an_await_cancels_the_call(session: Session) -> None:
    future = session.submit(time.sleep, 1000)

    async def give_up() -> None:
        await asyncio.wait_for(future, 0.5)

    with pytest.raises((TimeoutError, asyncio.TimeoutError)):
        asyncio.run(give_up())
    assert poll(future.done) and future.cancelled()
    assert session.run(max, 1, 2) == 2


def test_await_in_a_cell(kernel: Kernel) -> None:
    kernel.ok("from nbdist import Session\nsession = Session(2)")
    assert kernel.ok("print(await session.submit(max, 1, 2))").text == "2\n"


def test_scatter_is_public() -> None:
    assert nbdist.per_rank is per_rank


def test_names_that_are_given_to_this_process_are_no_variables_of_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    main = vars(sys.modules["__main__"])
    monkeypatch.setitem(main, "rate", 0.01)
    monkeypatch.setitem(main, "mean", "my own")
    look = eval("lambda: (rate, mean([3]))", main)
    assert in_ddp(0, look, imports="from statistics import mean", need={"rate": 0.1}) == (0.1, 3)
    assert (main["rate"], main["mean"]) == (0.01, "my own")

    def assigns() -> None:
        main["rate"] = 7

    in_ddp(0, assigns, need={"rate": 0.1})
    assert main["rate"] == 7, "what the function itself assigns stays, as it runs in this process"
    with pytest.raises(ZeroDivisionError):
        in_ddp(0, lambda: 1 / 0, need={"other": 1})
    assert "other" not in main
