"""Remote tiers: an op that was built on one machine serves on others, if somebody vouches for it.

Each machine is a fresh process with a store of its own. `make test-remotes` runs these tests
against real servers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import child, known, servers, tiers, transcript
from sample.remote import SITE, SOURCE, Machines, remote_lines

from opkiln.decision import terms
from opkiln.remote import lockfile
from opkiln.store import signatures, signing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sample.tiers import Place


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    return Machines(tmp_path_factory.mktemp("machines"))


@pytest.fixture(scope="module")
def lock(machines: Machines) -> str:
    return machines.lock()


@pytest.fixture(params=tiers.KINDS)
def any_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Every kind of tier."""
    made = tiers.start(request.param, tmp_path / "tier")
    yield made
    made.stop()


@pytest.fixture(params=tiers.KINDS if tiers.REAL else ("registry",))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = tiers.start(request.param, tmp_path / "tier")
    yield made
    made.stop()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Place]:
    made = tiers.start("web", tmp_path / "web")
    yield made
    made.stop()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Place]:
    made = tiers.start("registry", tmp_path / "registry")
    yield made
    made.stop()


def only(lock: str) -> lockfile.LockRow:
    (row,) = lockfile.read(lock)
    return row


def test_an_op_that_was_pushed_serves_elsewhere(machines: Machines, any_place: Place) -> None:
    place = any_place
    machines.push(place.url, **place.variables)
    store = machines.new()
    found = machines.fetch(store, place.url, **place.variables)
    assert found["value"] == 42, found
    assert [verdict for verdict, _ in remote_lines(found)] == ["fetched"]
    assert found["trace"][-1][1] == "taken"
    assert f"fetched from {place.url}, trusted by {machines.public}" in found["trace"][-1][2]
    place.stop()
    again = machines.fetch(store, place.url, **place.variables)
    assert (again["value"], remote_lines(again)) == (42, [])
    assert f"fetched from {place.url}" in again["explained"]


def test_a_digest_in_a_lock_file_needs_no_signature(
    machines: Machines, place: Place, lock: str
) -> None:
    done = machines.command("builder", "cache", "push", "--remote", place.url, **place.variables)
    assert done.returncode == 0, done.stderr
    store = machines.new()
    unsigned = machines.fetch(store, place.url, **place.variables)
    assert unsigned["value"] == "CompilingOff"
    assert "it is not signed" in remote_lines(unsigned)[0][1]
    assert "it is not signed" in unsigned["told"][0]
    found = machines.load(
        store, OPKILN_REMOTES=place.url, OPKILN_LOCK=lock, OPKILN_MODE="cached", **place.variables
    )
    assert found["value"] == 42, found
    assert f"trusted by {lock}" in found["trace"][-1][2]


def test_an_altered_blob_is_refused(machines: Machines, any_place: Place, lock: str) -> None:
    place = any_place
    machines.push(place.url, **place.variables)
    place.alter(only(lock).sha256)
    found = machines.fetch(machines.new(), place.url, OPKILN_LOCK=lock, **place.variables)
    assert found["value"] == "CompilingOff"
    refused = [reason for verdict, reason in remote_lines(found) if verdict == "refused"]
    assert len(refused) == 2, found  # by the lock file's digest, and by the name
    assert all("has the SHA-256" in reason for reason in refused)
    assert "has the SHA-256" in found["told"][0]


def test_another_key_is_refused_before_anything_is_downloaded(
    machines: Machines, place: Place
) -> None:
    machines.push(place.url, **place.variables)
    found = machines.fetch(
        machines.new(), place.url, OPKILN_TRUSTED_KEYS=machines.other, **place.variables
    )
    assert found["value"] == "CompilingOff"
    ((verdict, reason),) = remote_lines(found)
    assert verdict == "refused"
    assert machines.public in reason
    assert machines.other in reason
    if place.server is not None:
        asked = [each for each in place.server.requests if each.startswith("GET")]
        assert not any("/blobs/" in each for each in asked)


