"""Machines on which the driver counts GPUs in another order than CUDA: the fastest comes first there."""

from __future__ import annotations

from imitated import program

OUT_OF_MEMORY = """
import torch
from nbdist import Session

with Session(1, devices=[0]) as session:
    print(session.run(torch.cuda.get_device_name))
    try:
        session.run(lambda: torch.empty(1 << 42, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as exc:
        print(str(exc.__cause__).splitlines()[-1])
    print(str(session.status()).splitlines()[-1])
"""


def test_an_out_of_memory_error_shows_the_ranks_own_gpu() -> None:
    name, message, status = program(OUT_OF_MEMORY, capability="9.0").splitlines()
    assert "rank 0 works on cuda:0 (Imitated GPU 9.0, 0.3 GiB of 16.0 GiB in use" in message
    assert "cuda:0: 0.3 of 16.0 GiB" in status
    name, message, status = program(OUT_OF_MEMORY, capability="7.5,9.0").splitlines()
    assert name == "Imitated GPU 9.0"
    assert "rank 0 works on cuda:0" in message and "7.5" not in message, "rather nothing than of the other GPU"
    assert "0.0 of 16.0 GiB" not in status


def test_a_gpu_by_its_name_among_visible_ones() -> None:
    code = """
import torch
from nbdist import Session

with Session(1, devices=["GPU-00000001"]) as session:
    print(session.run(torch.cuda.get_device_name))
try:
    Session(1, devices=["GPU-00000002"])
except ValueError as exc:
    print(exc)
"""
    lines = program(code, {"CUDA_VISIBLE_DEVICES": "1"}, capability="7.5,9.0").splitlines()
    assert lines[0] == "Imitated GPU 7.5", "CUDA's number 1 is the slower one"
    assert "GPU-00000002" in lines[1] and "no GPU that this notebook may use" in lines[1]


def test_a_gpu_that_is_listed_twice_is_refused() -> None:
    code = """
from nbdist import Session

try:
    Session(1, devices="cuda", env={"CUDA_VISIBLE_DEVICES": "0,0"})
except ValueError as exc:
    print(exc)
"""
    assert "0 GPUs are visible" in program(code)
