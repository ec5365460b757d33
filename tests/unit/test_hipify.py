"""The translated copy of an op's sources: what is in it, and that the original stays as it is."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest

from opkiln.base.build_model import TorchSDK
from opkiln.base.model import INLINE_ROOT, ROCM, OpSpec
from opkiln.errors import SpecError, ToolchainError
from opkiln.machine.toolchain import staged_copy, torch_sdk, translate_hip

_KERNEL = """\
#include <cuda_runtime.h>
#include "scale.h"
__global__ void scale(float* x) { x[threadIdx.x] = std::max(x[threadIdx.x] * kScale, 0.f); }
cudaError_t launch(float* x, cudaStream_t stream) {
  scale<<<1, 32, 0, stream>>>(x);
  return cudaGetLastError();
}
"""


@pytest.fixture
def torch() -> TorchSDK:
    found = torch_sdk.find()
    if found is None:
        pytest.skip("torch is not installed")
    return found


def write(top: Path, files: dict[str, str | bytes]) -> None:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def a_spec(root: Path, *sources: str, include_dirs: tuple[str, ...] = ()) -> OpSpec:
    return OpSpec(
        name="op", distribution="package", root=str(root), sources=sources, backend=ROCM,
        include_dirs=include_dirs,
    )  # fmt: skip


def stage(spec: OpSpec, torch: TorchSDK, where: Path) -> staged_copy.Staged:
    where.mkdir()
    return staged_copy.stage_hip(spec, torch, str(where))


def tree(top: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a directory: contents, modes, times."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (top, *sorted(top.rglob("*"))):
        stat = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (stat.st_mode, stat.st_mtime_ns, stat.st_ctime_ns, content)
    return found


_ODD = b'// \xff\xfe\x80 latin\r\n#include "b.h"\r\nint f();\r\n\r'


def test_sources_and_the_headers_they_include_are_translated_line_by_line_elsewhere(
    tmp_path: Path, torch: TorchSDK
) -> None:
    root = tmp_path / "op"
    write(root, {
        "cuda.cu": _KERNEL,
        "include/scale.h": "// cudaStream_t\nconstexpr float kScale = 2;\n",
        "unused.h": "",
        "odd.cpp": _ODD,
        "b.h": b"// no newline at the end",
        "odd.cu": b"cudaStream_t s; // \xff\r\ncudaError_t e;",
        "torchs.cpp": "#include <ATen/cuda/CUDAContext.h>\n#include <c10/cuda/CUDAStream.h>\n",
    })  # fmt: skip
    for path in (*root.rglob("*"), root):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree(root)
    names = ("cuda.cu", "odd.cpp", "odd.cu", "torchs.cpp")
    try:
        spec = a_spec(root, *names, include_dirs=("include",))
        staged = stage(spec, torch, tmp_path / "stage")
        assert tree(root) == before, "the source tree is not touched"
    finally:
        for path in (root, *root.rglob("*")):
            path.chmod(0o755)
    copy = Path(staged.root)
    assert os.access(copy / "cuda.cu", os.W_OK)
    assert staged.sources == {name: name for name in names}
    assert (copy / "cuda.cu").read_text() == (
        _KERNEL.replace("cuda_runtime.h", "hip/hip_runtime.h")
        .replace("cudaE", "hipE").replace("cudaS", "hipS").replace("cudaG", "hipG")
        .replace("std::max(", "::max(")
    )  # fmt: skip
    assert (copy / "include/scale.h").read_text().startswith("// hipStream_t\n")
    assert (copy / "odd.cu").read_bytes() == b"hipStream_t s; // \xff\r\nhipError_t e;"
    # What has no CUDA stays byte for byte, and torch's headers get the names of a ROCm torch.
    assert (copy / "odd.cpp").read_bytes() == _ODD
    assert (copy / "b.h").read_bytes() == b"// no newline at the end"
    assert (copy / "torchs.cpp").read_text() == (
        "#include <ATen/hip/HIPContext.h>\n#include <c10/hip/HIPStream.h>\n"
    )
    # Every file of the copy leads back to what it was made of.
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {*names, "scale.h", "b.h"}
    assert os.listdir(tmp_path / "stage") == [tmp_path.parts[1]]
    assert staged.origin == {str(path): str(root / path.relative_to(copy)) for path in files}
    assert staged.digests == {
        path: hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for path in staged.origin.values()
    }  # fmt: skip


def test_an_authors_header_is_not_taken_for_one_of_cudas(tmp_path: Path, torch: TorchSDK) -> None:
    text = '#include "cuda.h"\n#  include <cuda_fp16.h>\n#include "cuda_bf16.h"\n'
    write(tmp_path / "op", {"cuda.cu": text, "cuda.h": "", "compat/cuda_fp16.h": ""})
    spec = a_spec(tmp_path / "op", "cuda.cu", include_dirs=("compat",))
    staged = stage(spec, torch, tmp_path / "stage")
    assert (Path(staged.root) / "cuda.cu").read_text() == (
        '#include "cuda.h"\n#  include <cuda_fp16.h>\n#include "hip/hip_bf16.h"\n'
    )


def test_headers_are_found_wherever_an_include_may_lead(tmp_path: Path, torch: TorchSDK) -> None:
    write(tmp_path / "pkg", {
        "op/csrc/a.cu": '#include "../../shared/up.h"\n#include <angle.h>\n#if 0\n'
                        '#include"never.h"\n#endif\n#if __has_include("asked.h")\n#endif\n',
        "shared/up.h": '#include "beside.h"\n',
        "shared/beside.h": "cudaStream_t beside;\n",
        "op/include/angle.h": "#pragma once\n",
        "op/csrc/never.h": "",
        "op/csrc/asked.h": "",
        "shared/unasked.h": "",
    })  # fmt: skip
    spec = a_spec(tmp_path / "pkg" / "op", "csrc/a.cu", include_dirs=("include",))
    staged = stage(spec, torch, tmp_path / "stage")
    top = Path(staged.root).parent
    found = sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())
    assert found == [
        "op/csrc/a.cu", "op/csrc/asked.h", "op/csrc/never.h", "op/include/angle.h",
        "shared/beside.h", "shared/up.h",
    ]  # fmt: skip
    assert (top / "shared/beside.h").read_text() == "hipStream_t beside;\n"
    assert staged.include_dirs == {"include": f"{top}/op/include"}


def test_a_header_behind_a_link_is_where_the_compiler_will_look(
    tmp_path: Path, torch: TorchSDK
) -> None:
    write(tmp_path, {
        "real/csrc/a.cu": '#include "../x.h"\n', "real/x.h": "cudaStream_t here;\n",
    })  # fmt: skip
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "csrc").symlink_to(tmp_path / "real" / "csrc")
    staged = stage(a_spec(tmp_path / "op", "csrc/a.cu"), torch, tmp_path / "stage")
    copied = Path(staged.root) / "csrc" / ".." / "x.h"
    assert copied.read_text() == "hipStream_t here;\n"
    assert os.path.samefile(staged.origin[os.path.normpath(copied)], tmp_path / "real" / "x.h")


def test_where_an_include_is_computed_every_header_is_taken(
    tmp_path: Path, torch: TorchSDK
) -> None:
    write(tmp_path / "op", {
        "a.cu": "#define WHICH \"one.cuh\"\n#include WHICH\n", "one.cuh": "cudaError_t one;\n",
        "include/deep/two.h": "", "include/notes.txt": "",
    })  # fmt: skip
    spec = a_spec(tmp_path / "op", "a.cu", include_dirs=("include",))
    staged = stage(spec, torch, tmp_path / "stage")
    assert (Path(staged.root) / "one.cuh").read_text() == "hipError_t one;\n"
    assert (Path(staged.root) / "include/deep/two.h").exists()
    assert not (Path(staged.root) / "include/notes.txt").exists()


def test_torchs_and_cudas_own_headers_stay_out_of_the_copy(tmp_path: Path, torch: TorchSDK) -> None:
    write(tmp_path, {
        "op/a.cu": "#include <cuda_runtime_api.h>\n#include <torch/extension.h>\n",
        "cuda/cuda_runtime_api.h": "", "torch/torch/extension.h": "",
    })  # fmt: skip
    outside = (str(tmp_path / "cuda"), str(tmp_path / "torch"))
    spec = a_spec(tmp_path / "op", "a.cu", include_dirs=outside)
    staged = stage(spec, torch, tmp_path / "stage")
    assert staged.include_dirs == {str(tmp_path / "torch"): str(tmp_path / "torch")}
    assert len(staged.origin) == 1
    text = (Path(staged.root) / "a.cu").read_text()
    assert text == "#include <hip/hip_runtime_api.h>\n#include <torch/extension.h>\n"


def test_sources_outside_the_root_and_in_no_file_are_copied_too(
    tmp_path: Path, torch: TorchSDK
) -> None:
    write(tmp_path, {"elsewhere/b.cu": "cudaError_t b;\n"})
    outside = str(tmp_path / "elsewhere" / "b.cu")
    spec = a_spec(Path(INLINE_ROOT), "main.cu", outside)
    spec = spec._replace(inline=(("main.cu", "cudaError_t é;\n"),))
    staged = stage(spec, torch, tmp_path / "stage")
    assert (Path(staged.root) / staged.sources["main.cu"]).read_text() == "hipError_t é;\n"
    assert (Path(staged.root) / staged.sources[outside]).read_text() == "hipError_t b;\n"
    assert list(staged.origin.values()) == [f"{INLINE_ROOT}/main.cu", outside]


def test_the_same_sources_give_the_same_copy_in_two_places(tmp_path: Path, torch: TorchSDK) -> None:
    copies = []
    for name in ("one", "two words"):
        write(tmp_path / name, {"cuda.cu": _KERNEL, "scale.h": "", "sub/b.cuh": ""})
        staged = stage(a_spec(tmp_path / name, "cuda.cu"), torch, tmp_path / f"stage {name}")
        copies.append({
            path.relative_to(staged.root): path.read_bytes()
            for path in Path(staged.root).rglob("*") if path.is_file()
        })  # fmt: skip
    assert copies[0] == copies[1]


def test_a_source_that_is_not_there_is_named(tmp_path: Path, torch: TorchSDK) -> None:
    with pytest.raises(SpecError, match=r"op op: the source gone\.cu does not exist"):
        stage(a_spec(tmp_path, "gone.cu"), torch, tmp_path / "stage")


# torch's hipify


def a_torch(where: Path, torch: TorchSDK, more: str = "") -> TorchSDK:
    """A torch that cannot be imported and has the real one's hipify."""
    modules = where / "utils" / "hipify"
    shutil.copytree(os.path.join(torch.path, "utils", "hipify"), modules)
    (where / "__init__.py").write_text("raise ImportError('must not be imported')")
    with open(modules / "hipify_python.py", "a") as file:
        file.write(more)
    return torch._replace(path=str(where), version="2.99", hip="6.2.41133")


