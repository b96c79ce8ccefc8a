"""Memory that ends: a rank dies and not the notebook, and what does not fit is refused."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Kernel, poll

GB = 1 << 30


@contextlib.contextmanager
def container(limit: int) -> Iterator[Path]:
    """Make a control group with a limit of memory in bytes."""
    name = f"nbdist-test-{secrets.token_hex(4)}"
    for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, name)
        try:
            group.mkdir()
            (group / file).write_text(str(limit))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            assert poll(functools.partial(removed, group))
        return
    pytest.skip("needs root, and control groups that can be made")


def removed(group: Path) -> bool:
    """Remove a control group; returns whether it is gone. One with processes stays."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.mark.started  # in the container, as all that it starts
@pytest.mark.long("fills the memory of a container")
def test_a_container_whose_memory_ends(tmp_path: Path) -> None:
    with container(3 * GB) as group, contextlib.closing(Kernel(tmp_path)) as kernel:
        kernel.ok(f"import os\nopen('{group}/cgroup.procs', 'w').write(str(os.getpid()))")
        kernel.ok("import time\nimport numpy as np\nfrom nbdist import Session, in_ddp\nin_ddp(2, print)")
        kernel.ok("held = np.ones(225_000_000)")  # more than half
        refused = kernel.run("in_ddp(2, lambda: held.shape)")
        assert refused.error == "MemoryError", refused
        assert "the data that the call takes along: 1,800 MB of memory are needed" in refused.message
        assert " of the 3,221 MB of the container" in refused.message
        strided = kernel.run("in_ddp(2, lambda strided: 1, held[:200_000_000].reshape(2, -1).T[1:])")
        assert strided.error == "MemoryError" and "in one piece" in strided.message, strided
        kernel.ok("def answer():\n    return np.ones(170_000_000)\nsession = Session(2)\nsession.run(os.getpid)")
        answer = kernel.run("session.run(answer)")
        assert answer.error in ("MemoryError", "RankDied"), answer
        eaten = kernel.run(
            "def eat():\n    parts = []\n    while True:\n        parts.append(np.ones(2_500_000))\nin_ddp(2, eat)"
        )
        assert eaten.error == "RankDied" and "SIGKILL" in eaten.message, eaten
        assert kernel.ok("print(int(held[7]), in_ddp(2, lambda: 6))").text == "1 6\n"


def test_ranks_and_what_they_start_are_killed_first() -> None:
    from nbdist import in_ddp

    def oom() -> tuple[str, str]:
        own = Path("/proc/self/oom_score_adj").read_text()
        return own, os.popen("cat /proc/self/oom_score_adj").read()

    if not os.path.exists("/proc/self/oom_score_adj"):
        pytest.skip("only Linux has it")
    assert in_ddp(1, oom) == ("1000\n", "1000\n")
