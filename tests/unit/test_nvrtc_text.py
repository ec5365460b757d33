"""A CUDA source is divided for the host compiler and for NVRTC."""

from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opkiln.machine.binary import fatbin
from opkiln.machine.binary.source import ByteSource as Bytes
from opkiln.machine.nvrtc import container, names
from opkiln.machine.nvrtc.cut import CannotCut, HostPart, Source, device_text
from opkiln.machine.nvrtc.tokens import divide

_UNNAMED = "unnamed_of_this_source"


def host(text: str) -> str:
    """The host's part, on one line without the blanks that do not matter."""
    return re.sub(r"\s+", " ", HostPart(text, _UNNAMED).text).strip().replace(" ;", ";")


def device(text: str, on_device: frozenset[str] = frozenset()) -> str:
    return re.sub(r"\s+", " ", device_text(text, on_device)).strip()


@given(
    st.lists(
        st.sampled_from(
            ["{", "}", "(", ")", '"a}\\"{"', "'{'", "'\\''", 'R"(})")"', 'R"x(}")x)x"', "// }\n",
             "/* { */", "#define X {\\\n }\n", "1'000", "name", " ", "\n", "\\\n", "::", "<<<",
             ">>>", "'", '"', "#", "\x00", "\u00e9", "u8R", "\\"]
        )
    ).map("".join)
)  # fmt: skip
def test_tokens_joined_are_the_text_again(text: str) -> None:
    assert "".join(token.text for token in divide(text)) == text
    ends = [token.end for token in divide(text)]
    assert [token.start for token in divide(text)] == [0, *ends][: len(ends)]


# Text that hides braces, and where it may stand in the body of a function.
_TRAPS = ['"}"', "'}'", 'R"(})"', 'R"d(})x")d"', "/* } */", "// }\n", "\n#pragma unroll\n", "{ }",
          "if (a < b) { c(); }", "[=](int i) { return i; }", "1'000"]  # fmt: skip


@given(st.lists(st.sampled_from(_TRAPS), max_size=6), st.sampled_from(["__global__", "__device__"]))
def test_a_body_ends_where_its_brace_closes_whatever_it_holds(body: list[str], word: str) -> None:
    text = f"{word} void f(int a) {{ {' '.join(body)} }} int after;"
    assert host(text).endswith("void f(int a); int after;")
    source = Source(text)
    (function,) = source.functions
    assert text[source.significant[function.last].end :] == " int after;"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__global__ void k(int* x) { *x = 1; }", "void k(int* x);"),
        ("static __global__ void k() {}", "void k();"),
        ("static inline __device__ int f() { return 1; }", "int f();"),
        ("__forceinline__ __device__ int f() { return 1; }", "int f();"),
        ("template <class T, int N = (1 > 0)> __global__ void k(T x) {}",
         "template <class T, int N = (1 > 0)> void k(T x);"),
        ("template <> __global__ void k<float>(float x) {}", "template <> void k<float>(float x);"),
        ("__global__ void __launch_bounds__(256, 2) k() {}", "void k();"),
        ("__global__ __cluster_dims__(2, 1, 1) void k(const __grid_constant__ P p) {}",
         "void k(const P p);"),
        ("extern \"C\" __global__ void k() {}", 'extern "C" void k();'),
        ("extern \"C\" { __global__ void k() {} int g() { return 1; } }",
         'extern "C" { void k(); int g() { return 1; } }'),
        ("namespace a::b { __device__ float f(float x) { return x; } }",
         "namespace a::b { float f(float x); }"),
        ("__host__ __device__ int f(int x) { return x; }", "int f(int x) { return x; }"),
        ("struct S { __device__ S(int a) : x{a}, y(a) {} int x, y; };",
         "struct S { S(int a); int x, y; };"),
        ("struct S { static __device__ int f() { return 1; } };", "struct S { static int f(); };"),
        ("struct S { __device__ int operator()(int i) const { return i; } };",
         "struct S { int operator()(int i) const; };"),
        ("template <class T> struct S : B<T> { __device__ operator float() const { return 1; } };",
         "template <class T> struct S : B<T> { operator float() const; };"),
        ("__device__ auto f(int x) -> decltype(x + 1) { return x; }",
         "auto f(int x) -> decltype(x + 1);"),
        ("template <class T> requires (sizeof(T) > 2) __global__ void k(T x) {}",
         "template <class T> requires (sizeof(T) > 2) void k(T x);"),
        ("template <class T> requires Small<T> && Flat<T> __global__ void k(T x) {}",
         "template <class T> requires Small<T> && Flat<T> void k(T x);"),
        ("__constant__ float table[2] = {1, 2};",
         "static __attribute__((__unused__)) float table[2] = {1, 2};"),
        ("extern __shared__ float memory[];", "extern float memory[];"),
        ("enum class M : int { A, B }; __device__ M m() { return M::A; }",
         "enum class M : int { A, B }; M m();"),
        ("struct __attribute__((aligned(16))) V { float x; };",
         "struct __attribute__((aligned(16))) V { float x; };"),
        ("int x = f([] { return 1; }); int y{3}; auto z = a<b>(2);",
         "int x = f([] { return 1; }); int y{3}; auto z = a<b>(2);"),
        ("__attribute__((__noinline__)) __device__ int f() { return 1; }",
         "__attribute__((__noinline__)) int f();"),
        ("__noinline__ int f() { return 1; }", "int f() { return 1; }"),
        ("bool operator<<(A a, B b) { return a.x << 3; }",
         "bool operator<<(A a, B b) { return a.x << 3; }"),
    ],
)  # fmt: skip
def test_the_host_gets_device_functions_without_their_bodies(text: str, expected: str) -> None:
    assert host(text) == expected


