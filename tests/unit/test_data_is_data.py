"""Nothing that opkiln reads from a file can run as code: what would do that is not used."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(__file__).parents[2] / "src" / "opkiln"

# Modules whose readers build arbitrary objects, or that are only good for reading such files.
MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "dbm",
    "jsonpickle", "code", "codeop", "yaml", "xmlrpc",
}  # fmt: skip
# Calls that run a text or an object's own code, by their last two names.
CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load",
    "builtins.eval", "builtins.exec", "runpy.run_path", "shutil.unpack_archive", "os.system",
    "os.popen", "tempfile.mktemp",
}  # fmt: skip
METHODS = {"extractall"}  # an archive's members go where they say; ours are read one by one
LAST = METHODS | {name.rpartition(".")[2] for name in CALLS}
# A source without any of these words is not parsed.
SUSPECT = re.compile(
    rf"\b(import|from) .*\b({'|'.join(MODULES)})\b|"
    rf"(?<![\w.])({'|'.join(name for name in CALLS if '.' not in name)})\(|"
    rf"\b({'|'.join(name for name in CALLS if '.' in name)}|{'|'.join(METHODS)})\("
)


@functools.cache
def nodes(code: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(code)))


def last_name(function: ast.expr) -> str:
    """The name by which a function is called, without what is before the dot."""
    return getattr(function, "attr", None) or getattr(function, "id", "")


def found(code: str) -> list[str]:
    """What a source has of these."""
    bad = []
    for node in nodes(code) if SUSPECT.search(code) else ():
        if isinstance(node, ast.Import):
            bad += [a.name for a in node.names if a.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            bad += [node.module] if (node.module or "").partition(".")[0] in MODULES else []
        elif isinstance(node, ast.Call) and (last := last_name(node.func)) in LAST:
            name = ast.unparse(node.func)
            short = ".".join(name.split(".")[-2:])
            safe = any(each.arg == "weights_only" and _true(each.value) for each in node.keywords)
            if (short in CALLS and not safe) or ("." in name and last in METHODS):
                bad.append(name)
    return bad


def _true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def in_all_sources(look: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """What a look finds in each source file that has any of it."""
    sources = sorted(SOURCE.rglob("*.py"))
    assert len(sources) > 100, "the sources are not where this test looks for them"
    looked = {str(path.relative_to(SOURCE)): look(path.read_text()) for path in sources}
    return {path: names for path, names in looked.items() if names}


def test_no_file_is_read_as_code() -> None:
    assert in_all_sources(found) == {
        # The function that calls an op is written from the names of its parameters.
        "builder/declaration.py": ["compile"],
        # The annotations of a function, as Python itself would evaluate them.
        "loading/schema.py": ["eval", "compile"],
        # The signatures of a package's functions, from the module that a load of the op imports.
        "builder/reading.py": ["eval", "compile", "exec", "compile"],
    }


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("import pickle", "pickle"),
        ("def f():\n    from marshal import loads", "marshal"),
        ("import xmlrpc.client as x", "xmlrpc.client"),
        ("eval(open(f).read())", "eval"),
        ("torch.load(f)", "torch.load"),
        ("torch.load(f, weights_only=False)", "torch.load"),
        ("x.y.torch.load(f)", "x.y.torch.load"),
        ("zipfile.ZipFile(f).extractall()", "zipfile.ZipFile(f).extractall"),
    ],
)
def test_what_must_not_be_there_would_be_found(code: str, named: str) -> None:
    assert found(code) == [named]


@pytest.mark.parametrize("code", ["torch.load(f, weights_only=True)", "re.compile('x')", "load(f)"])
def test_what_may_be_there_is_not_taken_for_it(code: str) -> None:
    assert found(code) == []


# Modules that connect to others. `socket` itself is for pairs of descriptors within this host.
NETWORK = {
    "asyncio", "ftplib", "http", "httpx", "imaplib", "poplib", "requests", "smtplib",
    "socketserver", "ssl", "telnetlib", "torch.distributed", "urllib.request", "urllib3",
    "websockets", "wsgiref",
}  # fmt: skip
CONNECTS = re.compile(rf"\b(socket|{'|'.join(name.rpartition('.')[2] for name in NETWORK)})\b")


def connecting(code: str) -> list[str]:
    """What a source has to reach other hosts with."""
    found = []
    for node in nodes(code) if CONNECTS.search(code) else ():
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and last_name(node.func) in ("socket", "create_connection"):
            called = ast.unparse(node.func)
            found += [called] if called in ("socket.socket", "socket.create_connection") else []
    parts = {name: {name.partition(".")[0], ".".join(name.split(".")[:2])} for name in found}
    return [name for name in found if parts[name] & NETWORK or name.startswith("socket.")]


def test_only_remote_tiers_and_jobs_connect_to_another_host() -> None:
    """Tiers where the user names one: tests/build/test_remotes.py. Jobs that call opkiln.ensure or
    make a group of ranks."""
    found = in_all_sources(connecting)
    assert {path: set(names) for path, names in found.items()} == {
        # The store of the job's process group, or of its launcher.
        "cluster/job.py": {"torch.distributed"},
        "cluster/stores.py": {"socket.create_connection"},
        # Whether an optimizer's parameters are sharded: it asks a group that the program has made.
        "ops/optimizing/sharded.py": {"torch.distributed"},
        # One of a pair that ninja was started with.
        "compat/ninja/server.py": {"socket.socket"},
        # Ranks of one host: a group that the program makes, and the socket for its memory.
        "compat/deepspeed/shm_comm.py": {"torch.distributed"},
        "ops/shm_comm/group.py": {
            "socket.socket", "torch.distributed", "torch.distributed.distributed_c10d",
        },
        "ops/shm_comm/process_group.py": {"torch.distributed"},
        "remote/tier.py": {"http.client.HTTPException"},  # to recognise it
        "remote/web.py": {
            "http.client", "http.client.HTTPConnection", "http.client.HTTPResponse", "ssl",
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "import http.client",
        "from urllib import request",
        "import urllib.request",
        "from torch import distributed",
        "import torch.distributed as dist",
        "import socket; socket.create_connection(('x', 1))",
        "from socket import socket",
    ],
)
def test_what_would_connect_would_be_found(code: str) -> None:
    assert connecting(code) != []
