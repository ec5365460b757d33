"""Small real servers for remote tiers: files over HTTP, and the registry protocol's shape.

`make test-remotes` runs the same tests against docker-registry, nginx and an S3 server.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import itertools
import json
import re
import socket
import ssl
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


class Server(http.server.ThreadingHTTPServer):
    """Files in memory. It counts connections and notes every request."""

    daemon_threads = True

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.login = ""  # user:password, if one is needed
        self.redirect_to = ""  # where downloads of blobs are redirected to
        self.forbidden = ""  # a pattern of the requests that this login may not make
        self.limit: int | None = None  # bytes of a body, after which the connection is cut
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Files(http.server.BaseHTTPRequestHandler):
    """GET, HEAD and PUT of files, with ranges."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def _begin(self) -> bool:
        """Note the request. Whether it may go on."""
        self.server.requests.append(f"{self.command} {self.path}")
        self.server.headers.append(dict(self.headers))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        wanted = "Basic " + base64.b64encode(self.server.login.encode()).decode()
        if self.server.login and self.headers.get("Authorization") != wanted:
            self._answer(401, **{"WWW-Authenticate": 'Basic realm="here"'})
            return False
        if self.server.forbidden and re.match(self.server.forbidden, self.server.requests[-1]):
            self._answer(403)
            return False
        return True

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            limit = self.server.limit
            self.wfile.write(body if limit is None else body[:limit])
            if limit is not None and len(body) > limit:
                self.close_connection = True

    def _file(self, name: str, **headers: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            self._answer(404)
            return
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(found[1])
            if start >= len(data):
                self._answer(416)
            else:
                self._answer(206, data[start:], **headers)
            return
        self._answer(200, data, **headers)

    def do_GET(self) -> None:
        if self._begin():
            self._file(self.path)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        if self._begin():
            self.server.files[self.path] = self.body
            self._answer(201)


class Registry(Files):
    """What opkiln needs of the OCI distribution protocol."""

    def do_GET(self) -> None:
        if not self._begin():
            return
        name = self.path.partition("/blobs/")[2]
        if name and self.server.redirect_to:
            self._answer(307, Location=f"{self.server.redirect_to}/{name}")
        else:
            self._file(self.path)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        if self._begin():
            self._answer(202, Location=f"{self.path}1?state=x")

    def do_PUT(self) -> None:
        if not self._begin():
            return
        path, _, query = self.path.partition("?")
        if "/uploads/" in path:
            digest = query.rpartition("digest=")[2].replace("%3A", ":")
            if digest != "sha256:" + hashlib.sha256(self.body).hexdigest():
                self._answer(400)
                return
            self.server.files[path.partition("/uploads/")[0] + f"/{digest}"] = self.body
        else:
            manifest = json.loads(self.body)
            repository = path.partition("/manifests/")[0]
            for each in (manifest["config"], *manifest["layers"]):
                if f"{repository}/blobs/{each['digest']}" not in self.server.files:
                    self._answer(404)
                    return
            self.server.files[path] = self.body
        self._answer(201)


class Silent:
    """A host that takes connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(16)
        self.host = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def stop(self) -> None:
        self._socket.close()


class Dripping(Silent):
    """A host that answers with ``begin`` at once, and then with the bytes of ``rest``, one by one,
    again and again. ``asked`` is set when it has got a request."""

    def __init__(self, begin: bytes, rest: bytes, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self._begin, self._rest, self._tls = begin, rest, tls
        self.asked = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is stopped
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._drip, args=(connection,), daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client is gone
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            connection.recv(1 << 16)
            self.asked.set()
            connection.sendall(self._begin)
            for byte in itertools.cycle(self._rest):
                time.sleep(0.05)
                connection.sendall(bytes([byte]))


def make_certificate(directory: Path) -> ssl.SSLContext:
    """A server's side of TLS for this host. Whoever trusts ``tls.crt`` can connect."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout",
         str(directory / "tls.key"), "-out", str(directory / "tls.crt")],
        check=True, capture_output=True,
    )  # fmt: skip
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    return made


def unused_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
