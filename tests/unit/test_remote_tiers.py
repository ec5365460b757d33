"""The parts of remote tiers: what they send, what they believe, whom they tell a login."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import servers
from sample.levels import X86_64, X86_V3

from opkiln.errors import RemoteWarning, SettingError, StoreError
from opkiln.remote import credentials, lockfile, names, patience, plain, registry, tiers, web
from opkiln.remote.patience import Patience
from opkiln.remote.tier import Absent, Forbidden, Published, Unreachable, Unusable
from opkiln.settings import override, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[[type[servers.Files]], servers.Server]

pytestmark = pytest.mark.timed

SHA = "ab" * 32
WHAT = Published(SHA, 3, "", {"op": "small", "target": X86_V3})


def nothing() -> None:
    """A pulse that nobody feels."""


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[servers.Server] = []

    def begin(handler: type[servers.Files]) -> servers.Server:
        started.append(servers.Server(handler))
        return started[-1]

    yield begin
    for each in started:
        each.stop()


@pytest.fixture(autouse=True)
def _new_process() -> None:
    tiers.forget()


def root_of(cache: Path) -> str:
    root = cache / "v1"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(root)


# Downloads


def serving(start: Start, data: bytes) -> tuple[servers.Server, str, str]:
    import hashlib

    server, sha256 = start(servers.Files), hashlib.sha256(data).hexdigest()
    server.files[f"/cas/{sha256}"] = data
    return server, f"http://{server.host}", sha256


def test_a_blob_arrives_whole_in_pieces(start: Start, cache: Path) -> None:
    data = os.urandom(3 << 20)
    _, url, sha256 = serving(start, data)
    pieces: list[int] = []
    path = tiers.download(url, sha256, len(data), root_of(cache), pieces.append)
    assert Path(path).read_bytes() == data
    assert len(pieces) > 1
    assert sum(pieces) == len(data)


def test_a_blob_that_is_too_long_is_refused(start: Start, cache: Path) -> None:
    _, url, sha256 = serving(start, b"x" * 1000)
    with pytest.raises(Unusable, match="longer than 999 bytes"):
        tiers.download(url, sha256, 999, root_of(cache))


def test_a_blob_with_another_digest_is_refused_and_removed(start: Start, cache: Path) -> None:
    server, url, sha256 = serving(start, b"x" * 1000)
    server.files[f"/cas/{sha256}"] = b"y" * 1000
    with pytest.raises(Unusable, match=f"not {sha256}"):
        tiers.download(url, sha256, 1000, root_of(cache))
    assert os.listdir(f"{root_of(cache)}/staging") == []


@pytest.mark.parametrize(("sha256", "size"), [("../../etc", 5), (SHA.upper(), 5), (SHA, 0)])
def test_what_is_not_a_digest_and_a_size_is_not_asked_for(
    start: Start, cache: Path, sha256: str, size: int
) -> None:
    server = start(servers.Files)
    with pytest.raises(Unusable):
        tiers.download(f"http://{server.host}", sha256, size, root_of(cache))
    assert server.connections == 0


def test_a_blob_that_is_not_there_is_absent_and_the_tier_is_not_down(
    start: Start, cache: Path
) -> None:
    url = f"http://{start(servers.Files).host}"
    with pytest.raises(Absent):
        tiers.download(url, SHA, 5, root_of(cache))
    assert not tiers.is_down(url)


def test_two_processes_that_download_the_same_do_not_share_a_file(
    start: Start, cache: Path
) -> None:
    data = b"x" * 1000
    _, url, sha256 = serving(start, data)
    root = root_of(cache)
    first, fd = tiers._part(root, sha256)
    if os.fork() == 0:  # record locks are a process's
        other = tiers.download(url, sha256, 1000, root)
        os._exit(0 if other != first and Path(other).read_bytes() == data else 1)
    assert os.wait()[1] == 0
    os.close(fd)


# Patience


def test_a_task_that_says_nothing_is_left_alone_and_ends_at_its_next_word() -> None:
    ended = threading.Event()

    def task(pulse: Callable[[], None]) -> None:
        time.sleep(0.3)
        try:
            pulse()
        finally:
            ended.set()

    began = time.monotonic()
    with pytest.raises(patience.Silent):
        patience.patiently(task, Patience(0.1, 0.1))
    assert time.monotonic() - began < 0.3
    assert ended.wait(10)


def test_each_word_gives_a_task_more_time() -> None:
    def task(pulse: Callable[[], None]) -> str:
        for _ in range(5):
            time.sleep(0.1)
            pulse()
        return "done"

    assert patience.patiently(task, Patience(5.0, 5.0)) == "done"
    with pytest.raises(patience.Silent):
        patience.patiently(lambda pulse: (pulse(), time.sleep(1)), Patience(5.0, 0.1))


def test_an_error_of_a_task_is_raised_where_it_is_waited_for() -> None:
    with pytest.raises(ZeroDivisionError):
        patience.patiently(lambda _: 1 // 0)


# Records of names


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"schema": 2}', b'{"schema": 1, "sha256": 1}', b"[" * 100_000,
     b'{"schema": 1, "sha256": "a", "size": "x", "signatures": "", "labels": {}}'],
)  # fmt: skip
def test_a_malformed_record_is_refused(data: bytes) -> None:
    with pytest.raises(Unusable):
        plain.read_record(data)
    with pytest.raises(Unusable):
        registry.read_manifest(data)


def test_a_record_and_a_manifest_say_what_was_published() -> None:
    what = WHAT._replace(signatures='{"a": "b"}\n')
    assert plain.read_record(plain.write_record(what)) == what
    assert registry.read_manifest(registry.write_manifest(what)) == what
    assert registry.write_manifest(what) == registry.write_manifest(what)


def test_a_manifest_of_something_else_is_refused() -> None:
    image = json.loads(registry.write_manifest(WHAT))
    image["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar+gzip"
    with pytest.raises(Unusable, match="tar"):
        registry.read_manifest(json.dumps(image).encode())


def test_publishers_of_a_layout_do_not_lose_each_others_tags(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"abc")
    for number in range(4):
        if os.fork() == 0:
            tier = registry.Layout("oci:///x", str(tmp_path / "layout"))
            for each in range(5):
                tier.write(f"t{number}-{each}", str(tmp_path / "blob"), WHAT, nothing)
            os._exit(0)
    assert [os.wait()[1] for _ in range(4)] == [0] * 4
    tier = registry.Layout("oci:///x", str(tmp_path / "layout"))
    for number in range(4):
        for each in range(5):
            assert tier.published(f"t{number}-{each}", nothing) == WHAT


@pytest.mark.parametrize("op", ["a", "x" * 300, "späti/../op", ".hidden"])
def test_a_name_is_a_tag_that_every_registry_takes(op: str) -> None:
    import re

    made = names._name("package", op, "0" * 40, [("a.cpp", SHA)])
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", made)
    assert made != names._name("package", op, "0" * 40, [("a.cpp", "cd" * 32)])


# Lock files


ROW = lockfile.Locked("pkg", 'o"p\\', "cpu", (), X86_64, X86_V3, ("avx512f",), "none", "n", SHA, 5)


def test_a_lock_file_says_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "ops.lock"
    path.write_text(lockfile.write([ROW, ROW._replace(op="a"), ROW]))
    assert lockfile.read(str(path)) == (ROW._replace(op="a"), ROW)


@pytest.mark.parametrize(
    "change",
    [("version = 1", "version = 2"), ("size = 5", 'size = "5"'), (f'sha256 = "{SHA}"\n', ""),
     ("version", "= ")],
)  # fmt: skip
def test_a_lock_file_that_cannot_be_understood_is_an_error(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    path = tmp_path / "ops.lock"
    path.write_text(lockfile.write([ROW]).replace(*change))
    with pytest.raises(StoreError, match="cannot be used"):
        lockfile.read(str(path))


# Settings


@pytest.mark.parametrize("text", ["registry/prefix", "ftp://x/y", "oci://", "https://me:pw@host/x"])
def test_a_url_that_cannot_be_a_tier_is_an_error(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_REMOTES", text)
    with pytest.raises(SettingError):
        assert settings.remotes


def test_a_bucket_without_its_library_is_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(Unreachable, match="s3fs") as told:
        tiers.open_tier("s3://bucket/ops")
    assert told.value.hint == "pip install s3fs"


# Logins


def docker(tmp_path: Path, **config: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_login_of_dockers_config_is_found(tmp_path: Path) -> None:
    auth = base64.b64encode(b"me:pass:word").decode()
    directory = docker(tmp_path, auths={"https://host:5000": {"auth": auth}, "b": {}})
    with override(docker_config=directory):
        found = ("me", "pass:word", "", f"{tmp_path}/config.json")
        assert credentials.for_registry("host:5000") == found
        assert credentials.for_registry("other") is None
        assert credentials.for_registry("b") is None


def test_a_credential_helper_is_asked(tmp_path: Path) -> None:
    helper = tmp_path / "docker-credential-test"
    helper.write_text(
        "#!/bin/sh\n"
        '[ "$1" = get ] || exit 1\n'
        'read -r host || true\n[ "$host" = known ] || exit 1\n'
        'echo "{\\"Username\\": \\"<token>\\", \\"Secret\\": \\"s\\"}"\n'
    )
    helper.chmod(0o755)
    directory = docker(tmp_path, credHelpers={"known": "test", "other": "test"})
    path = f"{tmp_path}:{os.environ['PATH']}"
    with pytest.MonkeyPatch.context() as patch, override(docker_config=directory):
        patch.setenv("PATH", path)
        assert credentials.for_registry("known") == ("", "", "s", "docker-credential-test")
        assert credentials.for_registry("other") is None


def test_a_helpers_name_cannot_be_a_path(tmp_path: Path) -> None:
    directory = docker(tmp_path, credsStore="../../bin/x")
    with override(docker_config=directory), pytest.raises(Unreachable, match="not a helper"):
        credentials.for_registry("host")


def test_netrc_has_the_logins_of_web_servers(tmp_path: Path) -> None:
    path = tmp_path / "netrc"
    path.write_text("machine host login me password secret\ndefault login all password x\n")
    path.chmod(0o600)
    with override(netrc=str(path)):
        assert credentials.for_web("host") == ("me", "secret", "", str(path))
        assert credentials.for_web("another") is None


# What is forbidden, and logins that are refused


def test_a_name_that_is_forbidden_does_not_end_the_use_of_the_tier(
    start: Start, cache: Path, tmp_path: Path
) -> None:
    server, url, sha256 = serving(start, b"x" * 1000)
    server.forbidden = "GET /ac/"
    root, netrc = root_of(cache), tmp_path / "netrc"
    with override(netrc=str(netrc)):
        for _ in range(2):
            with pytest.raises(Forbidden) as told:
                tiers.reach(url, root, lambda tier, pulse: tier.published("name", pulse))
    assert str(told.value) == (
        f"{server.host} answers HTTP 403, asked without a login (none for {server.host} in {netrc})"
    )
    assert not tiers.is_down(url)
    assert not os.path.exists(f"{root}/failures")  # other processes ask it, too
    assert Path(tiers.download(url, sha256, 1000, root)).read_bytes() == b"x" * 1000


def test_the_user_is_told_once_that_a_tier_forbids_something() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            tiers.tell_forbidden("s3://bucket/ops", Forbidden("why"))
    (only,) = told
    assert only.category is RemoteWarning
    assert "s3://bucket/ops forbids it, so it counts as missing: why" in str(only.message)


def test_a_blob_is_published_though_nobody_may_ask_whether_it_is_there(
    start: Start, tmp_path: Path
) -> None:
    server = start(servers.Files)
    server.forbidden = "HEAD"
    (tmp_path / "blob").write_bytes(b"abc")
    tiers.open_tier(f"http://{server.host}").write("n", str(tmp_path / "blob"), WHAT, nothing)
    assert sorted(server.files) == ["/ac/n", f"/cas/{SHA}"]


@pytest.mark.parametrize("kind", ["http", "oci+http"])
def test_a_login_that_is_refused_is_tried_once(start: Start, tmp_path: Path, kind: str) -> None:
    """A server may lock the account after a few attempts."""
    server = start(servers.Files if kind == "http" else servers.Registry)
    server.login = "me:another"
    auth = base64.b64encode(b"me:secret").decode()
    directory = docker(tmp_path, auths={server.host: {"auth": auth}})
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    (tmp_path / "blob").write_bytes(b"abc")
    with override(docker_config=directory, netrc=str(tmp_path / "netrc")):
        tier = tiers.open_tier(f"{kind}://{server.host}/ops")
        with pytest.raises(Unreachable, match="HTTP 401, asked with the login of me") as told:
            tier.write("name", str(tmp_path / "blob"), WHAT, nothing)
    assert str(tmp_path) in str(told.value)
    assert "secret" not in str(told.value)
    assert len(server.requests) == 1


class Bearer(servers.Files):
    """A registry that wants a token, and the server that gives tokens."""

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        self.server.headers.append(dict(self.headers))
        told = self.headers.get("Authorization", "")
        if self.path.startswith("/token"):
            ok = told == "Basic " + base64.b64encode(b"me:secret").decode()
            self._answer(200, b'{"token": "t"}') if ok else self._answer(401)
        elif told == "Bearer t":
            self._answer(200, b"blob")
        else:
            realm = f"http://{self.server.host}/token"
            self._answer(
                401, **{"WWW-Authenticate": f'Bearer realm="{realm}",service="s",scope="a:b:c"'}
            )


def test_a_registry_that_wants_a_token_gets_one_once(start: Start) -> None:
    server = start(Bearer)
    login = credentials.Login("me", "secret")
    client = web.Client(f"http://{server.host}/", lambda _: login, list)
    for _ in range(2):
        with client.request("GET", "/v2/x/blobs/y", nothing, scope="a") as response:
            assert response.read() == b"blob"
    asked = [each.partition("?")[0] for each in server.requests]
    assert asked == ["GET /v2/x/blobs/y", "GET /token", "GET /v2/x/blobs/y", "GET /v2/x/blobs/y"]
    assert "service=s&scope=a%3Ab%3Ac" in server.requests[1]
    assert server.connections == 1


class Denying(Bearer):
    """It gives a token to everybody, and nothing for it."""

    def do_GET(self) -> None:
        if self.path.startswith("/token") and not self.server.forbidden:
            self._answer(200, b'{"token": "another"}')
        elif self.path.startswith("/token"):
            self._answer(403)
        else:
            super().do_GET()


@pytest.mark.parametrize("by", ["registry", "token server"])
def test_a_repository_that_a_good_login_may_not_read_is_forbidden_not_down(
    start: Start, by: str
) -> None:
    """Public registries say so of repositories that do not exist yet."""
    server = start(Denying)
    server.forbidden = "all" if by == "token server" else ""
    client = web.Client(f"http://{server.host}/", lambda _: None, list)
    with pytest.raises(Forbidden), client.request("GET", "/v2/x", nothing, scope="a"):
        pass


def test_a_realm_without_tls_does_not_get_the_login_of_a_registry_with_it(start: Start) -> None:
    login = credentials.Login("me", "secret")
    client = web.Client("https://registry.example/", lambda _: login, list)
    with pytest.raises(Unreachable, match="sends logins to"):
        client._answer('Bearer realm="http://registry.example/token"', "", nothing)


def test_a_redirect_to_plain_http_is_refused() -> None:
    client = web.Client("https://host/", lambda _: None, list)
    with pytest.raises(Unreachable, match="redirects to http://"):
        client._redirected("https://host/a", "http://host/a")
    assert client._redirected("https://host/a", "/b") == "https://host/b"


def test_proxies_are_used_but_not_for_the_hosts_that_are_excepted(start: Start) -> None:
    proxy = start(servers.Files)
    proxy.files["http://far.example/x"] = b"through the proxy"
    with override(http_proxy=f"http://{proxy.host}", no_proxy="near.example, .local"):
        client = web.Client("http://far.example/", lambda _: None, list)
        with client.request("GET", "x", nothing) as response:
            assert response.read() == b"through the proxy"
        assert web.Client._proxy("http", "near.example") == ""
        assert web.Client._proxy("http", "a.near.example") == ""
        assert web.Client._proxy("http", "a.local") == ""
        assert web.Client._proxy("http", "nearer.example") != ""
