"""Ops that are written with ``opkiln/op.h``: every type crosses, every misfit is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample import child

from opkiln.base.model import PACKAGE
from opkiln.builder.base import DeclaredFunctions
from opkiln.errors import LoadError, LoadTestError
from opkiln.loading import loader

if TYPE_CHECKING:
    from collections.abc import Callable

    from sample.package import Package

HEADERS = str(Path(PACKAGE, "csrc"))
SOURCE, ADD = "csrc/light.cpp", "csrc/scaled_add.cpp"
T = torch.ones(1)  # of functions that need no tensor

_built: list[Package] = []


@pytest.fixture
def light(package: Callable[..., Package]) -> Any:
    """The functions of the sample op, built once."""
    if not _built:
        _built.append(package("light"))
        _built[0].builder().jit_load()
    return loader.loaded_here()[_built[0].builder().op().name][0].value


def said_by(function: Any, *given: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        function(*given)
    return str(caught.value).splitlines()[0]


def test_numbers_lists_and_optionals_cross_unchanged(light: Any) -> None:
    assert light.numbers(T, -(2**62), 2.5, True) == (-(2**62), 2.5, True)
    assert light.numbers(T, 0, -0.0, False)[2] is False
    lists = ([1, -2], [0.5], [True, False], ["", "text"])
    assert light.lists(T, *lists) == lists
    assert light.lists(T, [], [], [], []) == ([], [], [], [])
    given = (3, 1.5, False, "x", [4, 5])
    assert light.optionals(T, *given) == given
    assert light.optionals(T, None, None, None, None, None) == (None,) * 5


def test_a_string_may_hold_any_text(light: Any) -> None:
    for text in ("", "a", "zero\0inside", "ümläut", "x" * 5000):
        assert light.twice(T, text) == text * 2


DTYPES = [
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "bool",
    "bfloat16",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "uint16",
    "uint32",
    "uint64",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_crosses_by_its_number(light: Any, name: str) -> None:
    dtype = getattr(torch, name)
    made = light.make(T, [2], dtype, torch.device("cpu"))
    assert made.dtype == dtype
    # torch gives a ScalarType that an op returns as its number
    assert light.describe(made)[3] == light.same_dtype(T, dtype)
    if dtype != torch.float32:
        assert said_by(light.check, made, made, "data").startswith(f"check: y has dtype {name}, ")


def test_devices_cross_with_their_index(light: Any) -> None:
    for device in ("cpu", "cuda:1", "meta", "xpu:3", "mps"):
        assert light.same_device(T, torch.device(device)) == torch.device(device)


def test_a_tensors_properties_are_torchs(light: Any) -> None:
    for x in (torch.ones(3, 4).t()[1:], torch.tensor(1), torch.ones(0, 2, dtype=torch.int8)):
        found = light.describe(x)
        assert found == (
            list(x.shape), list(x.stride()), x.storage_offset(), light.same_dtype(T, x.dtype),
            x.device, x.is_contiguous(),
        )  # fmt: skip


def test_tensors_that_are_written_are_the_callers(light: Any) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.arange(5, dtype=dtype)
        light.scale_(x, 2.0)
        assert torch.equal(x, torch.arange(5, dtype=dtype) * 2)
    xs = [torch.ones(2), torch.ones(0), torch.ones(3)]
    light.scale_each_(xs, 3.0)
    assert torch.equal(torch.cat(xs), torch.full((5,), 3.0))
    x = torch.zeros(2)
    assert light.maybe_fill_(T, x, 7.0) is True
    assert x.tolist() == [7, 7]
    assert light.maybe_fill_(T, None, 7.0) is False


def test_a_write_counts_up_the_version(light: Any) -> None:
    x = torch.ones(2)
    before = x._version
    light.scale_(x, 2.0)
    assert x._version > before


def test_tensors_and_lists_of_them_are_returned(light: Any) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    whole, rows = light.split(x)
    assert whole.shape == x.shape
    assert [row.tolist() for row in rows] == x.tolist()
    assert torch.equal(light.sum_all([x, x], torch.tensor([1.0])), 2 * x + 1)
    assert torch.equal(light.sum_all([x]), x)
    made = light.make(T, [2, 0, 3], torch.int16, torch.device("cpu"))
    assert (made.shape, made.dtype, made.is_contiguous()) == ((2, 0, 3), torch.int16, True)


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 3, 4),
        torch.ones(3, 4).t(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(4, 6)[:, ::2],
        torch.ones(1, 3).expand(4, 3),
        torch.ones(0, 3).t(),
        torch.tensor(1.0),
        torch.ones(3, dtype=torch.complex64),
    ],
)
def test_empty_like_has_the_strides_that_torch_chooses(light: Any, x: torch.Tensor) -> None:
    found, expected = light.like(x), torch.empty_like(x)
    assert (found.shape, found.stride(), found.dtype) == (
        expected.shape, expected.stride(), expected.dtype,
    )  # fmt: skip
    assert torch.equal(light.dense(x), x)
    assert light.dense(x).is_contiguous()


def test_dispatch_runs_the_code_of_each_dtype(light: Any) -> None:
    kinds = (torch.float, torch.double, torch.half, torch.bfloat16, torch.int, torch.long)
    for dtype in (*kinds, torch.uint8):
        x = torch.arange(-6, 6).to(dtype).reshape(3, 4).t()
        assert torch.equal(light.doubled(x), x * 2)
    expected = "float32, float64, float16, bfloat16, int32, int64 or uint8"
    said = said_by(light.doubled, torch.ones(2, dtype=torch.bool))
    assert said == f"doubled: a tensor has dtype bool, expected {expected}"


def test_16_bit_floats_round_as_torchs_do(light: Any) -> None:
    """All bit patterns, doubled in float and rounded back: infinities, subnormals, ties."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        scaled = {by: x.float() * by for by in (2.0, 0.50048828125, 3.0e-3)}
        for by, expected in scaled.items():
            y = x.clone()
            light.scale_(y, by)
            assert torch.equal(y.isnan(), x.isnan())
            there = ~x.isnan()
            assert torch.equal(y[there], (x[there].double() * by).to(torch.float).to(dtype))
            assert expected.shape == y.shape


