"""CUDA errors, idle GPUs and their load, as the notebook shows them: on CPU ranks, with an imitated driver."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import on, remember, sums

from nbdist import Session
from nbdist.kernel.calls import waiting
from nbdist.kernel.calls.ending import Ending, Failure
from nbdist.kernel.calls.gpu_errors import explain_gpu_error
from nbdist.kernel.session import executor_of
from nbdist.system.gpus import GpuUse, in_words, local_cores, look

GIB = 1 << 30


class FakeNvml:
    """The functions of nvidia-ml-py that are used, for one GPU whose processes are `processes`."""

    NVMLError = LookupError

    def __init__(self) -> None:
        self.processes: dict[int, int | None] = {}
        self.open = 0
        self.other = b"NVIDIA H100"
        """The name of the other GPUs."""

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 6

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:
        return "handle" if number == 5 else "other"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return {"GPU-abc": "handle", "MIG-abc": "part"}[name]

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return self.other if handle == "other" else b"NVIDIA H100"

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return SimpleNamespace(busId={"handle": b"00000000:C1:00.0"}[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=60 * GIB, total=80 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu={"handle": 97}[handle])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes.items()]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    yield fake
    assert not fake.open


@pytest.fixture
def session() -> Iterator[Session]:
    """Two CPU ranks, which the notebook takes for ranks that share a GPU once they run."""
    with Session(2, devices="cpu") as session:
        session.run(sums)
        executor = executor_of(session)
        assert executor.group is not None
        executor.wanted = executor.group.layout = dataclasses.replace(
            executor.layout, devices=["cuda:0", "cuda:0"], visible=["5"]
        )
        yield session
        executor.wanted = dataclasses.replace(executor.wanted, devices=["cpu", "cpu"])


def test_memory_and_processes_of_a_gpu_are_read_from_the_driver(nvml: FakeNvml) -> None:
    nvml.processes = {os.getpid(): GIB, 7: 40 * GIB, 1 << 30: None}
    use = look("5")
    assert use == look("GPU-abc") == GpuUse("NVIDIA H100", 60 * GIB, 80 * GIB, 97, nvml.processes)
    part = look("MIG-abc")
    assert part is not None and part.load is None and look("GPU-no") is None
    assert in_words(use, {7: 3}) == (
        "NVIDIA H100, 60.0 GiB of 80.0 GiB in use: this notebook 1.0 GiB, rank 3 40.0 GiB, pid 1073741824 ?"
    )


def test_the_cores_near_a_gpu(nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.system.gpus._BUS", tmp_path)
    assert local_cores("GPU-abc") == []
    (tmp_path / "0000:c1:00.0").mkdir()
    (tmp_path / "0000:c1:00.0" / "local_cpulist").write_text("0-1,8\n")
    assert local_cores("5") == local_cores("GPU-abc") == [0, 1, 8]
    assert local_cores("GPU-no") == []


def test_numbers_of_gpus_that_differ_are_those_of_cuda(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts the fastest first, the driver by the bus."""
    nvml.other = b"NVIDIA T4"
    assert look("5") is None and look("GPU-abc") is not None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert look("5") is not None


@pytest.mark.parametrize(
    ("text", "log", "says"),
    [
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "", "nvidia-smi -c DEFAULT"),
        ("NCCL error in: x.cpp:1, unhandled system error\nError while creating shared memory segment", "", "NCCL_SHM_"),
        ("NCCL error: unhandled system error", "WARN Error while creating shared memory segment /dev/s", "NCCL_SHM_"),
        ("NCCL communicator was aborted", "Watchdog caught collective operation timeout: Work(1)", "timeout: Work(1)"),
        ("CUDA error: an illegal memory access", "", "rank 1 works on cuda:0"),
        ("no GPU in this", "Watchdog caught collective operation timeout: Work(1)", None),
    ],
)
def test_errors_of_the_machine_come_with_advice(text: str, log: str, says: str | None) -> None:
    lines = explain_gpu_error(RuntimeError(text), 1, "cuda:0", None, {}, log)
    assert (says is None and lines == []) or (says is not None and says in "\n".join(lines))


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_out_of_memory_says_who_has_it(session: Session, nvml: FakeNvml) -> None:
    pids = session.run_all(os.getpid)
    nvml.processes = dict(zip(pids, [20 * GIB, 39 * GIB], strict=True))
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate") as caught:
        session.run(on, 1, out_of_memory)
    said = str(caught.value.__cause__)
    assert "on rank 1 (pid" in said and said.endswith(
        "rank 1 works on cuda:0 (NVIDIA H100, 60.0 GiB of 80.0 GiB in use: rank 0 20.0 GiB, rank 1 39.0 GiB)"
    )
    group = executor_of(session).group
    assert group is not None
    group.layout = dataclasses.replace(group.layout, devices=["cpu", "cpu"])
    assert session.run(sums) == 2.0 and session.run_all(os.getpid) == pids, "the rank can go on"


