"""Modules that a notebook has imported for what they do to others are imported in ranks, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cells import cells
from conftest import Kernel

from nbdist.capture.side_effects import modules_in

CELLS = cells("capture/cells/side_effects.py")
ROOT = str(Path(__file__).parent.parent.parent)


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        ("import a, b.c as d", ["a", "b.c"]),
        ("from a.b import c as d, e", ["a.b", "a.b.c", "a.b.e"]),
        ("from a import *", ["a", "a.*"]),
        ("try:\n    import a\nexcept ImportError:\n    import b\nif x:\n    import c", ["a", "b", "c"]),
        ("def f():\n    import a\nlambda: __import__('b')\nclass C:\n    import d", ["d"]),
        ("from . import a", []),
        ("important = 5\nimport (", []),
        ("'import a'\nx = 1", []),
    ],
)
def test_the_modules_of_a_cell(cell: str, named: list[str]) -> None:
    assert sorted(modules_in(cell)) == sorted(named)


def packages(folder: Path) -> None:
    """`course`, whose `course.extras` gives its class another method, and `stranger`, which gives it a third."""
    (folder / "course").mkdir()
    (folder / "course" / "__init__.py").write_text("")
    (folder / "course" / "learner.py").write_text("class Learner:\n    pass\ndef make(): return Learner()\n")
    patch = "from course.learner import Learner\ndef {0}(self): return '{0}'\nLearner.{0} = {0}\n"
    (folder / "course" / "extras.py").write_text(patch.format("bonus"))
    (folder / "stranger.py").write_text(patch.format("gift"))
    (folder / "bystander.py").write_text("open('imported', 'a').write('!')\n")


def test_a_package_that_a_call_uses_is_patched_as_in_the_notebook(kernel: Kernel) -> None:
    packages(kernel.cwd)
    kernel.ok("from nbdist import Session\nfrom course.learner import make\nimport bystander\nsession = Session(2)")
    kernel.ok("def train(name): return getattr(make(), name)()")
    kernel.ok("session.run(make)")
    kernel.ok("from course.extras import *")
    assert kernel.ok("session.run(train, 'bonus')").text == "'bonus'\n"
    assert (kernel.cwd / "imported").read_text() == "!", "of other packages nothing is imported"
    missing = kernel.run("import stranger\nsession.run(train, 'gift')")
    assert missing.error == "AttributeError"
    assert "In the notebook, stranger has given Learner its 'gift'" in missing.plain_traceback
    assert "imports='import stranger'" in missing.plain_traceback
    assert kernel.ok("session.run(train, 'gift', imports='import stranger')").text == "'gift'\n"
    assert "given" not in kernel.run("session.run(train, 'no_such')").plain_traceback


def test_a_warning_names_a_module_that_ranks_cannot_import(kernel: Kernel) -> None:
    packages(kernel.cwd)
    (kernel.cwd / "course" / "broken.py").write_text(
        "import os\nif 'RANK' in os.environ: raise LookupError('no GPU')\n"
    )
    kernel.ok("from nbdist import in_ddp\nfrom course.learner import make\nimport course.broken")
    result = kernel.ok("print(type(in_ddp(2, make)).__name__)")
    assert "Learner\n" in result.text
    assert (
        "course.broken, which the notebook has imported, cannot be imported in this rank (LookupError: no"
        in result.text
    )


@pytest.mark.long("larger trainings")
def test_methods_that_fastai_gives_its_learners_elsewhere() -> None:
    code = """
import sys, fastai.learner
from nbdist.capture.side_effects import missing_import
for name in ("distrib_ctx", "no_such"):
    print(missing_import(AttributeError(f"'Model' object has no attribute '{name}'")))
"""
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    known, unknown = done.stdout.splitlines()
    assert "from fastai.distributed: `from fastai.distributed import *` in a cell" in known and not unknown


@pytest.mark.long("interpreters of their own")
def test_in_a_script(tmp_path: Path) -> None:
    packages(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(CELLS["a script"])
    environ = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environ)
    assert done.stdout == "bonus\n", done.stderr


@pytest.mark.slow
def test_fastai(kernel: Kernel) -> None:
    pytest.importorskip("fastai")
    kernel.ok("from nbdist import in_ddp\nfrom fastai.collab import *\nfrom fastai.distributed import *")
    assert kernel.ok(CELLS["fastai"]).text == "True\n"
