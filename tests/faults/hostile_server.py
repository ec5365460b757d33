"""A server that answers as a remote tier should, or as none should (`hostile_tiers.py`).

A conversation is drawn from a seed. Each answer begins as an honest one: a record or a manifest, a
blob, a token. Then it may be spoilt: its status line, its headers, its framing, what it says, where
it sends the client, and how fast it comes.
"""

from __future__ import annotations

import base64
import json
import random
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from opkiln.store import signatures, signing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

USER, PASSWORD, IDENTITY = "me", "s3cret-pass", "s3cret-identity"
BASIC = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
MOST = 64 << 20  # bytes of an answer without an end
ENDLESS = 10**12  # a number of bytes that never come

CONTROL = "\x1b[2J\x1b]0;title\x07\x08\x00\x85\u202e\r\n\tfake line"
NUMBERS = (0, -1, 1, True, False, 2**31, 2**64, 10**30, 1e308, -0.0, 1.5)
RAW = (  # JSON that is not written by json.dumps
    b"", b"null", b"[", b"[" * 100_000, b'{"a":' * 50_000, b"1e999", b"-1e999", b"NaN", b"Infinity",
    b"9" * 5000, b"1" + b"0" * 4000, b'"\\ud800"', b'{"schema":1,"schema":2}', b"\xff\xfe\x00",
    b"\xef\xbb\xbf{}", b"\x00" * 50, b'{"a": 1}{"b": 2}', b"<html>sign in</html>", b"{'a': 1}",
)  # fmt: skip
LOCATIONS = (
    "http://[::1", "http://[zz]/", "http://127.0.0.1:99999/", "http://127.0.0.1:-1/", "//", "http:",
    "http://127.0.0.1:abc/", "http://" + "a" * 300 + "/", "http://a..b/", "http:///x", "https:///",
    "http://\x7f/", "http://xn--/", "http://\xe9\xff/", "ftp://127.0.0.1/", "file:///etc/passwd",
    "javascript:alert(1)", "http://127.0.0.1:0/", "http://%31%32/", "?\x1b[2J", "/" + "../" * 5000,
    "http://0/", "http://127.0.0.1:1/", "/" + "a" * 60_000, "http://u:p@127.0.0.1:1/", "\x85",
    "http://a\u3002b/", "https://127.0.0.1:1/", "http://.../", "http://-/", "http://[::ffff:1.2]/",
)  # fmt: skip
STATUSES = (
    100, 101, 103, 199, 200, 201, 204, 206, 226, 300, 301, 302, 303, 304, 307, 308, 400, 401, 403,
    404, 410, 416, 418, 429, 500, 503, 599, 600, 999,
)  # fmt: skip
STATUS_LINES = (
    b"", b"\r\n\r\n", b"HTTP/1.1", b"HTTP/1.1 ", b"HTTP/1.1 200", b"HTTP/9.9 200 OK", b"200 OK",
    b"HTTP/1.1 99999 OK", b"HTTP/1.1 -1 OK", b"HTTP/1.1 abc OK", b"HTTP/1.1 1e2 OK", b"SSH-2.0-x",
    b"HTTP/1.1 \xb2\xb3\xb9 OK", b"HTTP/1.1 20" + b"0" * 5000, b"\x16\x03\x01\x02\x00\x01\x00",
    b"X" * 70_000, b"HTTP/1.0 200 OK", b"HTTP/0.9 200 OK", b"ICY 200 OK", b"\x00" * 20,
    b"HTTP/1.1 500 " + CONTROL.replace("\r\n", "").encode(), b"http/1.1 200 ok", b"HTTP/1.1 0 x",
)  # fmt: skip
HEADERS = (
    b"Content-Length: -1", b"Content-Length: abc", b"Content-Length: 5, 5", b"Content-Length: ",
    b"Content-Length: 99999999999999999999999", b"Content-Length: 1e9", b"Content-Length: 0",
    b"Content-Length: \xb2", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: \x0bchunked", b"Connection: close", b"Connection: keep-alive", b": x",
    b"no colon", b"\x00: \x00", b"X-Long: " + b"a" * 70_000, b" folded", b"X: \x1b[2J",
    b"\x80: \xff",
    b"Content-Encoding: gzip", b"Location: ", b"Content-Range: bytes 5-1/3", b"Keep-Alive: -1",
    b"\r\n".join([b"X: y"] * 150), b"WWW-Authenticate: ", b"Retry-After: 9999999999", b"X" * 200,
)  # fmt: skip
CHUNKS = (
    b"zz\r\n", b"-5\r\nabcde\r\n", b"FFFFFFFFFFFFFFFFFF\r\nabc", b"0x10\r\n", b"\r\n", b"5\r\nabc",
    b"5;" + b"e" * 70_000 + b"\r\nabcde\r\n", b"1_0\r\n", b" 5 \r\nabcde\r\n", b"5\nabcde\n0\n\n",
    b"\xb2\r\n", b"0\r\n" + b"T: x\r\n" * 3000, b"00000000000000000\r\n\r\n", b"5\r\nabcdeXX0\r\n",
)  # fmt: skip
PAUSE = 0.02  # seconds between two bytes of an answer that drips


