"""Ranks on two imitated GPUs: what README and docs/how-to/devices.md promise of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from imitated.computing import Computing, raise_on_gpu

from nbdist import Session, in_ddp, rank_device
from nbdist import devices as nbdist_devices

#: NCCL is not imitated.
OPTIONS = {"backend": "gloo"}


def look() -> tuple[Any, ...]:
    return os.environ["CUDA_VISIBLE_DEVICES"], str(rank_device()), uuid_here()


def uuid_here() -> str:
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


NAMES = ["GPU-00000001-0000-0000-0000-000000000000", "GPU-00000002-0000-0000-0000-000000000000"]


def test_each_rank_has_a_gpu(session: Session) -> None:
    assert session.run_all(look) == [("0,1", "cuda:0", NAMES[0]), ("0,1", "cuda:1", NAMES[1])]


def sums() -> float:
    with Computing():
        total = torch.full((3,), dist.get_rank() + 1.0, device=rank_device())
        dist.all_reduce(total)
        return float(total.sum().item())


def test_gloo_adds_up_over_gpus(session: Session) -> None:
    assert session.run_all(sums) == [9.0, 9.0]


def test_the_notebook_uses_cuda_before_during_and_after_calls(session: Session) -> None:
    with Computing():
        x = torch.arange(8.0, device="cuda:1")

        def doubled() -> tuple[str, torch.Tensor]:
            with Computing():
                return str(x.device), x * 2

        future = session.submit(doubled)
        assert x.sum().item() == 28.0
        device, back = future.result()
        assert device == "cuda:0" and back.device.type == "cpu" and back.tolist() == (x.cpu() * 2).tolist()
        assert session.run_all(lambda: str(x.device)) == ["cuda:0", "cuda:1"], "each has it on its own GPU"
        assert in_ddp.options(devices="cpu")(1, lambda: (x.device.type, x.sum().item())) == ("cpu", 28.0)
        assert x.sum().item() == 28.0
    assert not any(session.run_all(torch.cuda._is_in_bad_fork))


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        (["cuda:1", "cuda:0"], [("1,0", "cuda:0", NAMES[1]), ("1,0", "cuda:1", NAMES[0])]),
        ([1], [("1", "cuda:0", NAMES[1])]),
        (["GPU-00000002"], [(NAMES[1], "cuda:0", NAMES[1])]),
        (["cuda:1", "cuda:1"], [("1", "cuda:0", NAMES[1])] * 2),
    ],
)
def test_devices_by_number_and_by_name(devices: list[Any], wanted: list[Any]) -> None:
    with Session(len(devices), devices=devices, backend="gloo") as session:
        assert session.run_all(look) == wanted


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks need a GPU each, but 2 GPUs are visible"):
        Session(3)
    assert nbdist_devices.gpu_names() == NAMES


def test_out_of_memory_says_where_and_the_ranks_go_on(session: Session) -> None:
    pids = session.run_all(os.getpid)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        session.run(lambda: dist.get_rank() or torch.empty(1 << 42, dtype=torch.uint8, device="cuda"))
    assert "rank 0 works on cuda:0 (Imitated GPU 9.0, " in str(caught.value.__cause__)
    assert session.run_all(sums) == [9.0, 9.0] and session.run_all(os.getpid) == pids


def out_of_bounds() -> None:
    with Computing():
        table, ids = torch.ones(4, 2, device="cuda"), torch.tensor([9], device="cuda")
        table.index_select(0, ids).sum().item()


def test_a_gpu_assertion_is_reported_and_the_next_call_has_fresh_ranks(
    session: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    pids = session.run_all(os.getpid)
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        session.run(out_of_bounds)
    assert "Assertion `srcIndex < srcSelectDimSize` failed" in str(caught.value.__cause__)
    assert session.run_all(sums) == [9.0, 9.0]
    assert not set(session.run_all(os.getpid)) & set(pids)
    assert "cannot use its GPU any more, after a CUDA error" in capfd.readouterr().err


def fail_on_the_other(catch: bool) -> None:
    """In a rank: a kernel on a GPU that is not the rank's own meets an error, which the rank's own GPU has not."""
    with torch.cuda.device(1 - torch.cuda.current_device()):
        torch.ones(1).cuda()
        raise_on_gpu()
    torch.cuda.synchronize()
    if catch:
        raise KeyError("mine")


@pytest.mark.parametrize(("catch", "says"), [(False, "device-side assert"), (True, "mine")])
def test_an_error_on_another_gpu_of_the_call_ends_the_ranks_use(session: Session, catch: bool, says: str) -> None:
    pids = session.run_all(os.getpid)
    with pytest.raises(Exception, match=says):
        session.run(fail_on_the_other, catch)
    assert session.run_all(sums) == [9.0, 9.0]
    assert not set(session.run_all(os.getpid)) & set(pids)


def test_a_call_makes_no_context_on_a_gpu_that_it_does_not_use(session: Session) -> None:
    session.run_all(sums)
    assert session.run_all(lambda: [torch._C._cuda_hasPrimaryContext(gpu) for gpu in range(2)]) == [
        [True, False],
        [False, True],
    ]


def trained(shard: bool) -> tuple[float, float, torch.Tensor]:
    """In a rank: the first and last loss, and the weights."""
    torch.manual_seed(0)
    with Computing():
        model: Any = torch.nn.Linear(8, 1).to(rank_device())
        if shard:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, 8, device=rank_device())
        losses = []
        for _ in range(20):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        weights = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
        return losses[0], losses[-1], torch.cat([one.detach().flatten() for one in weights])


@pytest.mark.parametrize("shard", [False, True])
def test_models_train_over_both_gpus(session: Session, shard: bool) -> None:
    (first, last, weights), (_, _, others) = session.run_all(trained, shard)
    assert last < first / 4 and weights.device.type == "cpu" and torch.equal(weights, others)
