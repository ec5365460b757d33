"""Two versions of opkiln with different manifests share one cache directory in peace."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from sample import child

from opkiln import settings
from opkiln.machine.toolchain import host
from opkiln.store import entry

LOAD = """
import sys
import opkiln
from opkiln.loading import loader

opkiln.load("one", [sys.argv[1]], is_python_module=False, abi="none")
print(*[loaded.artifact.origin for loaded, _ in loader.loaded_here().values()])
"""
# The parts of a manifest, by schema. If this differs and the older version would misread what the
# newer one writes (or the other way round), bump settings.SCHEMA and add a row; a part that older
# versions may ignore needs no new schema, only this row as it is now.
PARTS = {2: "66cd36c415da60b4428ce1b22654110e97857390"}


def shown(part: object) -> str:
    if isinstance(part, dict):
        return "{" + ",".join(f"{name}:{shown(part[name])}" for name in sorted(part)) + "}"
    if isinstance(part, (list, tuple)):
        return type(part).__name__ + "[" + ",".join(map(shown, part)) + "]"
    if isinstance(part, entry.Row):
        return f"row({','.join(map(shown, part.parts))};{shown(part.rest)})"
    if isinstance(part, entry.Named):
        return f"named({shown(part.shape)})"
    return getattr(part, "__name__", repr(part))


def test_the_layout_follows_from_the_schema_of_manifests() -> None:
    assert entry.SCHEMA == settings.SCHEMA
    text = Path(settings.__file__).read_text()
    assert re.search(r'^LAYOUT = f"v\{SCHEMA - 1\}"$', text, re.MULTILINE)


def test_the_parts_of_a_manifest_belong_to_a_schema() -> None:
    from opkiln.base.digest import key

    assert key("parts", shown(entry._MANIFEST)) == PARTS[settings.SCHEMA]


@pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")
def test_two_schemas_do_not_rebuild_each_others_entries(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "op.cpp"
    source.write_text('extern "C" int value() { return 1; }\n')
    newer = tmp_path / "newer"
    shutil.copytree(child.SOURCE / "opkiln", newer / "opkiln")
    file = newer / "opkiln" / "settings.py"
    text = file.read_text()
    assert f"\nSCHEMA = {settings.SCHEMA}\n" in text
    file.write_text(text.replace(f"\nSCHEMA = {settings.SCHEMA}\n", "\nSCHEMA = 99\n"))

    def load(version: Path) -> str:
        # With no receipt: those keep what a version found, so they would hide a rebuild.
        for receipts in cache.glob("*/receipts"):
            shutil.rmtree(receipts)
        env = {"PYTHONPATH": str(version)}
        return child.run(LOAD, str(source), env=env, forked=False).strip()

    assert [load(each) for each in (child.SOURCE, newer)] == ["built", "built"]
    assert [load(each) for each in (child.SOURCE, newer) * 2] == ["store"] * 4
    assert sorted(os.listdir(cache)) == sorted([settings.LAYOUT, "v98"])
