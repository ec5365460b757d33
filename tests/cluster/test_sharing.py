"""Loads of unmodified programs in a job: one rank compiles, the others take its library."""

from __future__ import annotations

import json
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
from ranks import Node, free_port
from sample import forks, known, pool, servers

from opkiln.base.model import INLINE_ROOT, ONE_CALL, Op, OpSpec
from opkiln.cluster import job, sharing, work
from opkiln.cluster.messages import Made, OpTask
from opkiln.cluster.stores import Memory
from opkiln.decision import terms
from opkiln.errors import ClusterError, CompileError, OpkilnError
from opkiln.loading import loader
from opkiln.remote import fetch, patience
from opkiln.settings import LAYOUT, override

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timed

PROGRAM = """
import ctypes, hashlib, json, os, sys
from torch import distributed
distributed.init_process_group("gloo")
from torch.utils.cpp_extension import load, load_inline

rank = int(os.environ["RANK"])
TEXT = 'extern "C" int number() { return 5; }'

def inline():
    return load_inline(
        "in_text", TEXT, is_python_module=False, no_implicit_headers=True, extra_cflags=["-O1"]
    )

said = {"file": load("in_file", ["value.cpp"], is_python_module=False)}
# As many programs do it: one rank first, and the others wait for it at a barrier.
if rank == 0:
    said["text"] = inline()
distributed.barrier()
if rank != 0:
    said["text"] = inline()
assert inline() == said["text"]
assert ctypes.CDLL(said["file"]).value() == 23
assert ctypes.CDLL(said["text"]).number() == 5

import cluster_ops, torch
from opkiln.loading import loader
assert torch.equal(cluster_ops.twice(torch.ones(3)), torch.ones(3) * 2)
said["op"] = next(
    loaded.artifact.path for name, (loaded, _) in loader.loaded_here().items() if name[1] == "twice"
)
digests = {k: hashlib.sha256(open(v, "rb").read()).hexdigest() for k, v in said.items()}
distributed.barrier()
print(json.dumps(digests), flush=True)
"""


