"""HTTP by the standard library: connections that are kept, redirects, logins, proxies.

A login goes to the host that it is for and to no other: a registry redirects a download to a
bucket, which must not see it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import threading
from urllib.parse import quote, urlencode, urljoin, urlsplit

from opkiln.remote import patience
from opkiln.remote.tier import CHUNK, LARGEST_RECORD, Forbidden, Unreachable
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from http.client import HTTPConnection, HTTPResponse

    from opkiln.remote.credentials import Login
    from opkiln.remote.tier import Pulse

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_GONE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class UnexpectedStatus(Unreachable):
    """An answer that the protocol does not have here."""


class Client:
    """What one tier sends its requests with. Many threads may use it.

    ``find_login`` gives the login for a host; it is asked once, at the first request.
    ``login_files`` are where it looks, for messages.
    """

    def __init__(
        self,
        base: str,
        find_login: Callable[[str], Login | None],
        login_files: Callable[[], Sequence[str]],
    ) -> None:
        self.base = base
        self._host = urlsplit(base).netloc
        self._find_login, self._login_files = find_login, login_files
        self._login: Login | None = None
        self._authorization: dict[str, str] = {}  # by scope; "" is the login itself
        self._asked = False
        self._idle: list[tuple[int, str, HTTPConnection]] = []  # (pid, scheme and host, …)
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None

    @contextlib.contextmanager
    def request(
        self,
        method: str,
        url: str,
        pulse: Pulse,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        file: str = "",
        scope: str = "",
    ) -> Iterator[HTTPResponse]:
        """Send a request, and give the answer to be read. ``url`` may be relative to the base.

        ``file`` is sent as the body. ``scope`` is what a registry's token has to be for.

        Raises Unreachable if the login is refused (401): it would be refused each time, and a
        server may lock an account after a few attempts. Raises Forbidden if only this request is
        refused: 403, or 401 though the registry has just given a token. Raises OSError and
        http.client.HTTPException.
        """
        url, asked = self._redirected(self.base, url), False
        for _ in range(_MOST_REDIRECTS + 2):
            given = dict(headers or {})
            if urlsplit(url).netloc == self._host and (told := self._authorize(scope)):
                given["Authorization"] = told
            connection, response = self._send(method, url, pulse, given, body, file)
            status, location = response.status, response.headers.get("Location", "")
            if status in _REDIRECTS and method in ("GET", "HEAD") and location:
                self._finish(url, connection, response)
                url = self._redirected(url, location)
                continue
            if status == 401 and not asked and urlsplit(url).netloc == self._host:
                asked = True
                challenge = response.headers.get("WWW-Authenticate", "")
                self._finish(url, connection, response)
                if self._answer(challenge, scope, pulse):
                    continue
                raise self._login_refused(status)
            if status in (401, 403):
                self._finish(url, connection, response)
                raise Forbidden(self._refusal(status, url))
            try:
                yield response
            finally:
                self._finish(url, connection, response)
            return
        raise Unreachable(f"{url}: too many redirects")

    def _login_refused(self, status: int) -> Unreachable:
        return Unreachable(self._refusal(status, self.base), hint="see docs/remotes.md, Logins")

    def _refusal(self, status: int, url: str) -> str:
        """What a server said, and which login it said that to. Never the password."""
        host = urlsplit(url).netloc
        if host != self._host:
            who = f"without a login ({self._host} redirects there)"
        elif self._login:
            who = f"with {self._login}"
        else:
            files = ", ".join(self._login_files())
            where = f"none for {host} in {files}" if files else "HOME is not set"
            who = f"without a login ({where})"
        return f"{host} answers HTTP {status}, asked {who}"

    def _redirected(self, url: str, location: str) -> str:
        """Where a server sends us. A login must not go from TLS to plain HTTP."""
        there = urljoin(url, location)
        before, after = urlsplit(url).scheme, urlsplit(there).scheme
        if after not in ("http", "https") or (before == "https" and after == "http"):
            raise Unreachable(f"{url} redirects to {after}://, which is refused")
        return there

    # Logins

    def _authorize(self, scope: str) -> str:
        if not self._asked:
            self._login, self._asked = self._find_login(self._host), True
            self._authorization[""] = self._login.basic if self._login else ""
        return self._authorization.get(scope) or self._authorization.get("", "")

    def _answer(self, challenge: str, scope: str, pulse: Pulse) -> bool:
        """Get the token that a registry asks for. Whether there is one to try."""
        kind, _, rest = challenge.partition(" ")
        if kind.lower() != "bearer":
            return False
        asked = dict(_CHALLENGE.findall(rest))
        realm = asked.get("realm", "")
        plain = urlsplit(self.base).scheme == "http"
        if not realm.startswith(("https://", "http://") if plain else "https://"):
            raise Unreachable(f"{self._host} sends logins to {realm!r}, which is refused")
        query = {"service": asked.get("service", ""), "scope": asked.get("scope") or scope}
        headers, body, method = {}, None, "GET"
        if self._login and self._login.identity_token:
            method, headers = "POST", {"Content-Type": "application/x-www-form-urlencoded"}
            token = self._login.identity_token
            form = {"grant_type": "refresh_token", "refresh_token": token, "client_id": "opkiln"}
            body = urlencode({**query, **form}).encode()
        else:
            realm += ("&" if "?" in realm else "?") + urlencode(query)
            if self._login:
                headers = {"Authorization": self._login.basic}
        connection, response = self._send(method, realm, pulse, headers, body, "")
        try:
            if response.status == 403:  # the login is good, but not for this repository
                raise Forbidden(self._refusal(403, self.base))
            if response.status != 200:
                raise self._login_refused(response.status)
            told = json.loads(response.read(LARGEST_RECORD))
            token = told.get("token") or told.get("access_token")
        except (ValueError, AttributeError, RecursionError) as error:
            raise Unreachable(f"{realm} gave no token: {error}") from error
        finally:
            self._finish(realm, connection, response)
        if not token:
            raise Unreachable(f"{realm} gave no token")
        self._authorization[scope] = f"Bearer {token}"
        return True

    # Connections

    def _send(
        self,
        method: str,
        url: str,
        pulse: Pulse,
        headers: Mapping[str, str],
        body: bytes | None,
        file: str,
    ) -> tuple[HTTPConnection, HTTPResponse]:
        while True:
            connection, kept = self._connection(url)
            try:
                response = self._exchange(connection, method, url, pulse, headers, body, file)
                return connection, response
            except _GONE:
                connection.close()
                if not kept:
                    raise  # otherwise the server has closed a connection that was not used for long
            except BaseException:
                connection.close()
                raise

    def _exchange(
        self,
        connection: HTTPConnection,
        method: str,
        url: str,
        pulse: Pulse,
        headers: Mapping[str, str],
        body: bytes | None,
        file: str,
    ) -> HTTPResponse:
        parts = urlsplit(url)
        target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (
            f"?{parts.query}" if parts.query else ""
        )
        if self._proxy(parts.scheme, parts.hostname or "") and parts.scheme == "http":
            target = url
        given = {"User-Agent": "opkiln", **headers}
        if file:
            given["Content-Length"] = str(os.path.getsize(file))
            with open(file, "rb") as source:
                connection.request(method, target, _pieces(source.read, pulse), given)
        else:
            if body is None and method in ("POST", "PUT"):
                body = b""
            connection.request(method, target, body, given)
        response = connection.getresponse()
        pulse()
        return response

    def _connection(self, url: str) -> tuple[HTTPConnection, bool]:
        """A connection to a host, and whether it was used before."""
        parts = urlsplit(url)
        place = f"{parts.scheme}://{parts.netloc}"
        with self._lock:
            # A forked child must not talk through its parent's connections.
            self._idle = [each for each in self._idle if each[0] == os.getpid()]
            for each in self._idle:
                if each[1] == place:
                    self._idle.remove(each)
                    return each[2], True
        if not parts.hostname:
            raise Unreachable(f"{url} names no host")
        secure = parts.scheme == "https"
        host, port, proxy = parts.hostname, parts.port, self._proxy(parts.scheme, parts.hostname)
        if proxy:
            through = urlsplit(proxy if "//" in proxy else f"//{proxy}")
            host, port = through.hostname or "", through.port or 8080
        connection: HTTPConnection
        if secure:
            context = self._context()
            connection = http.client.HTTPSConnection(
                host, port, timeout=patience.SOCKET, context=context
            )
            if proxy:
                connection.set_tunnel(parts.hostname, parts.port or 443)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=patience.SOCKET)
        return connection, False

    def _context(self) -> ssl.SSLContext:
        import ssl

        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    @staticmethod
    def _proxy(scheme: str, host: str) -> str:
        """The proxy for a host; empty if it is reached directly."""
        proxy = settings.https_proxy if scheme == "https" else settings.http_proxy
        if not proxy:
            return ""
        for word in filter(None, (each.strip() for each in settings.no_proxy.split(","))):
            if word == "*" or host == word.lstrip(".") or host.endswith("." + word.lstrip(".")):
                return ""
        return str(proxy)

    def _finish(self, url: str, connection: HTTPConnection, response: HTTPResponse) -> None:
        """Keep the connection, if nothing is left to be read from it."""
        if not response.isclosed() and (response.length or 0) < CHUNK:
            with contextlib.suppress(OSError, http.client.HTTPException):
                response.read(CHUNK)
        if not response.isclosed() or response.will_close:
            connection.close()
            return
        parts = urlsplit(url)
        with self._lock:
            self._idle.append((os.getpid(), f"{parts.scheme}://{parts.netloc}", connection))


def _pieces(read: Callable[[int], bytes], pulse: Pulse) -> Iterator[bytes]:
    while piece := read(CHUNK):
        pulse()
        yield piece


def body_of(response: HTTPResponse, pulse: Pulse, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """The body of an answer to a request for a range, in pieces with their offsets."""
    at = start if response.status == 206 else 0
    for piece in _pieces(response.read1, pulse):
        yield at, piece
        at += len(piece)


def expect(response: HTTPResponse, *statuses: int) -> None:
    """Raise UnexpectedStatus for an answer that is none of these."""
    if response.status not in statuses:
        told = response.read(200).decode("utf-8", "replace").strip()
        words = " ".join(told.split()) if "<" not in told else ""
        colon = ": " if words else ""
        raise UnexpectedStatus(f"HTTP {response.status} {response.reason}{colon}{words}")
