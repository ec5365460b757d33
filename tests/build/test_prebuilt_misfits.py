"""What does not fit is refused with its reason before it is opened, and the next resort serves."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from sample import child, known
from sample.levels import LEVELS, lacks
from sample.shipped import Shipped, mask, rewrite

from opkiln.base.model import ABI_TORCH
from opkiln.building import loadtest
from opkiln.errors import CompilingOff, FallbackWarning
from opkiln.machine import uname
from opkiln.machine.toolchain import torch_sdk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package


@pytest.fixture
def shipped(plain: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    return Shipped(plain, "csrc/add.cpp", tmp_path, monkeypatch)


def refused(shipped: Shipped, reason: str, **attributes: Any) -> None:
    """`explain` and the load both say why, nothing that was shipped is opened, a build serves."""
    said = shipped.explained(**attributes)
    assert "plain: would compile: " in said
    assert f"prebuilt  refused  {reason}" in said
    assert shipped.load(**attributes).add(1, 2) in (103, 99)
    assert shipped.origin == "built"
    assert f"prebuilt  refused  {reason}" in shipped.trace
    assert [path for path in shipped.opened if "/prebuilt/" in path] == []
    assert len(shipped.opened) == 1


def test_another_declaration_of_the_op(shipped: Shipped) -> None:
    shipped.build()
    refused(shipped, "it was built from another declaration of this op", FLAGS=("-fno-math-errno",))


def test_a_changed_source(shipped: Shipped) -> None:
    shipped.build()
    shipped.package.edit("csrc/add.cpp", "a + b", "a - b")
    refused(shipped, "csrc/add.cpp changed")


def test_a_changed_header(shipped: Shipped) -> None:
    shipped.build()
    shipped.package.edit("csrc/include/scale.h", "kScale = 3", "kScale = 4")
    refused(shipped, "csrc/include/scale.h changed")


def test_a_flipped_byte(shipped: Shipped) -> None:
    library = shipped.build() / "plain.so"
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    refused(shipped, "damaged: plain.so has the wrong digest")
    assert library.read_bytes() == bytes(data)  # left as it was: it is not ours


def test_a_manifest_that_was_changed(shipped: Shipped) -> None:
    manifest = shipped.build() / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"debug":false', b'"debug":true '))
    refused(shipped, "damaged: the manifest's digest does not match")


def test_a_manifest_that_lacks_what_it_must_say(shipped: Shipped) -> None:
    rewrite(shipped.build(), lambda manifest: manifest.pop("needs"))
    refused(shipped, "damaged: manifest.json: 'needs' is missing")


def test_another_schema_of_manifests(shipped: Shipped) -> None:
    rewrite(shipped.build(), lambda manifest: manifest.update(schema=99))
    refused(shipped, "damaged: the manifest has an unknown schema")


@pytest.mark.parametrize("part", ["prebuilt", "prebuilt/v1/ops", "leaf", "library"])
def test_what_everybody_can_write_to(shipped: Shipped, part: str) -> None:
    leaf = shipped.build()
    path = {"leaf": leaf, "library": leaf / "plain.so"}.get(part, shipped.package / part)
    path.chmod(0o777)
    refused(shipped, f"{path} is writable by everybody")


def test_a_library_that_is_a_link_to_elsewhere(shipped: Shipped, tmp_path: Path) -> None:
    library = shipped.build() / "plain.so"
    shutil.move(library, tmp_path / "plain.so")
    library.symlink_to(tmp_path / "plain.so")
    refused(shipped, "unreadable: ")


def test_a_library_for_another_machine(shipped: Shipped) -> None:
    rewrite(shipped.build(), lambda manifest: manifest["target"].update(machine="riscv64"))
    refused(shipped, "it is for linux on riscv64")


def test_a_release_is_not_loaded_by_who_debugs(
    shipped: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped.build()
    monkeypatch.setenv("OPKILN_DEBUG", "1")
    refused(shipped, "OPKILN_DEBUG is set, and it was built without")


def test_a_debug_build_is_not_loaded_by_who_does_not(shipped: Shipped) -> None:
    shipped.build(debug=True)
    refused(shipped, "it was built for debugging")


def test_flags_that_were_asked_for_by_opkilns_own_variable(
    shipped: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped.build()
    monkeypatch.setenv("OPKILN_CXXFLAGS", "-fno-math-errno")
    refused(shipped, "it was built with other flags than OPKILN_CXXFLAGS asks for")


def test_flags_that_every_build_on_a_machine_gets_do_not_concern_what_is_installed(
    shipped: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = shipped.build()
    monkeypatch.setenv("CXXFLAGS", "-fno-math-errno")
    shipped.load()
    assert shipped.opened == [str(leaf / "plain.so")]


def test_a_cpu_that_was_asked_for_by_name(
    shipped: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped.build(cpu=LEVELS[2])
    monkeypatch.setenv("OPKILN_CPU", LEVELS[1])
    refused(shipped, f"it is for {LEVELS[2]}, and OPKILN_CPU asks for {LEVELS[1]}")
    assert shipped.package.load().level() == 1


def test_a_cpu_that_was_asked_for_by_name_and_was_shipped(
    shipped: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped.build(cpu=LEVELS[2])
    wanted = shipped.build(cpu=LEVELS[1])
    monkeypatch.setenv("OPKILN_CPU", LEVELS[1])
    assert shipped.load().level() == 1
    assert shipped.opened == [str(wanted / "plain.so")]


def test_a_cpu_that_lacks_features_is_told_which(
    shipped: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The levels are in test_prebuilt.py, in processes of their own."""
    shipped.build(cpu=LEVELS[2])
    monkeypatch.setattr(uname, "_CPUINFO", str(mask(tmp_path / "cpuinfo", 1)))
    uname.cpuinfo.cache_clear()
    try:
        refused(shipped, f"it needs {lacks(LEVELS[1], than=LEVELS[2])}, which this CPU lacks")
    finally:
        monkeypatch.undo()
        uname.cpuinfo.cache_clear()


