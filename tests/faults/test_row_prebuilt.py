"""What is installed serves who may write nothing: no file, no process, no socket, no home."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import child
from sample.shipped import Shipped
from sample.tracing import NETWORK, calls, strace

if TYPE_CHECKING:
    from sample.package import Package

pytestmark = pytest.mark.row(8)

_LOAD = """
import os
from {name}.op import PlainBuilder
from opkiln.loading import loader
builder = PlainBuilder()
library = builder.load()
path = loader.here.ops[builder.op().name].loaded.artifact.path
os.write(1, b"%d %s" % (library.add(1, 2), path.encode()))
"""
NOWHERE = {
    "HOME": None, "XDG_CACHE_HOME": None, "OPKILN_CACHE_DIR": None, "OPKILN_RUNTIME_DIR": None,
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip


@pytest.fixture
def shipped(plain: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    return Shipped(plain, "csrc/add.cpp", tmp_path, monkeypatch)


def test_a_load_of_what_is_installed_writes_nothing_starts_nothing_and_opens_no_socket(
    shipped: Shipped, tmp_path: Path
) -> None:
    leaf = shipped.build()
    log = tmp_path / "log"
    code = _LOAD.format(name=shipped.package.name)
    # The library itself writes, which is how other tests see that it was opened.
    env = {**NOWHERE, "SAMPLE_OPENED": None}
    said = child.run(code, path=[shipped.package.where], env=env, prefix=strace(log, NETWORK))
    assert said == f"103 {leaf / 'plain.so'}"
    made = calls(log)
    assert any(call.path == str(leaf / "plain.so") for call in made)  # it saw the load at all
    written = [call for call in made if call.writes and not call.path.startswith("pipe:")]
    assert [call for call in written if call.path != "/dev/null"] == []
    assert len([call for call in made if call.name == "execve" and not call.failed]) == 1
    assert [call for call in made if call.name in ("flock", *NETWORK.split(","))] == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_without_a_home_is_served_from_roots_read_only_package(
    shipped: Shipped, tmp_path: Path
) -> None:
    """An image: a compiler filled it, and there is none where it runs."""
    python = child.python_for(child.NOBODY)
    if python is None:
        pytest.skip("no interpreter that another user can start")
    public = Path("/var/tmp") / f"opkiln-test-{os.getpid()}"
    leaf = shipped.build()
    try:
        shutil.copytree(shipped.package.where, public / "packages")
        # Other workers write bytecode there at any moment.
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(child.SOURCE, public / "source", ignore=without)
        for directory, _, files in os.walk(public):
            os.chmod(directory, 0o555)
            for name in files:
                os.chmod(os.path.join(directory, name), 0o444)
        code = _LOAD.format(name=shipped.package.name)
        said = child.run(
            code, python=python, user=child.NOBODY, path=[public / "packages"],
            env={**NOWHERE, "PATH": "/nowhere", "SAMPLE_OPENED": None, "OPKILN_MODE": "cached",
                 "PYTHONPATH": f"{public / 'source'}:{public / 'packages'}"},
        )  # fmt: skip
        inside = leaf.relative_to(shipped.package.where)
        assert said == f"103 {public / 'packages' / inside / 'plain.so'}"
    finally:
        shutil.rmtree(public)
