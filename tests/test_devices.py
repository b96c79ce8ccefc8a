"""GPUs that ranks are given, seen from a notebook that has none: the numbers and names of GPUs are simulated."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbdist import Session, devices, in_ddp
from nbdist.capture.big_data import Storage
from nbdist.devices import NCCL, Place, choose_backend, choose_devices, place_ranks, visible_entries
from nbdist.kernel.calls.group import Group
from nbdist.kernel.cell.cell import Cell
from nbdist.kernel.session import executor_of
from nbdist.rank.world import environ, join
from nbdist.system.visible_devices import visible
from nbdist.wire.messages import World

UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "visible_gpus", lambda: 3)
    monkeypatch.setattr(devices, "gpu_names", lambda: UUIDS)
    # CUDA counts these as the driver does.
    monkeypatch.setattr(
        devices, "names_by_number", lambda environ: [UUIDS[int(one)] for one in visible(environ, UUIDS).entries or ()]
    )
    monkeypatch.setattr(devices, "has_nccl", lambda: True)  # torch for CPUs has not


@pytest.mark.parametrize(
    ("asked", "visible", "chosen", "places"),
    [
        (None, None, ["cuda:0", "cuda:1"], [("0,1", 0), ("0,1", 1)]),
        ("cuda", "2,0", ["cuda:0", "cuda:1"], [("2,0", 0), ("2,0", 1)]),
        (["cuda:0", "cuda:2"], None, ["cuda:0", "cuda:2"], [("0,2", 0), ("0,2", 1)]),
        ([2, 0], None, ["cuda:2", "cuda:0"], [("2,0", 0), ("2,0", 1)]),
        (["cuda:1", "cuda:0"], "1,2,0", ["cuda:1", "cuda:0"], [("2,1", 0), ("2,1", 1)]),
        ([1, 0], "GPU-cccc,GPU-aabb,1", ["cuda:1", "cuda:0"], [("GPU-aabb-2,GPU-cccc-3", n) for n in (0, 1)]),
        (["GPU-aabb", "GPU-cccc"], "GPU-cccc,GPU-aab", UUIDS[1:], [("GPU-aabb-2,GPU-cccc-3", n) for n in (0, 1)]),
        (None, "2gpu, 0,-1,1", ["cuda:0", "cuda:1"], [("2,0", 0), ("2,0", 1)]),
        (["cuda:1", "cuda:1"], None, ["cuda:1", "cuda:1"], [("1", 0), ("1", 0)]),
        (["GPU-cccc", "GPU-aabb"], None, UUIDS[:0:-1], [("GPU-cccc-3,GPU-aabb-2", 0), ("GPU-cccc-3,GPU-aabb-2", 1)]),
        (["GPU-cccc"] * 2, "2,0", ["GPU-cccc-3"] * 2, [("GPU-cccc-3", 0)] * 2),
        (["MIG-a", "MIG-b"], None, ["MIG-a", "MIG-b"], [("MIG-a", 0), ("MIG-b", 0)]),
        (None, "MIG-a,MIG-b", ["cuda:0", "cuda:1"], [("MIG-a", 0), ("MIG-b", 0)]),
        (["cuda:1", "cuda:0"], "MIG-a,MIG-b", ["cuda:1", "cuda:0"], [("MIG-b", 0), ("MIG-a", 0)]),
        ("cpu", "1", ["cpu", "cpu"], [("", None), ("", None)]),
    ],
)
def test_each_rank_is_given_its_own(
    asked: Any, visible: str | None, chosen: list[str], places: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_devices(2, asked) == chosen
    wanted = [Place(own, "cpu" if number is None else f"cuda:{number}") for own, number in places]
    assert place_ranks(chosen, visible_entries(os.environ)) == wanted


@pytest.mark.parametrize(
    ("asked", "visible", "says"),
    [
        ("mps", None, r"devices must be 'cpu', 'cuda', or a list .*, got 'mps'"),
        (["xpu:0", "xpu:1"], None, r"devices must be 'cpu', 'cuda', or a list .*, got 'xpu:0'"),
        (["cuda", "cuda"], None, r"or a list .* \('cpu', 'cuda:1', .*, got 'cuda'"),
        (["cuda:0", "cpu"], None, "must be of one kind"),
        (["cuda:0", "GPU-aaaa"], None, "must be of one kind"),
        (["cuda:0"], None, "must be one for each of 2 ranks, got 1"),
        (["cuda:0", "cuda:3"], None, "got 'cuda:3': 3 GPUs are visible"),
        (["GPU-aa", "GPU-cccc"], None, "GPU-aa is not one GPU, but the beginning of several: GPU-aaaa-1, GPU-aabb-2"),
        (["GPU-dddd", "GPU-cccc"], None, "GPU-dddd is no GPU that this notebook may use: GPU-aaaa-1"),
        (["GPU-cccc", "GPU-aabb"], "0,2", "GPU-aabb is no GPU that this notebook may use: GPU-aaaa-1, GPU-cccc-3"),
        (["MIG-a", "MIG-c"], "MIG-a,MIG-b", "must be among CUDA_VISIBLE_DEVICES=MIG-a,MIG-b, got 'MIG-c'"),
        (["cuda:0", "cuda:2"], "MIG-a,MIG-b", "got 'cuda:2': 2 GPUs are visible"),
    ],
)
def test_devices_that_cannot_be_had(
    asked: Any, visible: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=says):
        Session(2, devices=asked)


def test_variables_for_the_ranks_alone_count() -> None:
    session = Session(2, env={"CUDA_VISIBLE_DEVICES": "1,0,2"}, devices=["cuda:2", "cuda:0"])
    chosen = executor_of(session).layout
    assert place_ranks(chosen.devices, chosen.visible) == [
        Place("2,1", "cuda:0"),
        Place("2,1", "cuda:1"),
    ]


@pytest.mark.parametrize(
    ("visible", "gpus", "why"),
    [
        ("2", "1 GPU is", None),
        ("2,-1,0", "1 GPU is", None),
        ("2,7,0", "1 GPU is", "the list ends at '7', which is no GPU of this machine"),
        ("2,zero,0", "1 GPU is", "the list ends at 'zero', which is no number of a GPU"),
        ("2,GPU-aaaa", "1 GPU is", "the list ends at 'GPU-aaaa', which is no number of a GPU"),
        ("GPU-cc,2", "1 GPU is", "the list ends at '2', which is no name that begins with GPU-"),
        ("GPU-cc, GPU-aabb", "1 GPU is", "the list ends at ' GPU-aabb', which is no name that begins with GPU-"),
        ("GPU-cc,GPU-aa", "1 GPU is", "the list ends at 'GPU-aa', which is the beginning of several names"),
        ("GPU-cc,GPU-dd", "1 GPU is", "the list ends at 'GPU-dd', which is no GPU of this machine"),
        ("GPU-cc,GPU-cccc", "0 GPUs are", "a list with 'GPU-cccc-3' twice shows no GPU"),
        ("0,0", "0 GPUs are", "a list with '0' twice shows no GPU"),
        ("0,7,00", "0 GPUs are", "a list with '0' twice shows no GPU"),
        ("MIG-a,0", "1 GPU is", "the list ends at '0', which is no name that begins with MIG-"),
        ("", "0 GPUs are", None),
        ("-1", "0 GPUs are", None),
    ],
)
@pytest.mark.parametrize("of", ["the ranks", "the notebook"])
def test_gpus_that_cuda_would_not_find_do_not_count(
    visible: str, gpus: str, why: str | None, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is read as torch reads it, whatever CUDA showed to this process when it was first used."""
    variables = {"CUDA_VISIBLE_DEVICES": visible}
    if of == "the notebook":
        monkeypatch.setenv(*variables.popitem())
    with pytest.raises(ValueError, match=f"2 ranks need a GPU each, but {gpus} visible") as caught:
        Session(2, devices="cuda", env=variables)
    assert ("devices=['cuda:0', 'cuda:0']" in str(caught.value)) == (gpus == "1 GPU is")
    assert (f"visible (CUDA_VISIBLE_DEVICES={visible}: {why})" if why else "visible. ") in str(caught.value)


