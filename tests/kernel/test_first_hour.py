"""Mistakes of the first hour: a call, the class of its error, and words that the error must have.

All are answered in the notebook's own process, before any rank starts, but for the last table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import nbdist
from nbdist import (
    RayOptions,
    Recording,
    Session,
    attach,
    cluster,
    context,
    explain,
    in_ddp,
    parallel_map,
    per_rank,
    post_mortem,
    replay_step,
    sessions,
    use,
    warm,
)
from nbdist.errors import NbdistError, RemoteTraceback
from nbdist.kernel.calls import stacks
from nbdist.kernel.calls.arguments import many_ranks
from nbdist.kernel.options import SessionOptions


def train(x: int = 1) -> int:
    return x


def two(a: int, b: int) -> int:
    return a + b


#: Options of a session, the class of the error, words of its text.
WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"timeout": "10s"}, TypeError, "timeout must be a number of seconds, got '10s' (str)"),
    ({"timeout": 0}, ValueError, "timeout must be a finite number of seconds above 0, got 0"),
    ({"timeout": float("nan")}, ValueError, "timeout must be a finite number of seconds above 0, got nan"),
    ({"timeout": float("inf")}, ValueError, "timeout must be a finite number"),
    ({"timeout": [1]}, TypeError, "timeout must be a number of seconds, got [1] (list)"),
    ({"timeout": True}, TypeError, "timeout must be a number of seconds, got True"),
    ({"backend": "ncll"}, ValueError, "got 'ncll'. Did you mean 'nccl'?"),
    ({"backend": "cpu:glo"}, ValueError, "got 'cpu:glo'. Did you mean 'gloo'?"),
    ({"backend": "horovod"}, ValueError, "backend must be 'gloo', 'nccl', another backend of torch"),
    ({"backend": 3}, TypeError, "backend must be a string such as 'gloo', or a mapping, got 3"),
    ({"backend": {"timout": 3}}, ValueError, "got 'timout'. Did you mean 'timeout'?"),
    ({"backend": {"timeout": "10s"}}, TypeError, "backend['timeout'] must be a number of seconds, got '10s'"),
    ({"outputs": "all"}, TypeError, "has no argument 'outputs'. Did you mean 'output'?"),
    ({"device": "cpu"}, TypeError, "has no argument 'device'. Did you mean 'devices'?"),
    ({"xyzzy": 1}, TypeError, "backend, devices, threads"),
    ({"threads": "4"}, TypeError, "threads must be an integer, got '4' (str)"),
    ({"threads": 0}, ValueError, "threads must be at least 1, got 0"),
    ({"output": "rank1"}, ValueError, "output must be one of 'rank0', 'all', 'tabs', 'none', got 'rank1'"),
    ({"output": True}, ValueError, "output must be one of"),
    ({"lines": "all"}, TypeError, "lines must be an integer, got 'all'"),
    ({"lines": -1}, ValueError, "lines must be at least 0, got -1"),
    ({"env": "A=1"}, TypeError, "env must be a mapping from names to strings, such as a dict, got 'A=1'"),
    ({"env": {"A": 1}}, TypeError, "env['A'] must be a string, got 1 (int)"),
    ({"env": {3: "1"}}, TypeError, "env must be a mapping from names to strings, got the key 3"),
    ({"env": {"A=B": "1"}}, ValueError, "env must have names without '='"),
    ({"seed": "3"}, TypeError, "seed must be an integer or None, got '3'"),
    ({"seed": 1 << 70}, ValueError, "seed must be an integer of 64 bits"),
    ({"seed_ranks": "yes"}, TypeError, "seed_ranks must be True or False, got 'yes'"),
    ({"settings": "no"}, TypeError, "settings must be True or False, got 'no'"),
    ({"hold_on_error": 1}, TypeError, "hold_on_error must be True or False, got 1"),
    ({"start": "fork"}, ValueError, "start must be one of 'forkserver', 'spawn', got 'fork'"),
    ({"restarts": -1}, ValueError, "restarts must be at least 0, got -1"),
    ({"restarts": "2"}, TypeError, "restarts must be an integer, got '2'"),
    ({"output": "tab"}, ValueError, "got 'tab'. Did you mean 'tabs'?"),
    ({"on_hang": "rise"}, ValueError, "on_hang must be one of 'say', 'raise', got 'rise'. Did you mean 'raise'?"),
    ({"on_hang": True}, ValueError, "on_hang must be one of"),
    ({"check": "nans"}, ValueError, "got 'nans'. Did you mean 'nan'?"),
    ({"check": True}, TypeError, "check must be 'nan', 'ranks', 'ranks:N' or a list of these, got True"),
    ({"check": ["nan", "rank"]}, ValueError, "got ['nan', 'rank']. Did you mean 'ranks'?"),
    ({"check": "ranks:0"}, ValueError, "'ranks:N' (each N steps)"),
    ({"names": "x"}, TypeError, "has no argument 'names'. Did you mean 'name'?"),
    ({"name": 3}, TypeError, "name must be a string, got 3"),
    ({"name": "a/b"}, ValueError, "name must be up to 64 letters, digits"),
    ({"name": "x", "idle": "1h"}, TypeError, "idle must be a number of seconds, got '1h'"),
    ({"name": "x", "keep": "1G"}, TypeError, "keep must be an integer, got '1G'"),
    ({"name": "x", "keep": 10}, ValueError, "keep must be at least 1048576, got 10"),
    ({"idle": 3600}, ValueError, "idle must be given with a name, got no name: Session(2, name='...', idle=...)"),
    ({"keep": 1 << 21}, ValueError, "keep must be given with a name"),
]


@pytest.mark.parametrize(("options", "error", "words"), WRONG_OPTIONS, ids=lambda one: str(one)[:40])
def test_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    for call in (in_ddp.options, lambda **given: Session(2, **given)):
        with pytest.raises(error) as caught:
            call(**options)
        assert words in str(caught.value)


#: Calls as text, the class of the error, words of its text.
WRONG_CALLS: list[tuple[str, type[Exception], str]] = [
    ("nbdist.in_dpp", AttributeError, "Did you mean 'in_ddp'?"),
    ("nbdist.Sesion", AttributeError, "Did you mean 'Session'?"),
    ("nbdist.xyzzy", AttributeError, "module 'nbdist' has no attribute 'xyzzy'"),
    ("in_ddp(train, 2)", TypeError, "the number of ranks comes first, in_ddp(2, train, ...)"),
    ("in_ddp.options()(train, 2)", TypeError, "the number of ranks comes first"),
    ("in_ddp(2, train())", TypeError, "fn must be a function, got 1 (int): pass the function itself"),
    ("in_ddp(2, None)", TypeError, "fn must be a function, got None"),
    ("in_ddp(2, 'train')", TypeError, "fn must be a function, got 'train'"),
    ("in_ddp(2)", TypeError, "write in_ddp(ngpus, fn, *args, imports=, need=, **kwargs)"),
    ("in_ddp(nprocs=2, fn=train)", TypeError, "write in_ddp(ngpus, fn, *args"),
    ("in_ddp('2', train)", TypeError, "ngpus must be an integer, got '2'"),
    ("in_ddp(True, train)", TypeError, "ngpus must be an integer, got True"),
    ("in_ddp(2.0, train)", TypeError, "ngpus must be an integer, got 2.0"),
    ("in_ddp(-1, train)", ValueError, "ngpus must be at least 0, got -1"),
    ("in_ddp(2, two)", TypeError, "missing a required argument: 'a'"),
    ("in_ddp(2, two, 1, 2, 3)", TypeError, "too many positional arguments"),
    ("in_ddp(2, two, 1, c=2)", TypeError, "two() got an unexpected keyword argument 'c'"),
    ("in_ddp(2, two, 1, 2, output='all')", TypeError, "Options come first: in_ddp.options(output=...)"),
    ("in_ddp(2, two, 1, 2, devices='cpu')", TypeError, "Options come first: in_ddp.options(devices=...)"),
    ("in_ddp(2, two, args=(1, 2))", TypeError, "two() got an unexpected keyword argument 'args'"),
    ("in_ddp(2, train, imports='numpy')", ValueError, 'Did you mean "import numpy"?'),
    ("in_ddp(2, train, imports='import numpy as')", ValueError, "line 1 is not Python"),
    ("in_ddp(2, train, imports=np)", TypeError, "imports must be import statements"),
    ("in_ddp(2, train, need='trian')", NameError, "got 'trian'"),
    ("in_ddp(2, train, need=train)", TypeError, "need must be names of variables (a string or a list)"),
    ("in_ddp(2, train, need=['train', 3])", TypeError, "got the name 3 (int)"),
    ("in_ddp(2, train, per_rank([1, 2, 3]))", ValueError, "must have an item for each of 2 ranks, got 3"),
    ("in_ddp(2, train, per_rank(3))", TypeError, "values must be a list with one value for each rank, got 3"),
    ("in_ddp.options(devices='gpu')(2, train)", ValueError, "devices must be 'cpu', 'cuda', or a list"),
    ("in_ddp.options(devices=0)(2, train)", TypeError, "devices must be 'cpu', 'cuda', or a list"),
    ("in_ddp.options(devices=['cpu'])(2, train)", ValueError, "devices must be one for each of 2 ranks, got 1"),
    ("in_ddp.options(devices='cpu', backend='nccl')(2, train)", ValueError, "backend must be 'gloo' for ranks on"),
    ("in_ddp.options(engine='rai')(2, train)", ValueError, "got 'rai'. Did you mean 'ray'?"),
    ("in_ddp.options(min_ranks=1)(2, train)", ValueError, "restarts must be at least 1 with min_ranks=1"),
    ("in_ddp.options(min_ranks=3, restarts=1)(2, train)", ValueError, "min_ranks must be at most the number of ranks"),
    ("in_ddp.options(2)(2, train)", TypeError, "write in_ddp.options(backend=, devices="),
    ("Session(2, 'cpu')", TypeError, "write Session(nranks, backend="),
    ("Session()", TypeError, "write Session(nranks, backend="),
    ("Session('2')", TypeError, "nranks must be an integer, got '2'"),
    ("Session(0)", ValueError, "nranks must be at least 1, got 0"),
    ("Session(2).run()", TypeError, "write run(fn, *args, imports=, need=, ranks=, **kwargs)"),
    ("Session(2).run(train, ranks=5)", TypeError, "ranks must be a list of ranks, such as [0, 1], got 5"),
    ("Session(2).run(train, ranks='0')", TypeError, "ranks must be a list of ranks"),
    ("Session(2).run(train, ranks=[5])", ValueError, "rank must be 0 to 1, got 5"),
    ("Session(2).run(train, ranks=[])", ValueError, "ranks must name at least one rank"),
    ("Session(2).logs('0')", TypeError, "rank must be an integer, got '0'"),
    ("RayOptions(gpu=1)", TypeError, "RayOptions has no argument 'gpu'. Did you mean 'gpus'?"),
    ("RayOptions('auto')", TypeError, "write RayOptions(address="),
    ("RayOptions(cpus='2')", TypeError, "cpus must be a number, got '2'"),
    ("RayOptions(gpus=2)", ValueError, "gpus must be 0, or 1 for each rank, got 2"),
    ("RayOptions(placement='packed')", ValueError, "got 'packed'. Did you mean 'pack'?"),
    ("RayOptions(ranks_per_node=1.5)", TypeError, "ranks_per_node must be an integer, got 1.5"),
    ("RayOptions(resources=[1])", TypeError, "resources must be a mapping from names of resources to amounts"),
    ("RayOptions(resources={'memory': '8G'})", TypeError, "resources['memory'] must be a number, got '8G'"),
    ("RayOptions(labels='a')", TypeError, "labels must be a mapping"),
    ("RayOptions(same='polars')", TypeError, "same must be a list of names of packages, got 'polars'"),
    ("RayOptions(wait='1m')", TypeError, "wait must be a number, got '1m'"),
    ("RayOptions(address=3)", TypeError, "address must be a string"),
    ("use('rays')", ValueError, "got 'rays'. Did you mean 'ray'?"),
    ("use(3)", ValueError, "engine must be one of 'local', 'ray'"),
    ("cluster('slrm', nodes=2)", ValueError, "got 'slrm'. Did you mean 'slurm'?"),
    ("cluster('slurm')", ValueError, 'nodes must be the number of nodes: cluster("slurm", nodes=2)'),
    ("cluster('slurm', nodes='2')", TypeError, "nodes must be an integer, got '2'"),
    ("cluster(['a'], gpu=2)", TypeError, "has no argument 'gpu'. Did you mean 'gpus'?"),
    ("cluster(['a'], wait='1m')", TypeError, "wait must be a number of seconds, got '1m'"),
    ("parallel_map(train, 3)", TypeError, "items must be a list or another iterable, got 3"),
    ("parallel_map([1, 2], train)", TypeError, "fn must be a function, got [1, 2]"),
    ("parallel_map(train)", TypeError, "write parallel_map(fn, items"),
    ("parallel_map(two, [1, 2])", TypeError, "missing a required argument: 'b'"),
    ("parallel_map(train, [1], workers='2')", TypeError, "workers must be an integer, got '2'"),
    ("parallel_map(train, [1], worker=2)", TypeError, "has no argument 'worker'. Did you mean 'workers'?"),
    ("parallel_map(train, [1], chunk=0)", ValueError, "chunk must be at least 1, got 0"),
    ("parallel_map(train, [1], progress=2)", TypeError, "progress must be True or False, got 2"),
    ("context('joblib')", ValueError, "package must be one of 'multiprocess', 'multiprocessing', got 'joblib'"),
    ("warm(3)", TypeError, "imports must be import statements"),
    ("warm(idle='1h')", TypeError, "idle must be a number of seconds, got '1h'"),
    ("warm(idle=-1)", ValueError, "idle must be a finite number of seconds above 0, got -1"),
    ("explain(train())", TypeError, "fn must be a function, got 1"),
    ("post_mortem()", NbdistError, "no rank is held"),
    ("nbdist.atach", AttributeError, "Did you mean 'attach'?"),
    ("attach()", TypeError, "write attach(name)"),
    ("attach(3)", TypeError, "name must be a string, got 3"),
    ("attach('')", ValueError, "name must be up to 64 letters, digits"),
    ("attach('never-made')", NbdistError, "there is no session 'never-made'. Sessions with a name: "),
    ("sessions('x')", TypeError, "write sessions()"),
    ("Session(1).result()", NbdistError, "only a session with a name has a journal: Session(2, name='...')"),
    ("Session(1).run(train, timeout=3)", TypeError, "Options come first: in_ddp.options(timeout=...)"),
    ("in_ddp(1, train, check='nan')", TypeError, "Options come first: in_ddp.options(check=...)"),
    ("Recording('f')", TypeError, "Recording needs the model among its objects"),
    ("Recording(torch.nn.Linear(1, 1))", TypeError, "folder must be a path, got Linear(in_features=1"),
    ("Recording('f', 3)", TypeError, "objects with state_dict() and load_state_dict(), got 3"),
    ("Recording('f', model=3)", TypeError, "Recording has no argument 'model': it has folder, *objects"),
    ("Recording('f', torch.nn.Linear(1, 1))", RuntimeError, "a recording is made by ranks"),
    ("replay_step('f', train)", TypeError, "missing 1 required keyword-only argument: 'step'; write replay_step("),
    ("replay_step('f', train(), step=1)", TypeError, "fn must be a function, got 1"),
    ("replay_step(train, 'f', step=1)", TypeError, "folder must be a path, got <function train"),
    ("replay_step('f', train, step=1)", FileNotFoundError, "has no recording: record a training with fit(..., record="),
]


@pytest.mark.parametrize(("call", "error", "words"), WRONG_CALLS, ids=lambda one: str(one)[:50])
def test_a_mistake_raises_an_error_that_helps(call: str, error: type[Exception], words: str) -> None:
    names = {one.__name__: one for one in (train, two, cluster, context, explain, parallel_map, per_rank, use, warm)}
    names |= {one.__name__: one for one in (attach, sessions, replay_step, post_mortem)}
    with pytest.raises(error) as caught:
        eval(call, {**names, "nbdist": nbdist, "in_ddp": in_ddp, "Session": Session, "RayOptions": RayOptions,
                    "Recording": Recording, "np": np, "torch": torch})  # fmt: skip
    assert words in str(caught.value)


def test_numbers_of_numpy_are_integers() -> None:
    with Session(np.int64(1)) as session:  # type: ignore[arg-type]
        assert session.nranks == 1 and type(session.nranks) is int
    SessionOptions(timeout=np.float32(3), seed=np.int64(3), restarts=np.int32(1))


def test_functions_that_check_their_arguments_themselves_are_left_to_do_so() -> None:
    class Loose:
        def __call__(self, *args: Any, **kwargs: Any) -> int:
            return len(args) + len(kwargs)

    def stated(**kwargs: Any) -> int:
        return len(kwargs)

    stated.__signature__ = "what a decorator says"  # type: ignore[attr-defined]
    assert in_ddp(1, Loose(), 1, a=2) == 2
    assert in_ddp(1, stated, a=2) == 1


def ask_after_a_fork() -> None:
    """Fail as torch's CUDA build does where the fork server has imported torchrec, and there is no driver."""
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use")