@pytest.mark.parametrize("forged", ["signature", "size", "name"])
def test_a_forged_record_is_refused_before_anything_is_downloaded(
    machines: Machines, web: Place, forged: str
) -> None:
    machines.push(web.url, **web.variables)
    server = web.server
    assert server is not None
    (path,) = (each for each in server.files if "/ac/" in each)
    record = json.loads(server.files[path])
    if forged == "signature":
        record["signatures"] = signatures.write({machines.public: bytes(64)}).decode()
    elif forged == "size":
        record["size"] = 600 << 20
    else:
        signed = signing.sign_artifact("another", record["sha256"], record["size"], machines.key)
        record["signatures"] = signed.decode()
    server.files[path] = json.dumps(record).encode()
    found = machines.fetch(machines.new(), web.url, **web.variables)
    assert found["value"] == "CompilingOff"
    ((verdict, reason),) = remote_lines(found)
    assert verdict == "refused"
    assert f"its signature by {machines.public} is for something else" in reason
    assert found["told"] == [f"{web.url}: {reason}"]
    assert not any(each.startswith("GET") and "/cas/" in each for each in server.requests)


def test_a_refused_artifact_is_compiled_instead(machines: Machines, registry: Place) -> None:
    machines.push(registry.url, **registry.variables)
    found = machines.load(
        machines.new(), OPKILN_REMOTES=registry.url, OPKILN_TRUSTED_KEYS=machines.other,
        **registry.variables,
    )  # fmt: skip
    assert (found["value"], found["origin"]) == (42, "built")


def test_what_does_not_fit_is_fetched_once(machines: Machines, registry: Place) -> None:
    """A header of the artifact is another one here. Headers are not in its name."""
    header = machines.tree.write("pkg/n.h", "#define N 1\n")
    machines.tree.write("pkg/a.cpp", '#include "n.h"\n' + SOURCE)
    try:
        built = machines.load(
            machines.new(), OPKILN_REMOTES=registry.url, OPKILN_PUSH=machines.key,
            **registry.variables,
        )  # fmt: skip
        assert built["origin"] == "built"
        header.write_text("#define N 2\n")
        store = machines.new()
        for _ in range(2):
            found = machines.fetch(store, registry.url, **registry.variables)
            assert found["value"] == "CompilingOff"
            assert any("n.h" in each[2] for each in found["trace"] if each[1] == "refused"), found
        assert registry.server is not None
        asked = [each for each in registry.server.requests if each.startswith("GET")]
        assert len([each for each in asked if "/blobs/" in each]) == 1
    finally:
        header.unlink()
        machines.tree.write("pkg/a.cpp", SOURCE)


def test_eight_publishers_of_one_name_all_succeed(machines: Machines, place: Place) -> None:
    words = ("cache", "push", "--remote", place.url, "--key", machines.key)
    started = [machines.start("builder", *words, **place.variables) for _ in range(8)]
    ended = [child.finish(each) for each in started]
    assert not [each.stderr for each in ended if each.returncode]
    assert machines.fetch(machines.new(), place.url, **place.variables)["value"] == 42


def test_pull_fetches_what_a_lock_file_names_and_only_once(
    machines: Machines, place: Place, lock: str
) -> None:
    machines.push(place.url, **place.variables)
    store = machines.new()
    words = ("cache", "pull", "--lock", lock, "--remote", place.url, "--fitting", "--json")
    for status in ("fetched", "already there"):
        done = machines.command(store, *words, **place.variables)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)["artifacts"]
        assert (row["status"], row["url"]) == (status, place.url)
    found = machines.load(store, OPKILN_MODE="cached")
    assert found["value"] == 42
    assert f"fetched from {place.url}" in found["trace"][-1][2]


def test_pull_of_something_that_no_tier_has_says_so(
    machines: Machines, place: Place, lock: str
) -> None:
    words = ("cache", "pull", "--lock", lock, "--remote", place.url)
    done = machines.command(machines.new(), *words, **place.variables)
    assert done.returncode == 5
    assert f"{place.url} does not have it" in done.stdout


