"""The parts of remote tiers: what they send, what they believe, whom they tell a login."""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import servers
from sample.levels import X86_64, X86_V3

from opkiln.errors import RemoteWarning, SettingError, StoreError
from opkiln.remote import credentials, lockfile, patience, plain, registry, tiers, web
from opkiln.remote.credentials import Login
from opkiln.remote.patience import Deadline, Patience
from opkiln.remote.tier import Absent, Forbidden, Publication, Tier, Unreachable, Unusable
from opkiln.settings import override, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[[type[servers.Files]], servers.Server]

pytestmark = pytest.mark.timed

SHA = "ab" * 32
LONG = Patience(1e6, 1e6)
WHAT = Publication(SHA, 3, "", {"op": "small", "target": X86_V3})


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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssl.SSLContext]:
    """What a server of this host needs for TLS. This process trusts it."""
    directory = tmp_path_factory.mktemp("tls")
    server = servers.make_certificate(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(directory / "tls.crt"))
        yield server


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
    given = LONG._replace(told=pieces.append)
    path = tiers.download(url, sha256, len(data), root_of(cache), given)
    assert Path(path).read_bytes() == data
    assert len(pieces) > 1
    assert sum(pieces) == len(data)


def test_a_blob_arrives_by_tls_and_one_connection_serves_several_requests(
    start: Start, cache: Path, certificate: ssl.SSLContext
) -> None:
    server, url, sha256 = serving(start, b"x" * 1000)
    server.socket = certificate.wrap_socket(server.socket, server_side=True)
    url = url.replace("http:", "https:")
    for name in ("one", "two"):
        ask = lambda tier, deadline, name=name: tier.look_up(name, deadline)  # noqa: E731
        assert tiers.reach(url, root_of(cache), ask, LONG) is None
    path = tiers.download(url, sha256, 1000, root_of(cache), LONG)
    assert Path(path).read_bytes() == b"x" * 1000
    assert server.connections == 1


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
    first, fd = tiers._open_part(root, sha256)
    if os.fork() == 0:  # record locks are a process's
        other = tiers.download(url, sha256, 1000, root)
        os._exit(0 if other != first and Path(other).read_bytes() == data else 1)
    assert os.wait()[1] == 0
    os.close(fd)


# Patience


def test_a_task_that_says_nothing_is_left_alone_and_ends_at_its_next_word() -> None:
    given_up, ended = threading.Event(), threading.Event()

    def task(deadline: Deadline) -> None:
        given_up.wait(10)
        try:
            deadline.hear()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        patience.run_with_deadline(task, Patience(0.1, 0.1))
    given_up.set()
    assert ended.wait(10)