ASSERTION = (
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [3,0,0], thread: [96,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed.\n"
)


def use_gpus(*gpus: tuple[Callable[[], None], Callable[[], int]] | None) -> None:
    """Have nbdist find in this rank that torch uses these GPUs, which are imitated.

    Args:
        gpus: For each GPU what `synchronize` and `memory_allocated` do; None for a GPU without a context of the rank.
    """

    def used(gpu: int) -> tuple[Callable[[], None], Callable[[], int]]:
        one = gpus[gpu]
        assert one is not None, "the question to this GPU would create a context"
        return one

    torch.cuda.is_initialized = lambda: True  # type: ignore[assignment]
    torch.cuda.device_count = lambda: len(gpus)
    torch._C._cuda_hasPrimaryContext = lambda gpu: gpus[gpu] is not None  # type: ignore[attr-defined]
    torch.cuda.synchronize = lambda gpu: used(gpu)[0]()  # type: ignore[assignment]
    torch.cuda.memory_allocated = lambda gpu: used(gpu)[1]()  # type: ignore[assignment]


def use_gpu(synchronize: Callable[[], None], allocated: Callable[[], int] = lambda: 0) -> None:
    """Have nbdist find in this rank that torch uses one GPU of two, which are imitated."""
    use_gpus((synchronize, allocated), None)


def raise_as_every_call_does() -> None:
    raise RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`")


def lose_context(error: Exception | None) -> None:
    os.write(2, ASSERTION.encode() * 3)
    use_gpu(raise_as_every_call_does)
    if error is not None:
        raise error


TEXTS = [
    "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`",
    "parallel_for failed: cudaErrorAssert: device-side assert triggered",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "HIP error: unspecified launch failure",
]