def test_a_known_digest_is_one_request_and_a_name_two(
    machines: Machines, registry: Place, lock: str
) -> None:
    machines.push(registry.url, **registry.variables)
    server = registry.server
    assert server is not None
    for trusted, expected in (
        ({"OPKILN_LOCK": lock}, ["blobs"]),
        ({"OPKILN_TRUSTED_KEYS": machines.public}, ["manifests", "blobs"]),
    ):
        server.requests.clear()
        found = machines.load(
            machines.new(), OPKILN_REMOTES=registry.url, OPKILN_MODE="cached", **trusted,
            **registry.variables,
        )  # fmt: skip
        assert found["value"] == 42, found
        assert [each.split("/")[4] for each in server.requests] == expected


def test_a_local_hit_connects_to_nobody(machines: Machines, registry: Place) -> None:
    found = machines.fetch("builder", registry.url, **registry.variables)
    assert (found["value"], remote_lines(found)) == (42, [])
    assert registry.server is not None
    assert registry.server.connections == 0


def test_without_remotes_nothing_connects(machines: Machines) -> None:
    code = """
        import sys
        seen = []
        sys.addaudithook(lambda name, given: seen.append(name) if "connect" in name else None)
        from pkg.op import Builder
        assert Builder().load().answer() == 42
        assert not [each for each in sys.modules if each.startswith(("opkiln.remote", "http"))]
        print([name for name in seen if name == "socket.connect"])
    """
    for store in ("builder", machines.new()):  # a hit, and a build
        env = machines.environment(store)
        # Not forked: the process that forks has imported what ranks of a job import.
        assert child.run(code, path=[machines.tree.path], env=env, forked=False).strip() == "[]"


def test_without_keys_and_without_a_lock_file_nobody_is_asked(
    machines: Machines, registry: Place
) -> None:
    machines.push(registry.url, **registry.variables)
    assert registry.server is not None
    before = registry.server.connections
    found = machines.load(
        machines.new(), OPKILN_REMOTES=registry.url, OPKILN_MODE="cached", **registry.variables
    )
    assert found["value"] == "CompilingOff"
    assert "nothing says what is trusted" in remote_lines(found)[0][1]
    assert registry.server.connections == before
    (told,) = found["told"]  # once, also if several loads ask nobody
    assert "no tier of OPKILN_REMOTES is asked: nothing says what is trusted" in told
    assert "hint: export OPKILN_TRUSTED_KEYS=" in told


@pytest.mark.parametrize("variable", ["OPKILN_TRUSTED_KEYS", "OPKILN_LOCK"])
def test_what_cannot_be_read_of_what_is_trusted_is_told(machines: Machines, variable: str) -> None:
    missing = {variable: str(machines.base / "missing")}
    found = machines.load(machines.new(), OPKILN_REMOTES="http://127.0.0.1:1", **missing)
    assert found["origin"] == "built"
    (told,) = found["told"]
    assert "no tier of OPKILN_REMOTES is asked: " in told
    assert str(machines.base / "missing") in told


def test_in_sealed_mode_the_error_says_that_nobody_was_asked(machines: Machines) -> None:
    code = """
        import warnings; warnings.simplefilter("ignore")
        from pkg.op import Builder
        from opkiln.errors import SealedError
        try:
            Builder().load()
        except SealedError as error:
            print(error)
    """
    given = {"OPKILN_REMOTES": "http://127.0.0.1:1", "OPKILN_MODE": "sealed"}
    env = machines.environment(machines.new(), **given)
    told = child.run(code, path=[machines.tree.path], env=env)
    assert "no tier of OPKILN_REMOTES was asked: nothing says what is trusted" in told