class Clock:
    """A clock that stands still, in place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(patience, "time", made)
    return made


def test_words_give_a_request_no_more_time_and_bytes_give_some_back(clock: Clock) -> None:
    deadline = Deadline(Patience(2.0, 10.0))
    assert deadline.left == 2  # for the first answer
    deadline.hear()
    assert deadline.left == 10
    clock.now += 8
    deadline.hear()
    assert deadline.left == 2
    deadline.hear(patience.SLOWEST)
    assert deadline.left == 3
    deadline.hear(1000 * patience.SLOWEST)  # what came fast does not pay for a stall
    assert deadline.left == 10
    clock.now += 10
    assert deadline.expire()
    with pytest.raises(TimeoutError):
        deadline.hear()


def test_no_request_lasts_longer_than_the_load_that_it_is_a_part_of(clock: Clock) -> None:
    deadline = Deadline(LONG._replace(until=clock.now + 5))
    deadline.hear(1000 * patience.SLOWEST)
    assert deadline.left == 5


def test_at_the_deadline_the_socket_is_shut_down_and_its_reader_ends() -> None:
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def task(deadline: Deadline) -> None:
        deadline.guard(ours)
        try:
            ours.recv(1)
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        patience.run_with_deadline(task, Patience(0.1, 0.1))
    assert ended.wait(10)
    ours.close()
    theirs.close()


BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize(
    ("scheme", "begin", "rest"),
    [("https", b"\x16\x03\x03\x40\x00", b"\x02"), ("http", b"HTTP/1.1 ", b"0"),
     ("http", b"", b"HTTP/1.1 100 Continue\r\n\r\n"), ("http", b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
     ("http", BODY, b" "), ("https", BODY, b" "), ("oci+http", BODY, b" "),
     ("http", BODY.replace(b"200", b"404"), b" "),
     ("http", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"T: x\r\n")],
    ids=["handshake", "status line", "interim answers", "headers", "record", "record by TLS",
         "manifest", "rest of an error", "trailers"],
)  # fmt: skip
def test_one_deadline_holds_for_a_whole_request_whatever_drips_in(
    cache: Path, scheme: str, begin: bytes, rest: bytes, certificate: ssl.SSLContext
) -> None:
    dripping = servers.Dripping(
        begin, rest, certificate if (scheme, begin) == ("https", BODY) else None
    )
    requests: list[threading.Thread] = []

    def ask(tier: Tier, deadline: Deadline) -> Publication | None:
        requests.append(threading.current_thread())
        return tier.look_up("name", deadline)

    with pytest.raises(tiers.Down, match="no complete answer"), pytest.warns(RemoteWarning):
        tiers.reach(f"{scheme}://{dripping.host}/ops", root_of(cache), ask, Patience(0.5, 0.5))
    requests[0].join(30)
    assert not requests[0].is_alive()  # nothing of it goes on
    dripping.stop()


def test_an_error_of_a_task_is_raised_where_it_is_waited_for() -> None:
    with pytest.raises(ZeroDivisionError):
        patience.run_with_deadline(lambda _: 1 // 0)


# Records of names


WHAT_SAYS = plain.write_record(WHAT)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"schema": 2}', b'{"schema": 1, "sha256": 1}', b"[" * 100_000,
     b'{"schema": 1, "sha256": "a", "size": "x", "signatures": "", "labels": {}}',
     *(WHAT_SAYS.replace(b'"size": 3', b'"size": ' + each)
       for each in (b"1e999", b"true", b"3.0", b"null", b"9" * 5000)),
     WHAT_SAYS.replace(SHA.encode(), b"\\ud800"), WHAT_SAYS.replace(b'""', b'"\\ud800"')],
)  # fmt: skip
def test_a_malformed_record_is_refused(data: bytes) -> None:
    for read in (plain.read_record, registry.read_manifest):
        with pytest.raises(Unusable) as told:
            read(data)
        assert str(told.value).isprintable()


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
            tier = registry.OciLayout(str(tmp_path / "layout"))
            for each in range(5):
                tier.write(f"t{number}-{each}", str(tmp_path / "blob"), WHAT, Deadline(LONG))
            os._exit(0)
    assert [os.wait()[1] for _ in range(4)] == [0] * 4
    tier = registry.OciLayout(str(tmp_path / "layout"))
    for number in range(4):
        for each in range(5):
            assert tier.look_up(f"t{number}-{each}", Deadline(LONG)) == WHAT


@pytest.mark.parametrize("op", ["a", "x" * 300, "späti/../op", ".hidden"])
def test_a_name_is_a_tag_that_every_registry_takes(op: str) -> None:
    import re

    made = lockfile.artifact_name("package", op, "0" * 40, [("a.cpp", SHA)])
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", made)
    assert made != lockfile.artifact_name("package", op, "0" * 40, [("a.cpp", "cd" * 32)])


# Lock files


ROW = lockfile.LockRow("pkg", 'o"p\\', "cpu", (), X86_64, X86_V3, ("avx512f",), "none", "n", SHA, 5)


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


@pytest.mark.parametrize(
    "text",
    ["registry/prefix", "ftp://x/y", "oci://", "https://me:pw@host/x", "https://host:99999/x",
     "oci://[::1/x"],
)  # fmt: skip
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
        assert credentials.registry_login("host:5000") == found
        assert credentials.registry_login("other") is None
        assert credentials.registry_login("b") is None


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
        assert credentials.registry_login("known") == ("", "", "s", "docker-credential-test")
        assert credentials.registry_login("other") is None


def test_a_helpers_name_cannot_be_a_path(tmp_path: Path) -> None:
    directory = docker(tmp_path, credsStore="../../bin/x")
    with override(docker_config=directory), pytest.raises(Unreachable, match="not a helper"):
        credentials.registry_login("host")


def test_netrc_has_the_logins_of_web_servers(tmp_path: Path) -> None:
    path = tmp_path / "netrc"
    path.write_text("machine host login me password secret\ndefault login all password x\n")
    path.chmod(0o600)
    with override(netrc=str(path)):
        assert credentials.web_login("host") == ("me", "secret", "", str(path))
        assert credentials.web_login("another") is None


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
                tiers.reach(url, root, lambda tier, deadline: tier.look_up("name", deadline))
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
    tiers.open_tier(f"http://{server.host}").write(
        "n", str(tmp_path / "blob"), WHAT, Deadline(LONG)
    )
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
            tier.write("name", str(tmp_path / "blob"), WHAT, Deadline(LONG))
    assert str(tmp_path) in str(told.value)
    assert "secret" not in str(told.value)
    assert len(server.requests) == 1


class Bearer(servers.Files):
    """A registry that wants a token, and the server that gives tokens: this one, or the one that
    ``redirect_to`` names."""

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        self.server.headers.append(dict(self.headers))
        told = self.headers.get("Authorization", "")
        if self.path.startswith("/token"):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            ok = told == "Basic " + base64.b64encode(b"me:secret").decode()
            ok = ok or b"refresh_token=secret" in body
            self._answer(200, b'{"token": "t"}') if ok else self._answer(401)
        elif told == "Bearer t":
            self._answer(200, b"blob")
        else:
            realm = f"{self.server.redirect_to or f'http://{self.server.host}'}/token"
            self._answer(
                401, **{"WWW-Authenticate": f'Bearer realm="{realm}",service="s",scope="a:b:c"'}
            )

    do_POST = do_GET


def test_a_registry_that_wants_a_token_gets_one_once(start: Start) -> None:
    server = start(Bearer)
    login = Login("me", "secret")
    client = web.Client(f"http://{server.host}/", lambda _: login, list)
    for _ in range(2):
        with client.request("GET", "/v2/x/blobs/y", Deadline(LONG), scope="a") as response:
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
    with pytest.raises(Forbidden), client.request("GET", "/v2/x", Deadline(LONG), scope="a"):
        pass


@pytest.mark.parametrize("login", [Login("me", "secret"), Login("", "", "secret")])
def test_a_login_goes_to_another_host_for_tokens_only_if_the_user_has_named_it(
    start: Start, login: Login
) -> None:
    def ask(token_host: str = "") -> bytes:
        client = web.Client(f"http://{registry_server.host}/", lambda _: login, list, token_host)
        with client.request("GET", "/v2/x", Deadline(LONG), scope="a") as response:
            return response.read()

    registry_server, tokens = start(Bearer), start(Bearer)
    registry_server.redirect_to = f"http://{tokens.host}"
    with pytest.raises(Unreachable, match="without its login") as told:
        ask()
    assert f"add ?tokens={tokens.host} to the tier's URL" in told.value.hint
    assert "secret" not in str(told.value)
    assert tokens.requests == ["GET /token?service=s&scope=a%3Ab%3Ac"]
    assert "Authorization" not in tokens.headers[0]
    assert ask(tokens.host) == b"blob"


def test_the_url_of_a_registry_names_the_host_for_tokens(start: Start, tmp_path: Path) -> None:
    registry_server, tokens = start(Bearer), start(Bearer)
    registry_server.redirect_to = f"http://{tokens.host}"
    auth = base64.b64encode(b"me:secret").decode()
    directory = docker(tmp_path, auths={registry_server.host: {"auth": auth}})
    url = f"oci+http://{registry_server.host}/team/ops?tokens={tokens.host}"
    with override(docker_config=directory):
        pieces = tiers.open_tier(url).read(SHA, 0, Deadline(LONG))
        assert b"".join(piece for _, piece in pieces) == b"blob"
    assert registry_server.requests[-1] == f"GET /v2/team/ops/blobs/sha256:{SHA}"


def test_a_token_that_anybody_gets_serves_though_the_login_was_kept_back(start: Start) -> None:
    class Public(Bearer):
        def do_GET(self) -> None:
            if self.path.startswith("/token"):
                self.server.headers.append(dict(self.headers))
                self._answer(200, b'{"token": "t"}')
            else:
                super().do_GET()

    registry_server, tokens = start(Bearer), start(Public)
    registry_server.redirect_to = f"http://{tokens.host}"
    client = web.Client(f"http://{registry_server.host}/", lambda _: Login("me", "secret"), list)
    with client.request("GET", "/v2/x", Deadline(LONG), scope="a") as response:
        assert response.read() == b"blob"
    assert "Authorization" not in tokens.headers[0]


def test_a_host_for_tokens_that_no_shell_could_take_is_refused() -> None:
    """It would be part of a hint, which people copy."""
    client = web.Client("https://registry.example/", lambda _: Login("me", "secret"), list)
    with pytest.raises(Unreachable, match="which is refused"):
        client._answer('Bearer realm="https://x;reboot/token"', "", Deadline(LONG))


def test_a_challenge_of_one_long_word_takes_no_time() -> None:
    client = web.Client("https://registry.example/", lambda _: None, list)
    with pytest.raises(Unreachable, match="which is refused"):
        client._answer("Bearer " + "a" * 65_000, "", Deadline(LONG))


def test_a_realm_without_tls_does_not_get_the_login_of_a_registry_with_it(start: Start) -> None:
    login = Login("me", "secret")
    client = web.Client("https://registry.example/", lambda _: login, list)
    with pytest.raises(Unreachable, match="sends logins to"):
        client._answer('Bearer realm="http://registry.example/token"', "", Deadline(LONG))


def test_a_redirect_to_plain_http_is_refused() -> None:
    client = web.Client("https://host/", lambda _: None, list)
    with pytest.raises(Unreachable, match="redirects to http://"):
        client._resolve_url("https://host/a", "http://host/a")
    assert client._resolve_url("https://host/a", "/b") == "https://host/b"


def test_proxies_are_used_but_not_for_the_hosts_that_are_excepted(start: Start) -> None:
    proxy = start(servers.Files)
    proxy.files["http://far.example/x"] = b"through the proxy"
    with override(http_proxy=f"http://{proxy.host}", no_proxy="near.example, .local"):
        client = web.Client("http://far.example/", lambda _: None, list)
        with client.request("GET", "x", Deadline(LONG)) as response:
            assert response.read() == b"through the proxy"
        assert web.Client._proxy("http", "near.example") == ""
        assert web.Client._proxy("http", "a.near.example") == ""
        assert web.Client._proxy("http", "a.local") == ""
        assert web.Client._proxy("http", "nearer.example") != ""
