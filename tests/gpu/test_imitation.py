"""The imitated GPU itself: results are real; it has a GPU's limits, waits and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from imitated import program
from imitated.computing import Computing, kernels


@pytest.fixture
def gpu() -> Iterator[Computing]:
    before = kernels()
    with Computing() as computing:
        yield computing
    assert kernels() == before, "kernels were launched that computed nothing"


# ------------------------------------------------------------------------------------------------------------ results


def trained(device: str, optimizer: Callable[..., torch.optim.Optimizer], sparse: bool) -> list[torch.Tensor]:
    """The parameters of a small model after three steps, on the CPU."""
    torch.manual_seed(0)
    table, linear = torch.nn.Embedding(10, 4, sparse=sparse), torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(table, torch.nn.Flatten(), torch.nn.LayerNorm(4), linear).to(device)
    made = optimizer(model.parameters(), lr=0.1)
    ids = torch.tensor([1, 2, 2, 7]).to(device)
    for _ in range(3):
        made.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(ids), torch.ones(4, 1, device=device)).backward()
        made.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_training_gives_what_it_gives_on_the_cpu(gpu: Computing, optimizer: Any, sparse: bool) -> None:
    if sparse and optimizer is torch.optim.AdamW:
        pytest.skip("torch has none for sparse gradients")
    found, wanted = (trained(device, optimizer, sparse) for device in ("cuda:1", "cpu"))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_views_copies_and_selections(gpu: Computing) -> None:
    x = torch.arange(12.0, device="cuda").view(3, 4)
    assert x.t().contiguous().tolist() == x.cpu().t().tolist() == x.t().cpu().tolist()
    assert x.t().to(torch.int32).tolist() == x.cpu().t().int().tolist()
    assert x[x > 5].tolist() == [6, 7, 8, 9, 10, 11] and x[:, 1].tolist() == [1, 5, 9]
    x[torch.tensor([0, 2])] = -1
    assert x.sum(1).tolist() == [-4, 22, -4]
    values, order = x.cpu().cuda().view(-1).sort(descending=True)
    assert (values[0].item(), order[0].item()) == (7.0, 7)
    assert x.to("cuda:1").device == torch.device("cuda", 1)


def test_random_numbers_follow_the_gpus_generator(gpu: Computing) -> None:
    torch.cuda.manual_seed(3)
    state = torch.random.get_rng_state()
    one, two = torch.randn(4, device="cuda"), torch.randn(4, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.randn(4, device="cuda"), one) and not torch.equal(one, two)
    assert torch.equal(torch.random.get_rng_state(), state)
    own = torch.Generator("cuda").manual_seed(5)
    first = torch.randperm(100, device="cuda", generator=own)
    assert torch.equal(torch.randperm(100, device="cuda", generator=own.manual_seed(5)), first)


def test_a_graph_does_its_operations_at_each_launch(gpu: Computing) -> None:
    table, at = torch.zeros(4, device="cuda"), torch.tensor([1], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = table.index_select(0, at) + 1
        table.index_add_(0, at, found)
    assert table.tolist() == [0, 0, 0, 0]
    graph.replay()
    graph.replay()
    assert table.tolist() == [0, 3, 0, 0] and found.tolist() == [2]
    at.fill_(3)
    graph.replay()
    assert table.tolist() == [0, 3, 0, 1]


def test_waiting_while_a_graph_is_recorded_is_an_error(gpu: Computing) -> None:
    x = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.item()
    assert (x + 1).item() == 2


def test_operations_and_waits_are_counted(gpu: Computing) -> None:
    x, y = torch.ones(4, device="cuda"), torch.ones(4).pin_memory()
    gpu.clear()
    z = x.add(1).mul_(2)
    z.copy_(y, non_blocking=True)
    z.view(2, 2).t()
    assert gpu.operations == {"aten::add": 1, "aten::mul_": 1, "aten::copy_": 1} and gpu.waits.total() == 0
    z.sum().item()
    assert gpu.waits == {"cuda": 1}
    z.nonzero()
    z.cpu()
    assert gpu.waits == {"cuda": 2, "aten::nonzero": 1}


# ------------------------------------------------------------------------------------------------------------- errors


def test_tensors_of_several_devices_are_refused(gpu: Computing) -> None:
    x = torch.ones(2, device="cuda:0")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        x.to("cuda:2")
    assert (x + torch.tensor(1.0)).tolist() == [2, 2]


def test_memory_is_limited_for_all_processes_together() -> None:
    code = """