@pytest.mark.slow
def test_two_ranks_with_stores_of_their_own_compile_each_load_once_and_have_one_digest(
    tmp_path: Path,
) -> None:
    nodes = [Node(tmp_path / name, torch=True) for name in ("a", "b")]
    port = str(free_port())
    ranks = []
    for rank, node in enumerate(nodes):
        (node.path / "program.py").write_text(PROGRAM)
        env = {
            **node.environment(), "RANK": str(rank), "WORLD_SIZE": "2", "OPKILN_ENSURE": "1",
            "OPKILN_PATCH_TORCH": "1",  # as `opkiln run` sets it
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            "OPKILN_JOB_SECRET": "a secret of the job",
        }  # fmt: skip
        ranks.append(
            forks.Fork(
                ["program.py"], env=env, cwd=node.path,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    said = []
    try:
        for each in ranks:
            out, err = each.communicate(timeout=240)
            assert each.returncode == 0, err
            said.append(json.loads(out.splitlines()[-1]))
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
    pool.add(nodes[0].cache)
    assert said[0] == said[1]
    assert len(set(said[0].values())) == 3
    built = sorted(e["op"] for node in nodes for e in node.entries() if "created" in e)
    assert built == ["in_file", "in_text", "twice"]
    assert [len(node.entries()) for node in nodes] == [3, 3]


def test_ranks_that_share_a_store_that_is_not_there_yet_are_one_node(tmp_path: Path) -> None:
    with override(cache_dir=str(tmp_path / "new")):
        first, second = (work.Worker([]).hello().node for _ in range(2))
    made = (tmp_path / "new" / LAYOUT).stat()
    assert first == second
    assert first.endswith(f":{made.st_dev}:{made.st_ino}")


# Who builds


def op_of(text: str, *flags: str) -> Op:
    spec = OpSpec(
        name="shared", distribution=ONE_CALL, root=INLINE_ROOT, sources=("a.cpp",),
        inline=(("a.cpp", text),), kind="plain", abi="none", declared_by="call", cxx_args=flags,
    )  # fmt: skip
    return Op(spec)


@pytest.fixture
def store() -> Memory:
    return Memory()


def sharing_of(store: Memory, op: Op, rank: int, lease: float = 0.3) -> Any:
    made = sharing._Sharing(op, job.JobPlace(rank, 3, store, "job"), "key/0")
    made.lease = lease
    return made


def test_rank_that_builds_and_dies_is_replaced(store: Memory) -> None:
    op = op_of('extern "C" int value() { return 1; }\n')
    other = sharing_of(store, op, 2).channel
    other.swap("turn", None, OpTask((2,)))
    began = time.monotonic()
    known = sharing_of(store, op, 0).run(0)
    assert (known.made.by, known.made.digest) == (0, next(iter(known.worker.artifacts[0])))
    assert time.monotonic() - began >= 0.3
    found = other.look(["turn"])[0]
    assert found is not None
    assert found.tried == (2, 0)
    # Whoever comes later takes the same, and builds nothing.
    assert sharing_of(store, op, 1).run(0).made == known.made


def test_rank_that_could_not_build_leaves_it_to_the_next_one_at_once(
    store: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = op_of('extern "C" int value() { return 8; }\n')
    first = sharing_of(store, op, 0)
    monkeypatch.setattr(first.worker, "make", lambda *_, **__: Made(reason="the disk is full"))
    with pytest.raises(ClusterError, match="was not built"):
        first.run(0)
    second = sharing_of(store, op, 1, lease=60)
    channel = second.channel.another()
    assert second.run(0).made.by == 1
    assert channel.look(["turn"])[0].tried == (0, 1)


def test_load_that_was_interrupted_can_be_tried_again(
    store: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    op = op_of('extern "C" int value() { return 5; }\n')
    first = sharing_of(store, op, 0)
    monkeypatch.setattr(first.worker, "make", interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.run(0)
    again = sharing_of(store, op, 0).run(0)
    assert again.made.by == 0
    assert again.made.digest


def test_what_all_ranks_have_voted_for_since_is_not_replaced(
    store: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "has_group", lambda: True)
    monkeypatch.setattr(job, "find", lambda *_: job.JobPlace(0, 3, store, "job"))
    monkeypatch.setattr(sharing, "_known", {})
    monkeypatch.setattr(sharing, "_ours", {})
    op = op_of('extern "C" int value() { return 1; }\n')
    try:
        sharing.share(op)
        shared = terms.find_pin(op)
        assert shared is not None
        assert shared.artifact is not None
        voted = terms.pin(op, shared.artifact)
        sharing.share(op)
        assert terms.find_pin(op) is voted
        monkeypatch.setattr(job, "has_group", lambda: False)
        sharing.share(op)
        assert terms.find_pin(op) is voted
    finally:
        terms.release(op)


def test_remote_tiers_are_asked_before_a_rank_says_what_it_has(
    store: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = op_of('extern "C" int value() { return 7; }\n')
    server = servers.Server(servers.Files)
    try:
        monkeypatch.setenv("OPKILN_REMOTES", f"http://{server.host}")
        monkeypatch.setenv("OPKILN_TRUSTED_KEYS", f"ed25519:{43 * 'A'}=")
        # A busy machine may be silent for 2.5 seconds, and is then given up.
        monkeypatch.setattr(fetch, "LOAD", patience.COMMAND)
        assert sharing_of(store, op, 0).can_make()
        asked = len(server.requests)
        assert asked > 0
        work.Worker([op]).hello()
        assert len(server.requests) > asked
    finally:
        server.stop()


def test_library_that_cannot_be_sent_is_built_by_each_node_and_is_the_same(
    store: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = op_of('extern "C" int value() { return 3; }\n', "-march=native")
    first = sharing_of(store, op, 0).run(0)
    assert first.made.digest
    assert not first.made.bundle
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(known.make_store(tmp_path / "another node")))
    second = sharing_of(store, op, 1).run(0)
    assert second.made == first.made
    assert second.worker.how == ["built"]
    # What is built there differs: the two must not be used side by side.
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(known.make_store(tmp_path / "third node")))
    third = sharing_of(store, op_of('extern "C" int value() { return 4; }\n', "-march=native"), 2)
    with pytest.raises(ClusterError, match="rank 2 cannot use the library of rank 0") as raised:
        third.run(0)
    assert "cannot be sent, and this rank's own has the SHA-256" in raised.value.why


def test_source_that_does_not_compile_is_compiled_by_one_rank_and_fails_on_all(
    store: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = op_of("int value( { return 1; }\n")
    with pytest.raises(CompileError):
        sharing_of(store, op, 0).run(0)
    later = sharing_of(store, op, 1)
    later.worker.error = OpkilnError("this rank cannot build")  # not what is wrong with the source
    monkeypatch.setattr(later.worker, "make", lambda *_, **__: pytest.fail("it was built again"))
    with pytest.raises(ClusterError, match="rank 0 tried") as raised:
        later.run(0)
    assert "expected" in raised.value.why  # what the compiler says


def test_error_of_a_builders_python_is_raised_as_it_is(
    store: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("no such table")

    op = op_of('extern "C" int value() { return 6; }\n')
    monkeypatch.setattr(loader, "obtain", fail)
    with pytest.raises(LookupError, match="no such table"):
        sharing_of(store, op, 0).run(0)


def test_rank_that_cannot_build_waits_for_others_and_then_says_why(
    store: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = op_of('extern "C" int value() { return 2; }\n')
    alone = sharing_of(store, op, 0)
    monkeypatch.setattr(alone, "can_make", lambda: False)
    with pytest.raises(ClusterError, match="was not built"):
        alone.run(0)
    able = sharing_of(store, op, 1).run(0)
    assert able.made.by == 1
    unable = sharing_of(store, op, 2)
    monkeypatch.setattr(unable, "can_make", lambda: False)
    assert unable.run(0).made == able.made
