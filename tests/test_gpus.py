"""Promises of README and the how-to page about GPUs, on real ones: `make gpu` runs this, on bare machines, too.

NBDIST_GPU_DRY_RUN=1 runs on CPU ranks what of it can be: that shows whether these tests work, and nothing of GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist import Session, in_ddp, rank_device, warm
from nbdist import devices as nbdist_devices
from nbdist.engines import warm_ranks
from nbdist.system.gpus import look

DRY = os.environ.get("NBDIST_GPU_DRY_RUN") == "1"
GPUS = 0 if DRY else torch.cuda.device_count()
#: A session of one rank, and of two: with a GPU each, or one for both.
ONE: Any = "cpu" if DRY else "cuda"
TWO: Any = "cpu" if DRY else ["cuda:0", "cuda:1" if GPUS > 1 else "cuda:0"]
#: The options of a session of two ranks that talk through NCCL, on one GPU, too.
PAIR: Any = {"devices": TWO, "backend": None if DRY else nbdist_devices.NCCL}
#: Seconds that a call may take: on a bare machine nothing else ends one that hangs.
LIMIT = 120.0


def needs(gpus: int) -> Any:
    return pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} NVIDIA GPU{'s' if gpus > 1 else ''}, {GPUS} here")


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (DRY or GPUS), reason="needs an NVIDIA GPU")]


@pytest.fixture(scope="module")
def pair() -> Iterator[Session]:
    """Two ranks for the tests that leave them as they were."""
    with Session(2, **PAIR, timeout=LIMIT) as session:
        yield session


def sums() -> float:
    total = torch.ones(1, device=rank_device())
    dist.all_reduce(total)
    return total.item()


def used() -> int:
    """Bytes of the first GPU that are in use, by anybody."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


# -------------------------------------------------------------------------------------------------- process groups


