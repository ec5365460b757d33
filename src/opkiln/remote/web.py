"""HTTP by the standard library: connections that are kept, redirects, logins, proxies.

A login goes to the host that it is for: a registry redirects a download to a bucket, which must not
see it. A registry may also name a server that gives tokens for the login. If that is another host,
it gets the login only if the user has named it in the tier's URL.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPResponse
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlencode, urljoin, urlsplit

from opkiln.base.forks import cached_property
from opkiln.remote.credentials import Login
from opkiln.remote.patience import Deadline
from opkiln.remote.tier import CHUNK, LARGEST_RECORD, Absent, Failure, Forbidden, Unreachable
from opkiln.settings import settings

if TYPE_CHECKING:
    import ssl

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_CHALLENGE = re.compile(r'\b(\w+)="([^"]*)"')  # without \b, a long word takes hours
_TOKEN = re.compile("[!-~]+")
# It becomes part of a hint, which people copy.
_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d+)?")
_GONE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class UnexpectedStatus(Unreachable):
    """An answer that the protocol does not have here."""


class _Sent(NamedTuple):
    """A request, whichever host it is sent to."""

    method: str
    headers: Mapping[str, str]
    body: bytes | str = b""  # or the path of the file with it


class Client:
    """Sends the requests of one tier. Many threads may use it.

    ``find_login`` gives the login for a host; it is asked once, at the first request.
    ``login_files`` are where it looks, for messages. ``token_host`` may have the login, too.
    """

    def __init__(
        self,
        base: str,
        find_login: Callable[[str], Login | None],
        login_files: Callable[[], Sequence[str]],
        token_host: str = "",
    ) -> None:
        self.base = base
        self._trusted = (_host(base), token_host)
        self._host = urlsplit(base).netloc
        self._find_login, self._login_files = find_login, login_files
        self._withheld = ""  # the host of tokens that did not get the login
        self._tokens: dict[str, str] = {}  # values of Authorization headers, by scope
        # By process (a forked child must not use its parent's connections), scheme and host.
        self._idle: dict[tuple[int, str, str], list[HTTPConnection]] = defaultdict(list)

    @contextlib.contextmanager
    def request(
        self,
        method: str,
        url: str,
        deadline: Deadline,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | str = b"",
        scope: str = "",
    ) -> Iterator[HTTPResponse]:
        """Send a request, and give the answer to be read. ``url`` may be relative to the base.

        ``body`` may be the path of a file. ``scope`` is what a registry's token has to be for.

        Raises Unreachable if the login is refused (401): it would be refused each time, and a
        server may lock an account after a few attempts. Raises Forbidden if only this request is
        refused: 403, or 401 though the registry has just given a token. Raises OSError, and
        whatever http.client and urllib raise for what a server sends (``tiers.reach``).
        """
        url, asked = self._resolve_url(self.base, url), False
        for _ in range(_MOST_REDIRECTS + 2):
            given = dict(headers or {})
            ours = _host(url) == _host(self.base)
            if ours and (token := self._tokens.get(scope) or self._basic):
                given["Authorization"] = token
            with self._exchange(url, deadline, _Sent(method, given, body)) as response:
                status, location = response.status, response.headers.get("Location", "")
                redirects = status in _REDIRECTS and method in ("GET", "HEAD") and location
                if not redirects and (status != 401 or asked or not ours):
                    if status in (401, 403):
                        raise self._refusal(Forbidden, status, url)
                    yield response
                    return
                challenge = response.headers.get("WWW-Authenticate", "")
            if redirects:
                url = self._resolve_url(url, location)
                continue
            asked = True
            if not self._answer(challenge, scope, deadline):
                raise self._refusal(Unreachable, status, self.base)
        raise Unreachable(f"{_host(url)}: too many redirects")

    def read(
        self, url: str, start: int, deadline: Deadline, *, accept: str = "", scope: str = ""
    ) -> Iterator[tuple[int, bytes]]:
        """A file in pieces, each with its offset, from ``start`` on or from the beginning. Raises
        Absent, and as ``request``."""
        given = {"Range": f"bytes={start}-" if start else "", "Accept": accept}
        headers = {name: text for name, text in given.items() if text}
        with self.request("GET", url, deadline, headers=headers, scope=scope) as response:
            if response.status in (404, 410):
                raise Absent(url)
            if response.status != 416 or not start:  # 416: there is nothing beyond ``start``
                expect(response, 200, 206)
                at = start if response.status == 206 else 0
                for piece in _pieces(response.read1, deadline):
                    yield at, piece
                    at += len(piece)
                return
        yield from self.read(url, 0, deadline, accept=accept, scope=scope)

    def _refusal(self, kind: type[Failure], status: int, url: str) -> Failure:
        """The error for a refused request, with the login that was sent, without its password."""
        host, hint = urlsplit(url).netloc, "see docs/remotes.md, Logins"
        if self._withheld:
            hint = f"if that host may have it, add ?tokens={self._withheld} to the tier's URL"
        if _host(url) != _host(self.base):
            who = f"without a login ({self._host} redirects there)"
        elif self._withheld:
            who = f"without its login, which it wants to be sent to {self._withheld}"
        elif self._login:
            who = f"with {self._login}"
        else:
            files = ", ".join(self._login_files())
            where = f"none for {host} in {files}" if files else "HOME is not set"
            who = f"without a login ({where})"
        return kind(f"{host} answers HTTP {status}, asked {who}", hint)

    def _resolve_url(self, url: str, location: str) -> str:
        """The URL that a location leads to. A login must not go from TLS to plain HTTP."""
        there = urljoin(url, location)
        before, after = urlsplit(url).scheme, urlsplit(there).scheme
        if after not in ("http", "https") or (before == "https" and after == "http"):
            raise Unreachable(f"{url} redirects to {after}://, which is refused")
        return there

    # Logins

    @cached_property
    def _login(self) -> Login | None:
        return self._find_login(self._host)

    @property
    def _basic(self) -> str:
        return self._login.basic if self._login else ""

    def _answer(self, challenge: str, scope: str, deadline: Deadline) -> bool:
        """Get the token that a registry asks for. Returns whether it asks for one."""
        kind, _, rest = challenge.partition(" ")
        if kind.lower() != "bearer":
            return False
        asked = dict(_CHALLENGE.findall(rest))
        realm = asked.get("realm", "")
        plain = urlsplit(self.base).scheme == "http"
        login, host = self._login, _host(realm)
        allowed = ("https://", "http://") if plain else "https://"
        if not realm.startswith(allowed) or not _HOST.fullmatch(host):
            raise Unreachable(f"{self._host} sends logins to {realm!r}, which is refused")
        if login and host not in self._trusted:
            login, self._withheld = None, host
        query = {"service": asked.get("service", ""), "scope": asked.get("scope") or scope}
        if login and login.identity_token:
            token = login.identity_token
            form = {"grant_type": "refresh_token", "refresh_token": token, "client_id": "opkiln"}
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            sent = _Sent("POST", headers, urlencode({**query, **form}).encode())
        else:
            realm += ("&" if "?" in realm else "?") + urlencode(query)
            sent = _Sent("GET", {"Authorization": login.basic} if login else {})
        with self._exchange(realm, deadline, sent) as response:
            if response.status != 200:  # 403: the login is good, but not for this repository
                failure = Forbidden if response.status == 403 else Unreachable
                raise self._refusal(failure, response.status, self.base)
            told = json.loads(response.read(LARGEST_RECORD))
        token = told.get("token") or told.get("access_token")
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise Unreachable(f"{host} gave no token")
        self._tokens[scope] = f"Bearer {token}"
        return True

    # Connections

    @contextlib.contextmanager
    def _exchange(self, url: str, deadline: Deadline, sent: _Sent) -> Iterator[HTTPResponse]:
        """The answer of one host. The connection is kept if little of the answer is left unread."""
        where = urlsplit(url)
        idle = self._idle[os.getpid(), where.scheme, where.netloc]
        connection, response = self._connect_and_send(idle, url, deadline, sent)
        drain = True
        try:
            yield response
        except BaseException as error:
            drain = isinstance(error, Failure)  # after other errors, do not wait for the rest
            raise
        finally:
            left = 0 if response.isclosed() else response.length  # None: it does not say
            if drain and left is not None and left < CHUNK:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    response.read(CHUNK)
            if response.isclosed() and not response.will_close and deadline.left > 0:
                deadline.guard(None)
                idle.append(connection)
            else:
                response.close()
                connection.close()

    def _connect_and_send(
        self, idle: list[HTTPConnection], url: str, deadline: Deadline, sent: _Sent
    ) -> tuple[HTTPConnection, HTTPResponse]:
        while True:
            kept = None
            with contextlib.suppress(IndexError):  # another thread may have taken the last one
                kept = idle.pop()
            connection = kept or self._new_connection(url, deadline)
            try:
                return connection, self._send(connection, url, deadline, sent)
            except BaseException as error:
                connection.close()
                # A server closes a connection that was not used for long.
                if not (kept and isinstance(error, _GONE)):
                    raise

    def _send(
        self, connection: HTTPConnection, url: str, deadline: Deadline, sent: _Sent
    ) -> HTTPResponse:
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(None)  # it is connected, so the deadline can shut it down
        deadline.guard(connection.sock)
        parts = urlsplit(url)
        target = url
        if parts.scheme == "https" or not self._proxy(parts.scheme, parts.hostname or ""):
            path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
            target = f"{path}?{parts.query}" if parts.query else path
        given = {"User-Agent": "opkiln", **sent.headers}
        if isinstance(sent.body, str):
            given["Content-Length"] = str(os.path.getsize(sent.body))
            with open(sent.body, "rb") as source:
                connection.request(sent.method, target, _pieces(source.read, deadline), given)
        else:
            body = sent.body if sent.method in ("POST", "PUT") else None
            connection.request(sent.method, target, body, given)
        response = connection.getresponse()
        deadline.hear()
        return response

    def _new_connection(self, url: str, deadline: Deadline) -> HTTPConnection:
        parts = urlsplit(url)
        if not parts.hostname:
            raise Unreachable(f"{url} names no host")
        host, port, proxy = parts.hostname, parts.port, self._proxy(parts.scheme, parts.hostname)
        if proxy:
            through = urlsplit(proxy if "//" in proxy else f"//{proxy}")
            host, port = through.hostname or "", through.port or 8080
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=deadline.left)
        connection = http.client.HTTPSConnection(
            host, port, timeout=deadline.left, context=self._tls
        )
        if proxy:
            connection.set_tunnel(parts.hostname, parts.port or 443)
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        import ssl

        return ssl.create_default_context()

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


def _host(url: str) -> str:
    """The host and the port of a URL, as one word."""
    parts = urlsplit(url)
    usual = ":443" if parts.scheme == "https" else ":80"
    return parts.netloc.lower().removesuffix(usual)


def _pieces(read: Callable[[int], bytes], deadline: Deadline) -> Iterator[bytes]:
    while piece := read(CHUNK):
        deadline.hear(len(piece))
        yield piece


def expect(response: HTTPResponse, *statuses: int) -> None:
    """Raise UnexpectedStatus for an answer that is none of these."""
    if response.status not in statuses:
        told = response.read(200).decode("utf-8", "replace")
        words = told.strip() if "<" not in told else ""
        colon = ": " if words else ""
        raise UnexpectedStatus(f"HTTP {response.status} {response.reason}{colon}{words}")
