"""Cases of clusters alone: room, placement, versions, lost nodes, a lost head, one transfer a node."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from calls import sums
from conftest import Kernel, living, open_fds, poll, ranks_of, start_cluster

import nbdist
from nbdist import NbdistError, RankDied, RayOptions, Session
from nbdist.engines.ray.kernel import driver_process as process
from nbdist.engines.ray.kernel.ranks import RayEngine, RayRanks
from nbdist.engines.ray.launch.starting import LIGHT, free_ports
from nbdist.kernel.cell.cell import Cell
from nbdist.kernel.session import executor_of
from nbdist.wire.channel import Channel

pytestmark = pytest.mark.long("clusters of Ray")


@pytest.fixture(scope="module")
def options(ray_cluster: Any) -> Iterator[RayOptions]:
    """Ranks over both nodes. What a test has started there, but for its ranks, stays for the next test."""
    yield RayOptions(address=ray_cluster.address, placement="spread", cpus=0.5, linger=1000.0)
    process.release()


def node_rank() -> int:
    return int(os.environ["NODE_RANK"])


def raylet(pid: int | None = None) -> int:
    """Return the node of a rank, by default of this one: the process that is its node."""
    return next(process.pid for process in psutil.Process(pid).parents() if process.name() == "raylet")


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def free_cpus(cluster: Any) -> float:
    """Return the resources that the cluster's nodes have left."""
    free = cluster.global_state.available_resources_per_node().values()
    return float(sum(node.get("CPU", 0.0) for node in free))


# -------------------------------------------------------------------------------------------------------------- options


def test_ranks_that_are_placed_together(ray_cluster: Any) -> None:
    options = RayOptions(address=ray_cluster.address, placement="strict_spread", ranks_per_node=2, cpus=0.5, linger=0.0)
    with Session(3, engine=options) as own:
        assert own.run_all(node_rank) == [0, 0, 1] and own.run(sums) == 3
        assert own.run_all(lambda: os.environ["LOCAL_WORLD_SIZE"]) == ["2", "2", "1"]


def test_ranks_on_one_node_use_no_network(ray_cluster: Any) -> None:
    with Session(2, engine=RayOptions(address=ray_cluster.address, placement="strict_pack", linger=0.0)) as own:
        assert own.run_all(lambda: (node_rank(), os.environ["MASTER_ADDR"])) == [(0, "127.0.0.1")] * 2


def test_a_gpu_for_each_rank_is_its_own(ray_cluster: Any) -> None:
    """Ray believes what a node says of its GPUs: there are none here, but the ranks are given their numbers."""
    node = ray_cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=80 << 20)
    try:
        for together in (1, 2):
            options = RayOptions(address=ray_cluster.address, gpus=1, ranks_per_node=together, linger=1000.0)
            ranks = RayEngine(options).start(2, print)
            assert ranks.setting(0, {}).environ["CUDA_VISIBLE_DEVICES"] == "0,1"
            assert [slot.local_rank for slot in ranks.slots] == [0, 1]
            ranks.close()
            if together == 1:  # once is enough; on the resources of the ranks before
                with pytest.raises(Exception, match=r"(?i)cuda"), Session(2, engine=options) as own:
                    assert "on cuda" in repr(own)
                    own.run(sums)
            process.release()
    finally:
        process.release()
        ray_cluster.remove_node(node)


def test_threads_are_the_cpus_of_a_rank_on_as_few_nodes_as_possible(ray_cluster: Any) -> None:
    with Session(2, engine=RayOptions(address=ray_cluster.address, cpus=2, linger=0.0)) as own:
        assert own.run_all(lambda: (node_rank(), torch.get_num_threads())) == [(0, 2), (0, 2)]


def test_the_working_directory_of_the_runtime_environment(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "project_module.py").write_text("answer = 42\n")
    environment = {"working_dir": str(tmp_path), "env_vars": {"OF_THE_NODES": "yes"}}
    options = RayOptions(address=ray_cluster.address, runtime_env=environment, linger=0.0)
    with Session(2, engine=options) as own:
        found = own.run_all(lambda: (os.getcwd(), os.environ["OF_THE_NODES"], os.path.exists("project_module.py")))
        assert all(folder != os.getcwd() and (env, there) == ("yes", True) for folder, env, there in found)
        assert own.run(lambda: __import__("project_module").answer) == 42


