"""scaled_add against its reference, on every device that is here."""

import pytest
import torch

from demo_ops import scaled_add
from demo_ops.ops.scaled_add import reference
from demo_ops.ops.scaled_add.op import ScaledAddBuilder


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return request.param


def _inputs(device, *shape):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    return x.requires_grad_(), y.requires_grad_()


def test_native_code_serves_the_op(device):
    builder = ScaledAddBuilder(backend="cpu" if device == "cpu" else None)
    builder.jit_load()  # native, or an error that says why not
    assert builder.backend != "cpu" or device == "cpu"


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 1000), (2, 3, 33333)])
def test_the_op_computes_what_its_reference_does(device, shape):
    x, y = _inputs(device, *shape)
    torch.testing.assert_close(scaled_add(x, y, 0.3), reference.scaled_add(x, y, 0.3))


def test_the_gradient_is_the_references(device):
    x, y = _inputs(device, 1000)
    weights = torch.linspace(-1, 1, 1000, device=device)
    found = torch.autograd.grad((scaled_add(x, y, 0.3) * weights).sum(), (x, y))
    expected = torch.autograd.grad((reference.scaled_add(x, y, 0.3) * weights).sum(), (x, y))
    torch.testing.assert_close(found, expected)


def test_the_op_is_registered_as_torch_wants_it(device):
    x, y = _inputs(device, 7)
    scaled_add(x, y, 0.3)  # loads it
    torch.library.opcheck(torch.ops.demo_ops.scaled_add.default, (x, y, 0.3))


def test_a_whole_graph_compiles_with_the_op_in_it(device):
    x, y = _inputs(device, 100)
    expected = scaled_add(x, y, 0.3) * 2

    def doubled(x, y):
        return scaled_add(x, y, 0.3) * 2

    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y), expected)


@pytest.mark.parametrize(
    ("y", "message"),
    [(torch.ones(3), "one shape"), (torch.ones(2, dtype=torch.float64), "float32")],
)
def test_arguments_that_do_not_fit_are_refused(device, y, message):
    with pytest.raises(RuntimeError, match=message):
        scaled_add(torch.ones(2, device=device), y.to(device), 0.3)