class Honest(NamedTuple):
    """An artifact as its maker has published it."""

    name: str
    sha256: str
    blob: bytes
    record: dict[str, Any]
    manifest: dict[str, Any]
    key: str  # the trusted key
    private: str  # the file of its private half, to sign other things with
    stranger: str  # the file of a private key that nobody trusts


class Asked(NamedTuple):
    """A request."""

    method: str
    path: str
    text: str  # all of it


class Answer:
    """An answer, from which the bytes on the wire follow."""

    def __init__(self, status: int = 200, body: bytes = b"") -> None:
        self.line = f"HTTP/1.1 {status} X".encode()
        self.headers: list[bytes] = []
        self.body = body
        self.path = ""  # what was asked for
        self.framing = "length"  # chunked, or close: the end of the connection ends it
        self.raw: bytes | None = None  # what comes in place of a framed body
        self.before = b""  # what comes before the status line
        self.endless = b""  # what comes after it, again and again
        self.swift: int | None = None  # so many bytes come at once, and then one after the other
        self.cut: int | None = None  # so many bytes come, and then the connection ends
        self.stall = False  # what comes after that is silence
        self.reset = False  # it ends with a reset

    def head(self) -> bytes:
        framing = {
            "length": b"Content-Length: %d" % (ENDLESS if self.endless else len(self.body)),
            "chunked": b"Transfer-Encoding: chunked",
            "close": b"Connection: close",
        }[self.framing]
        return b"\r\n".join([self.line, *self.headers, framing, b"", b""])

    def pieces(self, size: int) -> Iterator[bytes]:
        """The bytes; ``size`` at a time, where that may be seen."""
        yield self.before + self.head()
        if self.raw is not None:
            yield self.raw
        else:
            for at in range(0, len(self.body), size):
                yield self._framed(self.body[at : at + size])
            if self.framing == "chunked" and not self.endless:
                yield b"0\r\n\r\n"
        while self.endless:
            yield self._framed(self.endless)

    def _framed(self, piece: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(piece), piece) if self.framing == "chunked" else piece