# -------------------------------------------------------------------------------------------------- what cannot be had


def test_a_cluster_that_is_too_small_says_what_is_missing(ray_cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    process.release()
    options = RayOptions(address=ray_cluster.address, cpus=3, resources={"second": 0.5, "license": 1}, wait=4)
    with pytest.raises(NbdistError, match=r"no room for 4 ranks for 4 s: license: 4 wanted, 0 free of 0") as caught:
        in_ddp_on(options, 4)
    assert "CPU: 12 wanted, 8 free of 8; " in str(caught.value) and "2 nodes, placement 'pack'" in str(caught.value)
    assert "nbdist: waiting for room for 4 ranks (" in capsys.readouterr().err
    assert poll(lambda: free_cpus(ray_cluster) == 8.0)


def in_ddp_on(options: RayOptions, nranks: int) -> Any:
    with Session(nranks, engine=options) as own:
        return own.run(sums)


def test_ranks_start_as_soon_as_there_is_room(ray_cluster: Any) -> None:
    options = RayOptions(address=ray_cluster.address, resources={"second": 0.75}, linger=0.0)
    waiting: list[str] = []

    def makes_room(notice: str) -> None:
        waiting.append(notice)
        first.stop()

    first = process.DriverProcess(options, 1, print)
    with contextlib.closing(RayEngine(options).start(1, makes_room)) as ranks:
        assert "waiting for room for 1 rank (" in waiting[0]
        assert poll(lambda: ranks.pids[0] is not None) and raylet(ranks.pids[0]) == raylet_of(*ray_cluster.worker_nodes)


def test_no_cluster_at_that_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    with pytest.raises(NbdistError, match="no connection to Ray at"):
        in_ddp_on(RayOptions(address=address), 2)


def test_other_versions_on_the_nodes_are_named_before_any_rank_starts(ray_cluster: Any, tmp_path: Path) -> None:
    for name in ("torch", "cloudpickle"):
        info = tmp_path / f"{name}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    path = os.pathsep.join([str(tmp_path), LIGHT, str(Path(__file__).parent.parent.parent)])
    options = RayOptions(address=ray_cluster.address, runtime_env={"env_vars": {"PYTHONPATH": path}})
    expected = rf"differ: node 0: torch is 0.1, here {torch.__version__.partition('+')[0]}; cloudpickle is 0.1"
    with pytest.raises(NbdistError, match=expected):
        in_ddp_on(options, 2)


# ----------------------------------------------------------------------------------------------------------------- data


def test_captured_data_goes_to_each_node_once(options: RayOptions) -> None:
    data = np.random.default_rng(0).random(6 << 20)  # 48 MB

    def total() -> float:
        return float(data.sum())

    def private() -> list[int]:
        """Return the bytes that are a rank's own: not a segment that it maps, whoever else has read it by now."""
        found = [psutil.Process(pid).memory_info() for pid in own.run_all(os.getpid)]
        return [info.rss - info.shared for info in found]

    with Session(4, engine=options) as own:
        assert own.run_all(node_rank) == [0, 0, 1, 1]
        before = private()
        assert own.run_all(total) == [data.sum()] * 4
        ranks: Any = executor_of(own).group.ranks  # type: ignore[union-attr]
        received = ranks.received()
        assert len(received) == 2 and all(data.nbytes <= size < data.nbytes + 100_000 for size in received)
        assert own.run_all(total) == [data.sum()] * 4
        assert ranks.received() == received  # unchanged: not sent again
        # One copy a node, which its ranks share.
        after = private()
        assert all(now < then + data.nbytes // 2 for then, now in zip(before, after, strict=True)), (before, after)


def test_only_nodes_that_run_the_function_get_its_data(options: RayOptions) -> None:
    data = np.ones(1 << 20)
    with Session(2, engine=options) as own:
        assert own.call(lambda: float(data[5]), ranks=[1]) == [1.0]
        first, second = executor_of(own).group.ranks.received()  # type: ignore[union-attr]
        assert first == 0 and second >= data.nbytes


# --------------------------------------------------------------------------------------------------------------- losses


def test_min_ranks_takes_the_ranks_that_fit(ray_cluster: Any) -> None:
    options = RayOptions(address=ray_cluster.address, resources={"second": 0.5}, cpus=0.5, linger=0.0, wait=1.0)
    with contextlib.closing(RayEngine(options).start(4, print, least=1)) as ranks:
        assert len(ranks.pids) == len(ranks.slots) == 2, "halves of one"
    with pytest.raises(NbdistError, match=r"had no room for 3 ranks for 1 s: second: 1\.5 wanted"):
        RayEngine(options).start(4, print, least=3)


class Nodes:
    """Nodes of a cluster on which a session runs alone: `nodes` by the processes that are these."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.nodes = cluster, dict[int, Any]()
        self.options = RayOptions(
            address=cluster.address, resources={"own": 0.5}, cpus=0.5, placement="strict_spread", linger=0.0
        )

    def fill(self) -> None:
        """Add nodes until there are two."""
        while len(self.nodes) < 2:
            node = self.cluster.add_node(num_cpus=1, resources={"own": 1.0}, object_store_memory=80 << 20)
            self.nodes[raylet_of(node)] = node

    def lose(self, pid: int) -> None:
        self.cluster.remove_node(self.nodes.pop(pid), allow_graceful=False)


@pytest.fixture(scope="class")
def own_nodes(ray_cluster: Any) -> Iterator[Nodes]:
    own = Nodes(ray_cluster)
    try:
        yield own
    finally:
        for node in own.nodes.values():
            ray_cluster.remove_node(node)


class TestNodesThatComeAndGo:
    def test_fewer_nodes_go_on_and_all_are_back_at_the_next_restart(
        self, own_nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        own_nodes.fill()

        def fn(folder: str) -> tuple[int, list[int]]:
            count, size = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_world_size()
            open(os.path.join(folder, f"{count}-{size}-{dist.get_rank()}"), "w").close()
            if count == 0 and dist.get_rank() == 0:
                sums()  # rank 1 does not come
            while count == 0 or not os.path.exists(os.path.join(folder, "grown")):
                time.sleep(0.05)
            if count == 1:
                os._exit(9)
            everybody: list[Any] = [None] * size
            dist.all_gather_object(everybody, dist.get_rank())
            return size, everybody

        with Session(2, engine=own_nodes.options, restarts=2, min_ranks=1) as own:
            victim = own.run_all(raylet)[1]
            future = own.submit(fn, str(tmp_path))
            assert poll(lambda: len(list(tmp_path.glob("0-2-*"))) == 2)
            assert poll(lambda: "rank 0 waits in all_reduce" in own.stacks()), own.stacks()
            own_nodes.lose(victim)
            assert poll((tmp_path / "1-1-0").exists, 200)
            assert own.nranks == 1 and str(own.status()).startswith("1 rank,")
            own_nodes.fill()
            (tmp_path / "grown").touch()
            assert future.result() == (2, [0, 1]) and own.nranks == 2
        said = capsys.readouterr().err
        assert "was lost with node 1 (" in said
        assert (
            "2 ranks were asked for and 1 could be started: the call goes on with 1. The next restart asks for 2 again"
            in said
        ), said

    def test_data_are_passed_on_from_node_to_node(self, own_nodes: Nodes) -> None:
        own_nodes.fill()
        data = np.random.default_rng(0).random(5 << 20)  # 40 MB
        options = RayOptions(**{**vars(own_nodes.options), "resources": {}})
        with Session(4, engine=options) as own:
            assert own.run_all(node_rank) == [0, 1, 2, 3]
            assert own.run_all(lambda: float(data.sum())) == [data.sum()] * 4
            received = executor_of(own).group.ranks.received()  # type: ignore[union-attr]
            assert all(data.nbytes <= size < data.nbytes + 100_000 for size in received)

    def test_a_node_that_is_drained_lets_all_ranks_know_at_the_same_step_and_its_loss_is_named(
        self, own_nodes: Nodes, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        own_nodes.fill()

        def fn(folder: str) -> list[int]:
            step = 0
            while not nbdist.preempted():
                step += 1
                open(os.path.join(folder, str(dist.get_rank())), "w").close()
                time.sleep(0.05)
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, step)
            return everybody

        with Session(2, engine=own_nodes.options) as own:
            victim = own.run_all(raylet)[1]
            drained = own_nodes.nodes[victim]
            future = own.submit(fn, str(tmp_path))
            assert poll(lambda: len(list(tmp_path.iterdir())) == 2)
            taken_at = int(time.time() * 1000) + 1_000_000  # later than any test ends
            reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            GcsClient(address=own_nodes.cluster.address).drain_node(drained.node_id, reason, "taken away", taken_at)
            first, second = future.result()
            assert first == second > 0
            future = own.submit(time.sleep, 1000)
            assert poll(future.running)
            own_nodes.lose(victim)
            with pytest.raises(RankDied, match=r"rank 1 .* was lost with node 1 \(") as caught:
                future.result()
            assert caught.value.rank == 1
        assert "will be taken away in" in (said := capsys.readouterr().err) and "node 1 (" in said


def test_a_lost_driver(options: RayOptions) -> None:
    with Session(2, engine=options) as own:
        assert own.run(sums) == 2.0
        driver = executor_of(own).group.ranks.driver.process  # type: ignore[union-attr]
        future = own.submit(time.sleep, 1000)
        assert poll(future.running)
        os.kill(driver.pid, signal.SIGKILL)
        with pytest.raises(RankDied, match="the connection to the Ray cluster has ended"):
            future.result()
        assert poll(lambda: not ranks_of()), ranks_of()
        own.restart()
        assert own.run(sums) == 2.0


def test_a_killed_kernel_frees_the_cluster(ray_cluster: Any, options: RayOptions, tmp_path: Path) -> None:
    process.release()
    kernel = Kernel(tmp_path)
    try:
        kernel.ok(f"import time, nbdist\nfrom nbdist import RayOptions, in_ddp\nnbdist.use({options!r})")
        kernel.start("def fn():\n    open('began', 'w').close()\n    time.sleep(1000)\nin_ddp(2, fn)")
        assert poll((tmp_path / "began").exists)
        assert len(ranks_of()) >= 2
        os.kill(kernel.pid, signal.SIGKILL)
        assert poll(lambda: not ranks_of()), ranks_of()
        assert poll(lambda: free_cpus(ray_cluster) == 8.0)
    finally:
        kernel.close()


def interrupted(*args: Any, **about: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["end", "look", "start"])
def test_a_press_while_ranks_come_or_go_gives_their_room_back(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    options = RayOptions(address=ray_cluster.address, cpus=0.5, placement="strict_pack", linger=1000.0)
    if when == "end":
        ranks = RayEngine(options).start(1, print)
        driver = ranks.driver
    else:
        driver = process.DriverProcess(options, 1, print)
        driver.keep()  # as a session does at its end
    if when == "start":
        monkeypatch.setattr(driver, "reusable", lambda: True)
    monkeypatch.setattr(driver, "reusable" if when == "look" else "request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        if when == "end":
            ranks.close()
        else:
            RayEngine(options).start(1, print)
    assert poll(lambda: driver.process.poll() is not None)


@pytest.fixture
def own_cluster() -> Iterator[Any]:
    """A cluster that a test may ruin, with a port for clients. Ray gives its head up after 15 seconds, not 60."""
    [port] = free_ports(1)
    patience = {"gcs_rpc_server_reconnect_timeout_s": 15}
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        cluster = start_cluster(folder, ray_client_server_port=port, _system_config=patience)
        cluster.client = f"ray://127.0.0.1:{port}"
        try:
            yield cluster
        finally:
            cluster.shutdown()


def test_a_client_and_a_lost_head(own_cluster: Any) -> None:
    with Session(2, engine=RayOptions(address=own_cluster.client, placement="strict_spread", linger=0.0)) as own:
        assert own.run_all(node_rank) == [0, 1] and own.run(sums) == 2.0
        big = np.ones(3 << 20)
        assert own.run(lambda: big + 1).sum() == 2 * len(big)
    options = RayOptions(address=own_cluster.address, resources={"second": 0.25}, linger=0.0)
    with Session(2, engine=options) as own:
        assert own.run(sums) == 2.0
        future = own.submit(time.sleep, 1000)
        assert poll(future.running)
        own_cluster.remove_node(own_cluster.head_node, allow_graceful=False)
        with pytest.raises(RankDied, match="lost"):
            future.result()
    assert poll(lambda: not ranks_of()), ranks_of()


# ------------------------------------------------------------------------------------------ a node that does not answer


def agent_of(pid: int) -> psutil.Process:
    """The agent that holds a rank on this machine: the parent of its fork server."""
    agent = psutil.Process(pid).parents()[1]
    assert "nbdist" not in "".join(agent.cmdline())
    return agent


def test_a_node_of_rank_0_that_answers_late(options: RayOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked = process.DriverProcess.ask, []

    def ask_again(driver: process.DriverProcess, node: int, what: str, *arguments: Any) -> Any:
        asked.append(what)
        if asked.count("rendezvous") == 2:  # it has not answered the first time
            agent.resume()
        return ask(driver, node, what, *arguments)

    with Session(2, engine=options) as session:
        pids = session.run_all(os.getpid)
        session.run(dist.destroy_process_group)  # the next call needs a new one
        agent = agent_of(pids[0])
        monkeypatch.setattr(process.DriverProcess, "ask", ask_again)
        agent.suspend()
        try:
            assert session.run(sums) == 2.0 and session.run_all(os.getpid) == pids
        finally:
            agent.resume()
    assert asked.count("rendezvous") >= 2


def test_a_node_of_rank_0_that_does_not_answer(options: RayOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(2, engine=options) as session:
        pids = session.run_all(os.getpid)
        session.run(dist.destroy_process_group)
        agent, rendezvous = agent_of(pids[0]), RayRanks.rendezvous

        def gives_up(ranks: RayRanks) -> Any:
            try:
                return rendezvous(ranks)
            finally:
                agent.resume()  # the ranks are ended by it

        monkeypatch.setattr(RayRanks, "patience", 1.0)
        monkeypatch.setattr(RayRanks, "rendezvous", gives_up)
        agent.suspend()
        try:
            with pytest.raises(NbdistError, match=r"node of rank 0 .* does not answer"):
                session.run(sums)
        finally:
            agent.resume()
        monkeypatch.undo()
        assert session.run(sums) == 2.0


def test_the_node_of_rank_0_is_lost_before_the_ranks_meet(options: RayOptions) -> None:
    with Session(2, engine=options) as session:
        pids = session.run_all(os.getpid)
        session.run(dist.destroy_process_group)
        agent_of(pids[0]).kill()
        with pytest.raises(RankDied, match=r"rank 0 .* was lost"):
            session.run(sums)
        session.restart()
        assert session.run(sums) == 2.0


# --------------------------------------------------------------------------------------------- functions that use Ray


@pytest.fixture
def connected(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ray, with the notebook connected to the cluster."""
    import ray

    monkeypatch.setenv("PYTHONBREAKPOINT", "")  # Ray sets it, and it would stay
    monkeypatch.setenv("RAY_TQDM_PATCH_PRINT", "0")  # Ray would leave another `print` to the tests that come later
    ray.init(address=ray_cluster.address, namespace="of the notebook", logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("engine", ["ray", "local"])
def test_functions_that_use_ray_themselves(connected: Any, options: RayOptions, engine: str) -> None:
    numbers = connected.put(list(range(5)))

    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def add(self) -> int:
            self.count += 1
            return self.count

    counter = connected.remote(num_cpus=0)(Counter).options(name="counter").remote()

    def use() -> tuple[int, str]:
        import ray

        ray.get(counter.add.remote())
        named = ray.get_actor("counter")
        address = ray.get_runtime_context().gcs_address
        return sum(ray.get(numbers)) + ray.get(ray.remote(num_cpus=0)(lambda: 1).remote()), address, named == counter

    with Session(2, engine=options if engine == "ray" else None) as own:
        assert own.run_all(use) == [(11, options.address, True)] * 2
        back = own.run(lambda: (numbers, counter))
        assert connected.get(back[0]) == [0, 1, 2, 3, 4] and connected.get(back[1].add.remote()) == 3
        address = own.run(lambda: os.environ.get("RAY_ADDRESS"))
        assert address == (options.address if engine == "ray" else None), "without references, too"


# --------------------------------------------------------------------------------------------------------------- output


def test_output_that_no_cell_shows_stays_on_its_node(options: RayOptions, capfd: pytest.CaptureFixture[str]) -> None:
    def chatter(word: str) -> None:
        for number in range(2000):
            print(f"{word} {dist.get_rank()} {number}")

    with Session(4, engine=options) as own:
        own.run(chatter, "hidden")
        group = executor_of(own).group
        assert group is not None
        assert [log.text().count("hidden") for log in group.relay.logs] == [2000, 0, 0, 0]
        assert own.logs(3).splitlines()[-1] == "hidden 3 1999" and own.logs(3).count("hidden") == 2000
        assert "hidden 2 1999" in str(own.status())
        capfd.readouterr()
        own.call(chatter, ("shown",), output="all")
        assert capfd.readouterr().out.count("] shown ") == 8000, "a terminal has all of it"
        with pytest.raises(RankDied, match="last words of 1"):
            own.run(lambda: dist.get_rank() == 1 and (print("last words of 1"), os._exit(3)))
    assert own.logs(2).count("hidden") == own.logs(2).count("shown") == 2000, "also when the ranks have ended"


def test_a_full_cell_gets_the_end_and_a_number(options: RayOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(Cell, "in_notebook", True)
    monkeypatch.setattr(Cell, "text", lambda self, text, kind: shown.append(text))
    monkeypatch.setattr(Cell, "message", lambda self, kind, content: shown.append(content["data"]["text/plain"]))

    def chatter() -> None:
        for number in range(5000):
            print("x" * 80, number)

    with Session(4, engine=options, lines=100) as own:
        own.call(chatter, output="all")
        group = executor_of(own).group
        assert group is not None
        title, *last = shown[-1].splitlines()
        assert re.match(r"\.\.\. 20,000 lines; these are the last 100; .*session.logs\(rank\)", title), title
        assert last[-1].endswith("x 4999")
        assert sum(len(log.text()) for log in group.relay.logs) < 20_000 * 80 / 2, "most has stayed on the nodes"
        assert own.logs(3).count("\n") == 5000


# ------------------------------------------------------------------------------------------------ what the kernel holds


def test_the_next_call_finds_the_room_and_the_processes_of_the_last(ray_cluster: Any, options: RayOptions) -> None:
    process.release()
    with Session(2, engine=options) as own:
        assert own.run(sums) == 2.0
        parents = own.run_all(os.getppid)  # what takes seconds to start on a node
    for _ in range(2):
        with Session(2, engine=options) as own:
            assert own.run_all(os.getppid) == parents
    assert free_cpus(ray_cluster) == 7.0, "the room of one session"
    process.release()
    assert poll(lambda: free_cpus(ray_cluster) == 8.0)


@pytest.mark.started  # a forked worker of Ray has no title
def test_a_ray_of_this_machine_alone_takes_a_token_and_ends_with_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    process.release()
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # who finds it, finds it on the loopback interface
    with Session(2, engine=RayOptions(linger=0.0, cpus=0.5)) as own:
        assert own.run(sums) == 2.0
        holder, address, _ = process.private_rays[os.getpid()]
        family = psutil.Process(holder.pid).children(recursive=True)
        commands = [" ".join(one.cmdline()) for one in family if one.name() != "raylet"]
        unused = r"ray::IDLE|/default_worker\.py|/autoscaler/_private/monitor\.py"
        assert not [command for command in commands if re.search(unused, command)], "what Ray starts by default"
        with pytest.raises(NbdistError, match="no connection to Ray"):
            in_ddp_on(RayOptions(address=address), 1)
    process.release()
    assert family and poll(lambda: not living(family))


def test_the_kernel_holds_as_much_for_many_ranks_as_for_few(options: RayOptions) -> None:
    def nothing() -> None: ...

    def costs(ranks: int) -> tuple[int, int, int]:
        """Descriptors of a session's; messages to the driver and from it in a call."""
        small = RayOptions(**{**vars(options), "cpus": 0.25, "linger": 0.0})
        before, traffic = open_fds(), []
        with Session(ranks, engine=small) as own, pytest.MonkeyPatch.context() as patch:
            own.run(nothing)
            descriptors = open_fds() - before
            send, receive = Channel.send, Channel.receive
            patch.setattr(Channel, "send", lambda *args, **kw: (send(*args, **kw), calls.__setitem__(0, calls[0] + 1)))
            for _ in range(10):
                calls = [0, 0]

                def count(channel: Channel, calls: list[int] = calls) -> Any:
                    message = receive(channel)
                    calls[1] += message[0][0] == "event"
                    return message

                patch.setattr(Channel, "receive", count)
                own.run(nothing)
                traffic.append(tuple(calls))
        return descriptors, *min(traffic)

    process.release()  # of the session before, which would go in the meantime
    few, many = costs(2), costs(8)
    assert few[:2] == many[:2] and many[1] == 1, "one message for all ranks"
    assert many[2] <= 4, f"{many[2]} messages from two nodes with 8 ranks"
