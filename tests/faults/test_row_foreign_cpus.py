"""Row 15: two kinds of CPU that share one home have builds of their own, and none gets SIGILL."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import mounts
import pytest
from loaders import Loader, leaves, returning, write
from sample.levels import IS_X86

if TYPE_CHECKING:
    from fault_rows import Cases

pytestmark = pytest.mark.row(15)

# The CPU features that x86-64-v2 lacks and v3 has, or armv8-a lacks and armv8.2-a has, by the
# kernel's names, and all that is beyond.
_LACKED = re.compile(
    r"avx|fma|bmi|movbe|abm|f16c|amx|vaes|vpclmul|gfni|sha_ni|rdpid"
    if IS_X86
    else r"atomics|asimd.+|fphp|dcpop|lrcpc|sve|bf16|i8mm"
)
# A feature of the better CPU: as the kernel lists it, as a refusal names it, and its macro in C.
LISTED, NAMED, MACRO = (
    ("avx", "avx", "__AVX__") if IS_X86 else ("atomics", "lse", "__ARM_FEATURE_ATOMICS")
)
# 3 where the compiler was told of that feature, so that each value says whose build it is.
VALUE = f"#if defined({MACRO})\n#define V 3\n#else\n#define V 2\n#endif"
REFUSED = rf"\b{NAMED}\b.*this CPU lacks"


@pytest.fixture
def poor(tmp_path: Path) -> list[str]:
    """What to put before a process that is to run on a CPU without that feature."""
    text = Path("/proc/cpuinfo").read_text()
    if f" {LISTED} " not in text:
        pytest.skip(f"this CPU has no {LISTED} that another could lack")
    poorer = re.sub(r"(?m)^(flags|Features)\s*:.*$", _without, text)
    return mounts.another_cpu(write(tmp_path / "cpuinfo", poorer))


def _without(line: re.Match[str]) -> str:
    return " ".join(word for word in line.group().split() if not _LACKED.match(word))


def test_two_kinds_of_cpu_that_share_a_home_have_two_builds(
    tmp_path: Path, cache: Path, poor: list[str], cases: Cases
) -> None:
    source = write(tmp_path / "op.cpp", returning("V", VALUE))
    for number in cases(10, least=2):
        for prefix, value in (([], 3), (poor, 2)):
            with Loader(prefix=prefix) as process:
                answer = process.load("op", source)
                assert answer.value == value, answer
                assert answer.origin == ("store" if number else "built")
    assert len({leaf.parents[1].name for leaf in leaves(cache)}) == 2  # the keys of the intents


def test_a_shared_layer_of_a_better_cpu_is_refused_with_what_is_lacking(
    tmp_path: Path, cache: Path, poor: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "op.cpp", returning("V", VALUE))
    with Loader() as process:
        assert process.load("op", source).value == 3
    monkeypatch.setenv("OPKILN_STORE_LAYERS", str(cache))
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(tmp_path / "other"))
    with Loader(prefix=poor) as process:
        answer = process.load("op", source)
        assert answer.value == 2, answer
        assert any(re.search(REFUSED, reason) for reason in answer.refused)
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(tmp_path / "third"))
    with Loader({"OPKILN_MODE": "cached"}, prefix=poor) as process:
        answer = process.load("op", source)
        assert answer.value is None
        assert answer.error is not None


def test_an_entry_under_a_key_that_is_not_its_own_is_refused_with_what_is_lacking(
    tmp_path: Path, cache: Path, poor: list[str]
) -> None:
    """A store that was put together badly: the names say one CPU, the library needs another."""
    source = write(tmp_path / "op.cpp", returning("V", VALUE))
    with Loader(prefix=poor) as process:
        assert process.load("op", source).value == 2
    (leaf,) = leaves(cache)
    with Loader() as process:
        assert process.load("op", source).value == 3
    (better,) = set(leaves(cache)) - {leaf}
    shutil.rmtree(leaf)
    shutil.copytree(better, leaf)
    shutil.rmtree(cache / "v1" / "receipts")
    with Loader(prefix=poor) as process:
        answer = process.load("op", source)
        assert answer.value == 2, answer
        assert any(re.search(REFUSED, reason) for reason in answer.refused)