import os, subprocess, sys, torch
free, total = torch.cuda.mem_get_info()
assert (free, total) == (724 << 20, 1024 << 20), (free, total)
kept = torch.empty(500 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as exc:
    print(str(exc).splitlines()[0][:60])
other = "import torch; print(torch.cuda.mem_get_info(1)[0] >> 20); torch.cuda.mem_get_info(0)"
done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
print(done.stdout, *[line for line in done.stderr.splitlines() if "CUDA error" in line])
del kept
torch.cuda.empty_cache()
print(torch.cuda.mem_get_info(0)[0] >> 20)
"""
    lines = program(code, memory_mib=1024).splitlines()
    assert lines[0].startswith("CUDA out of memory. Tried to allocate 300.00 MiB")
    assert lines[1] == "724" and "out of memory" in lines[2], "a context takes 300 MiB, and 224 were left"
    assert lines[3] == "724"


ASSERTING = """
import torch
from imitated import program
from imitated.computing import Computing
with Computing():
    row = torch.ones(4, 2, device="cuda").index_select(0, torch.tensor([9], device="cuda"))
    print(tuple(row.shape))
    for use in (torch.cuda.synchronize, lambda: torch.ones(1, device="cuda")):
        try:
            use()
        except RuntimeError as exc:
            print(type(exc).__name__, str(exc).splitlines()[0])
"""


def test_an_index_out_of_bounds_is_found_when_the_host_waits_and_stays() -> None:
    lines = program(ASSERTING).splitlines()
    assert lines == ["(1, 2)", *["AcceleratorError CUDA error: device-side assert triggered"] * 2]


def test_a_fork_of_a_process_with_cuda_has_none() -> None:
    code = """
import os, torch
torch.ones(1).cuda()
if os.fork() == 0:
    try:
        torch._C._cuda_getDeviceCount()
        print(torch.cuda._is_in_bad_fork(), flush=True)
        torch.ones(1).cuda()
    except RuntimeError as exc:
        print(str(exc)[:38], flush=True)
    os._exit(0)
os.wait()
"""
    assert program(code).splitlines() == ["True", "Cannot re-initialize CUDA in forked su"]


# ------------------------------------------------------------------------------------------------------------ machines

GPUS = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
driver.cuInit(0)
driver.cuDeviceGetCount(ctypes.byref(count))
print([driver.imitated_gpu(number) for number in range(count.value)])
"""


def test_a_mixed_machine_counts_the_fastest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert program(GPUS, gpus=3, capability="7.5,9.0,8.0") == "[1, 2, 0]"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert program(GPUS, gpus=3, capability="7.5,9.0,8.0") == "[1, 0]"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert program(GPUS, gpus=3, capability="7.5,9.0,8.0") == "[0, 2]"


@pytest.mark.parametrize(
    ("visible", "shown"),
    [("1", "[1]"), ("1,0", "[1, 0]"), ("GPU-00000002", "[1]"), ("0,5,1", "[0]"), ("", "[]"), ("0,0", "[]")],
)
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, visible: str, shown: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert program(GPUS) == shown


def test_exclusive_mode_lets_one_process_in() -> None:
    code = """
import subprocess, sys, torch
torch.ones(1).cuda()
other = [sys.executable, "-c", "import torch; torch.ones(1).cuda()"]
print(subprocess.run(other, capture_output=True, text=True).stderr)
"""
    assert "busy or unavailable" in program(code, exclusive=True)
