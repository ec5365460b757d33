"""Libraries of op.h on several torches.

    light.py build WHEELS       # prints their paths as JSON; WHEELS has those of NVRTC
    light.py run NAME PATH      # opens one with the torch of this interpreter, and calls it

There are three: for the CPU, and for CUDA by nvcc and by NVRTC. The last two are called although
there is no GPU: each kernel's launch must then fail with an error that says why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sample"))

from light.op import LightBuilder
from lightcuda.op import LightcudaBuilder

if TYPE_CHECKING:
    from opkiln.builder import OpBuilder

CPU, NVCC, NVRTC = "cpu", "cuda-nvcc", "cuda-nvrtc"
ARCHS = "9.0a"


def build(wheels: str) -> None:
    """Compile the libraries with the torch of this interpreter, and print where they are."""
    from opkiln.machine.toolchain import toolkits
    from opkiln.settings import override

    found = {CPU: _built(LightBuilder(), CPU)}
    with override(cuda_arch_list=ARCHS, cuda="nvcc"):
        found[NVCC] = _built(LightcudaBuilder(), NVCC)
    toolkits.site_directories = lambda: [wheels]
    with override(cuda_arch_list=ARCHS, cuda="nvrtc"):
        found[NVRTC] = _built(LightcudaBuilder(), NVRTC)
    print(json.dumps(found))


def _built(builder: OpBuilder, name: str) -> str:
    """Each in a store of its own: what nvcc built would also serve a request for NVRTC."""
    from opkiln.decision.terms import Request
    from opkiln.loading import loader
    from opkiln.settings import override, settings

    with override(cache_dir=f"{settings.cache_dir}/{name}"):
        return loader.obtain(Request(builder.op(), must_be_native=True))[0].path


def run(name: str, path: str) -> None:
    """Open a library and call its functions. Raises AssertionError."""
    import torch

    functions = _opened(LightBuilder() if name == CPU else LightcudaBuilder(), path)
    said = (run_on_cpu if name == CPU else launch_without_gpu)(functions)
    print(f"{name} on torch {torch.__version__}: {said}")


def _opened(builder: OpBuilder, path: str) -> Any:
    from opkiln.loading import register
    from opkiln.loading.native import open_artifact

    builder.FUNCTIONS.import_module()
    op = builder.op()
    assert op.registration is not None
    open_artifact(op.spec, path, op.registration)
    return register.Functions(op.spec.name, op.registration.namespace, op.registration.names)


def run_on_cpu(functions: Any) -> str:
    """Values of each type cross unchanged, and errors come back."""
    import torch

    x = torch.arange(5.0)
    assert torch.equal(functions.scaled_add(x, x, 2.0), 3 * x)
    lists = ([1], [2.5], [True], ["text"])
    assert functions.lists(x, *lists) == lists
    given = (None, 1.0, None, "text", [3])
    assert functions.optionals(x, *given) == given
    assert functions.twice(x, "ab") == "abab"
    assert torch.equal(functions.doubled(x.bfloat16()), 2 * x.bfloat16())
    assert torch.equal(functions.topk(x, 2)[0], x.topk(2)[0])
    for heard, said in (
        (_error_of(functions.scaled_add, x, x[:3], 1.0), "scaled_add: y has shape [3], x has [5]"),
        (_error_of(functions.refused_by_torch, x), "refused_by_torch: aten::mm failed: "),
        (_error_of(functions.fail_in_part, x, 3), "fail_in_part: the part with the number failed"),
    ):
        assert heard.startswith(said), heard
    return "all calls agree"


def launch_without_gpu(functions: Any) -> str:
    """The kernels are registered for CUDA alone. Called there with tensors of the CPU, they check
    them, allocate their results and launch, which no driver takes."""
    import torch

    assert not torch.cuda.is_available(), "this is for machines without a GPU"
    x = torch.ones(4)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for function, given in (("bias_gelu", (x, x)), ("clustered", (x,))):
        assert _error_of(getattr(functions, function), *given).startswith(
            f"Could not run 'lightcuda::{function}' with arguments from the 'CPU' backend"
        )
        overload = getattr(torch.ops.lightcuda, function).default
        heard = _error_of(overload.redispatch, keys, *given)
        assert heard.startswith(f"{function}: "), heard
        assert "CUDA" in heard, heard
    return f"it is opened and registered, and a call says {heard!r}"


def _error_of(call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    build(sys.argv[2]) if sys.argv[1] == "build" else run(sys.argv[2], sys.argv[3])
