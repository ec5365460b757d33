"""A decorated op (examples/cuda_op) on a GPU: one line per check. Needs torch and nvcc, no pytest.

    PYTHONPATH=src python tests/gpu/decorated.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from checks import main, refusal

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "cuda_op"))

from cuda_op import bias_gelu

SIZES = (0, 1, 2, 3, 7, 17, 64, 127, 128, 129, 1000, 4099)


def inputs(rows: int, columns: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, columns, device="cuda"), torch.randn(columns, device="cuda")


def check_the_first_call_builds_it() -> str:
    began = time.perf_counter()
    x, bias = inputs(4)
    bias_gelu(x, bias)
    torch.cuda.synchronize()
    assert bias_gelu.load("cuda"), bias_gelu.explain("cuda")
    return f"{time.perf_counter() - began:.2f} s"


def check_values_and_strides_are_the_references() -> None:
    for rows in SIZES:
        for columns in (1, 8, 1000):
            bias_gelu.check(*inputs(rows, columns))


def check_gradients_are_the_references() -> None:
    x, bias = (each.requires_grad_() for each in inputs(33))
    got = torch.autograd.grad(bias_gelu(x, bias).square().sum(), (x, bias))
    expected = torch.autograd.grad(bias_gelu.reference(x, bias).square().sum(), (x, bias))
    torch.testing.assert_close(got, expected)


def check_torch_accepts_it_and_compiles_it() -> None:
    x, bias = inputs(5)
    torch.library.opcheck(bias_gelu.overload, (x, bias))
    torch.library.opcheck(bias_gelu.overload, (x.requires_grad_(), bias))
    compiled = torch.compile(bias_gelu, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, bias), bias_gelu.reference(x, bias))


def check_side_streams_and_graphs() -> None:
    x, bias = inputs(4099)
    expected = bias_gelu.reference(x, bias)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x.mul_(1)
        got = bias_gelu(x, bias)
    stream.synchronize()
    torch.testing.assert_close(got, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = bias_gelu(x, bias)
    x.neg_()
    graph.replay()
    torch.testing.assert_close(got, bias_gelu.reference(x, bias))


def check_errors_name_the_argument() -> str:
    x, bias = inputs(4)
    text = refusal(lambda: bias_gelu(x.double(), bias))
    assert "bias_gelu: x has dtype float64" in text, text
    text = refusal(lambda: bias_gelu(x.t(), bias))
    assert "x is not contiguous" in text, text
    return text.splitlines()[0]


def check_cpu_tensors_have_a_library_of_their_own() -> None:
    x, bias = (each.cpu() for each in inputs(7))
    bias_gelu.check(x, bias)


def check_the_call_costs_little() -> str:
    x, bias = inputs(1, 8)

    def per_call(function: object, count: int = 20_000) -> float:
        best = 1e9
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count // 5):
                function(x, bias)  # type: ignore[operator]
            best = min(best, (time.perf_counter() - began) / (count // 5))
        return best * 1e6

    no_grad = torch.ops.cuda_op.bias_gelu.no_grad
    times = {
        "bias_gelu": per_call(bias_gelu),
        "no_grad overload": per_call(no_grad),
        "default overload": per_call(bias_gelu.overload),
        "x + x": per_call(torch.add),
    }
    return ", ".join(f"{name} {value:.2f} us" for name, value in times.items())


if __name__ == "__main__":
    sys.exit(main([value for name, value in list(globals().items()) if name.startswith("check_")],
                  __doc__))  # fmt: skip
