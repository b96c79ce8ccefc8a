"""Named sessions on clusters of Ray: the keeper has the driver, and what the cluster needs to stay."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cells import cells
from conftest import Kernel, living, poll
from test_clusters import SMALL, srun  # noqa: F401 (a fixture)
from test_named import family, state_folder  # noqa: F401 (a fixture of each test)

from nbdist import RayOptions, Session, attach, sessions
from nbdist.wire.session_folder import names

pytestmark = pytest.mark.long("clusters of Ray")

CELLS = cells("kernel/cells/named_clusters.py")


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Any]:
    """Runs a cell until its third step, and kills its kernel; returns the processes that this one had started."""
    kernel = Kernel(tmp_path, env={"PATH": os.environ["PATH"]})

    def run_and_kill(cell: str) -> list[psutil.Process]:
        kernel.ok(f"SMALL = {SMALL}\n{CELLS['training']}")
        message = kernel.start(CELLS[cell])
        kernel.finish(message, until=lambda result: "step 2" in result.text)
        started = psutil.Process(kernel.pid).children(recursive=True)
        os.kill(kernel.pid, signal.SIGKILL)
        assert poll(lambda: not psutil.pid_exists(kernel.pid) or not living([psutil.Process(kernel.pid)]))
        return started

    try:
        yield run_and_kill
    finally:
        kernel.close()
        for name in names():
            with contextlib.suppress(Exception):
                attach(name).close()


def of_ray(processes: list[psutil.Process]) -> tuple[set[str], set[str]]:
    """The names of Ray's processes among these, and the folders in /tmp where these have their files."""
    found = [one for one in living(processes) if one.name() in ("raylet", "gcs_server")]
    folders = {folder for one in found for folder in re.findall(r"/tmp/ray-\w+", " ".join(one.cmdline()))}
    return {one.name() for one in found}, folders


def check_and_close(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], of_kernel: list[psutil.Process]
) -> None:
    """The call goes on after its kernel, its value and output are whole, and nothing stays after the session."""
    (folder / "goes on").touch()
    session = attach(name)
    assert session.result() == [(30.0, "yes" if name == "private" else None, str(folder))] * 2
    followed: list[str] = []  # by `attach`, in the background

    def is_shown() -> bool:
        followed.append(capsys.readouterr().out)
        return "step 5\n" in "".join(followed)

    assert poll(is_shown)
    session.replay()
    assert capsys.readouterr().out.splitlines() == [f"rank 0 step {step}" for step in range(6)]
    session.replay(output="all")
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == sorted(f"[rank {r}] rank {r} step {step}" for r in range(2) for step in range(6))
    assert session.run(os.getppid) > 0 and session.stacks() is not None
    started = [*family(name), *of_kernel]
    programs, folders = of_ray(started)
    assert programs == {"raylet", "gcs_server"} and len(folders) == 1, "Ray goes on without the notebook"
    session.close()
    assert poll(lambda: not living(started)), living(started)
    assert poll(lambda: not any(map(os.path.exists, folders)))


def test_a_ray_of_the_keepers_own(killed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_kernel = killed("a private Ray")
    assert [one.state for one in sessions() if one.name == "private"] == ["running"]
    check_and_close("private", tmp_path, capsys, of_kernel)


def test_machines_that_the_killed_notebook_had_started(
    srun: Path,  # noqa: F811
    killed: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_and_close("slurm", tmp_path, capsys, killed("nodes of Slurm"))


def test_a_lost_node(ray_cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The call starts again on the node that is left, and so do the ones of all who attach."""
    node = ray_cluster.add_node(num_cpus=1, resources={"second": 1.0}, object_store_memory=80 << 20)
    options = RayOptions(
        address=ray_cluster.address,
        resources={"second": 1.0},
        cpus=0.5,
        placement="strict_spread",
        linger=0.0,
        wait=30.0,
    )

    def world(folder: str) -> tuple[int, str]:
        import time

        import torch.distributed as dist

        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "of", dist.get_world_size())
        if dist.get_world_size() == 2:
            Path(folder, f"node-{dist.get_rank()}").touch()
            time.sleep(1000)
        return dist.get_world_size(), os.environ["TORCHELASTIC_RESTART_COUNT"]

    with Session(2, name="node", engine=options, restarts=1, min_ranks=1) as session:
        future = session.submit(world, str(tmp_path))
        assert poll(lambda: future.done() or len(list(tmp_path.glob("node-*"))) == 2, 300)
        assert not future.done(), future.exception()
        watcher = attach("node")
        ray_cluster.remove_node(node, allow_graceful=False)
        assert future.result() == (1, "1")
        assert watcher.result() == (1, "1") and watcher.nranks == session.nranks == 1
        capsys.readouterr()
        attach("node").replay()
        shown = capsys.readouterr()
        assert "attempt 0 of 2" in shown.out and "attempt 1 of 1" in shown.out
        assert "Starting again on fresh ranks (1 of 1 restarts)" in shown.err
