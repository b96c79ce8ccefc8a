"""The profile of a call's time: traces of ranks read, matched and drawn, and what a training in a session shows."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Kernel

from nbdist import Session
from nbdist.kernel.profile.profile import Profile
from nbdist.kernel.profile.timeline import Span, Trace, inside, merged, steps, without

MAIN, OTHER = 1, 2


def trace(*events: tuple[str, str, float, float, int], whole: int = 1, base: int = 0) -> tuple[bytes, int]:
    """Return what a rank records: a trace as the profiler writes it, and how many whole steps it has.

    The events are (name, category, start, end, thread), with times in milliseconds.
    """
    written = [
        {"ph": "X", "name": name, "cat": kind, "pid": 7, "tid": thread, "ts": start * 1000, "dur": (end - start) * 1000}
        for name, kind, start, end, thread in events
    ]
    arrow = {"ph": "s", "id": 1, "pid": 7, "tid": MAIN, "ts": 0, "cat": "fwdbwd", "name": "fwdbwd"}
    content = {"baseTimeNanoseconds": base, "traceEvents": [*written, arrow]}
    return zlib.compress(json.dumps(content).encode()), whole


def two_ranks() -> dict[int, tuple[bytes, int]]:
    """Rank 0 loads for 50 of 100 ms, and rank 1 waits for it."""
    return {
        0: trace(
            ("ProfilerStep#0", "user_annotation", 0, 100, MAIN),
            ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", 0, 50, MAIN),
            ("aten::mm", "cpu_op", 50, 80, MAIN),
            ("c10d::allreduce_", "cpu_op", 80, 81, MAIN),
            ("gloo:all_reduce", "user_annotation", 80, 100, OTHER),
        ),
        1: trace(
            ("ProfilerStep#0", "user_annotation", 0, 100, MAIN),
            ("aten::mm", "cpu_op", 0, 30, MAIN),
            ("aten::mul", "cpu_op", 10, 20, MAIN),
            ("gloo:all_reduce", "user_annotation", 30, 100, OTHER),
            ("aten::add", "cpu_op", 40, 50, MAIN),
        ),
    }


def read(recorded: Mapping[int, tuple[bytes, int]]) -> dict[int, Trace]:
    return {rank: Trace(*one) for rank, one in recorded.items()}


def test_spans_are_merged_and_subtracted() -> None:
    spans = merged([Span(5, 6), Span(0, 2), Span(1, 3)])
    assert spans == [(0, 3), (5, 6)]
    assert inside(Span(2, 5.5), spans) == [(2, 3), (5, 5.5)]
    assert without([Span(0, 10)], spans) == [(3, 5), (6, 10)]


def test_time_of_a_step_is_divided_into_kinds() -> None:
    first, second = steps(read(two_ranks()))
    assert first.parts == pytest.approx({"loader": 0.05, "compute": 0.03, "communication": 0.02, "waiting": 0})
    assert second.parts == pytest.approx({"loader": 0, "compute": 0.04, "communication": 0.02, "waiting": 0.04})
    assert second.waited_for == pytest.approx({0: 0.04}) and not first.waited_for


def test_hint_table_and_picture() -> None:
    profile = Profile(None, two_ranks())
    hint = "rank 1 waited 40% of the time for rank 0: its loader took 50 ms of a step of 100 ms"
    assert profile.hint() == hint and hint in repr(profile)
    picture = profile._repr_html_()
    assert picture.count("<rect") == 8 and "waiting 40%" in picture and hint in picture
    alone = Profile(None, {0: two_ranks()[0]})
    assert alone.hint() == "" and alone.shares()[0]["communication"] == pytest.approx(0.2)


def test_collectives_of_some_ranks_only_are_no_waiting() -> None:
    step = ("ProfilerStep#0", "user_annotation", 0, 10, MAIN)
    traces = {0: trace(step, ("gloo:broadcast", "user_annotation", 2, 10, OTHER)), 1: trace(step)}
    first, second = steps(read(traces))
    assert first.parts["communication"] == pytest.approx(0.008) and first.parts["waiting"] == 0
    assert second.parts["compute"] == pytest.approx(0.01)


def test_with_a_gpu_its_kernels_count() -> None:
    on_gpu = trace(
        ("ProfilerStep#0", "user_annotation", 0, 100, MAIN),
        ("aten::mm", "cpu_op", 0, 100, MAIN),
        ("gemm", "kernel", 0, 30, 9),
        ("ncclDevKernel_AllReduce_Sum_f32", "kernel", 30, 60, 10),
    )
    (step,) = steps(read({0: on_gpu}))
    assert step.parts["communication"] == pytest.approx(0.03) and step.parts["compute"] == pytest.approx(0.07)


def test_traces_of_all_ranks_are_saved_in_one_file(tmp_path: Path) -> None:
    traces = two_ranks()
    traces[1] = trace(("ProfilerStep#0", "user_annotation", 0, 100, MAIN), base=5_000_000)
    Profile(None, traces).save(tmp_path / "trace.json.gz")
    merged = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    starts = {event["pid"]: event["ts"] for event in merged["traceEvents"] if event["name"] == "ProfilerStep#0"}
    assert starts == {0: 0, 1000: 5000}, "5 ms later on the same clock"
    assert len({event["id"] for event in merged["traceEvents"] if "id" in event}) == 2


class Slow(torch.utils.data.Dataset[Any]):
    longest = 0.01
    """Seconds that a step takes, without its batch."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(3 * self.longest if dist.get_rank() == 0 else 0)
        return torch.ones(4)


