"""Tiers of plain files: a web server, a directory, a bucket. They have one layout.

    cas/<sha256>    a blob
    ac/<name>       a small JSON file: the digest, the size and the signatures of a blob

The build caches of bazel and ccache have the same two directories, so their servers can be used.
A blob is written before the name that leads to it.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from opkiln.base.digest import open_replacement
from opkiln.remote import credentials, tier, web
from opkiln.remote.patience import Deadline

_SCHEMA = 1


def write_record(what: tier.Publication) -> bytes:
    """The contents of a name's file."""
    return (json.dumps({"schema": _SCHEMA, **what._asdict()}, sort_keys=True) + "\n").encode()


def read_record(data: bytes) -> tier.Publication:
    """The contents of a name's file, parsed. Raises Unusable."""
    with tier.refuse_malformed("its record", tier.Unusable):
        body = json.loads(data)
        if body["schema"] != _SCHEMA:
            raise ValueError(f"it has the schema {body['schema']!r}")
        return tier.parse_publication(*(body[name] for name in tier.Publication._fields))


class Files(Protocol):
    """A place for files."""

    def read(self, path: str, start: int, deadline: Deadline) -> Iterator[tuple[int, bytes]]:
        """As ``Tier.read``."""

    def write(self, path: str, data: bytes | str, deadline: Deadline) -> None:
        """Write data, or the contents of the file with that path. Others see all of it or
        nothing."""

    def has(self, path: str, size: int, deadline: Deadline) -> bool:
        """Whether a file of this size is there, as far as this login may know."""


class Plain:
    """The layout over some files: a ``Tier``."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def look_up(self, name: str, deadline: Deadline) -> tier.Publication | None:
        try:
            return read_record(tier.read_small(self._files.read(f"ac/{name}", 0, deadline)))
        except tier.Absent:
            return None

    def read(self, sha256: str, start: int, deadline: Deadline) -> Iterator[tuple[int, bytes]]:
        return self._files.read(f"cas/{sha256}", start, deadline)

    def write(self, name: str, file: str, what: tier.Publication, deadline: Deadline) -> None:
        if not self._files.has(f"cas/{what.sha256}", what.size, deadline):
            self._files.write(f"cas/{what.sha256}", file, deadline)
        self._files.write(f"ac/{name}", write_record(what), deadline)


class Web(web.Client):
    """Files of a web server. Writing needs PUT: nginx's WebDAV, bazel-remote, and others."""

    def __init__(self, url: str) -> None:
        super().__init__(url.rstrip("/") + "/", credentials.web_login, credentials.web_files)

    def write(self, path: str, data: bytes | str, deadline: Deadline) -> None:
        with self.request("PUT", path, deadline, body=data) as response:
            web.expect(response, 200, 201, 202, 204)

    def has(self, path: str, size: int, deadline: Deadline) -> bool:
        try:
            with self.request("HEAD", path, deadline) as response:
                there = response.headers.get("Content-Length", str(size))
                return response.status == 200 and there == str(size)
        except tier.Forbidden:
            return False


class Folder:
    """Files below a directory, which may be on a network file system."""

    def __init__(self, root: str) -> None:
        self._root = root

    def read(self, path: str, start: int, deadline: Deadline) -> Iterator[tuple[int, bytes]]:
        path = os.path.join(self._root, path)
        try:
            # Without O_NONBLOCK, opening a FIFO waits for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise tier.Absent(path) from error
        try:
            while piece := os.pread(fd, tier.CHUNK, start):
                deadline.hear(len(piece))
                yield start, piece
                start += len(piece)
        finally:
            os.close(fd)

    def write(self, path: str, data: bytes | str, deadline: Deadline) -> None:
        path = os.path.join(self._root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with (
            open_replacement(path, sync=True) as out,
            open(data, "rb") if isinstance(data, str) else io.BytesIO(data) as source,
        ):
            shutil.copyfileobj(source, out, tier.CHUNK)
            os.fchmod(out.fileno(), 0o644)  # it is published
        deadline.hear()

    def has(self, path: str, size: int, deadline: Deadline) -> bool:
        deadline.hear()
        try:
            return os.stat(os.path.join(self._root, path)).st_size == size
        except FileNotFoundError:
            return False


_BUCKET_PIECE = 1 << 20
# Scheme: its package, and where that looks for logins.
_BUCKETS = {
    "s3": ("s3fs", "AWS_* variables, ~/.aws, or this instance's role"),
    "gs": ("gcsfs", "GOOGLE_APPLICATION_CREDENTIALS, ~/.config/gcloud, or this instance's role"),
}


class Bucket:
    """Files of a bucket, by fsspec, which is imported when it is used. It finds its own logins."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._scheme = url.partition(":")[0]
        package, self._logins = _BUCKETS[self._scheme]
        try:
            import fsspec  # type: ignore[import-untyped]

            self._kind: Any = fsspec.get_filesystem_class(self._scheme)
            self._made: tuple[int, Any] = (0, None)  # by this process
        except ImportError as error:
            raise tier.Unreachable(
                f"{self._scheme}:// needs the package {package}: {error}",
                hint=f"pip install {package}",
            ) from error
        with self._open(url):
            pass  # making fsspec's object may ask the cloud for a login, which takes time

    def read(self, path: str, start: int, deadline: Deadline) -> Iterator[tuple[int, bytes]]:
        whole, size = f"{self._url}/{path}", None
        while size is None or start < size:
            with self._open(path) as files:
                piece = files.cat_file(whole, start=start, end=start + _BUCKET_PIECE)
            deadline.hear(len(piece))
            yield start, piece
            start += len(piece)
            if len(piece) < _BUCKET_PIECE:
                return
            if size is None:  # most blobs have come by now, with one request
                with self._open(path) as files:
                    size = int(files.info(whole)["size"])

    def write(self, path: str, data: bytes | str, deadline: Deadline) -> None:
        whole = f"{self._url}/{path}"
        deadline.hear()  # the transfer says nothing until it is over
        with self._open(path) as files:
            if isinstance(data, str):
                files.put_file(data, whole)
            else:
                files.pipe_file(whole, data)

    def has(self, path: str, size: int, deadline: Deadline) -> bool:
        try:
            with self._open(path) as files:
                return int(files.info(f"{self._url}/{path}")["size"]) == size
        except (tier.Absent, tier.Forbidden):
            return False
        finally:
            deadline.hear()

    @contextmanager
    def _open(self, path: str) -> Iterator[Any]:
        """fsspec's object, for a block. Its errors there become failures of the tier."""
        try:
            if self._made[0] != os.getpid():  # a forked child needs an object of its own
                # The cache of listings is off: a look-up must see what others published since.
                files = self._kind(use_listings_cache=False)
                if self._scheme == "s3":
                    files.connect()  # to nobody yet: it makes botocore's client, in half a second
                self._made = (os.getpid(), files)
            yield self._made[1]
        except FileNotFoundError as error:
            raise tier.Absent(path) from error
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            # For HTTP's "forbidden", gcsfs raises an error of its own, which has the number.
            if isinstance(error, PermissionError) or getattr(error, "code", 0) == 403:
                raise tier.Forbidden(f"{told}, with the login from {self._logins}") from error
            raise tier.Unreachable(told) from error