def test_those_who_only_look_ask_nobody(machines: Machines, registry: Place) -> None:
    code = """
        from pkg.op import Builder
        from opkiln.loading.explain import explain
        print(explain(Builder().op()))
    """
    store = machines.new()
    for trusted, said in (
        ({"OPKILN_TRUSTED_KEYS": machines.public}, "only a load or a build connects"),
        ({}, f"no load asks it: {terms.NOTHING_TRUSTED}"),
    ):
        given = {"OPKILN_REMOTES": registry.url, **trusted, **registry.variables}
        env = machines.environment(store, **given)
        told = child.run(code, path=[machines.tree.path, SITE], env=env)
        assert f"not asked: {said}  [{registry.url}]" in told
    assert registry.server is not None
    assert registry.server.connections == 0


def test_a_build_with_opkiln_push_is_published(machines: Machines, registry: Place) -> None:
    other = machines.new()
    found = machines.load(
        other, OPKILN_REMOTES=registry.url, OPKILN_PUSH=machines.key, **registry.variables,
    )  # fmt: skip
    assert (found["origin"], found["told"]) == ("built", [])
    assert machines.fetch(machines.new(), registry.url, **registry.variables)["value"] == 42


@pytest.mark.skipif(tiers.REAL, reason="it needs torch, and no server")
def test_the_commands_of_the_page_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/remotes.md").read_text()
    commands = "\n".join(re.findall(r"<!-- tier -->\n```sh\n(.*?)```", page, re.DOTALL))
    known.make_store(tmp_path / "first")
    env = {**os.environ, "OPKILN_CACHE_DIR": str(tmp_path / "first"),
           "PATH": f"{transcript.programs(tmp_path / 'bin')}:{os.environ['PATH']}"}  # fmt: skip
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=tmp_path, env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(r"utils +cached", done.stdout)


# Tiers that do not answer


def _hosts(kind: str) -> tuple[str, servers.Silent | None]:
    if kind == "down":
        return f"127.0.0.1:{servers.unused_port()}", None
    if kind == "unroutable":
        return "192.0.2.1:5000", None  # a network for documentation: nobody has it
    silent = servers.Silent()
    return silent.host, silent


@pytest.mark.timed
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("down", "oci+http"), ("silent", "oci"), ("unroutable", "oci"),
     pytest.param("silent", "http", marks=pytest.mark.full)],
)  # fmt: skip
def test_a_tier_that_does_not_answer_is_passed_over_in_two_and_a_half_seconds(
    machines: Machines, place_after: Place, kind: str, scheme: str
) -> None:
    host, silent = _hosts(kind)
    url = f"{scheme}://{host}/ops"
    store = machines.new()
    urls = f"{url} {place_after.url}"
    found = machines.fetch(store, urls, **place_after.variables)
    assert found["value"] == 42, found
    assert found["seconds"] < 2.5 + 2.0  # the rest is what the load itself takes on a busy machine
    assert len(found["told"]) == 1
    assert f"{url} is not used from now on" in found["told"][0]
    assert remote_lines(found)[0][0] == "none"
    if silent is not None:
        # Another process with the same store does not wait for it again.
        code = f"""
            import time, warnings; warnings.simplefilter("ignore")
            from opkiln.remote import tiers
            from opkiln.store.layers import Store
            began = time.monotonic()
            try:
                tiers.reach({url!r}, Store().root, lambda tier, pulse: tier.look_up("x", pulse))
            except tiers.Down as error:
                print(time.monotonic() - began, error)
        """
        told = child.run(code, env=machines.environment(store))
        assert float(told.split()[0]) < 0.5
        assert "s ago" in told
        silent.stop()


@pytest.mark.timed
def test_other_processes_do_not_wait_for_a_tier_that_drips(machines: Machines) -> None:
    dripping = servers.Dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" ")
    store, url = machines.new(), f"http://{dripping.host}/ops"
    given = {"OPKILN_REMOTES": url, "OPKILN_TRUSTED_KEYS": machines.public}
    # This one does not give up before the test has ended.
    patient = "from opkiln.remote import fetch, patience\nfetch.LOAD = patience.COMMAND\n"
    first = machines.start_load(store, patient, **given)
    assert dripping.asked.wait(60)
    second = machines.load(store, **given)
    first.kill()
    first.communicate()
    dripping.stop()
    assert (second["value"], second["origin"], second["told"]) == (42, "built", [])
    assert "another process of this host asks" in remote_lines(second)[0][1]