class Server:
    """Takes connections, and lets ``answer`` send whatever it likes."""

    def __init__(self, answer: Callable[[Asked, socket.socket], bool]) -> None:
        self._answer = answer
        self.broken = ""  # a mistake of this server's own
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.host = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name="server", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(
                target=self._serve, args=(connection,), name="server", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as file:
                while (asked := _read(file)) and self._answer(asked, connection):
                    pass
        except OSError:
            return  # the client is gone
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise


def _read(file: Any) -> Asked | None:
    """A request, with its body."""
    lines: list[bytes] = []
    while (line := file.readline()) not in (b"", b"\r\n"):
        lines.append(line)
    if not lines:
        return None
    length = next((int(x.split(b":")[1]) for x in lines if x.lower().startswith(b"content-l")), 0)
    text = (b"".join(lines) + file.read(length)).decode("latin-1")
    method, _, rest = text.partition(" ")
    return Asked(method, rest.partition(" ")[0], text)


class Conversation:
    """What two servers say to a client: a tier, and another host, which it may send clients to."""

    def __init__(self, seed: str, honest: Honest, journal: Callable[[str], None]) -> None:
        self.dice = random.Random(seed)
        self._journal = journal
        self.honest = honest
        self.kind = self.dice.choice(["http", "oci+http"])
        self.login = self.dice.choice(["", "basic", "identity"])
        self.command = self.dice.choice(["", "", "", "", "", "", "push", "pull"])  # or a load
        # Whether the client has a lock file, and no key.
        self.locked = self.command == "pull" or self.dice.random() < 0.25
        self.wants_token = self.kind == "oci+http" and self.dice.random() < 0.5
        self.spoils = self.dice.choice([0.0, 0.2, 0.4, 0.7, 1.0, 1.0])  # how often an answer is bad
        self.elsewhere: list[Asked] = []  # what the other host was asked
        self.vouched = self.locked  # whether the client has seen what makes the blob trusted
        self.unvouched_blobs = 0  # requests for blobs before that
        self.most = 0  # bytes of the longest body; lines without an end end with the time alone
        self._lock = threading.Lock()
        self._asked = 0
        self.tier, self.other = Server(self._at_tier), Server(self._at_other)
        self.url = f"{self.kind}://{self.tier.host}/ops"
        login, command = self.login or "none", self.command or "load"
        journal(f"{self.url}, login: {login}, lock file: {self.locked}, {command}")

    def _at_tier(self, asked: Asked, connection: socket.socket) -> bool:
        return self._respond(asked, connection, elsewhere=False)

    def _at_other(self, asked: Asked, connection: socket.socket) -> bool:
        self.elsewhere.append(asked)
        return self._respond(asked, connection, elsewhere=True)

    def _respond(self, asked: Asked, connection: socket.socket, *, elsewhere: bool) -> bool:
        """Send an answer. Whether the connection goes on."""
        with self._lock:
            self._asked += 1
            dice = random.Random(f"{self.dice.random()} {self._asked}")
            answer, kind = self._honest(asked, elsewhere)
            answer.path = asked.path
            note = f"{asked.method} {asked.path[:200]}: {answer.line.decode()[9:12]} {kind}"
            if dice.random() < self.spoils:
                apply = [each for each in SPOILS if kind in ONLY_FOR.get(each, kind)]
                for spoil in dice.sample(apply, dice.choice([1, 1, 1, 2, 3])):
                    spoil(self, dice, answer, kind)
                    note += f", {spoil.__name__.removeprefix('_')}"
            self._journal(note)
            if kind == "blob" and not self.vouched:
                self.unvouched_blobs += 1
            if kind == "record" and self._vouches(answer.body):
                self.vouched = True
        return self._send(answer, connection, dice)

    def _honest(self, asked: Asked, elsewhere: bool) -> tuple[Answer, str]:
        """What an honest tier says, and what that is."""
        name, honest = asked.path.partition("?")[0].rpartition("/")[2], self.honest
        if name.startswith("token"):
            return Answer(200, json.dumps({"token": "t" * 20, "expires_in": 300}).encode()), "token"
        if self.wants_token and not elsewhere and "Authorization: Bearer" not in asked.text:
            answer = Answer(401)
            realm = f'realm="http://{self.tier.host}/token",service="s",scope="a:b:pull"'
            answer.headers.append(f"WWW-Authenticate: Bearer {realm}".encode())
            return answer, "challenge"
        if asked.method == "HEAD":
            return Answer(404), "nothing"
        if asked.method in ("POST", "PUT"):
            answer = Answer(201 if asked.method == "PUT" else 202)
            answer.headers.append(f"Location: {asked.path}1?state=x".encode())
            return answer, "written"
        if honest.sha256 in name or len(name.rpartition(":")[2]) == 64:
            return Answer(200, honest.blob), "blob"
        if name == honest.name:
            said = honest.record if self.kind == "http" else honest.manifest
            return Answer(200, json.dumps(said).encode()), "record"
        return Answer(404), "nothing"

    def _vouches(self, body: bytes) -> bool:
        """Whether a record says of the artifact what its maker has signed."""
        try:
            said = json.loads(body)
            if self.kind == "http":
                (mine, theirs) = (self.honest.record, said)
                return all(mine[x] == theirs[x] for x in ("sha256", "size", "signatures"))
            (mine, theirs) = (self.honest.manifest, said)
            notes = "org.opkiln.signatures"
            return bool(
                all(mine["layers"][0][x] == theirs["layers"][0][x] for x in ("digest", "size"))
                and mine["annotations"][notes] == theirs["annotations"][notes]
            )
        except Exception:
            return False

    def _send(self, answer: Answer, connection: socket.socket, dice: random.Random) -> bool:
        sent = 0
        swift = answer.swift if answer.swift is not None else ENDLESS
        cut = answer.cut if answer.cut is not None else MOST
        try:
            for piece in answer.pieces(dice.choice([1 << 16, 1 << 16, 4096, 1000])):
                rest = piece
                while rest and sent < cut:
                    part = rest[: min(swift - sent, cut - sent)] if sent < swift else rest[:1]
                    connection.sendall(part)
                    rest, sent = rest[len(part) :], sent + len(part)
                    if sent >= swift:
                        time.sleep(PAUSE)
                if sent >= cut:
                    break
        finally:
            self.most = max(self.most, sent if answer.raw is None else 0)
        if answer.stall:
            time.sleep(3600)
        if answer.reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return answer.cut is None and answer.framing != "close" and not answer.endless


# What may be wrong with an answer


def any_json(dice: random.Random, depth: int = 0) -> Any:
    """Any value that JSON has."""
    kind = dice.randrange(8 if depth < 3 else 6)
    if kind < 2:
        return dice.choice(NUMBERS)
    if kind < 5:
        texts = ("", CONTROL, "\ud800", "x" * 100_000, "../../etc/passwd", "0" * 64, "sha256:", "é")
        return dice.choice(texts)
    if kind == 5:
        return None
    values = [any_json(dice, depth + 1) for _ in range(dice.randrange(4))]
    names = ("sha256", "size", "token", "layers", "annotations", "", CONTROL)
    return values if kind == 6 else {dice.choice(names): value for value in values}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, (dict, list)):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from _paths(value[name], (*path, name))