def collectives() -> list[str]:
    """Every collective of the group's backend on its own device; what has failed."""
    device = torch.device("cuda") if "nccl" in dist.get_backend() else torch.device("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    failed = []

    def check(name: str, found: torch.Tensor, wanted: list[float]) -> None:
        if found.flatten().tolist() != wanted:
            failed.append(f"{name}: {found.tolist()} and not {wanted}")

    def ones(value: float = 1.0, count: int = 1) -> torch.Tensor:
        return torch.full((count,), float(value), device=device)

    everyone = [float(one) for one in range(size)]
    total = ones(rank)
    dist.all_reduce(total)
    check("all_reduce", total, [sum(everyone)])
    value = ones(rank)
    dist.broadcast(value, src=size - 1)
    check("broadcast", value, [size - 1.0])
    gathered = [ones() for _ in range(size)]
    dist.all_gather(gathered, ones(rank))
    check("all_gather", torch.cat(gathered), everyone)
    parts = ones(0.0, size)
    dist.all_gather_into_tensor(parts, ones(rank))
    check("all_gather_into_tensor", parts, everyone)
    own = ones(0.0)
    dist.reduce_scatter_tensor(own, ones(rank, size))
    check("reduce_scatter_tensor", own, [sum(everyone)])
    mixed = ones(0.0, size)
    dist.all_to_all_single(mixed, ones(rank, size))
    check("all_to_all_single", mixed, everyone)
    reduced = ones(rank)
    dist.reduce(reduced, dst=0)
    check("reduce", reduced, [sum(everyone)] if rank == 0 else reduced.tolist())
    gathering = [ones() for _ in range(size)] if rank == 0 else None
    dist.gather(ones(rank), gathering, dst=0)
    check("gather", torch.cat(gathering) if gathering else ones(), everyone if gathering else [1.0])
    scattered = ones(0.0)
    dist.scatter(scattered, [ones(one) for one in everyone] if rank == 0 else None, src=0)
    check("scatter", scattered, [float(rank)])
    if size > 1:
        if rank < 2:
            dist.send(ones(7.0), 1) if rank == 0 else dist.recv(own, 0)
        check("recv", own if rank == 1 else ones(7.0), [7.0])
    dist.barrier()
    # Of CPU tensors and objects, in addition to NCCL.
    host = torch.ones(1)
    dist.all_reduce(host)
    check("all_reduce on the CPU", host, [float(size)])
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    if objects != [{"rank": one} for one in range(size)]:
        failed.append(f"all_gather_object: {objects}")
    group = dist.new_group()
    dist.all_reduce(total, group=group)
    check("all_reduce in a group", total, [size * sum(everyone)])
    return failed


def test_nccl_and_all_collectives() -> None:
    nranks = max(1, GPUS)
    with Session(nranks, devices=ONE, timeout=LIMIT) as session:
        assert DRY or session.run(dist.get_backend) == nbdist_devices.NCCL
        assert session.run_all(collectives) == [[]] * nranks


def test_two_ranks_on_one_gpu_talk_through_gloo(capfd: pytest.CaptureFixture[str]) -> None:
    with Session(2, devices="cpu" if DRY else ["cuda:0", "cuda:0"], timeout=LIMIT) as session:
        assert session.run_all(sums) == [2.0, 2.0] and session.run(dist.get_backend) == "gloo"
        assert session.run_all(collectives) == [[], []]
    assert DRY or "ranks that share a GPU talk through gloo" in capfd.readouterr().err


def test_two_ranks_on_one_gpu_with_nccl(capfd: pytest.CaptureFixture[str]) -> None:
    for backend in (None,) if DRY else (nbdist_devices.NCCL, "nccl"):
        with Session(2, devices="cpu" if DRY else ["cuda:0", "cuda:0"], backend=backend, timeout=LIMIT) as session:
            assert session.run_all(sums) == [2.0, 2.0]
            assert DRY or session.run(dist.get_backend) == backend
            if backend != "nccl":  # which has no collectives of CPU tensors
                assert session.run_all(collectives) == [[], []]
    assert DRY or "to try NCCL out, not for speed" in capfd.readouterr().err


def asynchronous_checkpoint(folder: str) -> bool:
    from torch.distributed.checkpoint import async_save, load

    state = {"weight": torch.full((4,), 3.0, device=rank_device())}
    async_save(state, checkpoint_id=folder).result()
    state["weight"].zero_()
    load(state, checkpoint_id=folder)
    return bool((state["weight"] == 3.0).all())


def test_asynchronous_checkpoints(tmp_path: Any) -> None:
    assert in_ddp.options(devices=ONE)(1, asynchronous_checkpoint, str(tmp_path / "checkpoint"))


@needs(1)
def test_a_gpu_by_its_name() -> None:
    (name, *_) = nbdist_devices.gpu_names()
    with Session(1, devices=[name[:12]]) as session:
        assert session.run(lambda: (os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count())) == (name, 1)
        assert session.run(sums) == 1.0


@needs(2)
def test_each_rank_sees_its_own_where_it_looks() -> None:
    last = torch.cuda.device_count() - 1
    with Session(2, devices=[f"cuda:{last}", "cuda:0"]) as session:
        seen = session.run_all(lambda: (int(os.environ["LOCAL_RANK"]), torch.cuda.current_device(), uuid_here()))
        assert [one[0] for one in seen] == [one[1] for one in seen] == [0, 1]
        names = nbdist_devices.gpu_names()
        assert [one[2] for one in seen] == [names[last], names[0]]


def uuid_here() -> str:
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


# ---------------------------------------------------------------------------------------- the notebook and its GPU


@needs(1)
def test_cuda_in_the_notebook_before_during_and_after_calls() -> None:
    x = torch.arange(8.0, device="cuda")
    with Session(1, devices="cuda") as session:
        future = session.submit(lambda: (x * 2).sum())
        assert x.sum().item() == 28.0
        back = future.result(LIMIT)
        assert back.item() == 56.0 and back.device.type == "cpu", "what comes back is on the CPU"
        assert session.run(lambda: str(x.device)) == "cuda:0", "what goes there is on the rank's GPU"
    assert x.sum().item() == 28.0
    assert in_ddp.options(devices="cpu")(1, lambda: (x.device.type, x.sum().item())) == ("cpu", 28.0)
    assert not in_ddp(1, torch.cuda._is_in_bad_fork)


@needs(2)
def test_in_ddp_0_leaves_the_current_device() -> None:
    torch.cuda.set_device(1)
    try:
        assert in_ddp(0, torch.cuda.current_device) == 1 == torch.cuda.current_device()
    finally:
        torch.cuda.set_device(0)


@needs(1)
def test_the_notebooks_own_memory_is_the_same_after_20_calls() -> None:
    torch.ones(1, device="cuda")
    in_ddp(1, sums)
    own, all_of_it = torch.cuda.memory_reserved(), used()
    for _ in range(20):
        in_ddp(1, sums)
    assert torch.cuda.memory_reserved() == own
    for _ in range(600):  # the driver takes a while
        if used() <= all_of_it + (64 << 20):
            break
        time.sleep(0.1)
    assert used() <= all_of_it + (64 << 20), "ranks have left something on the GPU"


@needs(1)
def test_an_idle_session_gives_its_cache_back() -> None:
    def much() -> None:
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")

    with Session(1, devices="cuda") as session:
        session.run(sums)
        before = used()
        session.run(much)
        assert used() > before + (1 << 30)
        session.empty_cache()
        assert used() < before + (256 << 20)


@needs(1)
def test_garbage_in_circles_does_not_stay_on_the_gpu() -> None:
    class Learner:
        pass

    def train() -> int:
        before = torch.cuda.memory_allocated()
        learner: Any = Learner()
        learner.itself = learner
        learner.big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        return before

    with Session(1, devices="cuda") as session:
        assert [session.run(train) for _ in range(3)] == [0, 0, 0]


@needs(1)
def test_a_launch_takes_the_rank_that_waits_with_its_context() -> None:
    warm(gpus=1)
    try:
        for _ in range(2):
            waiting = warm_ranks._waiting
            assert waiting is not None
            for _ in range(600):
                if not waiting._ranks.exits() and None not in waiting._ranks.pids:
                    break
                time.sleep(0.1)
            assert in_ddp.options(devices="cuda")(1, lambda: (os.getpid(), sums())) == (waiting._ranks.pids[0], 1.0)
    finally:
        warm_ranks.stop()


@needs(1)
def test_status_has_memory_and_load() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    assert look("0") is not None
    with Session(1, devices="cuda") as session:
        session.run(sums)
        assert "GiB" in str(session.status())


def test_fresh_interpreters() -> None:
    assert in_ddp.options(devices=ONE, start="spawn")(1, sums) == 1.0


# ------------------------------------------------------------------------------------------------------- failures


def fail_while_others_wait() -> None:
    sums()
    if dist.get_rank() == 1:
        time.sleep(0.5)
        raise ValueError("boom")
    sums()


def test_a_failure_in_a_collective_keeps_the_session(pair: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    # After which the other rank is killed.
    for grace in ("GRACE_AFTER_FAILURE", "GRACE_WITH_GPU"):
        monkeypatch.setattr(f"nbdist.kernel.calls.ending.{grace}", LIMIT)
    pids = pair.run_all(os.getpid)
    with pytest.raises(ValueError, match="boom"):
        pair.run(fail_while_others_wait)
    assert pair.run(sums) == 2.0 and pair.run_all(os.getpid) == pids


def wait_for_ever() -> None:
    if dist.get_rank() == 0:
        sums()
    else:
        time.sleep(1000)


def test_the_stop_button_frees_ranks_in_a_collective(pair: Session) -> None:
    pids = pair.run_all(os.getpid)
    press = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    press.start()
    with pytest.raises(KeyboardInterrupt):
        pair.run(wait_for_ever)
    press.join()
    assert pair.run(sums) == 2.0 and pair.run_all(os.getpid) == pids


def test_a_rank_that_is_killed_in_a_collective() -> None:
    def die() -> None:
        sums()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sums()

    with Session(2, **PAIR, timeout=LIMIT) as session:
        with pytest.raises(Exception, match=r"rank 1 .* was killed by SIGKILL"):
            session.run(die)
        session.restart()
        assert session.run(sums) == 2.0


def come_late() -> float:
    sums()
    if dist.get_rank() == 1:
        time.sleep(600)
    return sums()


@needs(1)
def test_a_collective_that_times_out_raises_and_the_next_call_works() -> None:
    """torch's own setting ends the process."""
    options = {**PAIR, "backend": {"backend": PAIR["backend"], "timeout": 5}}
    with Session(2, **options, timeout=LIMIT) as session:
        pids = session.run_all(os.getpid)
        with pytest.raises(dist.DistBackendError, match="a collective took longer than its timeout") as caught:
            session.run(come_late)
        assert "OpType=ALLREDUCE" in str(caught.value.__cause__)
        assert session.run(sums) == 2.0 and session.run_all(os.getpid) == pids


@needs(1)
def test_a_gpu_assertion_with_nccl_is_reported_and_the_next_call_works() -> None:
    """torch's own setting ends the process."""

    def out_of_bounds() -> None:
        sums()
        if dist.get_rank() == 1:
            torch.ones(4, 2, device="cuda").index_select(0, torch.tensor([9], device="cuda")).sum().item()
        sums()

    with Session(2, **PAIR, timeout=LIMIT) as session:
        with pytest.raises(RuntimeError, match="device-side assert"):
            session.run(out_of_bounds)
        assert session.run(sums) == 2.0


@needs(1)
def test_an_assertion_of_the_last_kernel_is_raised_in_its_call() -> None:
    def out_of_bounds() -> None:
        torch.ones(4, 2, device="cuda").index_select(0, torch.tensor([9], device="cuda"))

    with Session(1, devices="cuda") as session:
        with pytest.raises(RuntimeError, match="device-side assert"):
            session.run(out_of_bounds)
        assert session.run(sums) == 1.0


@needs(2)
def test_an_assertion_on_another_gpu_is_raised_in_its_call() -> None:
    def out_of_bounds() -> None:
        torch.ones(4, 2, device="cuda:1").index_select(0, torch.tensor([9], device="cuda:1"))

    with Session(2, devices="cuda") as session:
        pids = session.run_all(os.getpid)
        with pytest.raises(RuntimeError, match="device-side assert"):
            session.run(out_of_bounds, ranks=[0])
        assert session.run(sums) == 2.0 and not set(session.run_all(os.getpid)) & set(pids)


@needs(1)
def test_out_of_memory_says_where_and_the_rank_goes_on() -> None:
    with Session(1, devices="cuda") as session:
        pid = session.run(os.getpid)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            session.run(lambda: torch.empty(1 << 42, dtype=torch.uint8, device="cuda"))
        assert "rank 0 works on cuda:0" in str(caught.value.__cause__)
        assert session.run(sums) == 1.0 and session.run(os.getpid) == pid


@needs(1)
def test_a_device_side_assert_is_reported_and_the_next_call_works() -> None:
    def out_of_bounds() -> float:
        table, ids = torch.ones(4, 2, device="cuda"), torch.tensor([9], device="cuda")
        return table.index_select(0, ids).sum().item()

    with Session(1, devices="cuda") as session:
        with pytest.raises(RuntimeError, match="device-side assert") as caught:
            session.run(out_of_bounds)
        assert "Assertion" in str(caught.value.__cause__)
        assert session.run(sums) == 1.0


# ------------------------------------------------------------------------------------------------------- training


def train_ddp(bf16: bool) -> tuple[float, float]:
    """The losses before and after some steps."""
    torch.manual_seed(0)
    device = rank_device()
    model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(256, 16, device=device)
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(20):
        with torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.parametrize("bf16", [False, True])
def test_ddp_trains(pair: Session, bf16: bool) -> None:
    first, last = pair.run(train_ddp, bf16)
    assert last < first / 4


Rows = list[list[int]]


def batches(column: Any, **options: Any) -> tuple[set[str], list[Rows]]:
    """Return the devices and the rows of three epochs; before the last one a row is written to."""
    from nbdist.recsys.loader import MemoryLoader, Ragged

    loader = MemoryLoader({"row": column}, 256, shuffle=True, seed=3, **options)
    where: set[str] = set()
    epochs = []
    for epoch in range(3):
        if epoch == 2:
            (column.values if isinstance(column, Ragged) else column)[0] = -1
        epochs.append([])
        for batch in loader:
            rows = batch["row"].values if isinstance(column, Ragged) else batch["row"]
            where.add(rows.device.type)
            epochs[-1].append(rows.tolist())
    return where, epochs


@pytest.mark.parametrize("kind", ["resident", "ragged", "too large"])
def test_batches_of_the_loader(kind: str) -> None:
    """Gathered on the GPU, or on the CPU and copied: in the order that they have on the CPU."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")

    def look() -> Any:
        from nbdist.recsys.loader import Ragged, resident

        if kind == "too large":
            resident._PART = 1 << 60

        def column() -> Any:
            ids = torch.arange(10_000)
            return Ragged(ids, torch.arange(0, 10_001, 2)) if kind == "ragged" else ids

        return batches(column(), device="cpu"), batches(column())

    (_, wanted), (where, found) = in_ddp.options(devices=ONE)(1, look)
    assert where == {ONE} and found == wanted


def test_batches_with_and_without_lists() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")

    def look() -> tuple[set[str], list[int]]:
        from nbdist.recsys.loader import MemoryLoader, Ragged

        columns = {"row": torch.arange(10_000), "genres": Ragged(torch.arange(20_000), torch.arange(0, 20_001, 2))}
        where, rows = set(), []
        for batch in MemoryLoader(columns, 100, shuffle=True, seed=0, device=ONE):
            where |= {batch["row"].device.type, batch["genres"].values.device.type}
            rows.append((batch["row"] * 1).cpu())
        return where, torch.cat(rows).sort().values.tolist()

    assert in_ddp.options(devices=ONE)(1, look) == ({ONE}, list(range(10_000)))


@needs(1)
def test_batches_that_stay_on_the_cpu_are_pinned() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")

    def look() -> list[tuple[str, bool]]:
        from nbdist.recsys.loader import MemoryLoader

        batches = MemoryLoader({"row": torch.arange(100)}, 10, device="cpu", pin_memory=True)
        return [(batch["row"].device.type, batch["row"].is_pinned()) for batch in batches]

    assert in_ddp.options(devices=ONE)(1, look) == [("cpu", True)] * 10


def test_a_streamed_file(tmp_path: Any) -> None:
    """A window after the other goes to the GPU."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow as pa

    file = str(tmp_path / "rows.parquet")
    parquet.write_table(pa.table({"row": range(1_000_000)}), file, row_group_size=20_000)

    def look(device: Any) -> tuple[str, int, list[list[int]]]:
        from nbdist.recsys.loader import ParquetLoader

        loader = ParquetLoader(file, 1000, shuffle=True, seed=1, memory_bytes=16 << 20, device=device, prefetch=0)
        rows = [batch["row"] for batch in loader]
        return rows[0].device.type, int(loader.whole), [batch.tolist() for batch in rows]

    def both() -> Any:
        return look("cpu"), look(None)

    (_, _, wanted), (device, whole, found) = in_ddp.options(devices=ONE)(1, both)
    assert device == ONE and not whole and found == wanted
    assert sorted(row for batch in found for row in batch) == list(range(1_000_000))


def train_sparse() -> tuple[float, float, bool]:
    """The losses before and after some steps of tables with sparse gradients."""
    pytest.importorskip("torchmetrics")
    from nbdist.recsys.sharding import replicate

    torch.manual_seed(0)
    model = replicate(torch.nn.Embedding(100, 4, sparse=True), lambda some: torch.optim.Adagrad(some, lr=0.5))
    losses = []
    for _ in range(20):
        model.optimizer.zero_grad()
        ids = torch.arange(dist.get_rank(), 100, 3, device=model.module.weight.device)
        loss = (model.model(ids).sum(1) - 1.0).square().mean()
        loss.backward()
        model.optimizer.step()
        losses.append(float(loss))
    return losses[0], losses[-1], model.module.weight.grad.is_sparse


def test_tables_with_sparse_gradients() -> None:
    for package in ("pyarrow", "polars", "torchmetrics"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    with Session(max(1, GPUS), devices=ONE) as session:
        for first, last, sparse in session.run_all(train_sparse):
            assert last < first / 10 and sparse


def train_captured(captured: bool | None, **options: Any) -> tuple[list[float], torch.Tensor]:
    """In a rank: losses and weights of a model, trained by SGD, which leaves the last bits what they are."""
    from nbdist.recsys.loader import MemoryLoader
    from nbdist.recsys.sharding import replicate
    from nbdist.recsys.training import fit, warmup_decay

    torch.manual_seed(0)
    tables = torch.nn.Embedding(500, 16, sparse=True), torch.nn.Linear(16, 1)
    model = replicate(torch.nn.Sequential(*tables), lambda some: torch.optim.SGD(some, lr=0.5))
    ids = torch.randint(500, (5000,), generator=torch.Generator().manual_seed(0))
    rows = MemoryLoader({"id": ids, "liked": ids % 3 == 0}, 64, shuffle=True, seed=1)
    options = {"steps": 130, "log_every": 40, "schedule": warmup_decay(130, warmup=9), "progress": False, **options}
    history = fit(model, lambda m, b: (m(b["id"])[:, 0], b["liked"]), rows, captured=captured, **options)
    return [record.loss for record in history], torch.cat([one.flatten() for one in model.module.parameters()]).cpu()


@pytest.mark.parametrize(
    "options, close", [({}, 1e-5), ({"max_grad_norm": 0.01}, 1e-5), ({"precision": "bf16"}, 1e-2)], ids=str
)
def test_captured_steps_learn_the_same(options: Any, close: float) -> None:
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    with Session(1, devices=ONE) as session:
        losses, weights = session.run(train_captured, False, **options)
        # Where there are CPUs alone, nothing can be captured.
        found, captured = session.run(train_captured, None if DRY else True, **options)
    assert found == pytest.approx(losses, rel=close)
    torch.testing.assert_close(captured, weights, rtol=close, atol=close)


def step_rows() -> list[tuple[float, bool]]:
    """In a rank, for some widths: how far Triton's kernel ends from torch's Adagrad, and whether it repeats itself."""
    from nbdist.recsys.parallel.fused_rows import FusedAdagrad

    found = []
    for width in (16, 64, 10):
        draw = torch.Generator("cuda").manual_seed(0)
        tables = [
            torch.nn.Parameter(torch.randn(n, width, device="cuda", generator=draw).double()) for n in (5000, 1, 90_000)
        ]
        runs = [
            [one.detach().float() for one in tables] + [torch.zeros_like(one.float()) for one in tables] for _ in "ab"
        ]
        optimizer = torch.optim.Adagrad(
            tables, lr=0.1, eps=1.0
        )  # so that the last bit of a gradient near 0 is no matter
        fused = [FusedAdagrad(run[:3], run[3:], 1.0) for run in runs]
        for _ in range(5):
            grads = []
            for table in tables:
                ids = (torch.rand(4096, device="cuda", generator=draw) ** 3 * len(table)).long()[None]
                rows = torch.randn(4096, width, device="cuda", generator=draw)
                table.grad = torch.sparse_coo_tensor(ids, rows.double(), table.shape, check_invariants=False)
                grads.append(torch.sparse_coo_tensor(ids, rows, table.shape, check_invariants=False))
            optimizer.step()
            for one in fused:
                one.step(grads, torch.tensor(0.1, device="cuda"))
        far = max(float((one - table).abs().max()) for one, table in zip(runs[0], tables, strict=False))
        found.append((far, all(torch.equal(*pair) for pair in zip(*runs, strict=True))))
    return found


@pytest.mark.skipif(DRY, reason="Triton's kernel needs a GPU")
def test_tables_are_stepped_by_triton_as_by_torch() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    with Session(1, devices=ONE) as session:
        for far, same in session.run(step_rows):
            assert far < 1e-4 and same


FASTAI = "from fastai.collab import *; from fastai.distributed import *"


@pytest.mark.parametrize("quickly", [False, True], ids=["distrib_ctx", "fast"])
@pytest.mark.parametrize(
    "options", [{"devices": ONE}, {"devices": TWO}, PAIR], ids=["one rank", "two ranks", "two NCCL ranks"]
)
def test_fastai_collab(request: pytest.FixtureRequest, options: Any, quickly: bool) -> None:
    for package in ("fastai", "polars"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from nbdist.recsys.datasets import synthetic_ratings

    ratings = synthetic_ratings(200, 100, 5_000).with_titles().to_pandas()

    def train() -> Any:
        from fastai.collab import CollabDataLoaders, collab_learner

        torch.manual_seed(0)
        learn = collab_learner(CollabDataLoaders.from_df(ratings, bs=256), n_factors=8, y_range=(0, 5.5))
        if quickly:
            from nbdist.fastai import fast

            fast(learn)
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx():
            learn.fit_one_cycle(2, 5e-3)
        return learn, next(learn.model.parameters()).device.type

    nranks = 1 if "one rank" in request.node.name else 2
    learn, where = in_ddp.options(**options, imports=FASTAI)(nranks, train)
    assert where == ONE and {weight.device.type for weight in learn.model.parameters()} == {"cpu"}
    with learn.no_bar():
        assert learn.recorder.values[-1][-1] == pytest.approx(float(learn.validate()[0]), rel=0.02)


def test_notebook_01(tmp_path: Any) -> None:
    for package in ("fastai", "polars", "nbclient", "nbconvert", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    root = Path(__file__).parents[1]
    command = [sys.executable, "notebooks/execute.py", "notebooks/01_fastai_collab.ipynb", "--output", str(tmp_path)]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    setting = {**os.environ, "NBDIST_SMALL": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=setting, cwd=root, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-3000:]


def train_sharded() -> bool:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    from nbdist.recsys.sharding import shard

    users = EmbeddingBagConfig(name="users", num_embeddings=1000, embedding_dim=16, feature_names=["user"])
    sharded = shard(EmbeddingBagCollection(tables=[users]), {"users": "row_wise"}, batch_size=8)
    features = KeyedJaggedTensor(["user"], torch.tensor([1, 2, 999]), lengths=torch.tensor([2, 1]))  # on the CPU
    before = sharded.gather()
    sharded.model(features).values().square().sum().backward()
    after = sharded.gather()
    if before is None or after is None:
        return True
    changed = (before.embedding_bags["users"].weight != after.embedding_bags["users"].weight).any(1).nonzero()
    return bool(changed.flatten().tolist() == [1, 2, 999])


def fit_sharded(pipelined: bool) -> tuple[list[float], float]:
    """Losses of a run, and the loss of the model which came together on the CPU."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    from nbdist.recsys.loader import MemoryLoader, keyed_jagged
    from nbdist.recsys.sharding import shard
    from nbdist.recsys.training import fit
    from nbdist.recsys.training.objective import log_loss

    ids = torch.arange(40_000) * 7919 % 1000
    rows = {"user": ids, "liked": ids % 3 == 0}
    users = EmbeddingBagConfig(name="users", num_embeddings=1000, embedding_dim=16, feature_names=["user"])
    torch.manual_seed(0)
    sharded = shard(EmbeddingBagCollection(tables=[users]), batch_size=1000, optimizer="adagrad", lr=0.3)

    def predict(model: Any, batch: Any) -> Any:
        return model(keyed_jagged(batch, ["user"])).values().sum(1), batch["liked"]

    train = MemoryLoader(rows, 1000 // dist.get_world_size(), shuffle=True, keyed=["user"])
    history = fit(sharded, predict, train, MemoryLoader(rows, 4000), epochs=2, pipelined=pipelined, progress=False)
    plain = sharded.gather()
    with torch.no_grad():
        loss = 0.0 if plain is None else float(log_loss(*predict(plain, {k: v.cpu() for k, v in rows.items()})))
    return history.values("valid_loss"), loss


@pytest.fixture(params=["all GPUs", "two NCCL ranks"])
def sharding_session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session with all GPUs that there are, and one of two ranks that may share a GPU."""
    pytest.importorskip("fbgemm_gpu", reason="FBGEMM is not installed: TorchRec's part is left out")
    all_gpus = request.param == "all GPUs"
    with Session(max(1, GPUS) if all_gpus else 2, **({"devices": ONE} if all_gpus else PAIR)) as session:
        yield session


def test_sharded_tables(sharding_session: Session) -> None:
    assert all(sharding_session.run_all(train_sharded))


def test_sharded_tables_train(sharding_session: Session) -> None:
    for pipelined in (False, True):
        losses, gathered = sharding_session.run(fit_sharded, pipelined)
        assert losses[-1] < losses[0] < 0.1 and gathered == pytest.approx(losses[-1], rel=1e-3)


# ------------------------------------------------------------------------------------------------------- the server


@needs(1)
def test_the_fork_server_has_not_initialised_the_driver() -> None:
    """Even though libraries ask for GPUs while they are imported."""
    code = "import torch; torch.cuda.is_available()"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}\nfrom nbdist.server import cuda_driver; print(cuda_driver.initialised())\n"
            "import torch; torch.cuda.init(); print(cuda_driver.initialised())",
        ],
        env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]