@pytest.mark.parametrize("hip", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "0",
            "1,0",
            "2,7,0",
            "0,0",
            "0,7,7",
            "1gpu2,2ampere",
            " 1 , 0 ",
            "1,,2",
            "-1",
            "0,-1,1",
            "+1,x",
            "zero,1",
        ),
        *("GPU-cccc", "GPU-cc,GPU-aabb", "GPU-cc,GPU-aa,GPU-aabb", "GPU-dd,GPU-cc", "GPU-cc,GPU-cc", "GPU-cc,GPU-c"),
        *("GPU-cc, GPU-aabb", "GPU-cc,1", "1,GPU-cc", "gpu-cc", "MIG-a,MIG-b", "MIG-a,MIG-a", "MIG-a,0", "0,MIG-a"),
    ],
)
def test_a_list_is_read_as_torch_reads_it(text: str, hip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4" if hip else None)
    variables = {"CUDA_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": text} if hip else {"CUDA_VISIBLE_DEVICES": text}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    read = torch.cuda._parse_visible_devices()
    names = bool(read) and isinstance(read[0], str)
    if names and not str(read[0]).startswith("MIG-"):
        monkeypatch.setattr(torch.version, "hip", None)  # whose names have no GPU-
        read = torch.cuda._transform_uuid_to_ordinals([str(one) for one in read], UUIDS)
        found: list[Any] = [
            UUIDS.index(entry) for entry in visible(variables | {"CUDA_VISIBLE_DEVICES": text}, UUIDS)[1] or ()
        ]
    else:
        found = [one if names else int(one) for one in visible(variables, ()).entries or ()]
    assert found == read
    assert visible({}, UUIDS) == ("CUDA_VISIBLE_DEVICES", None, "")


def test_ranks_on_amds_gpus_see_their_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """HIP reads its own variable first, and shows all GPUs where a list is empty."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,1")
    (world,) = worlds_of(["cuda:1"], monkeypatch)
    found = environ(world)
    assert (found["HIP_VISIBLE_DEVICES"], found["CUDA_VISIBLE_DEVICES"]) == ("1", "1")
    with pytest.raises(ValueError, match=r"2 GPUs are visible"):
        Session(3, devices="cuda")
    (world,) = worlds_of(["cpu"], monkeypatch)
    assert environ(world)["HIP_VISIBLE_DEVICES"] == "-1"


def test_a_session_keeps_the_gpus_that_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA of the notebook does, too: a list that changes later is for later sessions."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    session = Session(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert executor_of(session).layout.gpus() == ["2", "1"]
    with pytest.raises(ValueError, match="1 GPU is visible"):
        Session(2)


def test_gpus_that_a_mistake_hides_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch says nothing, and works on the CPU."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    for text, said in (("0,0", True), ("", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert in_ddp(1, dist.get_backend) == "gloo"
        notice = "no GPU is visible (CUDA_VISIBLE_DEVICES=0,0: a list with '0' twice shows no GPU)"
        assert (notice in capfd.readouterr().err) == said


def test_the_backend_follows_from_the_devices() -> None:
    assert choose_backend(["cpu"], None) == ("gloo", "")
    assert choose_backend(["cuda:0", "cuda:1"], None) == (NCCL, "") == choose_backend(["cuda"] * 2, None)
    for sharing in (["cuda:1", "cuda:1"], ["MIG-a", "MIG-b"]):
        name, said = choose_backend(sharing, None)
        assert name == "gloo" and "share a GPU talk through gloo" in said
        for asked in ("nccl", NCCL):
            name, said = choose_backend(sharing, asked)
            assert name == asked and "to try NCCL out, not for speed" in said
    assert choose_backend(["cuda:0", "cuda:1"], None, ["MIG-a", "MIG-b"])[0] == "gloo"
    assert choose_backend(["MIG-a"], None) == (NCCL, "")
    assert choose_backend(["cuda:0"], "nccl") == choose_backend(["cuda:0", "cuda:1"], "nccl") == ("nccl", "")
    with pytest.raises(ValueError, match="backend must be 'gloo' for ranks on the CPU"):
        Session(2, devices="cpu", backend={"backend": "nccl"})
    assert repr(Session(2)) == f"<nbdist.Session: 2 ranks on cuda:0, cuda:1, {NCCL}, not started>"


def test_a_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nccl", lambda: False)
    assert choose_backend(["cuda:0"], None) == ("gloo", "")
    assert choose_backend(["cuda:0", "cuda:1"], None) == (
        "gloo",
        "ranks talk through gloo: this build of torch has no NCCL",
    )
    assert choose_backend(["cuda", "cuda"], None) == (NCCL, ""), "a cluster has a build of its own"
    with pytest.raises(ValueError, match="got 'nccl': this build of torch has no NCCL"):
        Session(2, backend="nccl")


def worlds_of(devices: list[str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[World]:
    """Return the worlds that the ranks of a session would be given."""
    worlds: list[World] = []

    def send(self: Group, rank: int, message: Any, **parts: Any) -> None:
        worlds.append(message.world)

    with Session(len(devices), devices=devices, **options) as session, monkeypatch.context() as patch:
        patch.setattr(Group, "send", send)
        executor_of(session).ready(Cell()).join()
    return worlds


def test_variables_in_the_ranks_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL_RANK is the number of the rank's own GPU among those that it sees, as torchrun's scripts take it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,2")
    worlds = worlds_of(["cuda:0", "cuda:2"], monkeypatch)
    found = [environ(world) for world in worlds]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["1,2"] * 2
    assert [(world.device, one["LOCAL_RANK"]) for world, one in zip(worlds, found, strict=True)] == [
        ("cuda:0", "0"),
        ("cuda:1", "1"),
    ]


def test_ranks_are_bound_near_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (world.slot.cores for world in worlds_of(["cpu", "cpu"], monkeypatch))
    near = {"GPU-aaaa-1": second, "GPU-cccc-3": first}
    monkeypatch.setattr("nbdist.kernel.calls.group.local_cores", lambda gpu: list(near[gpu]))
    names = ["GPU-aaaa", "GPU-cccc"]
    assert [world.cores for world in worlds_of(names, monkeypatch, threads="bind")] == [second, first]
    assert [world.cores for world in worlds_of(names, monkeypatch)] == [None, None]


def test_accelerate_takes_the_gpu_that_a_rank_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not cuda:{LOCAL_RANK}, which a rank that sees one GPU alone does not have."""
    bypass = "ACCELERATE_BYPASS_DEVICE_MAP"
    worlds = worlds_of(["cuda:1", "cuda:1"], monkeypatch)
    assert [world.device for world in worlds] == ["cuda:0", "cuda:0"]
    assert environ(worlds[1])[bypass] == "true"
    assert not any(bypass in environ(world) for world in worlds_of(["cuda:0", "cuda:1"], monkeypatch))


@pytest.mark.parametrize("devices", [["cuda:1", "cuda:1"], ["MIG-a", "MIG-b"]])
def test_nccl_takes_ranks_that_share_a_gpu_for_hosts(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses two ranks with one GPU on one host."""
    monkeypatch.setenv("NCCL_NET", "mine")
    found = [environ(world) for world in worlds_of(devices, monkeypatch, backend="nccl")]
    assert [one["NCCL_HOSTID"] for one in found] == ["nbdist-0", "nbdist-1"]
    for one in found:
        assert one["NCCL_NET"] == "mine", "what the user has set holds"
        assert (one["NCCL_MNNVL_ENABLE"], one["NCCL_NVLS_ENABLE"], one["NCCL_IB_DISABLE"]) == ("0", "0", "1")
        assert one["NCCL_SOCKET_IFNAME"] in ("lo", "lo0")


@pytest.mark.parametrize("devices", [["cuda:1", "cuda:1"], ["cuda:0", "cuda:1"]])
def test_otherwise_ranks_are_on_one_host(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for world in worlds_of(devices, monkeypatch):
        assert not {"NCCL_HOSTID", "NCCL_NET", "NCCL_IB_DISABLE"} & environ(world).keys()


def test_torch_does_not_end_ranks_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    (world,) = worlds_of(["cuda:0"], monkeypatch)
    found = {name: value for name, value in environ(world).items() if name.startswith("TORCH_NCCL_")}
    assert found.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "1", "what the user has set holds"
    assert found == {
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    }
    (world,) = worlds_of(["cpu"], monkeypatch)
    assert not any("NCCL" in name for name in environ(world) if name != "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:2"]])
def test_several_ranks_alone_wait_for_nccl_at_their_start(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank has no peer to connect to, and would wait a third of a second; several can be released after it."""
    entered: dict[str, Any] = {}
    worlds = worlds_of(devices, monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: entered.update(current=device))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: entered.update(options))
    monkeypatch.setattr(dist, "PrefixStore", lambda *_: None)
    threads = torch.get_num_threads()
    try:
        join(worlds[-1], None)
    finally:
        torch.set_num_threads(threads)
    own = torch.device("cuda", len(devices) - 1)
    assert entered["current"] == own and entered.get("device_id") == (own if len(devices) > 1 else None)


def test_cpu_ranks_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    variables = ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU")
    assert in_ddp.options(devices="cpu")(1, lambda: [os.environ[name] for name in variables]) == ["", "true"]


def test_a_notice_says_that_ranks_share_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    with Session(2, devices=["cuda:1", "cuda:1"]) as session, pytest.raises(Exception, match=r"(?i)cuda|NVIDIA"):
        session.run(dist.get_rank)
    assert "nbdist: ranks that share a GPU talk through gloo" in capfd.readouterr().err


# ----------------------------------------------------------------- a notebook with a GPU, and ranks that have none


def test_devices_of_the_notebook_are_the_cpu_in_cpu_ranks() -> None:
    gpu = torch.device("cuda", 1)
    assert in_ddp.options(devices="cpu")(1, lambda: str(gpu)) == "cpu"


class FakeGpuStorage:
    """A torch storage as it is on a GPU, as far as its pickle goes."""

    device = torch.device("cuda", 0)

    def nbytes(self) -> int:
        return 3

    def cpu(self) -> Any:
        return torch.arange(3, dtype=torch.uint8).untyped_storage()


class FakeGenerator(torch.Generator):
    """A generator of a GPU, which torch for CPUs cannot make."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def get_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)  # a seed and an offset, which a CPU's generator does not take


def test_generators_of_the_gpu_begin_at_their_seed_in_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Generator", FakeGenerator)
    generator = FakeGenerator().manual_seed(7)
    wanted = torch.rand(3, generator=torch._C.Generator().manual_seed(7))

    def draw() -> torch.Tensor:
        return torch.rand(3, generator=generator)

    assert torch.equal(in_ddp.options(devices="cpu")(1, draw), wanted)


def test_tensors_on_the_gpu_go_to_the_cpu_of_cpu_ranks() -> None:
    data = pickle.dumps(Storage(FakeGpuStorage(), to_cpu=False, files=None), protocol=5)
    storage = in_ddp.options(devices="cpu")(1, lambda: list(pickle.loads(data)))
    assert storage == [0, 1, 2]