def _exchange(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _exchange(copy[path[0]], path[1:], new)
    return copy


def another_value(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    """A part of what is said is anything else, or missing."""
    try:
        said = json.loads(answer.body)
    except (ValueError, RecursionError):
        answer.body = json.dumps(any_json(dice)).encode()
        return
    path = dice.choice(list(_paths(said)))
    if path and dice.random() < 0.3:
        *above, last = path
        whole: Any = said
        for name in above:
            whole = whole[name]
        del whole[last]
    else:
        said = _exchange(said, path, any_json(dice))
    answer.body = json.dumps(said).encode()


def raw_json(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    """What is said is not JSON, or hardly."""
    body = dice.choice(RAW)
    answer.body = body if dice.random() < 0.8 else answer.body.decode("latin-1").encode("utf-16")


def forged_record(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    """It names a trusted key, which has not signed this; and it is large."""
    honest = talk.honest
    sha256 = honest.sha256 if dice.random() < 0.3 else f"{dice.getrandbits(256):064x}"
    size = dice.choice([len(honest.blob), 600 << 20, 1])
    made_up = {honest.key: dice.randbytes(64)}
    texts: list[Callable[[], bytes]] = [
        lambda: signatures.write(made_up),
        lambda: signing.sign_artifact("another-name", sha256, size, honest.private),
        lambda: signing.sign_artifact(honest.name, sha256, size, honest.stranger),
        lambda: signing.sign_artifact(honest.name, honest.sha256, size + 1, honest.private),
        lambda: b"",
    ]
    text = dice.choice(texts)().decode()
    if talk.kind == "http":
        said = {**honest.record, "sha256": sha256, "size": size, "signatures": text}
    else:
        layer = {**honest.manifest["layers"][0], "digest": f"sha256:{sha256}", "size": size}
        notes = {**honest.manifest["annotations"], "org.opkiln.signatures": text}
        said = {**honest.manifest, "layers": [layer], "annotations": notes}
    answer.body = json.dumps(said).encode()


def altered_body(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    """The body is shorter, longer, or has other bytes."""
    body = answer.body or dice.randbytes(dice.choice([1, 100, 5000]))
    at = dice.randrange(len(body)) if body else 0
    answer.body = dice.choice([
        body[:at], body + b"x" * dice.choice([1, 5000]), dice.randbytes(len(body)), b"",
        body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :], CONTROL.encode(), body * 3,
    ])  # fmt: skip


def another_status(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    answer.line = f"HTTP/1.1 {dice.choice(STATUSES)} X".encode()


def odd_status_line(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    answer.line = dice.choice(STATUS_LINES)


def odd_headers(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    answer.headers += dice.sample(HEADERS, dice.choice([1, 1, 2, 5]))


def odd_framing(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    answer.framing = dice.choice(["chunked", "chunked", "close"])
    if answer.framing == "chunked" and dice.random() < 0.7:
        answer.raw = dice.choice(CHUNKS)


def redirect(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    answer.line = f"HTTP/1.1 {dice.choice([301, 302, 303, 307, 308])} X".encode()
    there = f"{talk.other.host}{answer.path}"
    other = (f"http://{there}", f"http://{there}", f"http://{USER}@{there}", "", answer.path)
    there = dice.choice(other if dice.random() < 0.4 else LOCATIONS)
    answer.headers.append(b"Location: " + there.encode("utf-8", "surrogatepass"))


def challenge(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    """It asks for a login, or for a token from somewhere."""
    answer.line = dice.choice([b"HTTP/1.1 401 X", b"HTTP/1.1 401 X", b"HTTP/1.1 403 X"])
    hosts = (talk.other.host, talk.other.host, talk.tier.host, f"{USER}@{talk.other.host}")
    realm = f"http://{dice.choice(hosts)}/token"
    if dice.random() < 0.4:
        realm = dice.choice([*LOCATIONS, CONTROL])
    scope = dice.choice(["a:b:c", CONTROL.replace("\r\n", ""), "", "x" * 30_000])
    text = f'Bearer realm="{realm}",service="s",scope="{scope}"'
    if dice.random() < 0.4:
        text = dice.choice([
            f'bearer REALM="{realm}"', "Bearer", "Basic", 'Basic realm="x"', "Negotiate abc", "",
            "Bearer " + "a" * 60_000, 'Bearer realm="' + "a" * 60_000, 'Bearer realm=http://x',
            "Bearer " + 'a="' * 20_000, "Digest " + "=," * 20_000,
        ])  # fmt: skip
    text = f"WWW-Authenticate: {text}".replace("\r\n", "")
    answer.headers = [text.encode("utf-8", "surrogatepass")]


def odd_token(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    said: Any = {dice.choice(["token", "access_token"]): dice.choice([
        "a\r\nX-Injected: 1", "a\nb", "", "é", "\ud800", " ", "x" * 500_000, 5, None, [], {}, ["a"],
        True, CONTROL,
    ])}  # fmt: skip
    answer.body = json.dumps(said if dice.random() < 0.8 else any_json(dice)).encode()


def drip(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    """It comes byte by byte, and never ends."""
    answer.swift = dice.choice([0, 5, 20, 50, 100, 200, 1000])
    answer.endless = dice.choice([b"", b"x", b"x" * 100])


def hundred_continues(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    answer.before = b"HTTP/1.1 100 Continue\r\n\r\n" * dice.choice([1, 1000, 100_000])


def endless_body(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    answer.endless = dice.choice([b"x" * (1 << 16), b" ", b"[", b"0" * 4096])
    answer.framing = dice.choice(["length", "chunked", "close"])


def endless_trailers(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    answer.framing, answer.raw = "chunked", b"0\r\n"
    answer.body, answer.endless = b"", b""
    answer.raw += b"T: x\r\n" * 200_000


def cut(talk: Conversation, dice: random.Random, answer: Answer, kind: str) -> None:
    """The connection ends too early."""
    answer.cut = dice.choice([0, 1, 10, 30, 60, 100, 500, 5000])
    answer.reset, answer.stall = dice.random() < 0.3, dice.random() < 0.3


SPOILS = (
    another_value, another_value, raw_json, forged_record, forged_record, altered_body,
    another_status, odd_status_line, odd_headers, odd_framing, redirect, redirect, challenge,
    challenge, odd_token, odd_token, drip, hundred_continues, endless_body, endless_trailers, cut,
)  # fmt: skip
ONLY_FOR = {forged_record: ("record",), odd_token: ("token",), raw_json: ("record", "token")}
