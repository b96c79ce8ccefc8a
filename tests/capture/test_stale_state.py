"""Changes in the notebook, seen by the next call: a machine of random steps compares the notebook with its ranks."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cells import cells
from conftest import Kernel
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

CELLS = cells("capture/cells/stale.py")
MODULE = "RATE = 0.5\nOPTIONS = {{'k': 0}}\ndef value(): return {number}\n# {fill}\n"
NUMBERS = st.integers(1, 9)
PLACES = ["sessions[0].run", "sessions[1].run", "fresh"]


#: Numbers of files: the module may be a link to the file of an earlier example.
VERSIONS = itertools.count()


class Notebook(RuleBasedStateMachine):
    """Changes things in a kernel, and compares what it answers then with what ranks do."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel
        self.file = kernel.cwd / "own_state.py"
        self.edited = False  # after the notebook has loaded it
        self.edits = 0
        self.told: set[str] = set()
        """The places whose ranks have another module, after the first notice about it."""
        self.write(self.file)
        self.kernel.ok(CELLS["reset"])

    def write(self, file: Path) -> None:
        """A version of the module, each with another value and of another length."""
        self.edits += 1
        file.write_text(MODULE.format(number=self.edits, fill="#" * (self.edits % 50)))

    @rule(name=st.sampled_from(["a", "b"]), number=NUMBERS)
    def assign(self, name: str, number: int) -> None:
        self.kernel.ok(f"{name} = {number}")

    @rule(number=NUMBERS)
    def define(self, number: int) -> None:
        self.kernel.ok(f"def c(): return {number}")

    @rule(name=st.sampled_from(["a", "b", "c"]))
    def delete(self, name: str) -> None:
        self.kernel.ok(f"globals().pop({name!r}, None)")

    @rule(name=st.sampled_from(["first", "second"]), number=st.none() | NUMBERS)
    def change_a_class(self, name: str, number: int | None) -> None:
        gone = f"if {name!r} in vars(Kind): del Kind.{name}"
        self.kernel.ok(gone if number is None else f"Kind.{name} = {number}")

    @rule(number=st.none() | NUMBERS)
    def patch(self, number: int | None) -> None:
        self.kernel.ok(f"string.capwords = {'capwords' if number is None else f'lambda text: {number}'}")

    @rule(number=NUMBERS)
    def set_in_a_module(self, number: int) -> None:
        self.kernel.ok(f"own_state.RATE = {number}\nown_state.OPTIONS['k'] = {number}")

    @rule(
        line=st.sampled_from(
            [
                "os.environ['STATE_ONE'] = '1'",
                "os.environ.pop('STATE_ONE', None)",
                "os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()",
                "os.environ.pop('TZ', None); time.tzset()",
                "os.makedirs('other', exist_ok=True); os.chdir('other')",
                "os.chdir(HOME)",
                "getcontext().prec = 9",
                "getcontext().prec = 28",
                "logging.getLogger('state').setLevel(30)",
                "logging.getLogger('state').setLevel(0)",
                "logging.getLogger('state').addFilter(lambda record: True)",
                "logging.getLogger('state').filters.clear()",
                "builtins.of_state = 1",
                "vars(builtins).pop('of_state', None)",
                "gc.set_threshold(900)",
                "gc.set_threshold(*THRESHOLDS)",
                "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
                "signal.signal(signal.SIGUSR1, signal.SIG_DFL)",
                "shutil.register_archive_format('state', lambda *args: a)",
                "shutil._ARCHIVE_FORMATS.pop('state', None)",
                "sys.argv = ['notebook', '--rate']",
                "sys.argv = ['notebook']",
                "rate.set(2)",
                "rate.set(1)",
                "warnings.simplefilter('error')",
                "warnings.resetwarnings()",
            ]
        )
    )
    def change_a_setting(self, line: str) -> None:
        self.kernel.ok(line)

    @rule(way=st.sampled_from(["write", "replace", "older", "copy", "remove", "link", "touch"]), reload=st.booleans())
    def edit(self, way: str, reload: bool) -> None:
        if way == "touch":
            os.utime(self.file)
        else:
            new = self.file.with_name(f"version{next(VERSIONS)}.txt")
            self.write(new)
            if way == "older":
                os.utime(new, (10_000, 10_000))
            if way == "write":
                self.file.write_text(new.read_text())
            elif way == "copy":
                shutil.copy2(new, self.file)
            else:
                if way == "remove":
                    self.file.unlink()
                if way == "link":
                    link = self.file.with_name("link")
                    link.symlink_to(new)
                    new = link
                os.replace(new, self.file)
            self.edited = True
        if reload:
            self.kernel.ok("importlib.invalidate_caches()\nimportlib.reload(own_state)")
            self.edited = False
            self.told.clear()

    @rule(place=st.sampled_from(PLACES))
    def call(self, place: str) -> None:
        result = self.kernel.run(f"compare({place})")
        if result.error is not None:  # the version that the notebook has reloaded is in no file any more
            assert self.edited and "is stale in this rank" in result.message, result.traceback
            return
        said = result.text
        if self.edited and "edited after the notebook had imported it" in said:
            self.told.add(place)
        assert "same (" in said or (place in self.told and "module (" in said), said
        if place == "fresh":  # fresh ranks give a notice each time
            self.told.discard(place)


def kernel_with_sessions(kernel: Kernel) -> Kernel:
    (kernel.cwd / "own_state.py").write_text(MODULE.format(number=0, fill=""))
    kernel.ok(CELLS["begin"])
    return kernel


@pytest.mark.parametrize(
    "examples, steps",
    [(4, 35), pytest.param(8, 40, marks=pytest.mark.long("three hundred steps"))],
)
def test_ranks_answer_as_the_notebook_does(kernel: Kernel, examples: int, steps: int) -> None:
    kernel_with_sessions(kernel)
    how: Any = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
    how["phases"] = [Phase.generate]  # to make a failure shorter would take minutes
    run_state_machine_as_test(
        lambda: Notebook(kernel), settings=settings(max_examples=examples, stateful_step_count=steps, **how)
    )


def test_a_patch_that_is_taken_back_after_a_module_was_reloaded(kernel: Kernel) -> None:
    """A module that is executed again makes ranks apply all patches again, also patches of other modules."""
    state = Notebook(kernel_with_sessions(kernel))
    state.patch(5)
    state.call("sessions[0].run")
    state.edit("write", reload=True)
    state.patch(None)
    state.call("sessions[0].run")