@pytest.mark.parametrize("error", [*map(RuntimeError, TEXTS), ValueError("driver error 719"), None], ids=repr)
def test_a_rank_whose_context_is_lost_is_replaced(
    error: Exception | None, session: Session, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever the exception says, and also where the function returns before its last kernels fail."""
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    pids = session.run_all(os.getpid)
    with pytest.raises(Exception, match=re.escape(TEXTS[0] if error is None else str(error))) as caught:
        session.run(on, 1, functools.partial(lose_context, error))
    said = str(caught.value.__cause__)
    assert "on the GPU: /pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: Assertion " in said
    assert said.endswith("rank 1 works on cuda:0; install nvidia-ml-py to see which processes use its memory")
    executor = executor_of(session)
    executor.wanted = dataclasses.replace(executor.wanted, devices=["cpu", "cpu"])
    capfd.readouterr()
    assert session.run(sums) == 2.0 and not set(session.run_all(os.getpid)) & set(pids)
    assert "fresh ranks: rank 1 cannot use its GPU any more, after a CUDA error" in capfd.readouterr().err


def test_an_exception_leaves_a_gpu_that_waits_to_itself() -> None:
    """A kernel of NCCL waits for a rank that will not come."""

    def fail() -> None:
        use_gpu(lambda: time.sleep(1000))
        raise ValueError("CUDA error: an illegal memory access, said somebody")

    with Session(1, devices="cpu") as session:
        pid = session.run(os.getpid)
        with pytest.raises(ValueError, match="said somebody"):
            session.run(fail)
        with pytest.raises(ValueError, match="said somebody"):
            session.run(fail)
        session.run(lambda: use_gpu(lambda: None))
        assert session.run(os.getpid) == pid


def test_a_call_ends_when_the_gpu_is_done() -> None:
    def launch() -> None:
        use_gpu(lambda: print("the GPU is done"))

    with Session(1, devices="cpu") as session:
        session.run(launch)
        assert session.logs(0).count("the GPU is done") == 1


def launch_on_two(fails: bool, waits: bool) -> None:
    use_gpus((lambda: time.sleep(1000) if waits else None, lambda: 0), None, (raise_as_every_call_does, lambda: 0))
    if fails:
        raise ValueError("boom")


@pytest.mark.parametrize(("fails", "waits", "says"), [(False, False, "device-side assert"), (True, True, "boom")])
def test_each_gpu_of_a_call_is_asked_for_errors(fails: bool, waits: bool, says: str) -> None:
    """Also where the rank's own GPU has none, and where it waits for another rank."""
    with Session(1, devices="cpu") as session:
        pid = session.run(os.getpid)
        with pytest.raises(Exception, match=says):
            session.run(launch_on_two, fails, waits)
        assert session.run(os.getpid) != pid


class Learner:
    """An object in a reference cycle, like a learner of fastai and its callbacks, with a tensor on the GPU."""

    used = 0

    def __init__(self) -> None:
        self.itself = self
        Learner.used += 1 << 30

    def __del__(self) -> None:
        Learner.used -= 1 << 30


def test_garbage_in_circles_does_not_stay_on_the_gpu() -> None:
    def train() -> None:
        use_gpu(lambda: None, lambda: Learner.used)
        gc.disable()  # which runs by the number of objects, and these are few
        Learner()

    def fail() -> None:
        train()
        raise ValueError("boom")

    with Session(1, devices="cpu") as session:
        session.run(train)
        assert session.run(lambda: Learner.used) == 0
        with pytest.raises(ValueError, match="boom"):
            session.run(fail)
        assert session.run(lambda: Learner.used) == 0


def test_garbage_on_each_gpu_of_a_call_is_freed() -> None:
    def train() -> None:
        use_gpus((lambda: None, lambda: 0), (lambda: None, lambda: Learner.used))
        gc.disable()
        Learner()

    with Session(1, devices="cpu") as session:
        session.run(train)
        assert session.run(lambda: Learner.used) == 0


class FakeBackend:
    """NCCL's, of a group in which a collective was aborted."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("TIMEOUT", r"rank 0: a collective took longer than its timeout \(`backend={'timeout': seconds}`\)"),
        ("COMM_ERROR", "NCCL communication with another rank failed"),
    ],
)
def test_a_collective_that_was_aborted_does_not_pass_for_a_result(name: str, says: str) -> None:
    def collective() -> float:
        from nbdist.rank import nccl

        use_gpu(lambda: None)
        found = FakeBackend("SUCCESS")
        nccl.backend_of = lambda group: found
        found.name = name  # by torch's own thread, which has waited for long enough
        print("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE) ran for 5000 ms")
        return 1.0

    with Session(1, devices="cpu") as session:
        session.run(sums)
        executor = executor_of(session)
        assert executor.group is not None
        executor.group.layout = dataclasses.replace(executor.layout, devices=["cuda:0"])
        with pytest.raises(dist.DistBackendError, match=says) as caught:
            session.run(collective)
        assert "WorkNCCL(SeqNum=2, OpType=ALLREDUCE)" in str(caught.value.__cause__)
        assert Failure(0, caught.value).is_consequence() == (name != "TIMEOUT")


def test_a_call_on_gpus_ends_as_one(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with a GPU get longer to leave: `tests/kernel/test_ending.py`."""
    group = executor_of(session).group
    assert group is not None
    calls: list[bool] = []

    def ending(*, on_gpu: bool, **others: Any) -> Ending:
        calls.append(on_gpu)
        return Ending(on_gpu=on_gpu, **others)

    monkeypatch.setattr(waiting, "Ending", ending)
    for device in ("cpu", "cuda:0"):
        monkeypatch.setattr(group, "layout", dataclasses.replace(group.layout, devices=[device, device]))
        session.run(int)
    assert calls == [False, True]


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
        "NCCL communicator was aborted on rank 0.",
        "ncclUnhandledCudaError ... socketProgress: Connection closed by remote peer host<4242>",
        "NCCL Error 6: remote process exited or there was a network error",
    ],
)
def test_ranks_that_nccl_lets_down_are_not_the_cause(text: str) -> None:
    assert Failure(0, dist.DistBackendError(text)).is_consequence()
    assert not Failure(0, RuntimeError("CUDA error: an illegal memory access")).is_consequence()


def test_the_status_has_memory_and_load(session: Session, nvml: FakeNvml) -> None:
    assert str(session.status()).count("cuda:0: 60.0 of 80.0 GiB, 97 %") == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
        assert "cuda:0  idle" in str(session.status())


def spy_on_cache() -> None:
    import __main__

    __main__.emptied = 0

    def empty() -> None:
        __main__.emptied += 1

    use_gpu(lambda: None)
    torch.cuda.empty_cache = empty


def test_an_idle_session_gives_memory_back() -> None:
    with Session(2, devices="cpu") as session:
        session.empty_cache()  # nothing runs yet
        session.run(spy_on_cache)
        before = session.run_all(remember, 1)
        state = random.getstate(), torch.random.get_rng_state()
        session.empty_cache()
        assert random.getstate() == state[0] and torch.equal(torch.random.get_rng_state(), state[1])
        assert session.run_all(lambda: __import__("__main__").emptied) == [1, 1]
        assert [kept[:2] for kept in session.run_all(remember, 2)] == before
