"""Ranks with torch: its TCPStore, ops with references, ranks that switch in the background."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_rows import whole
from ranks import Ended, Node, free_port, run
from sample import child, forks, pool

from opkiln.cluster import stores
from opkiln.cluster.channel import Channel
from opkiln.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timed]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    where = tmp_path_factory.mktemp("nodes")
    made = [Node(where / "a", torch=True), Node(where / "b", torch=True)]
    yield made
    for node in made:
        pool.add(node.cache)


@pytest.fixture(scope="module")
def ranks(nodes: list[Node]) -> list[Ended]:
    """A job of two nodes with two ranks each, started by hand. All of it is authenticated."""
    variables = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "OPKILN_JOB_SECRET": "a secret of the job", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ended = run(nodes, 2, variables=variables)
    assert [each.code for each in ended] == [0] * 4, ended
    return ended


def test_cold_job_builds_once_fetches_once_per_node_and_all_ranks_run_one_library(
    ranks: list[Ended], nodes: list[Node]
) -> None:
    cold = [each.said["cold"] for each in ranks]
    assert len({digest for _, digest, *_ in cold}) == 1
    assert Counter(how for *_, how, _, _ in cold) == {
        "built": 1, "fetched": 1, "found on this node": 2,
    }  # fmt: skip
    assert all(native for *_, native, _ in cold)
    built = Counter(e["op"] for node in nodes for e in node.entries() if "created" in e)
    assert built == {"twice": 1, "thrice": 1, "fourfold": 1}


def test_rank_that_must_not_use_the_library_has_all_run_the_reference(ranks: list[Ended]) -> None:
    for each in ranks:
        _, digest, reason, _, native = each.said["reference"]
        assert (digest, native) == ("", False)
        assert "rank 2 (host " in reason
        assert "OPKILN_MODE=reference" in reason


def test_ranks_that_do_not_wait_switch_at_the_same_step(ranks: list[Ended]) -> None:
    assert [each.said["before"] for each in ranks] == [False] * 4
    switched = [each.said["switched"] for each in ranks]
    assert len({(digest, step) for _, digest, _, _, step, _ in switched}) == 1
    assert all(native for *_, native in switched)


def test_warm_job_with_a_process_group_builds_and_fetches_nothing(ranks: list[Ended]) -> None:
    assert [each.said["warm"] for each in ranks] == [["cached", "cached"]] * 4


@pytest.mark.parametrize("kind", ["tcp", "prefix", "file"])
def test_torchs_stores_say_which_of_many_ranks_have_spoken(kind: str, tmp_path: Path) -> None:
    from torch import distributed

    if kind == "file":  # it cannot append: there each key is asked for
        store = distributed.FileStore(str(tmp_path / "store"), 1)
    else:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if kind == "prefix":
        port = store.port
        store = distributed.PrefixStore("group", distributed.PrefixStore("attempt", store))
        assert stores.Torch(store).where == f"127.0.0.1:{port}"
    ours = Channel(stores.Torch(store), "job", "secret", 20.0)
    theirs = ours.another()
    keys = ["outcome", *(f"vote/{rank}" for rank in range(200))]
    assert theirs.look(keys) == [None] * 201
    for rank in (3, 150):
        ours.put(f"vote/{rank}", rank)
        ours.put(f"vote/{rank}", rank)
    assert ours.look(["vote/150"]) == [150]  # an answer: the server has all that was sent before
    found = dict(zip(keys, theirs.look(keys), strict=True))
    assert {key: value for key, value in found.items() if value is not None} == {
        "vote/3": 3, "vote/150": 150,
    }  # fmt: skip


def test_rank_that_connects_again_notices_at_once_that_the_store_is_gone() -> None:
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    client = stores.Torch(TCPStore("127.0.0.1", server.port, wait_for_workers=False))
    assert client.clone().look(["key"]) == [None]
    del server
    began = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        client.clone()
    assert time.monotonic() - began < 3


GROUP = """
import sys
from torch import distributed
from opkiln.cluster import job
distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
print(type(job.find(None, None, None, None, 5.0).store).__name__)
distributed.destroy_process_group()
"""


def test_a_group_that_a_program_made_without_a_launcher_is_the_job(tmp_path: Path) -> None:
    variables = {"GLOO_SOCKET_IFNAME": "lo"}
    assert child.run(GROUP, str(tmp_path / "met"), env=variables, bare=False).split() == ["Torch"]


SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def is_stopped(process: int) -> bool:
    states = [each.read_text().rpartition(") ")[2][0]
              for each in Path(f"/proc/{process}/task").glob("*/stat")]  # fmt: skip
    return set(states) == {"T"}


def test_bundle_is_told_of_when_the_server_has_it_all() -> None:
    from torch.distributed import TCPStore

    with forks.Fork(
        ["-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        client = TCPStore("127.0.0.1", int(server.stdout.readline()), wait_for_workers=False)
        channel = Channel(stores.Torch(client), "job", None, 1.0)
        server.send_signal(signal.SIGSTOP)
        while not is_stopped(server.pid):  # its other threads go on until one has the signal
            time.sleep(0.001)
        try:
            channel.put("vote/0", 1)  # nobody waits for the server: what is sent on this
            with pytest.raises(ClusterError, match="does not answer"):  # connection stays in order
                channel.put_bundle(b"a library")
        finally:
            server.send_signal(signal.SIGCONT)
        other = Channel(stores.Torch(client.clone()), "job", None, 20.0)
        digest = other.put_bundle(b"another")
        assert channel.another(20.0).get_bundle(digest, 7) == b"another"
        server.kill()


PROGRAM = """
import json, os, signal, sys, time
import torch.distributed
import cluster_ops
import opkiln
from opkiln.cluster import protocol