def test_parallel_for_covers_the_range_once(light: Any) -> None:
    for size in (0, 1, 1023, 1025, 100_000):
        x, y = torch.randn(size), torch.randn(size)
        assert torch.allclose(light.scaled_add(x, y, 0.5), x + 0.5 * y)
    assert light.threads(T) == torch.get_num_threads()


def test_an_exception_in_a_part_is_raised_outside_with_its_text(light: Any) -> None:
    for at in (0, 500, 999):
        said = said_by(light.fail_in_part, T, at)
        assert said == "fail_in_part: the part with the number failed"
    light.fail_in_part(T, 1000)  # no part has it


def test_torchs_ops_are_called_by_name(light: Any) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(light.through_torch(x, 1), x.relu().sum(1, keepdim=True))
    for ours, theirs in zip(light.topk(x, 2), x.topk(2), strict=True):
        assert torch.equal(ours, theirs)


def test_an_error_of_torch_is_raised_with_its_text(light: Any) -> None:
    said = said_by(light.refused_by_torch, torch.ones(2))
    assert said.startswith("refused_by_torch: aten::mm failed: ")
    assert "self must be a matrix" in said or "stderr" in said  # before 2.13 there is no text


X, Y = torch.ones(4), torch.ones(3, 2, dtype=torch.float64).t()
SAID = {
    "shape": "y has shape [2, 3], x has [4]",
    "dtype": "y has dtype float64, x has float32",
    "contiguous": "y is not contiguous: its shape is [2, 3], its strides are [1, 2]",
    "dim": "y has shape [2, 3], expected 3 dimensions",
    "exact": "y has shape [2, 3], expected [2, -1]",
    "data": "y has dtype float64, expected float32",
    "size": "y has shape [2, 3], so it has no dimension 7",
    "device": "a tensor is on meta, x is on cpu",
    "dispatch": "y has dtype float64, expected float32 or float16",
    "parts": "x 1 2.5 true float32 cpu [4]",
    "none": "an optional has no value: it is None",
    "item": "a list has 2 items, so it has no item 2",
    "undefined": "a tensor is not defined",
    "negative": "empty: the shape [2, -3] has a negative size",
}