@pytest.mark.parametrize(
    "ask",
    [
        ask_after_a_fork,
        lambda: torch.ones(2).cuda(),
        lambda: torch.nn.Linear(2, 2).to("cuda"),
        lambda: torch.ones(2, device="cuda:0"),
        lambda: torch.cuda.set_device(0),
    ],
    ids=["fork", "cuda", "to", "device", "set_device"],
)
def test_a_gpu_that_a_rank_does_not_have(ask: Any) -> None:
    with pytest.raises(Exception) as caught:
        in_ddp.options(devices="cpu")(1, ask)
    remote = caught.value.__cause__
    assert isinstance(remote, RemoteTraceback)
    assert "rank 0 works on the CPU" in str(remote) and "nbdist.rank_device()" in str(remote)


def test_a_group_with_another_backend() -> None:
    assert in_ddp.options(backend="cpu:gloo")(1, dist.get_backend) == "cpu:gloo"


def test_ranks_that_are_many_more_than_the_cores() -> None:
    words = many_ranks(1000, 2)
    assert words.startswith("1000 ranks on 2 cores start and work in turns") and "10.0 GB" in words
    assert many_ranks(8, 2) == "" == many_ranks(32, 2)


def test_many_ranks_that_do_the_same_are_one_line() -> None:
    waits = [stacks.Frame("/cell.py", "3", "train"), stacks.Frame("/x", "1", "run_call")]
    where: dict[int, list[stacks.Frame] | None] = dict.fromkeys(range(1000), waits)
    where[7] = None
    first, *_ = stacks.report(where).splitlines()
    assert first == "each of 999 ranks (0-6, 8-999) is in train at cell.py:3; rank 7 has returned"
    assert stacks.report(where).count("Stack of") == 1
    few = stacks.report({0: waits, 1: waits})
    assert few.startswith("rank 0 is in train at cell.py:3; rank 1 is in train") and few.count("Stack of") == 2