def test_unnamed_namespaces_get_a_name_if_one_has_a_kernel() -> None:
    plain = "namespace { int f() { return 1; } }"
    assert host(plain) == plain
    found = host("namespace { int f(); } namespace { __global__ void k() {} }")
    attribute = '__attribute__((__visibility__("hidden")))'
    opened = f"inline namespace {_UNNAMED} {attribute} {{"
    assert found == f"{opened} int f(); }} {opened} void k(); }}"


def test_lines_keep_their_numbers() -> None:
    text = '# 1 "op.cu"\n__global__\nvoid k() {\n  int a;\n# 40 "op.cu"\n}\nint after;\n'
    assert HostPart(text, _UNNAMED).text.splitlines()[4:] == ['# 40 "op.cu"', ";", "int after;"]
    source = "int f() {\n\n}\n__global__ void k() {}\n"
    assert device_text(source, frozenset()).splitlines() == ["", "", "", "__global__ void k() {}"]


def test_headers_of_the_system_are_one_token() -> None:
    header = '# 1 "/usr/include/a.h" 1 3 4\ninline __host__ __device__ int g() { return 1; }\n'
    text = header + '# 2 "op.cu" 2\n__global__ void k() {}\n'
    kinds = [token.kind for token in divide(text) if token.kind != "space"]
    assert kinds[:2] == ["system", "directive"]
    assert "inline   int g() { return 1; }" in HostPart(text, _UNNAMED).text
    own = text.replace("__host__ __device__", "__device__")
    assert "int g();" in host(own)


def test_the_host_does_not_take_nvccs_own_syntax() -> None:
    with pytest.raises(CannotCut, match=r"op\.cu:2: kernel<<<\.\.\.>>>\(\.\.\.\) is nvcc's own"):
        HostPart('# 1 "op.cu"\nvoid f() {\n  k<<<1, 2>>>();\n}\n', _UNNAMED)
    with pytest.raises(CannotCut, match="lambda needs nvcc"):
        HostPart("void f() { auto g = [] __device__ (int i) { return i; }; }", _UNNAMED)


