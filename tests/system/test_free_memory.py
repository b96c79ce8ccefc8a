"""Free memory of machines, containers and limits is read; what does not fit is refused."""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.system import free_memory
from nbdist.system.free_memory import Limit, check_fits, memory_limits
from nbdist.system.segments import Segment

GB = 1_000_000_000

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the system's files about control groups and memory by files in a folder."""
    monkeypatch.setattr(free_memory, "_CGROUPS", str(tmp_path))
    monkeypatch.setattr(free_memory, "_OWN_GROUPS", str(tmp_path / "own"))
    monkeypatch.setattr(free_memory, "_MEMORY", str(tmp_path / "meminfo"))
    (tmp_path / "meminfo").write_text("MemTotal: 4000000 kB\nMemAvailable: 3000000 kB\nSwapFree: 0 kB\nHugePages: 0\n")
    (tmp_path / "own").write_text("0::/\n")
    return tmp_path


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


SLEEPER = "import resource, time; resource.setrlimit(resource.RLIMIT_AS, (2000000000,) * 2); print(); time.sleep(1000)"


def test_a_process_that_got_no_memory_is_told_of_its_address_space() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        for words in ("MemoryError: ", "RuntimeError: can't start new thread", "std::bad_alloc"):
            assert "address space is limited to 2,000 MB" in free_memory.lack_of_address_space(words, process.pid)
        assert free_memory.lack_of_address_space("KeyError: 3", process.pid) == ""
        assert free_memory.lack_of_address_space("MemoryError", os.getpid()) == ""
        process.kill()
    assert free_memory.lack_of_address_space("MemoryError", process.pid) == "", "the bound of this process counts"


def test_a_machine_without_containers(machine: Path) -> None:
    assert memory_limits() == [Limit("this machine", 4000000 << 10, 3000000 << 10)]
    (machine / "meminfo").unlink()
    (machine / "own").unlink()
    assert memory_limits() == []


def test_copies_of_files_count_as_free(machine: Path) -> None:
    group(machine, max=3 * GB, current=2 * GB, stat="anon 5\nactive_file 100\ninactive_file 20\nslab_reclaimable 3")
    assert memory_limits()[1:] == [Limit("the container", 3 * GB, GB + 123)]


def test_the_groups_above_hold_too(machine: Path) -> None:
    (machine / "own").write_text("1:name=systemd:/job\n0::/job/step\n")
    group(machine / "job" / "step", max="max", current=5)
    group(machine / "job", max=GB, current=GB // 4)
    group(machine, max=2 * GB, current=GB)
    assert [limit.free for limit in memory_limits()[1:]] == [GB - GB // 4, GB]


def test_cgroups_v1_in_a_container_with_the_machines_path(machine: Path) -> None:
    (machine / "own").write_text("5:cpu:/\n4:memory,x:/docker/1234\n0::/\n")
    stat = "active_file 1\ntotal_active_file 200\ntotal_inactive_file 30"
    group(machine / "memory", limit_in_bytes=2 * GB, usage_in_bytes=GB, stat=stat)
    assert memory_limits()[1:] == [Limit("the container", 2 * GB, GB + 230)]
    group(machine / "memory", limit_in_bytes=(1 << 63) - 4096)
    assert len(memory_limits()) == 1


def test_swap_counts_as_free_as_far_as_the_group_may_use_it(machine: Path) -> None:
    (machine / "meminfo").write_text("MemTotal: 4000000 kB\nMemAvailable: 3000000 kB\nSwapFree: 1000 kB\n")
    group(machine, max=GB, current=GB, stat="anon 5")
    assert memory_limits()[1].free == 1000 << 10
    (machine / "memory.swap.max").write_text("5000\n")
    (machine / "memory.swap.current").write_text("1000\n")
    assert memory_limits()[1].free == 4000


def test_data_that_does_not_fit_is_refused_with_both_sizes(machine: Path) -> None:
    group(machine, max=2 * GB, current=GB + GB // 2, stat="anon 5")
    check_fits(GB // 4, "the data")
    check_fits(1, "a little")
    with pytest.raises(MemoryError, match=r"the data: 600 MB .* 500 MB are free of the 2,000 MB of the container"):
        check_fits(6 * GB // 10, "the data")


def test_a_pickle_that_grows_beyond_the_free_memory_is_refused(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and other small objects are in the pickle itself."""
    monkeypatch.setattr(free_memory, "_SPARE", 1 << 16)
    monkeypatch.setattr(free_memory, "_STEP", 1 << 20)
    group(machine, max=GB, current=GB - (3 << 20), stat="anon 5")
    file = free_memory.MeasuredFile("the data")
    pickle.Pickler(file).dump(["x" * 1000] * 100 + [f"{number:01000}" for number in range(2000)])
    assert len(pickle.loads(file.getbuffer())) == 2100
    with pytest.raises(
        MemoryError, match=r"the data, of which 2 MB are written: \d MB .* 3 MB are free of the 1,000 MB"
    ):
        pickle.Pickler(file).dump([b"x" * (4 << 20)])


def test_a_segment_is_reserved() -> None:
    segment = Segment.create(1 << 20)
    try:
        assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20
    finally:
        segment.close()


LIMITED = """
import resource
import numpy as np
from nbdist.system.segments import Segment
fds = len(__import__("os").listdir("/proc/self/fd"))
resource.setrlimit(resource.{limit}, ({size}, resource.RLIM_INFINITY))
try:
    Segment.create(4 << 30).private()
except MemoryError as exc:
    print(exc)
"""


@pytest.mark.parametrize(
    ("limit", "size", "told"),
    [
        (
            "RLIMIT_FSIZE",
            1 << 20,
            "4,295 MB of memory are needed, and 1 MB are free of the 1 MB of a file (`ulimit -f`)",
        ),
        ("RLIMIT_AS", 3 << 30, "of the 3,221 MB of this process's address space (`ulimit -v`)"),
    ],
)
def test_limits_of_the_process_are_named(limit: str, size: int, told: str) -> None:
    hard = resource.getrlimit(getattr(resource, limit))[1]
    if hard != resource.RLIM_INFINITY:
        pytest.skip("a limit is set here already")
    if limit == "RLIMIT_AS" and memory_limits()[0].free < 6 << 30:
        pytest.skip("so much memory is not free here")
    code = LIMITED.format(limit=limit, size=size)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told in done.stdout, done
