"""``opkiln.cubin``: device code from the store."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import opkiln
from opkiln import errors
from opkiln.base.model import CUDA
from opkiln.decision import archs
from opkiln.machine.toolchain import choice, nvrtc
from opkiln.run import events
from opkiln.settings import override

pytestmark = pytest.mark.counts_compiles

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cubin.md"
SOURCE = 'extern "C" __global__ void k(int* x) { *x = VALUE; }\n'


@pytest.fixture(params=["nvcc", "nvrtc"])
def compiler(request: pytest.FixtureRequest) -> str:
    if request.param == "nvcc" and not choice.available(CUDA):
        pytest.skip("no nvcc: pip install 'opkiln[cuda]'")
    if request.param == "nvrtc" and not nvrtc.available():
        pytest.skip("no NVRTC: torch's CUDA wheels bring it")
    return str(request.param)


def build(*options: str, source: str = SOURCE, arch: str = "9.0a") -> tuple[bytes, list[bool]]:
    """A cubin, and of each step whether it came from the store."""
    seen: list[events.Event] = []
    with events.listen(seen.append):
        made = opkiln.cubin(source, arch, options)
    return made, [each.data["cached"] for each in seen if each.kind == events.STEP_END]


def test_a_cubin_is_compiled_once_for_each_text_option_and_header(
    compiler: str, tmp_path: Path
) -> None:
    header = tmp_path / "value.h"
    header.write_text("#define VALUE 1\n")
    source, given = f'#include "value.h"\n{SOURCE}', f"-I{tmp_path}"
    with override(cuda=compiler):
        first, steps = build(given, source=source)
        assert steps == [False]
        assert first.startswith(b"\x7fELF")
        assert build(given, source=source) == (first, [])
        header.write_text("#define VALUE 2\n")
        edited, steps = build(given, source=source)
        assert steps == [False]
        assert edited != first
        header.write_text("#define VALUE 1\n")
        assert build(given, source=source) == (first, [])
        assert build("-DVALUE=1", arch="8.0")[1] == [False]


def test_line_numbers_do_not_keep_it_from_the_next_call(compiler: str) -> None:
    with override(cuda=compiler):
        first, _ = build("-DVALUE=1", "-lineinfo")
        assert build("-DVALUE=1", "-lineinfo") == (first, [])


def test_a_mistake_is_told_in_the_compilers_words(compiler: str) -> None:
    with override(cuda=compiler), pytest.raises(errors.CompileError, match="VALUE") as raised:
        build()
    assert "kernel.cu" in raised.value.why


def test_where_nothing_may_be_compiled_a_hit_still_serves(compiler: str) -> None:
    with override(cuda=compiler):
        first, _ = build("-DVALUE=1")
        with override(mode="cached"):
            assert build("-DVALUE=1") == (first, [])
            with pytest.raises(errors.CompilingOff, match="a cubin would have to be compiled"):
                build("-DVALUE=2")


@pytest.mark.parametrize("arch", ["8.0;9.0", "9.0+PTX", "all", "no"])
def test_it_is_for_one_architecture(arch: str) -> None:
    with pytest.raises(errors.ArchError):
        opkiln.cubin(SOURCE, arch)


def test_native_without_a_gpu_says_what_to_write() -> None:
    if archs.devices(CUDA):
        pytest.skip("there is a GPU")
    with pytest.raises(errors.ArchError, match="for one architecture"):
        opkiln.cubin(SOURCE)


def test_an_architecture_among_the_options_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="the options name an architecture"):
        opkiln.cubin(SOURCE, "9.0a", ["-arch=sm_80"])


def test_the_example_of_the_page(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ((code, said),) = re.findall(
        r"<!-- run -->\n```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    monkeypatch.setenv("OPKILN_CUDA", compiler)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