@pytest.mark.parametrize("what", SAID)
def test_a_message_names_the_op_and_the_argument(light: Any, what: str) -> None:
    assert said_by(light.check, X, Y, what) == f"check: {SAID[what]}"


def test_messages_name_items_and_conditions_and_end(light: Any) -> None:
    said = said_by(light.item_check, [torch.ones(2), torch.ones(2), torch.ones(3)])
    assert said == "item_check: xs[2] has shape [3], xs[0] has [2]"
    assert said_by(light.unmet, T, 0) == "unmet: expected k > 0"
    assert said_by(light.standard_error, T) == "a standard error"
    assert said_by(light.check, X, Y, "long").endswith(", ...] and more")


def test_a_cpu_torch_has_no_stream(light: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a stream")
    assert "built for the CPU only" in said_by(light.stream, T)


def uses(tensor: torch.Tensor) -> int:
    """How many tensors share the memory of this one."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def test_a_call_keeps_no_tensor(light: Any) -> None:
    """Arguments, results and what an error leaves behind are freed."""
    x, y = torch.ones(3), torch.ones(4)
    before = uses(x)
    outs = [light.scaled_add(x, x, 1.0), light.sum_all([x, x], x), *light.split(x.reshape(1, 3))[1]]
    said_by(light.scaled_add, x, y, 1.0)
    said_by(light.item_check, [x, y])
    light.scale_each_([x, y], 1.0)
    light.maybe_fill_(T, x, 1.0)
    assert [uses(each) for each in (x, y, *outs)] == [before] * 5


WRONG = {
    "int in place of Tensor": (
        "Tensor scaled_add(const Tensor& x, const Tensor& y, double scale) {",
        "Tensor scaled_add(const Tensor& x, int64_t, double scale) {\n  const Tensor& y = x;",
        "y is Tensor in the schema, int in C++",
    ),
    "int64_t in place of double": (
        "Tensor scaled_add(const Tensor& x, const Tensor& y, double scale) {",
        "Tensor scaled_add(const Tensor& x, const Tensor& y, int64_t scale) {",
        "scale is float in the schema, int in C++",
    ),
    "a tensor that is only read": (
        "void scale_(Tensor& x, double by) {",
        "void scale_(const Tensor& given, double by) {\n  Tensor x = given;",
        "x is Tensor(!) in the schema, Tensor in C++",
    ),
    "too few arguments": (
        "bool maybe_fill_(const Tensor&, optional<Tensor>& x, double value) {",
        "bool maybe_fill_(const Tensor&, optional<Tensor>& x) {\n  double value = 1;",
        "the schema has 3 arguments, the C++ function has 2 arguments",
    ),
    "another result": (
        "int64_t who(const Tensor&) {",
        "double who(const Tensor&) {",
        "the result is int in the schema, float in C++",
    ),
}


def small(made: Package, *names: str) -> None:
    """Leave only these functions in a copy of the sample: it compiles in a second."""
    functions = made / "functions.py"
    head, *each = functions.read_text().split("\n\n\n")
    kept = [text for text in each if any(f"def {name}(" in text for name in names)]
    functions.write_text("\n\n\n".join([head, *kept]))
    module = made / "op.py"
    text = module.read_text()
    sources = [ADD if names == ("scaled_add",) else SOURCE]
    everything = f'["{SOURCE}", "csrc/more.cpp", "{ADD}"]'
    assert everything in text
    module.write_text(text.replace(everything, repr(sources)))
    source = made / SOURCE
    kept = []
    for line in source.read_text().splitlines():
        if not line.startswith("OPKILN_OP(") or line.startswith(
            tuple(f"OPKILN_OP({name}," for name in names)
        ):
            kept.append(line)
    source.write_text("\n".join(kept))


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_signature_is_an_error_of_the_build(
    package: Callable[..., Package], mistake: str
) -> None:
    before, after, said = WRONG[mistake]
    made = package("light")
    name = next(n for n in ("scaled_add", "scale_", "maybe_fill_", "who") if f" {n}(" in after)
    small(made, name)
    made.edit(ADD if name == "scaled_add" else SOURCE, before, after)
    if name == "scale_":
        made.edit(SOURCE, "for (Tensor& x : xs) scale_(x, by);", "")
    with pytest.raises(LoadTestError) as caught:
        made.builder().jit_load()
    error = caught.value
    assert error.what == f"op light: the C++ function {name} does not fit its schema"
    assert said in error.why
    assert "schema: (" in error.why
    assert "C++:    (" in error.why
    assert f" {name}(" in error.hint  # the C++ declaration that fits


def test_a_schema_that_changes_later_is_compared_when_the_library_is_opened(
    package: Callable[..., Package],
) -> None:
    made = package("light")
    small(made, "who")
    made.builder().load()
    code = """
        import sys
        from importlib import import_module
        from opkiln.errors import OpkilnError
        from pathlib import Path
        builder = import_module(sys.argv[1] + ".op").LightBuilder
        functions = Path(sys.modules[builder.__module__].__file__).with_name("functions.py")
        functions.write_text(functions.read_text().replace("(t: Tensor)", "(t: Tensor, k: int)"))
        try:
            builder().jit_load()
        except OpkilnError as error:
            print(error)
    """
    said = child.run(code, made.name, path=[made.where], bare=False)
    assert "the C++ function who does not fit its schema" in said
    assert "the schema has 2 arguments, the C++ function has 1 argument" in said
    assert "hint: int64_t who(const Tensor& t, int64_t k)" in said


def test_a_function_that_is_missing_or_for_another_device_is_refused(
    package: Callable[..., Package],
) -> None:
    made = package("light")
    small(made, "who", "scale_")
    made.edit(SOURCE, "OPKILN_OP(scale_, cpu);", "OPKILN_OP(scale_, xpu);")
    with pytest.raises(LoadTestError) as caught:
        made.builder().jit_load()
    assert caught.value.what == "op light: its library has no cpu function scale_"
    assert "who for cpu" in caught.value.why
    assert "scale_ for xpu" in caught.value.why
    assert caught.value.hint.startswith("OPKILN_OP(scale_, cpu);")


def test_a_function_that_no_schema_declares_is_refused(package: Callable[..., Package]) -> None:
    made = package("light")
    small(made, "who")
    made.edit(SOURCE, "OPKILN_OP(who, cpu);", "OPKILN_OP(who, cpu);\nOPKILN_OP(like, cpu);")
    with pytest.raises(LoadTestError, match="has like, which no schema declares"):
        made.builder().jit_load()


def test_functions_without_schemas_are_refused(package: Callable[..., Package]) -> None:
    made = package("light")
    small(made, "who")
    with pytest.raises(LoadTestError, match="declares no schemas") as caught:
        made.builder(FUNCTIONS=DeclaredFunctions()).jit_load()
    assert "@kit.op()" in caught.value.hint


@pytest.mark.filterwarnings("error")
def test_an_edit_replaces_the_old_version_and_its_undoing_brings_it_back(
    package: Callable[..., Package],
) -> None:
    """The old kernel is unregistered first, so torch has no overridden kernel to warn of."""
    made = package("light")
    small(made, "who", "scale_")
    assert made.load().who(T) == 1
    made.edit(SOURCE, "kWho = 1", "kWho = 2")
    functions = made.load()
    assert functions.who(T) == 2
    made.edit(SOURCE, "kWho = 2", "kWho = 1")
    assert made.load().who(T) == 1
    assert functions.who(T) == 1


def test_a_version_that_does_not_fit_leaves_the_old_one_in_place(
    package: Callable[..., Package],
) -> None:
    made = package("light")
    small(made, "who")
    functions = made.load()
    made.edit(SOURCE, "int64_t who(const Tensor&) {", "bool who(const Tensor&) {")
    with pytest.raises(LoadTestError):
        made.load()
    assert functions.who(T) == 1


def test_two_ops_with_the_same_bytes_keep_to_themselves(package: Callable[..., Package]) -> None:
    one, other = package("light"), package("light")
    for made in (one, other):
        small(made, "who")
    assert one.load().who(T) == 1
    assert other.load().who(T) == 1
    other.edit(SOURCE, "kWho = 1", "kWho = 3")
    assert other.load().who(T) == 3
    assert one.load().who(T) == 1


def test_a_library_of_another_op_h_is_refused(package: Callable[..., Package]) -> None:
    from opkiln.loading import native as opening
    from opkiln.loading.native import open_artifact

    made = package("light")
    small(made, "who")
    made.load()
    path = made.loaded().artifact.path  # type: ignore[union-attr]
    before = opening.ABI
    opening.ABI = before + 1
    try:
        with pytest.raises(LoadError, match=r"op\.h of another opkiln"):
            open_artifact(made.builder().spec(), path)
    finally:
        opening.ABI = before
    assert made.load().who(T) == 1


REFUSED = {
    "int f(const Tensor&) { return 1; }": "not a type that an op can take or return",
    "void f(const Tensor&, float) {}": "not a type that an op can take or return",
    "void f(Tensor) {}": "tensors are taken by reference",
    "void f(opk::optional<Tensor>) {}": "tensors are taken by reference",
    "void f(opk::List<Tensor>) {}": "tensors are taken by reference",
    "void f(const Tensor&, int64_t& k) {}": "only tensors can be written",
    "void f(const Tensor& x) { x.data<float>(); }": "this tensor is only read",
    "void f(const Tensor& x) { x.data<const long double>(); }": "no dtype has this C++ type",
}


@pytest.mark.parametrize("code", REFUSED)
def test_code_that_cannot_be_an_op_does_not_compile(tmp_path: Path, code: str) -> None:
    done = compiled(tmp_path, f"using opk::Tensor;\n{code}\nOPKILN_OP(f, cpu);\n")
    assert done.returncode != 0
    assert REFUSED[code] in done.stderr


def test_a_device_that_opkiln_does_not_know_does_not_compile(tmp_path: Path) -> None:
    done = compiled(tmp_path, "void f(const opk::Tensor&) {}\nOPKILN_OP(f, meta);\n")
    assert "an op is for cpu, cuda or xpu" in done.stderr


@pytest.mark.parametrize(
    ("compiler", "standard"),
    [
        ("g++", "c++17"),
        ("clang++", "c++20"),
        pytest.param("g++", "c++20", marks=pytest.mark.full),
        pytest.param("clang++", "c++17", marks=pytest.mark.full),
    ],
)
def test_the_header_compiles_without_warnings(tmp_path: Path, compiler: str, standard: str) -> None:
    import shutil

    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    strict = ("-Wall", "-Wextra", "-Wshadow", "-Werror", "-fvisibility=hidden", f"-std={standard}")
    source = (Path(__file__).parents[1] / "sample" / "light" / "csrc" / "more.cpp").parent
    done = compiled(tmp_path, '#include "light.cpp"\n', *strict, f"-I{source}", compiler=compiler)
    assert done.returncode == 0, done.stderr


def compiled(
    tmp_path: Path, code: str, *flags: str, compiler: str = "g++"
) -> subprocess.CompletedProcess[str]:
    source = tmp_path / "op.cpp"
    source.write_text(f"#include <opkiln/op.h>\n{code}")
    command = [compiler, "-std=c++20", "-fPIC", f"-I{HEADERS}", *flags, "-c", str(source)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "op.o")], capture_output=True, text=True, check=False
    )
    assert sys.platform == "linux"
    return done
