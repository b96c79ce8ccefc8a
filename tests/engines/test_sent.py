"""The code that Ray runs on a node before nbdist is known to be there."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

from nbdist.engines.ray.driver import sent

pytest.importorskip("ray", reason="needs Ray")

#: Another interpreter, which finds no nbdist: it is given a pickle, and answers with a text.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "nbdist":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from ray import cloudpickle
print(cloudpickle.loads(sys.stdin.buffer.read())())
"""


def on_a_node_without_nbdist(code: object) -> str:
    from ray import cloudpickle

    sent.by_value()
    done = subprocess.run([sys.executable, "-c", WITHOUT], input=cloudpickle.dumps(code), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.mark.slow
@pytest.mark.started
def test_a_node_without_nbdist_says_so() -> None:
    differs = on_a_node_without_nbdist(functools.partial(sent.Host.differences, sent.Host(), {"nbdist": "1.2.3"}))
    assert differs == "nbdist is not installed, here 1.2.3"
    work = functools.partial(sent.work_at_once, "a call", {"nbdist": "1.2.3"})
    assert differs in on_a_node_without_nbdist(work)


def test_builds_of_one_version_do_not_differ() -> None:
    assert sent._build_of("2.13.0+cpu") == sent._build_of("2.13.0+cu130") == "2.13.0"
    assert sent._build_of(None) is None