def train(steps: int) -> int:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Slow()
    for number, batch in enumerate(torch.utils.data.DataLoader(data, batch_size=1), 1):
        begin = time.monotonic()
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number > 1:  # the first one may import what it uses
            data.longest = max(data.longest, time.monotonic() - begin)
        if number == steps:
            break
    return dist.get_rank() + 10


@pytest.mark.slow
def test_a_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Session(2, devices="cpu") as session:
        # What optimizers import when they are used is imported once, and not in each rank.
        profile = session.profile(train, 12, skip=2, steps=5, imports="import torch._dynamo")
        assert profile.value == 10
        assert [(step.number, step.rank) for step in profile.steps] == [(n, r) for n in range(2, 7) for r in (0, 1)]
        shares = profile.shares()
        assert shares[0]["loader"] > 0.4 and shares[1]["waiting"] > 0.3
        assert "rank 1 waited" in profile.hint() and "for rank 0: its loader took" in profile.hint()
        assert capfd.readouterr().err == ""
        profile.save(tmp_path / "trace.json")
        names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
        assert {"gloo:all_reduce", "ProfilerStep#2"} <= names
        early = session.profile(train, 4, skip=2, steps=5)
        assert len(early.steps) == 4, "what follows the last step is no step"
        nothing = session.profile(train, 2)
        assert nothing.value == 10 and not nothing.steps
        assert "skip=0" in repr(nothing) and "skip=0" in nothing._repr_html_()
        whole = session.profile(dist.get_rank, skip=0, ranks=[1])
        assert whole.value == 1 and [step.rank for step in whole.steps] == [1]
        with pytest.raises(ZeroDivisionError):
            session.profile(lambda: 1 / 0, skip=0)
        assert session.profile(train, 5, skip=2, steps=2).value == 10, "an error leaves no profiler behind"
        for wrong in ({"skip": -1}, {"steps": 0}, {"ranks": [5]}):
            with pytest.raises(ValueError):
                session.profile(train, 1, **wrong)  # type: ignore[arg-type]


def test_in_a_cell(notebook: Kernel) -> None:
    notebook.ok("%load_ext nbdist\n%ddp start 2 --devices cpu")
    result = notebook.ok("%%ddp --profile --skip 0\nimport torch\nx = torch.ones(300, 300) @ torch.ones(300, 300)")
    (picture,) = [output["data"]["text/html"] for output in result.outputs if "data" in output]
    assert "<svg" in picture and "rank 1" in picture
    notebook.ok("%ddp stop")