def test_off_ignores_what_is_installed(shipped: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped.build()
    monkeypatch.setenv("OPKILN_MODE", "source")
    assert "prebuilt" not in shipped.explained().partition("intent:")[0]
    shipped.load()
    assert shipped.origin == "built"
    assert [path for path in shipped.opened if "/prebuilt/" in path] == []


def test_where_nothing_may_compile_the_error_says_why_what_is_installed_does_not_serve(
    shipped: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped.build()
    shipped.package.edit("csrc/add.cpp", "a + b", "a - b")
    monkeypatch.setenv("OPKILN_MODE", "cached")
    assert "prebuilt  refused  csrc/add.cpp changed" in shipped.explained()
    with pytest.raises(CompilingOff):
        shipped.load()
    assert shipped.opened == []


def test_what_fits_and_is_worse_serves_where_the_better_is_damaged(shipped: Shipped) -> None:
    good = shipped.build(cpu=LEVELS[1])
    bad = shipped.build()
    if bad == good:
        pytest.skip("this CPU has nothing beyond its base")
    (bad / "plain.so").write_bytes(b"")
    shipped.load()
    assert shipped.opened == [str(good / "plain.so")]
    assert "prebuilt  refused  damaged: plain.so has the wrong digest" in shipped.trace


# What it needs of torch


def test_a_torch_that_lacks_a_symbol(
    package: Callable[..., Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = package("stable")
    torch = pytest.importorskip("torch")
    made.edit(
        "csrc/stable.cpp", "int64_t who(", 'extern "C" int aoti_torch_of_2_99();\nint64_t who('
    )
    made.edit("csrc/stable.cpp", "return kWho;", "return kWho + aoti_torch_of_2_99();")
    shipped = Shipped(made, "csrc/stable.cpp", tmp_path, monkeypatch)
    with pytest.MonkeyPatch.context() as there:
        there.setattr(loadtest.LoadTest, "check", lambda _self: None)  # its torch has it
        shipped.build()
    reason = f"it needs aoti_torch_of_2_99, which torch {torch.__version__} lacks"
    code = f"""
        import sys
        from {made.name}.op import StableBuilder
        from opkiln.loading.explain import explain
        print(explain(StableBuilder().op()))
        assert "torch" not in sys.modules
    """
    # By the symbols of the file, and, where torch is imported, by those of the library.
    told = child.run(code, path=[made.where], bare=False, forked=False)
    assert f"prebuilt  refused  {reason}" in told
    assert f"prebuilt  refused  {reason}" in shipped.explained()
    with pytest.warns(FallbackWarning, match="undefined symbol: aoti_torch_of_2_99"):
        functions = shipped.load()
    assert functions.who(torch.ones(2)) == 0  # the reference: nothing here can build it either
    assert f"prebuilt  refused  {reason}" in shipped.trace
    assert shipped.opened == []


def test_fallback_warning_tells_of_the_prebuilt_library_and_why_it_was_refused(
    package: Callable[..., Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = package("stable")
    shipped = Shipped(made, "csrc/stable.cpp", tmp_path, monkeypatch)
    leaf = shipped.build()
    made.edit("csrc/stable.cpp", "return kWho;", "return kWho + 1;")
    monkeypatch.setenv("OPKILN_MODE", "cached")
    with pytest.warns(FallbackWarning) as caught:
        shipped.load()
    (warning,) = [str(each.message) for each in caught if each.category is FallbackWarning]
    assert "OPKILN_MODE=cached" in warning
    (told,) = [line for line in warning.splitlines() if "prebuilt" in line]
    (refusal,) = [d for d in shipped.loaded.trace.candidates if d.resort == "prebuilt"]
    assert told == f"  the prebuilt library {leaf} was refused: {refusal.reason}"
    assert "csrc/stable.cpp" in told
    assert warning.splitlines()[-1].startswith("hint: ")
    assert caught[0].filename.endswith("package.py")  # where a user called load()


def test_another_torch_where_the_op_is_built_on_all_of_torch(
    shipped: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = torch_sdk.find()
    if sdk is None:
        pytest.skip("torch is not installed")
    monkeypatch.setattr(type(shipped.package.builder()), "ABI", ABI_TORCH)
    shipped.build()
    assert shipped.explained().startswith("plain: cached\n")
    other = sdk._replace(version="2.12.0")
    monkeypatch.setattr(torch_sdk, "find", lambda: other)
    refused(shipped, f"it is built for torch-{sdk.version}-")
    assert "and here is torch-2.12.0-" in shipped.trace


# What it needs of other libraries

_OP = """
#include <cstdio>
#include <cstdlib>
extern "C" int theirs();
extern "C" int value() { return theirs(); }
namespace {
__attribute__((constructor)) void note_opened() {
  if (const char* log = std::getenv("SAMPLE_OPENED")) {
    std::FILE* file = std::fopen(log, "a");
    std::fputs("opened\\n", file);
    std::fclose(file);
  }
}
}  // namespace
"""
_DECLARED = """
from opkiln.builder import OpBuilder

class Linked(OpBuilder):
    NAME, KIND, ABI = "linked", "plain", "none"

    def sources(self):
        return ["linked.cpp"]

    def extra_ldflags(self):
        return ["-L" + __file__.rpartition("/")[0] + "/lib", "-ltheirs"]
"""
_BUILD = """
import sys
from linked_ops import Linked
from opkiln.building import loadtest
from opkiln.decision.terms import BUILD, Request
from opkiln.loading import loader
from opkiln.store import layer
if sys.argv[2:]:
    loadtest.LoadTest.check = lambda self: None  # as where there is what it needs
made, _ = loader.obtain(Request(Linked().op(), BUILD))
layer.export([made.path], sys.argv[1])
"""
_LOAD = """
from linked_ops import Linked
from opkiln.errors import OpkilnError
from opkiln.loading.explain import explain
print(explain(Linked().op()))
try:
    print("value", Linked().load().value())
except OpkilnError as error:
    print(type(error).__name__)
"""


class Site:
    """A directory with ``linked_ops``, whose op is linked to libtheirs.so."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.package = base / "site" / "linked_ops"
        self.libraries = self.package / "lib"
        self.libraries.mkdir(parents=True)
        (self.package / "__init__.py").write_text(_DECLARED)
        (self.package / "linked.cpp").write_text(_OP)
        (self.libraries / "libtheirs.so").symlink_to("libtheirs.so.1")
        self.log = base / "opened"
        self.elsewhere = known.make_store(base / "elsewhere")

    def theirs(self, version: str, *, value: int = 7, soname: str = "libtheirs.so.1") -> None:
        """Compile the library, with its symbol in a version node of this name."""
        source, script = self.base / "theirs.c", self.base / "theirs.map"
        source.write_text(f"int theirs(void) {{ return {value}; }}\n")
        script.write_text(f"{version} {{ global: theirs; local: *; }};\n")
        subprocess.run(
            ["cc", "-shared", "-fPIC", str(source), "-o", str(self.libraries / "libtheirs.so.1"),
             f"-Wl,--version-script={script}", f"-Wl,-soname,{soname}"],
            check=True,
        )  # fmt: skip

    def ship(self, *arguments: str) -> None:
        place = str(self.package / "prebuilt")
        self.run(_BUILD, place, *arguments, OPKILN_CACHE_DIR=str(self.elsewhere))

    def run(self, code: str, *arguments: str, **env: str) -> str:
        env = {"LD_LIBRARY_PATH": str(self.libraries), "SAMPLE_OPENED": str(self.log), **env}
        return child.run(code, *arguments, path=[self.package.parent], env=env)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_library_that_it_needs_and_that_is_here(site: Site) -> None:
    site.theirs("THEIRS_2.0")
    site.ship()
    said = site.run(_LOAD, OPKILN_MODE="cached")
    assert said.startswith("linked: cached\n")
    assert said.endswith("value 7\n")
    assert site.log.read_text() == "opened\n"


def test_a_missing_soname(site: Site) -> None:
    site.theirs("THEIRS_2.0")
    site.ship()
    site.theirs("THEIRS_2.0", value=8, soname="libtheirs.so.2")
    (site.libraries / "libtheirs.so.1").rename(site.libraries / "libtheirs.so.2")
    (site.libraries / "libtheirs.so").unlink()
    (site.libraries / "libtheirs.so").symlink_to("libtheirs.so.2")
    said = site.run(_LOAD)
    assert "prebuilt  refused  it needs libtheirs.so.1, which is not here" in said
    assert said.endswith("value 8\n")  # of a build against the one that is here
    assert site.log.read_text() == "opened\n"


def test_a_library_that_has_an_older_version_than_it_was_linked_to(site: Site) -> None:
    site.theirs("THEIRS_2.0")
    site.ship()
    site.theirs("THEIRS_1.0", value=8)
    said = site.run(_LOAD)
    assert (
        "prebuilt  refused  it needs theirs of THEIRS_2.0, which this libtheirs.so.1 lacks" in said
    )
    assert said.endswith("value 8\n")
    assert site.log.read_text() == "opened\n"


def test_a_newer_libstdcxx_than_this_machines(site: Site) -> None:
    """Linked against a libstdc++ that has a version node which no release has."""
    site.theirs("GLIBCXX_9.9.99", soname="libstdc++.so.6")
    site.ship("untried")
    site.theirs("THEIRS_1.0", value=8)
    said = site.run(_LOAD)
    reason = "it needs theirs of GLIBCXX_9.9.99, which this libstdc++.so.6 lacks"
    assert f"prebuilt  refused  {reason}" in said
    assert said.endswith("value 8\n")
    assert site.log.read_text() == "opened\n"
