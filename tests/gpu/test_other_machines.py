"""Ranks on machines with other imitated GPUs: mixed ones, old ones, hidden ones."""

from __future__ import annotations

from imitated import program

LOOK = """
import torch
from nbdist import Session, in_ddp
from imitated.computing import Computing

def look():
    import os
    with Computing():
        total = torch.ones(1, device="cuda").item()
    return os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.get_device_name(), total
"""


def test_ranks_have_the_gpus_that_the_notebook_counts() -> None:
    code = """
with Session(2, backend="gloo") as session:
    print([torch.cuda.get_device_name(one) for one in range(2)] == [name for _, name, _ in session.run_all(look)])
with Session(1, devices=[1]) as session:
    print(session.run(look)[1] == torch.cuda.get_device_name(1))
"""
    assert program(LOOK + code, capability="7.5,9.0").split() == ["True", "True"]


def test_visible_gpus_of_the_notebook_hold() -> None:
    code = """
print(in_ddp(1, look))
print(in_ddp.options(devices=["cuda:0"])(1, look))
try:
    in_ddp(2, look)
except ValueError as exc:
    print(exc)
with Session(1, devices="cuda", env={"CUDA_VISIBLE_DEVICES": "0"}) as session:
    print(session.run(look))
"""
    lines = program(LOOK + code, {"CUDA_VISIBLE_DEVICES": "2"}, gpus=3).splitlines()
    assert lines[0] == lines[1] == "('2', 'Imitated GPU 9.0', 1.0)"
    assert lines[2].startswith("2 ranks need a GPU each, but 1 GPU is visible")
    assert lines[3] == "('0', 'Imitated GPU 9.0', 1.0)"


def test_a_list_that_changes_after_cuda_was_used() -> None:
    """CUDA of the notebook goes on with the old one; new ranks have the new one."""
    code = """
import os
torch.ones(1).cuda()
print(torch.cuda.device_count())
for visible in ("1", "0,1,2", "2,x,0"):
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        with Session(2, backend="gloo") as session:
            print([seen for seen, _, _ in session.run_all(look)])
    except ValueError as exc:
        print(exc)
"""
    lines = program(LOOK + code, {"CUDA_VISIBLE_DEVICES": "0,1"}, gpus=3).splitlines()
    assert lines[0] == "2" and lines[2] == "['0,1', '0,1']"
    assert lines[1].startswith("2 ranks need a GPU each, but 1 GPU is visible. ")
    assert (
        "1 GPU is visible (CUDA_VISIBLE_DEVICES=2,x,0: the list ends at 'x', which is no number of a GPU)" in lines[3]
    )


def test_no_visible_gpu_means_cpu_ranks() -> None:
    code = "import torch.distributed as dist\nprint(in_ddp(2, dist.get_backend))"
    assert program(LOOK + code, {"CUDA_VISIBLE_DEVICES": "0,0"}) == "gloo", "one that is named twice is none"


def test_a_gpu_that_cannot_be_had_is_refused() -> None:
    code = """
for devices in (["GPU-00000007"], ["cuda:2"]):
    try:
        Session(1, devices=devices)
    except ValueError as exc:
        print(exc)
"""
    first, second = program(LOOK + code).splitlines()
    assert "GPU-00000007" in first and "got 'cuda:2': 2 GPUs are visible" in second


def test_fresh_interpreters() -> None:
    code = 'print(in_ddp.options(devices=["cuda:1"], start="spawn")(1, look))'
    assert program(LOOK + code) == "('1', 'Imitated GPU 9.0', 1.0)"


def test_in_ddp_0_leaves_the_current_device() -> None:
    code = """
torch.cuda.set_device(1)
print(in_ddp(0, torch.cuda.current_device), torch.cuda.current_device())
"""
    assert program(LOOK + code) == "1 1"


def test_libraries_are_imported_without_the_driver() -> None:
    """A call forks its ranks from a process that never uses CUDA, though the notebook does from its first cell."""
    code = """
torch.ones(1).cuda()
print([in_ddp.options(imports="import torch; import torchmetrics")(1, look)[2] for _ in range(2)])
"""
    assert program(LOOK + code) == "[1.0, 1.0]"


BF16 = """
from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import fit

def train(precision):
    with Computing():
        model = replicate(torch.nn.Linear(2, 1), lambda some: torch.optim.SGD(some, lr=0.1))
        train = MemoryLoader({"x": torch.ones(64, 2), "y": torch.ones(64)}, 8)
        predict = lambda model, batch: (model(batch["x"]).squeeze(1), batch["y"])
        return fit(model, predict, train, steps=4, precision=precision, progress=False)[-1].loss > 0

with Session(1, devices="cuda") as session:
    print(session.run(train, "fp16"))
    try:
        print(session.run(train, "bf16"))
    except ValueError as exc:
        print(exc)
"""


def test_bf16_is_refused_where_a_gpu_would_emulate_it() -> None:
    first, second = program(LOOK + BF16, gpus=1, capability="7.5").splitlines()
    assert first == "True" and "fp16" in second