@pytest.fixture(scope="module")
def place_after(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = tiers.start("directory", tmp_path_factory.mktemp("after") / "tier")
    machines.push(made.url)
    yield made
    made.stop()


def test_a_wrong_password_is_told_and_the_op_is_compiled(
    machines: Machines, registry: Place
) -> None:
    assert registry.server is not None
    registry.server.login = "me:another"
    found = machines.load(
        machines.new(), OPKILN_REMOTES=registry.url, OPKILN_TRUSTED_KEYS=machines.public,
        **registry.variables,
    )  # fmt: skip
    assert found["origin"] == "built"
    assert "HTTP 401" in found["told"][0]
    assert "me" in found["told"][0]
    assert "secret" not in found["told"][0]


def _notes(machines: Machines, store: str) -> list[str]:
    """What a store remembers of tiers that are down."""
    directory = machines.base / store / "v1/failures"
    return [each.name for each in directory.glob("tier-*")]


def test_a_name_that_is_forbidden_is_missing_and_the_tier_stays(
    machines: Machines, registry: Place
) -> None:
    assert registry.server is not None
    registry.server.forbidden = "GET .*/manifests/"
    store = machines.new()
    found = machines.load(
        store, OPKILN_REMOTES=registry.url, OPKILN_TRUSTED_KEYS=machines.public,
        OPKILN_PUSH=machines.key, **registry.variables,
    )  # fmt: skip
    assert found["origin"] == "built"
    (told,) = found["told"]
    where = f"{registry.variables['DOCKER_CONFIG']}/config.json"
    assert f"HTTP 403, asked with the login of me from {where}" in told
    assert [(v, r.partition(":")[0]) for v, r in remote_lines(found)] == [("none", "forbidden")]
    assert _notes(machines, store) == []
    registry.server.forbidden = ""  # what was built has been published there
    assert machines.fetch(machines.new(), registry.url, **registry.variables)["value"] == 42


def test_a_tier_that_may_only_be_read_is_told_and_stays(
    machines: Machines, registry: Place
) -> None:
    assert registry.server is not None
    registry.server.forbidden = "(POST|PUT)"
    store = machines.new()
    variables = {"OPKILN_TRUSTED_KEYS": machines.public, **registry.variables}
    found = machines.load(store, OPKILN_REMOTES=registry.url, OPKILN_PUSH=machines.key, **variables)
    assert found["origin"] == "built"
    (told,) = found["told"]
    assert f"a.cpp was not published to {registry.url}" in told
    assert "HTTP 403" in told
    assert _notes(machines, store) == []
    words = ("cache", "push", "--remote", registry.url, "--key", machines.key)
    done = machines.command("builder", *words, **variables)
    assert done.returncode != 0
    assert "HTTP 403" in done.stderr


# Downloads


def test_an_interrupted_download_is_resumed(machines: Machines, registry: Place, lock: str) -> None:
    machines.push(registry.url, **registry.variables)
    server = registry.server
    assert server is not None
    store, words = machines.new(), ("cache", "pull", "--lock", lock, "--remote", registry.url)
    server.limit = 5000
    cut = machines.command(store, *words, **registry.variables)
    assert cut.returncode == 5
    assert "ended after 5000 of" in cut.stderr
    server.limit = None
    server.headers.clear()
    done = machines.command(store, *words, **registry.variables)
    assert done.returncode == 0, done.stderr
    assert [each.get("Range") for each in server.headers] == ["bytes=5000-"]
    staging = machines.base / store / "v1/staging"
    assert os.listdir(staging) == []


def test_a_damaged_rest_of_a_download_is_fetched_anew(
    machines: Machines, registry: Place, lock: str
) -> None:
    machines.push(registry.url, **registry.variables)
    row, store = only(lock), machines.new()
    staging = machines.base / store / "v1/staging"
    staging.mkdir(parents=True)
    for each in (staging, staging.parent, staging.parent.parent):
        each.chmod(0o700)
    (staging / f"{row.sha256}.part").write_bytes(b"x" * 100)
    words = ("cache", "pull", "--lock", lock, "--remote", registry.url)
    done = machines.command(store, *words, **registry.variables)
    assert done.returncode == 0, done.stderr
    assert machines.load(store, OPKILN_MODE="cached")["value"] == 42


def test_a_login_does_not_follow_a_redirect_to_another_host(
    machines: Machines, registry: Place, lock: str
) -> None:
    machines.push(registry.url, **registry.variables)
    server, bucket = registry.server, servers.Server(servers.Files)
    assert server is not None
    (blob,) = (name for name in server.files if only(lock).sha256 in name and "blobs" in name)
    bucket.files["/" + blob.rpartition("/")[2]] = server.files[blob]
    server.redirect_to = f"http://{bucket.host}"
    found = machines.fetch(machines.new(), registry.url, **registry.variables)
    bucket.stop()
    assert found["value"] == 42, found
    assert len(bucket.headers) == 1
    assert "Authorization" not in bucket.headers[0]


def test_a_lock_file_is_the_same_every_time_and_its_order_is_stable(
    machines: Machines, lock: str, tmp_path: Path
) -> None:
    again = tmp_path / "again.lock"
    assert machines.command("builder", "lock", "-o", str(again)).returncode == 0
    assert again.read_text() == Path(lock).read_text()
    row = only(lock)
    rows = [row._replace(op=name) for name in ("b", "a", "c")]
    assert lockfile.write(rows) == lockfile.write(reversed(rows))
    mixed = tmp_path / "mixed.lock"
    mixed.write_text(lockfile.write(rows))
    assert [each.op for each in lockfile.read(str(mixed))] == ["a", "b", "c"]


def test_a_lock_file_that_everybody_can_write_to_is_refused(
    machines: Machines, registry: Place, lock: str, tmp_path: Path
) -> None:
    machines.push(registry.url, **registry.variables)
    loose = tmp_path / "ops.lock"
    loose.write_text(Path(lock).read_text())
    loose.chmod(0o666)
    found = machines.load(
        machines.new(), OPKILN_REMOTES=registry.url, OPKILN_LOCK=str(loose), OPKILN_MODE="cached",
        **registry.variables,
    )  # fmt: skip
    assert found["value"] == "CompilingOff"
    assert remote_lines(found)[0][0] == "refused"


def test_an_object_of_a_plan_comes_from_a_tier(tmp_path: Path) -> None:
    """Of two sources one is edited: the other's object is fetched."""
    place = tiers.start("directory", tmp_path / "tier")
    machines = Machines(tmp_path / "machines")
    machines.tree.write("pkg/b.cpp", 'extern "C" int other() { return 1; }\n')
    machines.tree.declare(sources=["a.cpp", "b.cpp"])
    assert (
        machines.load("builder", OPKILN_REMOTES=place.url, OPKILN_PUSH=machines.key)["value"] == 42
    )
    machines.tree.write("pkg/a.cpp", SOURCE.replace("42", "43"))
    trace, given = tmp_path / "trace.json", {"OPKILN_TRUSTED_KEYS": machines.public}
    store = machines.new()
    found = machines.load(store, OPKILN_REMOTES=place.url, OPKILN_TRACE=str(trace), **given)
    assert found["value"] == 43, found
    ended = [each for each in json.loads(trace.read_text())["traceEvents"] if "dur" in each]
    steps = {each["name"]: each["args"]["cached"] for each in ended if "cached" in each["args"]}
    assert (steps["a.cpp"], steps["b.cpp"]) == (False, True), steps