def test_torch_itself_is_not_imported(tmp_path: Path, torch: TorchSDK) -> None:
    fake = a_torch(tmp_path / "torch", torch)
    write(tmp_path / "op", {"a.cu": "cudaError_t e;\n"})
    staged = stage(a_spec(tmp_path / "op", "a.cu"), fake, tmp_path / "stage")
    assert (Path(staged.root) / "a.cu").read_text() == "hipError_t e;\n"


def test_another_vocabulary_is_another_identity(tmp_path: Path, torch: TorchSDK) -> None:
    same, other = a_torch(tmp_path / "a", torch), a_torch(tmp_path / "b", torch, "# edited\n")
    assert (
        staged_copy.hipify_identity(same)
        == staged_copy.hipify_identity(torch)
        == staged_copy.hipify_identity(torch)
    )
    assert staged_copy.hipify_identity(other) != staged_copy.hipify_identity(torch)


def test_a_torch_without_hipify_is_said_to_have_none(tmp_path: Path, torch: TorchSDK) -> None:
    bare = torch._replace(path=str(tmp_path))
    write(tmp_path / "op", {"a.cu": ""})
    for ask in (
        lambda: staged_copy.hipify_identity(bare),
        lambda: stage(a_spec(tmp_path / "op", "a.cu"), bare, tmp_path / "stage"),
    ):
        with pytest.raises(ToolchainError, match=f"torch {bare.version.split('+')[0]}.*no hipify"):
            ask()


