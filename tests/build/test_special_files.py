"""A header that became a FIFO or a device: a clear error at once, warm and cold, and no hang."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from sample import child
from sample.package import rest

import opkiln
from opkiln.errors import InputError, SpecError
from opkiln.settings import override
from opkiln.store.layers import Store

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timed

HEADER = "#define VALUE 7\n"
DEVICES = {"device": "/dev/zero", "random device": "/dev/urandom"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An op with a header."""
    (tmp_path / "number.h").write_text(HEADER)
    made = tmp_path / "op.cpp"
    made.write_text('#include "number.h"\nextern "C" int value() { return VALUE; }\n')
    return made


def load(source: Path) -> int:
    # The limit is far beyond what is accepted here: an error must come long before it.
    with override(build_timeout=120.0):
        library = opkiln.load("op", [str(source)], is_python_module=False, abi="none")
    return int(library.value())


LOAD = """
    import sys, opkiln
    library = opkiln.load("op", [sys.argv[1]], is_python_module=False, abi="none")
    print(library.value())
"""


def value_in_new_process(source: Path) -> str:
    done = child.finish(child.start(LOAD, str(source)), timeout=120)
    return str(done.stdout).strip() or str(done.stderr)


def replace(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(DEVICES[kind])


SHOWN = (("warm", "FIFO"), ("cold", "FIFO"), ("cold", "device"))  # each takes a second


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        pytest.param(state, kind, marks=() if (state, kind) in SHOWN else pytest.mark.full)
        for state in ("warm", "cold")
        for kind in ("FIFO", *DEVICES)
    ],
)
def test_a_header_that_is_not_a_regular_file_is_named_and_nothing_hangs(
    kind: str, state: str, source: Path, tmp_path: Path
) -> None:
    header = tmp_path / "number.h"
    if state == "warm":
        assert load(source) == 7
    replace(header, kind)
    with pytest.raises(InputError) as caught:
        load(source)
    assert DEVICES.get(kind, str(header)) in caught.value.what
    assert ("FIFO" if kind == "FIFO" else "device without an end") in caught.value.what
    header.unlink()
    header.write_text(HEADER)
    assert load(source) == 7


@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_a_source_that_is_not_a_regular_file_is_said_to_be_one(kind: str, source: Path) -> None:
    replace(source, kind)
    with pytest.raises(SpecError, match="is not a regular file"):
        load(source)


@pytest.mark.parametrize("kind", ["FIFO", "device"])
@pytest.mark.parametrize("name", ["manifest.json", "inputs.json", "payload", "receipt"])
def test_a_file_of_the_store_that_is_not_a_regular_one_is_built_anew(
    kind: str, name: str, source: Path
) -> None:
    assert value_in_new_process(source) == "7"
    root = Store().root
    assert root is not None
    (manifest,) = _below(root, "ops", "manifest.json")
    if name == "receipt":
        rest()
        assert value_in_new_process(source) == "7"
        files = _below(root, "receipts", ".json")
    elif name == "payload":
        files = _below(os.path.dirname(manifest), "", ".so")
    else:
        files = _below(os.path.dirname(manifest), "", name)
    assert files
    for each in files:
        os.unlink(each)
        if kind == "FIFO":
            os.mkfifo(each, 0o600)
        else:
            os.symlink("/dev/zero", each)
    assert value_in_new_process(source) == "7"


def _below(root: str, room: str, ending: str) -> list[str]:
    return [
        os.path.join(directory, name)
        for directory, _, names in os.walk(os.path.join(root, room))
        for name in names
        if name.endswith(ending)
    ]
