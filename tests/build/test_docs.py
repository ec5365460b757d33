"""Every example in the docs is run, and every page says what the code does now."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from sample import child, command, forks, pool

from opkiln.base.model import CPU, CUDA, ROCM
from opkiln.machine.arch import cuda
from opkiln.machine.binary import fatbin
from opkiln.machine.toolchain import choice
from opkiln.store.layers import Store

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEVICES = ROOT / "docs" / "devices.md"
OPTIMIZERS = ROOT / "docs" / "optimizers.md"
TRANSFORMER = ROOT / "docs" / "transformer.md"
CUDA_OP = ROOT / "examples" / "cuda_op"
# What nvcc 13.0 lists; the page on devices shows what lists come to with it.
LISTED = cuda.parse("7.5;8.0;8.6;8.7;8.8;8.9;9.0;10.0;10.3;11.0;12.0;12.1")

_FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
_RUN = re.compile(r"<!-- run -->\n```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
_SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
_CONSOLE = re.compile(r"^\$ (opkiln arch .*)\n((?:[^$`\n].*\n)+)", re.MULTILINE)
_ARCHS = re.compile(r"^\|.*\| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)


@pytest.fixture
def toolkit() -> str:
    """The CUDA toolkit that opkiln takes here."""
    if not choice.available(CUDA):
        pytest.skip("no nvcc: pip install 'opkiln[cuda]'")
    device = choice.choose(Store().memory, CUDA).device
    assert device is not None
    return device.home


def _run(
    *arguments: str, cwd: Path = ROOT, store: Path | None = pool.CATALOGUE, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments."""
    kept = {} if store is None else {"OPKILN_CACHE_DIR": str(store)}
    environment = {**os.environ, **kept, **changes}
    assert forks.suits(environment)
    started = forks.Fork(
        arguments, cwd=cwd, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return child.finish(started, timeout=300)


def test_the_pages_have_what_is_looked_for_on_them() -> None:
    """The tests below pass on a page that has none of it."""
    assert sum(len(_FILE.findall(page.read_text())) for page in PAGES) > 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_shown_on_a_page_is_the_file_it_names(page: Path) -> None:
    for name, shown in _FILE.findall(page.read_text()):
        assert (ROOT / name).read_text() == shown, name


# One process runs them all: what torch imports for the first optimizer takes longer than most.
_EXAMPLES = """
import os, runpy, sys, torch
torch.set_num_threads(1)
for line in sys.argv[1:]:
    print(line, file=sys.stderr)
    sys.argv = line.split()
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "examples",
    [
        ["one_call.py", "train.py", "variants.py", "random_ltd.py", "decoder.py",
         "long_document.py --tokens 256 --steps 5", "evoformer_block.py", "swapped_adam.py",
         "background_checkpoint.py", "cuda_op/use.py"],
        pytest.param(["shm_ddp.py"], marks=pytest.mark.full), # tests/ops/test_shm_comm.py has ranks
        pytest.param(["long_document.py"], marks=pytest.mark.full),
    ],
    ids=["all", "shm_ddp", "long_document"],
)  # fmt: skip
def test_examples_run_and_what_they_built_serves_the_next_run(examples: list[str]) -> None:
    scripts = ("-c", _EXAMPLES, *(str(ROOT / "examples" / each) for each in examples))
    warm = _run(*scripts, OPKILN_MODE="sealed")
    if warm.returncode == 0:
        return
    # Its ops are not in the store that is kept between runs, or it does not work.
    cold = _run(*scripts)
    assert cold.returncode == 0, cold.stderr
    if cold.stdout.endswith(": the reference\n"):
        pytest.skip("a GPU without a toolkit: " + cold.stderr)
    warm = _run(*scripts, OPKILN_MODE="sealed")
    assert warm.returncode == 0, warm.stderr


@pytest.mark.counts_compiles
def test_an_example_runs_in_a_store_that_is_empty() -> None:
    script = str(ROOT / "examples" / "first_op" / "use.py")
    for mode in ("native", "sealed"):
        done = _run(script, store=None, OPKILN_MODE=mode)
        assert done.returncode == 0, done.stderr


def test_the_example_without_a_gpu_is_served_by_its_cpu_version() -> None:
    # A driver that is there is not asked for what CUDA_VISIBLE_DEVICES leaves: the call is.
    code = (
        "from cuda_op import bias_gelu\n"
        "builder = bias_gelu.builder(backend='cpu')\n"
        "builder.jit_load()\n"
        "print(builder.backend, builder.build_for_cpu, builder.error_log)\n"
    )
    done = _run("-c", code, cwd=CUDA_OP)
    assert (done.returncode, done.stdout) == (0, "cpu True None\n"), done.stderr


def test_the_example_compiles_for_the_gpus_it_is_asked_for(toolkit: str) -> None:
    code = (
        "from cuda_op import bias_gelu\n"
        "from opkiln.loading import loader\n"
        "builder = bias_gelu.builder(backend='cuda', archs='8.0;9.0')\n"
        "builder.jit_load()\n"
        "((loaded, _),) = loader.loaded_here().values()\n"
        "print(loaded.trace.candidates[-1].subject)\n"
        "print(*builder.builder().extra_compile_args['nvcc'], sep='\\n')\n"
    )
    done = _run("-c", code, cwd=CUDA_OP)
    assert done.returncode == 0, done.stderr
    entry, *flags = done.stdout.splitlines()
    assert fatbin.images(_library(Path(entry))) == ("sm_80", "sm_90")
    assert [flag for flag in flags if "sm_" in flag or "compute_" in flag] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
    ]


def _library(entry: Path) -> Path:
    return entry if entry.is_file() else entry / "bias_gelu.so"


SETUP = """
from cuda_op import bias_gelu
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension

extension = bias_gelu.builder(backend="cuda").builder()
setup(name="cuda_op", version="0.1", packages=["cuda_op"], ext_modules=[extension],
      cmdclass={"build_ext": BuildExtension})
"""


def test_a_setup_script_with_torchs_class_builds_the_same_images(
    toolkit: str, tmp_path: Path
) -> None:
    # A torch without CUDA refuses .cu files only because it has looked for no toolkit.
    code = (
        "import sys\n"
        "from torch.utils import cpp_extension\n"
        f"cpp_extension.CUDA_HOME = {toolkit!r}\n"
        f"sys.argv = ['setup.py', '-q', 'build', '--build-base', {str(tmp_path)!r}]\n"
        f"exec({SETUP!r})\n"
    )
    done = _run("-c", code, cwd=CUDA_OP, TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX")
    assert done.returncode == 0, done.stdout + done.stderr
    (library,) = tmp_path.rglob("*.so")
    assert fatbin.images(library) == ("sm_80", "sm_90", "compute_90")


@pytest.mark.parametrize("name", ["README.md", "docs/using.md", "docs/devices.md"])
def test_commands_on_a_page_run(name: str, tmp_path: Path) -> None:
    tried = 0
    for block in _SHELL.findall((ROOT / name).read_text()):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "opkiln":
                tried += 1
                done = command.run(*words[1:], cwd=tmp_path)
                here = choice.available(_backend(words))
                assert done.returncode == (0 if here else 3), f"{line}\n{done.stdout}{done.stderr}"
    assert tried


@pytest.mark.parametrize(
    "name",
    [str(page.relative_to(ROOT)) for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))],
)
def test_a_package_is_built_by_the_opkiln_that_is_installed(name: str) -> None:
    """An isolated build looks for opkiln on an index, where a checkout's own is not to be found."""
    text = (ROOT / name).read_text()
    lines = [line for block in _SHELL.findall(text) for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]*pip (?:install|wheel)[^`\n]*)`", text)
    for line in lines:
        selects = re.match(r"OPKILN_BUILD_\w+=|opkiln new|cd demo_ops", line)
        if selects and re.search(r"pip (install|wheel)\b.* \.(\s|$)", line):
            assert "--no-build-isolation" in line or "OPKILN_TORCH_DIR" in line, line


def _backend(words: list[str]) -> str:
    """What a command compiles for. Where there is no compiler for that, it says so, and fails."""
    target = "".join(words[words.index("--target") + 1 :][:1]) if "--target" in words else ""
    return next((each for each in (CUDA, ROCM) if target.startswith(each)), CPU)


def test_the_arch_table_is_what_the_grammar_says() -> None:
    rows = _ARCHS.findall(DEVICES.read_text())
    assert {"9.0a", "Blackwell", "all", "all-major"} <= {asked for asked, _ in rows}
    for asked, shown in rows:
        assert cuda.show(cuda.parse(asked, listed=LISTED)) == shown, asked


def test_what_opkiln_arch_is_shown_to_print_is_what_it_prints(toolkit: str) -> None:
    shown = _CONSOLE.findall(DEVICES.read_text())
    assert len(shown) == 2
    for line, expected in shown:
        done = command.run(*shlex.split(line)[1:])
        # The toolkit is this machine's; all else is the same with every one of CUDA 13.
        assert _without_toolkit(done.stdout) == _without_toolkit(expected), done.stderr
        assert done.returncode == ("refused" in expected)


def _without_toolkit(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if not line.startswith("toolkit")]


_SHOWN = """
import sys
for code in sys.argv[1:]:
    print(code, file=sys.stderr)
    exec(code, {"__name__": "__main__"})
    print(end="\\0")
"""


_GRAPH = """
import torch, cuda_op, first_op
x, y = torch.randn(8), torch.randn(8)
for call in (lambda x, y: first_op.scaled_add(x, y, 0.5), cuda_op.bias_gelu):
    expected = call(x, y)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, y), expected)
"""


def test_code_on_the_pages_prints_what_is_shown_and_the_examples_ops_work_in_a_whole_graph() -> (
    None
):
    found = [_RUN.findall(page.read_text()) for page in (DEVICES, OPTIMIZERS, TRANSFORMER)]
    assert all(found)
    shown = [each for page in found for each in page]
    shown.append((_GRAPH, ""))
    path = str(ROOT / "examples" / "first_op")
    done = _run("-c", _SHOWN, *(code for code, _ in shown), cwd=CUDA_OP, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\0") == [*(expected for _, expected in shown), ""]
