"""Remote tiers to test with: small servers of ours, or the real ones.

With TEST_REMOTES=real (`make test-remotes`) these are docker-registry with TLS and a
password, nginx with WebDAV, moto's S3 server, and gcp-storage-emulator.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from sample import servers

REAL = os.environ.get("TEST_REMOTES") == "real"
KINDS = (
    ("docker-registry", "nginx", "s3", "gs") if REAL else ("registry", "web", "directory", "layout")
)


class Place:
    """A tier. ``variables`` are what a process needs to reach it."""

    def __init__(self, url: str, variables: dict[str, str] | None = None) -> None:
        self.url = url
        self.variables = variables or {}
        self.server: servers.Server | None = None
        self.directory: Path | None = None
        self._children: list[subprocess.Popen[bytes]] = []

    def alter(self, sha256: str) -> None:
        """Flip a byte of a blob, in place."""

        def altered(data: bytes) -> bytes:
            return data[:-10] + bytes([data[-10] ^ 1]) + data[-9:]

        if self.server is not None:
            (name,) = (each for each in self.server.files if sha256 in each)
            self.server.files[name] = altered(self.server.files[name])
            return
        if self.url.startswith("s3:"):
            import s3fs

            bucket = s3fs.S3FileSystem(
                key="me", secret="secret", endpoint_url=self.variables["AWS_ENDPOINT_URL"]
            )
            path = f"bucket/ops/cas/{sha256}"
            bucket.pipe_file(path, altered(bucket.cat_file(path)))
            return
        if self.url.startswith("gs:"):
            host, name = self.variables["STORAGE_EMULATOR_HOST"], f"ops%2Fcas%2F{sha256}"
            with urllib.request.urlopen(f"{host}/storage/v1/b/bucket/o/{name}?alt=media") as got:
                data = altered(got.read())
            upload = f"{host}/upload/storage/v1/b/bucket/o?uploadType=media&name={name}"
            urllib.request.urlopen(urllib.request.Request(upload, data, method="POST")).close()
            return
        assert self.directory is not None
        files = [each for each in self.directory.rglob("*") if each.is_file()]
        found = [each for each in files if sha256 in str(each) and each.stat().st_size > 1000]
        assert len(found) == 1, found
        found[0].write_bytes(altered(found[0].read_bytes()))

    def run(self, argv: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        """Start a server, which ends with the test."""
        with open(log, "wb") as out:
            self._children.append(subprocess.Popen(argv, stdout=out, stderr=out, env=env))

    def wait(self, port: int, log: Path) -> None:
        import socket

        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert self._children[-1].poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
        for each in self._children:
            each.terminate()
            each.wait()


def start(kind: str, base: Path) -> Place:
    """A tier of this kind that has nothing."""
    base.mkdir()
    return _START[kind](base)


def _registry(base: Path) -> Place:
    server = servers.Server(servers.Registry)
    server.login = "me:secret"
    place = Place(f"oci+http://{server.host}/team/ops", _docker_login(base, server.host))
    place.server = server
    return place


def _docker_login(base: Path, host: str) -> dict[str, str]:
    auth = base64.b64encode(b"me:secret").decode()
    (base / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return {"DOCKER_CONFIG": str(base)}


def _web(base: Path) -> Place:
    server = servers.Server(servers.Files)
    server.login = "me:secret"
    netrc = base / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    place = Place(f"http://{server.host}/cache", {"NETRC": str(netrc)})
    place.server = server
    return place


def _directory(base: Path) -> Place:
    place = Place(f"file://{base}/files")
    place.directory = base / "files"
    return place


def _layout(base: Path) -> Place:
    place = Place(f"oci://{base}/layout")
    place.directory = base / "layout"
    return place


def program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"there is no {name} here; make test-remotes installs it")
    return found


def _docker_registry(base: Path) -> Place:
    port = servers.unused_port()
    servers.make_certificate(base)
    users = subprocess.run(
        [program("htpasswd"), "-Bbn", "me", "secret"], check=True, capture_output=True
    )
    (base / "htpasswd").write_bytes(users.stdout)
    (base / "c.yml").write_text(f"""
version: 0.1
log: {{level: warn, accesslog: {{disabled: false}}}}
storage: {{filesystem: {{rootdirectory: {base}/data}}, delete: {{enabled: true}}}}
http:
  addr: 127.0.0.1:{port}
  tls: {{certificate: {base}/tls.crt, key: {base}/tls.key}}
auth: {{htpasswd: {{realm: here, path: {base}/htpasswd}}}}
""")
    variables = _docker_login(base, f"localhost:{port}")
    variables["SSL_CERT_FILE"] = str(base / "tls.crt")
    place = Place(f"oci://localhost:{port}/team/ops", variables)
    place.directory = base / "data"
    place.run([program("docker-registry"), "serve", str(base / "c.yml")], base / "log")
    place.wait(port, base / "log")
    return place


def _nginx(base: Path) -> Place:
    port = servers.unused_port()
    (base / "files").mkdir()
    (base / "files").chmod(0o777)
    users = subprocess.run(
        [program("htpasswd"), "-mbn", "me", "secret"], check=True, capture_output=True
    )
    (base / "htpasswd").write_bytes(users.stdout)
    (base / "nginx.conf").write_text(f"""
daemon off; pid {base}/pid; error_log {base}/error.log; user root;
events {{}}
http {{
  access_log {base}/access.log; client_body_temp_path {base}/body; client_max_body_size 1g;
  proxy_temp_path {base}/p; fastcgi_temp_path {base}/f; uwsgi_temp_path {base}/u;
  scgi_temp_path {base}/s;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      root {base}/files; auth_basic here; auth_basic_user_file {base}/htpasswd;
      dav_methods PUT; create_full_put_path on;
    }}
  }}
}}
""")
    netrc = base / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    place = Place(f"http://127.0.0.1:{port}/ops", {"NETRC": str(netrc)})
    place.directory = base / "files"
    place.run([program("nginx"), "-c", str(base / "nginx.conf")], base / "log")
    place.wait(port, base / "log")
    return place


def _installed(name: str) -> str:
    """A program of a package of this environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"there is no {name} here; make test-remotes installs it")
    return found


def _s3(base: Path) -> Place:
    pytest.importorskip("s3fs")
    port = servers.unused_port()
    moto = _installed("moto_server")
    url = f"http://127.0.0.1:{port}"
    variables = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    place = Place("s3://bucket/ops", variables)
    place.run([moto, "-H", "127.0.0.1", "-p", str(port)], base / "log")
    place.wait(port, base / "log")
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    return place


def _gs(base: Path) -> Place:
    pytest.importorskip("gcsfs")
    port = servers.unused_port()
    variables = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # the emulator has no gRPC
        "NO_GCE_CHECK": "true",  # nor a server for logins
    }
    place = Place("gs://bucket/ops", variables)
    words = ("start", "--host", "127.0.0.1", "--port", str(port), "--in-memory",
             "--default-bucket", "bucket")  # fmt: skip
    place.run([_installed("gcp-storage-emulator"), *words], base / "log")
    place.wait(port, base / "log")
    return place


_START = {
    "registry": _registry, "web": _web, "directory": _directory, "layout": _layout,
    "docker-registry": _docker_registry, "nginx": _nginx, "s3": _s3, "gs": _gs,
}  # fmt: skip