directory, step = sys.argv[1:]
right = protocol.next_action

def reached(state):
    action = right(state)
    if step == getattr(action, "key", ""):
        try:
            os.mkdir(directory + "/killed")
        except FileExistsError:
            return action
        os.kill(os.getpid(), signal.SIGKILL)
    return action

protocol.next_action = reached
if step == "before" and os.environ["RANK"] == "1":
    try:
        os.mkdir(directory + "/killed")
        time.sleep(3)  # the other rank waits in ensure()
        os.kill(os.getpid(), signal.SIGKILL)
    except FileExistsError:
        pass
agreed = opkiln.ensure(cluster_ops.twice, timeout=40)
with open(directory + "/out" + os.environ["RANK"], "w") as file:
    json.dump([os.environ["TORCHELASTIC_RESTART_COUNT"], *agreed[0]], file)
"""


@pytest.mark.parametrize("step", ["vote/1", "before"])
def test_ranks_of_two_nodes_that_torchrun_restarts_ignore_what_was_said_before(
    step: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A rank dies before it votes, or before it calls ensure. Only the node on which it was counts
    the restart; torchrun's store is the same as before.
    """
    if not whole(request.config):
        pytest.skip("imports torch six times: --full-counts")
    nodes = [Node(tmp_path / "a", torch=True), Node(tmp_path / "b", torch=True)]
    port = free_port()
    agents = []
    for node in nodes:
        (node.path / "program.py").write_text(PROGRAM)
        agents.append(
            subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                    "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d",
                    f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job",
                    "--local-addr=127.0.0.1", "program.py", str(tmp_path), step,
                ],
                env=node.environment(), cwd=node.path, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        told = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], told
    assert (tmp_path / "killed").exists()
    said = [json.loads((tmp_path / f"out{rank}").read_text()) for rank in range(2)]
    assert sorted(each[0] for each in said) == ["0", "1"]
    assert said[0][2] == said[1][2] != ""
    assert sum(node.builds() for node in nodes) == 1


def test_unmodified_program_agrees_when_it_makes_its_process_group(tmp_path: Path) -> None:
    node = Node(tmp_path / "a", torch=True)
    record = tmp_path / "record"
    record.write_text(
        json.dumps({"op": "utils", "distribution": "opkiln", "backend": "cpu", "archs": ""}) + "\n"
    )
    program = """
import sys
from torch import distributed
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
assert "opkiln.cluster.ensure" in sys.modules
from opkiln.decision import terms
from opkiln.builder.registry import get_builder
pin = terms.find_pin(get_builder("utils").op())
import opkiln
store = distributed.FileStore(sys.argv[1], 1)
(choice,) = opkiln.ensure("utils", store=store, rank=0, world_size=1)
assert choice.digest == pin.artifact.sha256
print("pinned", pin.artifact.sha256)
"""
    done = subprocess.run(
        [
            sys.executable, "-m", "opkiln", "run", sys.executable, "-c", program,
            str(tmp_path / "file_store"),
        ],
        env={**node.environment(), "OPKILN_ENSURE": "1", "OPKILN_RECORD": str(record)},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pool.add(node.cache)
    (entry,) = node.entries()
    assert done.stdout.split() == ["pinned", entry["sha256"]]
