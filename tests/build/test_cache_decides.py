"""What makes the cache compile, and what does not."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
from sample import child
from sample.levels import LEVELS
from sample.package import Steps, put, rest, settle

import opkiln
from opkiln.builder import registry
from opkiln.errors import FallbackWarning
from opkiln.loading import loader
from opkiln.loading.explain import explain
from opkiln.run import events
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package

pytestmark = [pytest.mark.counts_compiles, pytest.mark.timed]

ALL = ["csrc/add.cpp", "csrc/scale.cpp", "csrc/where.cpp"]


@pytest.fixture
def built(plain: Package) -> Package:
    """The sample, built once, its files old enough for every shortcut to apply."""
    settle(*plain.files())
    assert plain.load().add(1, 2) == 103
    return plain


def looked(package: Package, **attributes: Any) -> tuple[Any, Steps]:
    """Load the op as it is now: (it, the steps that took)."""
    steps = Steps()
    with events.listen(steps):
        return package.load(**attributes), steps


def changes(package: Package, **attributes: Any) -> str:
    """What `opkiln explain` would say has changed."""
    return "\n".join(explain(package.builder(**attributes).op()).changes)


def test_a_cold_cache_compiles_every_source_and_links_once(plain: Package, steps: Steps) -> None:
    library = plain.load()
    assert (library.add(1, 2), library.scale(2)) == (103, 106)
    assert steps.compiled == ALL
    assert steps.linked == 1


def test_another_process_finds_it_and_runs_no_step(built: Package) -> None:
    out = child.run(f"""
        from opkiln.run import events
        from {built.name}.op import PlainBuilder
        seen = []
        with events.listen(seen.append):
            print(PlainBuilder().load().add(1, 2), len(seen))
    """, path=[built.where])  # fmt: skip
    assert out.split() == ["103", "0"]


def test_an_edited_header_recompiles_its_dependents_and_nothing_else(built: Package) -> None:
    built.edit("csrc/include/scale.h", "kScale = 3", "kScale = 4")
    assert "csrc/include/scale.h changed" in changes(built)
    library, steps = looked(built)
    assert library.scale(2) == 108
    assert steps.compiled == ["csrc/scale.cpp"]
    assert steps.labels(cached=True) == ["csrc/add.cpp", "csrc/where.cpp"]

    built.edit("csrc/include/shared.h", "= 100", "= 200")
    library, steps = looked(built)
    assert (library.add(1, 2), library.scale(2)) == (203, 208)
    assert steps.compiled == ["csrc/add.cpp", "csrc/scale.cpp"]


def test_an_edited_source_recompiles_itself_and_an_edit_taken_back_is_a_hit_again(
    built: Package,
) -> None:
    built.edit("csrc/add.cpp", "a + b", "a - b")
    library, steps = looked(built)
    assert library.add(1, 2) == 99
    assert steps.compiled == ["csrc/add.cpp"]
    built.edit("csrc/add.cpp", "a - b", "a + b")
    library, steps = looked(built)
    assert library.add(1, 2) == 103
    assert steps.seen == []


def test_touching_every_file_recompiles_nothing(built: Package) -> None:
    for years in (0, -20, 20, 20):  # also with times in the future, and also the second time
        moment = time.time() + years * 365.25 * 86400
        for path in built.files():
            os.utime(path, (moment, moment))
        for _ in range(2):
            library, steps = looked(built)
            assert library.add(1, 2) == 103
            assert steps.seen == []


def test_an_edit_shows_whatever_time_it_bears(built: Package) -> None:
    header = built / "csrc/include/shared.h"
    for value, years, rested in ((101, -20, True), (102, 20, True), (103, 20, False),
                                 (104, -20, False)):  # fmt: skip
        header.write_text(header.read_text().replace(str(value - 1), str(value)))
        moment = time.time() + years * 365.25 * 86400
        os.utime(header, (moment, moment))
        if rested:
            rest()
        library, steps = looked(built)
        assert library.add(0, 0) == value
        assert steps.compiled == ["csrc/add.cpp", "csrc/scale.cpp"] or not rested


def test_an_edit_under_the_old_size_and_time_shows(built: Package) -> None:
    header = built / "csrc/include/shared.h"
    before = os.stat(header)
    header.write_text(header.read_text().replace("= 100", "= 300"))
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(header)
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert looked(built)[0].add(0, 0) == 300


def test_an_edit_through_a_shared_mapping_shows_once_it_is_synced(built: Package) -> None:
    header = built / "csrc/include/shared.h"
    with header.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        place = mapped.find(b"= 100")
        mapped[place : place + 5] = b"= 300"
        mapped.flush()
        assert looked(built)[0].add(0, 0) == 300


def test_a_new_header_that_shadows_another_is_noticed(built: Package) -> None:
    for number, place in enumerate(("csrc/first", "csrc")):
        (built / place / "shared.h").write_text(f"constexpr int kShared = {number};\n")
        rest()
        assert f"{place}/shared.h is new" in changes(built)
        library, steps = looked(built)
        assert library.add(0, 0) == number
        assert steps.compiled == ["csrc/add.cpp", "csrc/scale.cpp"]
        (built / place / "shared.h").unlink()
        assert looked(built)[0].add(0, 0) == 100


def test_a_new_file_that_nobody_includes_changes_nothing(built: Package) -> None:
    (built / "csrc/first/other.h").write_text("#error never included\n")
    (built / "csrc/notes.txt").write_text("x")
    again, steps = looked(built)
    assert again is built.builder().load()
    assert steps.seen == []


def test_a_changed_flag_rebuilds_and_explain_names_it(built: Package) -> None:
    assert "-DEXTRA=1" in changes(built, FLAGS=("-DEXTRA=1",))
    _, steps = looked(built, FLAGS=("-DEXTRA=1",))
    assert steps.compiled == ALL
    assert looked(built, FLAGS=("-DEXTRA=1",))[1].seen == []
    assert looked(built)[1].seen == [], "the old flags' entry is still there"


def test_a_users_variable_rebuilds_and_explain_names_it(
    built: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value, named in (
        ("CXXFLAGS", "-DUSERS=1", "-DUSERS=1"), ("CPPFLAGS", "-DUSERS=2", "-DUSERS=2"),
        ("LDFLAGS", "-Wl,-z,now", "-Wl,-z,now"), ("OPKILN_DEBUG", "1", "debug: False -> True"),
        ("CPATH", "/opt/no/such/include", "/opt/no/such/include"),
    ):  # fmt: skip
        with monkeypatch.context() as users:
            users.setenv(variable, value)
            assert named in changes(built)
            assert looked(built)[1].linked == 1
            assert looked(built)[1].seen == []


def test_variables_behind_the_command_line_reach_no_compiler_and_are_named(
    plain: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "shared.h").write_text("constexpr int kShared = -1;\n")
    variables = ("C_INCLUDE_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH", "DEPENDENCIES_OUTPUT")
    for variable in variables:
        monkeypatch.setenv(variable, str(shadow))
    assert plain.load().add(0, 0) == 100
    told = explain(plain.builder().op())
    for variable in variables:
        assert variable in told.dropped
        assert variable in str(told)
    assert sorted(shadow.iterdir()) == [shadow / "shared.h"]


def test_cpath_is_searched_and_what_it_holds_is_watched(
    plain: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "theirs.h").write_text("constexpr int kTheirs = 1;\n")
    plain.edit("csrc/add.cpp", '"shared.h"', '"shared.h"\n#include <theirs.h>')
    plain.edit("csrc/add.cpp", "kShared;", "kTheirs;")
    monkeypatch.setenv("CPATH", str(theirs))
    assert plain.load().add(0, 0) == 1
    (theirs / "theirs.h").write_text("constexpr int kTheirs = 2;\n")
    rest()
    library, steps = looked(plain)
    assert library.add(0, 0) == 2
    assert steps.compiled == ["csrc/add.cpp"]


def test_a_moved_package_is_a_hit_and_an_edit_in_it_is_its_own(
    built: Package, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere with a blank"
    shutil.copytree(built.path, moved / built.name)
    code = f"""
        from opkiln.run import events
        from {built.name}.op import PlainBuilder
        seen = []
        with events.listen(seen.append):
            builder = PlainBuilder()
            print(builder.load().add(0, 0), len(seen), builder.root)
    """
    assert child.run(code, path=[moved]).strip() == f"100 0 {moved / built.name}"
    header = moved / built.name / "csrc/include/shared.h"
    header.write_text(header.read_text().replace("= 100", "= 500"))
    assert child.run(code, path=[moved]).split()[0] == "500"
    assert child.run(code, path=[built.where]).split()[:2] == ["100", "0"]


def test_a_damaged_library_is_replaced_and_never_loaded(built: Package, cache: Path) -> None:
    (library,) = cache.glob("v1/ops/*/plain/*/*/*/plain.so")
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 0xFF
    put(library, bytes(data))
    out = child.run(f"""
        from {built.name}.op import PlainBuilder
        from opkiln.loading import loader
        print(PlainBuilder().load().add(1, 2))
        print(next(iter(loader.loaded_here().values()))[0].trace)
    """, path=[built.where])  # fmt: skip
    assert out.startswith("103\n")
    assert "wrong digest" in out
    assert library.read_bytes() != bytes(data)


def test_a_lower_cpu_level_is_another_entry(built: Package) -> None:
    with override(cpu=LEVELS[1]):
        assert "target cpu" in changes(built)
        assert looked(built)[1].compiled == ALL
        assert looked(built)[1].seen == []
    assert looked(built)[1].seen == []


def test_explain_by_name_reaches_an_op_of_another_package(
    built: Package, package: Callable[..., Package]
) -> None:
    info = built.where / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[opkiln.ops]\ntheirs = {built.name}.op:PlainBuilder\n")
    text = str(opkiln.explain("theirs"))
    assert text.startswith("plain: loaded in this process")
    assert "build     taken    compiled 3 file(s)" in text
    assert "theirs" in registry.ALL_OPS


def test_explain_of_a_loaded_op_says_what_serves_it_since_when_and_from_where(
    built: Package,
) -> None:
    artifact = loader.here.ops[built.builder().op().name].loaded.artifact
    assert artifact is not None
    found = explain(built.builder().op())
    today = time.strftime("%Y-%m-%d")
    assert found.verdict.startswith(f"loaded in this process since {today} ")
    assert f"by {artifact.path}, which it built" in found.verdict
    assert found.loaded
    assert abs(found.since - time.time()) < 3600
    assert found.new_process == "cached"
    # What is loaded stays, and what a new process would do is told beside it.
    (built / "csrc/scale.cpp").write_text('extern "C" int scale(int a) { return a * 7; }\n')
    rest()
    text = str(explain(built.builder().op()))
    assert text.startswith(f"plain: loaded in this process since {today} ")
    assert "a new process: would compile: csrc/scale.cpp changed" in text


def test_explain_of_an_op_that_fell_back_says_that_its_reference_serves(
    package: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    stable = package("stable")
    monkeypatch.setenv("OPKILN_MODE", "cached")
    with pytest.warns(FallbackWarning):
        stable.load()
    verdict = explain(stable.builder().op()).verdict
    assert verdict.startswith("its pure-PyTorch reference serves in this process since ")
    assert "OPKILN_MODE=cached" in verdict