@pytest.mark.parametrize("text", ["void f() { (", "int a; }", "void f() { ( } )"])
def test_brackets_that_do_not_match_are_refused(text: str) -> None:
    with pytest.raises(CannotCut, match=r"closes nothing|is not closed"):
        Source(text)


def test_nvrtc_gets_no_function_of_the_hosts() -> None:
    source = """
    #include <opkiln/op.h>
    using opk::Tensor;
    #define DEV __device__ __forceinline__
    constexpr int square(int x) { return x * x; }
    DEV float twice(float x) { return 2 * x; }
    struct Shape { int n; int last() const { return n - 1; } };
    template <class T> __global__ void k(T* x) { *x = twice(*x); }
    template <class T> Tensor run(const Tensor& x) { if (1) { launch(k<T>); } return x; }
    MAKE(run)
    Tensor op(const Tensor& x) try { return run<float>(x); } catch (...) { throw; }
    OPKILN_OP(op, cuda);
    """
    found = device(source, frozenset(["twice"]))
    for removed in ("run<float>", "Tensor op", "Tensor run"):
        assert removed not in found
    for kept in ("square(int x) { return", "twice(float x) {", "last() const {", "k(T* x) {",
                 "MAKE(run)", "OPKILN_OP(op, cuda);", "#include <opkiln/op.h>"):  # fmt: skip
        assert kept in found


def test_what_a_macro_makes_of_a_function_counts() -> None:
    part = HostPart("__device__ inline float twice(float x) { return 2 * x; }", _UNNAMED)
    assert part.on_device == {"twice"}
    assert part.kernels == frozenset()


# The kernels' names


def _demangle(symbol: str) -> str:
    done = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ("_Z5plainPi", "plain"),
        ("cname", "cname"),
        ("_ZN1a1b4deepENS0_1PEPi", "a::b::deep"),
        ("_ZN12_GLOBAL__N_16kernelIfLi4ELNS_4ModeE1EEEvPKT_PS2_l", "kernel<float, 4, (Mode)1>"),
        ("_Z6kernelIPFiiEEvT_", "kernel<int (*)(int)>"),
        ("_Z6kernelI3BoxI3BoxIiEEEvT_", "kernel<Box<Box<int> > >"),
        ("_Z5otherPi", ""),
        ("_Z3runI6kernelEvv", ""),
    ],
)
def test_a_kernels_name_expression_follows_from_its_symbol(symbol: str, expected: str) -> None:
    kernels = frozenset(["plain", "cname", "deep", "kernel"])
    for demangle in (_demangle, names.demangler()):
        assert names.expression(symbol, kernels, _UNNAMED, demangle) == expected


def test_a_kernel_over_a_lambda_is_refused_by_name() -> None:
    symbol = "_Z6kernelIZ3runvEUliE_EvT_"
    with pytest.raises(names.UnnamedKernel, match=r"kernel<.*lambda"):
        names.expression(symbol, frozenset(["kernel"]), _UNNAMED, names.demangler())


def test_kernels_are_found_where_assembly_text_uses_them() -> None:
    text = """
    .globl _Z4usesv
    _Z4usesv:
        leaq _Z6kernelIfEvPT_(%rip), %rdi
        adrp x0, :got:cname
        call _Z5otherv
    .string "_Z6kernelIdEvPT_"
    .quad _Z6kernelIiEvPT_
_Z6kernelIiEvPT_:
    """
    found = names.find_references(text, frozenset(["kernel", "cname"]))
    assert found == ["_Z6kernelIfEvPT_", "cname"]


# The fat binary


def test_a_container_is_read_as_nvccs() -> None:
    cubin = b"\x7fELF\x02\x01\x01A\x08" + bytes(55)
    images = [("sm_80", cubin), ("sm_90a", cubin), ("compute_100f", b".version 9.0\n.target sm\0")]
    packed = container.pack(images)
    found = fatbin._containers(Bytes("it", len(packed), held=packed), 0, "it")
    assert [f"{fatbin._PREFIXES[kind]}{number}{mark}" for kind, number, mark in found] == [
        name for name, _ in images
    ]
