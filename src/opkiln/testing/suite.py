"""A suite of tests for an op that ``@opkiln.op`` declares.

    from opkiln.testing import op_tests
    from my_package import bias_gelu

    def samples(make, size):
        return make(size, 8), make(8)

    TestBiasGelu = op_tests(bias_gelu, samples)

pytest collects the class. Every test compares the native version with the reference: values,
dtypes, shapes and strides of the results, what is written to the arguments, and whether results
share memory with them. A device is tested if it is here and the op has sources for it.

Both must also accept the same arguments, or the op would depend on whether there is a compiler.
What a kernel leaves to the reference (``OPK_SERVED``, ``OPK_DISPATCH``) counts as accepted.

With ``OPKILN_MODE=reference`` nothing is compiled: what torch was told of the op (its schema,
gradient and shapes) is tested with the reference.
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from opkiln.builder.base import backend_of
from opkiln.builder.checking import Comparison, copy_tensors, written_arguments
from opkiln.builder.variants import tensors
from opkiln.decision import terms
from opkiln.errors import DifferenceError, FallbackWarning
from opkiln.settings import override, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Samples = Callable[..., Sequence[Any]]


# Nothing, one, primes, powers of two and their neighbours, more than one block of threads.
SIZES = (0, 1, 2, 3, 7, 17, 64, 127, 128, 129, 1000, 4099)
_SOME = 17  # where one size is enough
# Users may call an op with any of these dtypes, whatever it is written for.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)


class Make:
    """Makes the tensors of a sample: ``make(4, 8)``, ``make.integers(5, 0, 10)``."""

    def __init__(
        self, device: str, dtype: torch.dtype, *, strided: bool = False, seed: int = 0
    ) -> None:
        self.device, self.dtype, self.strided = device, dtype, strided
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers of both signs, none of them zero."""
        numbers = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        numbers = numbers + 0.1 * numbers.sign()
        return self._place(numbers.to(dtype or self.dtype))

    def integers(
        self, shape: int | Sequence[int], low: int, high: int, *, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Random whole numbers from ``low`` to below ``high``."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        drawn = torch.randint(low, high, sizes, generator=self._generator)
        return self._place(drawn.to(dtype))

    def _place(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device)
        if not self.strided or tensor.dim() == 0:
            return tensor
        # Every other element of a larger tensor, whose other elements are wrong on purpose.
        shape = (*tensor.shape[:-1], tensor.shape[-1] * 2)
        room = torch.full(shape, 3, dtype=torch.uint8, device=self.device).to(tensor.dtype)
        room[..., ::2] = tensor
        return room[..., ::2]


def op_tests(
    op: Any,
    samples: Samples,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    sizes: Sequence[int] = SIZES,
    devices: Sequence[str] | None = None,
) -> type:
    """A class of tests for pytest.

    ``samples(make)`` or ``samples(make, size)`` returns the arguments of one call; ``make`` makes
    its tensors. With ``size`` it is asked for each of ``sizes``, also 0. ``dtypes`` are those that
    the op has kernels for; with others it must do what the reference does. ``devices`` are by
    default those that are here and have sources.
    """
    sized = len(inspect.signature(samples).parameters) > 1
    places = list(devices) if devices is not None else _devices(op)
    sizes = tuple(sizes) if sized else (0,)
    some = _SOME if not sized or _SOME in sizes else sizes[-1]

    def given(device: str, dtype: torch.dtype, size: int, *, strided: bool = False) -> list[Any]:
        make = Make(device, dtype, strided=strided, seed=size)
        return list(samples(make, size) if sized else samples(make))

    on_device = pytest.mark.parametrize("device", places)
    with_dtype = pytest.mark.parametrize("dtype", dtypes, ids=_name)
    with_size = pytest.mark.parametrize("size", sizes)
    written = written_arguments(op.overload._schema)
    names = [argument.name for argument in op.overload._schema.arguments]

    def named(args: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(names, args, strict=False))

    def check(args: list[Any]) -> None:
        if settings.mode == terms.REFERENCE:
            Comparison(op.__name__, op.reference)(op.overload, tuple(args), {})
        else:
            op.check(*args)

    def check_accepted(args: list[Any]) -> None:
        """Compare a call as users make it. The kernel may leave it to the reference."""
        refused = _error_of(op.reference, args)
        # With OPKILN_MODE=native, a call that is left to the reference would be an error.
        native = settings.mode == terms.NATIVE
        with override(mode=terms.AUTO if native else settings.mode), warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            error = _error_of(op.overload, args)
            if error is None and refused is None:
                Comparison(op.__name__, op.reference)(op.overload, tuple(args), {})
        if (error is None) != (refused is None):
            both = ("native", "the reference")
            who, other = both if refused is None else both[::-1]
            text = str(error or refused).partition("\n")[0]
            raise DifferenceError(
                f"op {op.__name__}: {who} refuses arguments that {other} accepts",
                why=f"{who}: {text}\nso the op depends on whether there is a compiler",
                hint="OPK_SERVED(condition, ...) or OPK_DISPATCH in the kernel, and the reference "
                "runs; or accept the same in both",
            )

    class Suite:
        """Native against reference."""

        @on_device
        def test_a_native_version_is_built_and_loaded(self, device: str) -> None:
            if settings.mode == terms.REFERENCE:
                pytest.skip("OPKILN_MODE=reference: the reference runs")
            # Raises the error of the compiler or the loader. The other tests use what it builds.
            for builder in op.builder.variants() or (op.builder,):
                builder(backend=backend_of(builder, device)).jit_load()
            assert op.load(device), str(op.explain(device))

        @on_device
        @with_dtype
        @with_size
        def test_native_gives_what_the_reference_gives(
            self, device: str, dtype: torch.dtype, size: int
        ) -> None:
            check(given(device, dtype, size))

        @on_device
        @with_dtype
        def test_tensors_that_are_not_contiguous_are_read_as_they_are(
            self, device: str, dtype: torch.dtype
        ) -> None:
            check_accepted(given(device, dtype, some, strided=True))

        @on_device
        @pytest.mark.parametrize("dtype", [d for d in _DTYPES if d not in dtypes], ids=_name)
        def test_other_dtypes_give_what_the_reference_gives(
            self, device: str, dtype: torch.dtype
        ) -> None:
            try:
                args = given(device, dtype, some)
            except Exception as error:
                pytest.skip(f"the samples cannot be made so: {error}")
            check_accepted(args)

        @on_device
        @with_dtype
        def test_gradients_are_those_of_the_reference(
            self, device: str, dtype: torch.dtype
        ) -> None:
            if written:
                pytest.skip("it writes to its arguments, so it has no gradient")
            args = given(device, dtype, some)
            mine, theirs = _gradients(op, args), _gradients(op.reference, args)
            if mine is None or theirs is None:
                pytest.skip("none of its arguments and results has a gradient")
            compare = Comparison(f"{op.__name__}, gradient", op.reference)
            compare.results(mine, theirs, named(args))

        @on_device
        def test_torch_accepts_its_registration(self, device: str) -> None:
            args = given(device, dtypes[0], some)
            torch.library.opcheck(op.overload, tuple(args))
            if not written:
                torch.library.opcheck(op.overload, tuple(_require_grad(args)))

        @on_device
        def test_compiled_it_gives_the_same(self, device: str) -> None:
            args = given(device, dtypes[0], some)
            compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
            ours, theirs = copy_tensors(args), copy_tensors(args)
            got: Any = compiled(*ours)  # type: ignore[no-untyped-call]
            expected = op(*theirs)
            compare = Comparison(f"{op.__name__}, compiled", op.reference)
            compare.results(got, expected, named(args))
            compare.results(ours, theirs, named(args))

        @on_device
        def test_captured_in_a_graph_it_gives_the_same(self, device: str) -> None:
            if device != "cuda":
                pytest.skip("graphs are CUDA's")
            args = given(device, dtypes[0], some)
            expected = op(*copy_tensors(args))
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                op(*copy_tensors(args))
            stream.synchronize()
            replayed = copy_tensors(args)
            with torch.cuda.graph(graph):
                got = op(*replayed)
            for one, other in zip(tensors(replayed, {}), tensors(args, {}), strict=True):
                one.copy_(other)
            graph.replay()
            torch.cuda.synchronize()
            Comparison(f"{op.__name__}, graph", op.reference).results(got, expected, named(args))

    title = "".join(part.capitalize() for part in op.__name__.split("_"))
    Suite.__name__ = Suite.__qualname__ = f"Test{title}"
    return Suite


def _devices(op: Any) -> list[str]:
    backends = op.builder.BACKENDS
    found = ["cpu"] if "cpu" in backends else []
    if torch.cuda.is_available() and {"cuda", "rocm"} & set(backends):
        found.append("cuda")
    return found


def _require_grad(args: Sequence[Any]) -> list[Any]:
    def wanted(value: Any) -> Any:
        if isinstance(value, Tensor):
            fits = value.dtype.is_floating_point or value.dtype.is_complex
            return value.detach().clone().requires_grad_(fits)
        return [wanted(each) for each in value] if isinstance(value, (list, tuple)) else value

    return [wanted(each) for each in args]


def _gradients(function: Callable[..., Any], args: Sequence[Any]) -> list[Tensor] | None:
    """The gradients of all inputs, for a fixed gradient of the results."""
    given = _require_grad(args)
    inputs = [each for each in tensors(given, {}) if each.requires_grad]
    results = [each for each in tensors([function(*given)], {}) if each.requires_grad]
    if not inputs or not results:
        return None
    grads = [_ramp(each) for each in results]
    found = torch.autograd.grad(results, inputs, grads, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs, strict=True)]


def _error_of(function: Callable[..., Any], args: Sequence[Any]) -> Exception | None:
    """The error of a call with copies of these arguments; None if it succeeds."""
    try:
        function(*copy_tensors(args))
    except Exception as error:
        return error
    return None


def _ramp(tensor: Tensor) -> Tensor:
    """Numbers that differ from element to element, so that no two gradients cancel."""
    steps = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float64)
    return (torch.sin(steps * math.sqrt(2)) + 1.5).to(tensor.dtype).view(tensor.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