def test_a_hipify_that_has_changed_beyond_recognition_is_an_error_that_says_so(
    tmp_path: Path, torch: TorchSDK
) -> None:
    changed = a_torch(tmp_path / "torch", torch, "del PYTORCH_MAP, get_hip_file_path\n")
    write(tmp_path / "op", {"a.cu": ""})
    with pytest.raises(ToolchainError) as caught:
        stage(a_spec(tmp_path / "op", "a.cu"), changed, tmp_path / "stage")
    assert "the hipify of torch 2.99" in caught.value.what
    assert "lacks PYTORCH_MAP, get_hip_file_path" in caught.value.why


def test_words_are_translated_as_torchs_own_hipify_does(
    tmp_path: Path, torch: TorchSDK, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
#include <cuda_runtime.h>
#include <cub/cub.cuh>
#include <cuda_fp16.h>
__global__ void kernel(__nv_bfloat16* x) { x[0] = __shfl_down_sync(~0u, std::fmod(x[0], 2.f), 1); }
#if CUDA_VERSION >= 12000
void f() { cudaMemcpyAsync(a, b, 4, cudaMemcpyDeviceToHost, stream); cublasSgemm_v2(handle); }
#endif
"""
    write(tmp_path / "op", {"a.cu": text})
    staged = stage(a_spec(tmp_path / "op", "a.cu"), torch, tmp_path / "stage")
    ours = (Path(staged.root) / "a.cu").read_text()

    for name in [name for name in sys.modules if name.split(".")[0] == "hipify"]:
        monkeypatch.delitem(sys.modules, name)
    module = translate_hip.load(os.path.join(torch.path, "utils", "hipify"))
    top = str(tmp_path / "op")
    module.hipify(
        project_directory=top, output_directory=top, extra_files=[f"{top}/a.cu"],
        includes=[f"{top}/*"], is_pytorch_extension=True, hip_clang_launch=True,
        show_progress=False,
    )  # fmt: skip
    theirs = (tmp_path / "op" / "a.hip").read_text()
    assert theirs == module.HIPIFY_C_BREADCRUMB + ours
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.split(".")[0] == "hipify"]:
        del sys.modules[name]
