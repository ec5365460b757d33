"""How lists of flags are divided, and which are refused."""

from __future__ import annotations

import pytest
from sample.levels import ARM_V8

from opkiln.errors import SpecError
from opkiln.plan import flags

TAKEN = (
    f"-O2 -g -Wall -Wextra -Werror=return-type -ffast-math -fopenmp -pthread -march={ARM_V8}+sve",
    "-DX=1 -D X=@y -UX -Idir -I dir -isystem /x -include cstdint -std=c++17 --std=c++20 -w",
    "-I -Xlinker -O2", "-fsanitize=address,undefined -fno-rtti -mrecip=!sqrt",
    "-ffile-prefix-map=/a=/b -fvisibility=hidden -ftemplate-depth-100 -falign-functions=32:16",
    "--param max-inline-insns-single=100 --param=x=1 -static-libgcc -stdlib=libc++",
    "-flto=thin -flto",
    "-Wl,-rpath -Wl,/x -Wl,-rpath,$ORIGIN -Wl,-z,relro,-znow -Wl,--version-script=/x -Wl,-soname,x",
    "-Xlinker -rpath -Xlinker /x -L/x -l:x.a -Wl,-Bstatic -lx -Wl,-Bdynamic /x/liby.a",
    "-u sym -z now",
    "-Wl,--whole-archive,/x/a.a,--no-whole-archive -Wl,--gc-sections -Wl,--icf=all -Wl,-O1",
    "-fuse-ld=lld -Wa,--noexecstack,-mbig-obj -Wa,-I,/x -Wp,-D_FORTIFY_SOURCE=2",
    "-mllvm -inline-threshold=5 -Xclang -fno-pch-timestamp", "-fnew-thing=fast -mnew-thing -Wnew",
    "-I/opt/ssl@3/include -DX=f(a,-B) -DX=1,@y -lx@y -Wl,-rpath,/opt/ssl@3",
    "-fnew-thing=/x --new-thing -fprofile-use=/x -no-integrated-cpp",
)  # fmt: skip
TAKEN_BY_NVCC = (
    "-O3 -lineinfo --use_fast_math -std=c++17 --expt-relaxed-constexpr -Xptxas=-v,-dlcm=ca -G -g",
    "-Xcompiler -fPIC -Xcompiler=-Wall,-O2 -maxrregcount=32 --maxrregcount 32 -rdc=true -w",
    "-diag-suppress=177,20012 -Xcudafe --diag_suppress=20012 -Xfatbin -compress-all -DX -I/x",
    "--newer-option=true -Xptxas --allow-expensive-optimizations=true --ptxas-options=-O3",
    "-include=x.h -Xlinker -rpath,/x --default-stream per-thread -I -Xptxas",
)  # fmt: skip
REFUSED = {
    "-I -Xlinker -B/x/": "-B/x/", "-I": "-I", "-O2 -Xlinker": "-Xlinker",
    "-Wl,-rpath -lm": "-rpath",
    "-Wl,--outp=F": "--outp=F", "-Wl,-outp": "-outp", "-Wl,--depend,F": "--depend F",
    "-Xlinker --plug -Xlinker x": "--plug x", "-Wl,-sM": "-sM", "-Wa,-ahl=F": "-ahl=F",
    "-Wp,-D,X,-fplugin=x": "-fplugin=x", "--plugin=x": "--plugin=x", "-I@x": "-I@x",
    "-fmodule-mapper=|x": "-fmodule-mapper=|x", "-D -fplugin=x": "-D -fplugin=x",
    "--ptxas-path=x": "--ptxas-path=x", "--module-mapper=x": "--module-mapper=x",
    "-working-directory x": "-working-directory", "-fuse-ld=evil": "-fuse-ld=evil",
    "-flto=auto": "-flto=auto",
    "-mllvm -load=x": "-mllvm -load=x", "-Xclang -load -Xclang x": "-load", "-": "-",
}  # fmt: skip
# Each starts another program, loads code into the compiler, reads flags from a file, writes a file
# of its own or hides what was read. Many are spelled so that a simpler check would take them.
PAST_THE_PLAN = (
    "@/x", "-wrapper /x", "-wrapper=/x", "--wrapper=/x/x", "-fplugin=/x.so", "-fplugin-arg-evil-x",
    "-fpass-plugin=/x.so", "-specs=/x", "--specs=/x", "-specs /x", "-B/x/", "-B /x", "--prefix=/x/",
    "--prefix /x/", "-MF/x", "-MF /x", "-MM", "-M", "-MG", "-MT x", "-o/x", "-o /x", "--output=/x",
    "-###", "-E", "-S", "--preprocess", "--assemble", "-fsyntax-only", "-save-temps=/x",
    "--save-temps", "--write-dependencies", "--user-dependencies", "--dependencies", "-Wp,-MD,/x",
    "-Wp,@/x", "-Xpreprocessor -MD", "-Wa,@/x", "-Wa,--MD=/x", "-Xassembler @/x", "-Xclang -load",
    "-fuse-ld=/x", "--ld-path=/x", "-fdump-tree-all=/x", "-dumpdir /x/", "-aux-info /x", "-x none",
    "-xc", "--language=c", "--config=/x", "-ccc-gcc-name /x", "--gcc-toolchain=/x", "-flto @/x",
    "-time=/x", "-Wl,@/x", "-Wl,-plugin,/x.so", "-Wl,--plugin=/x.so", "-Wl,-plugin=/x.so",
    "-Xlinker @/x", "-Xlinker -plugin", "-Wl,-o,/x", "-Wl,-Map=/x", "-Wl,-Map,/x", "-Wl,--Map=/x",
    "-Wl,--out-implib=/x", "-Wl,--output=/x", "-Wl,--dependency-file=/x", "-Wl,-dependency-file=/x",
    "-Wl,-O1,@/x", "--for-linker=@/x", "--for-linker -plugin", "-Wp,-fplugin=/x.so",
    "-Xpreprocessor -fplugin=/x.so", "--plugin=/x.so", "-fmodules-ts -fmodule-mapper=|/x",
    "--modules-ts --module-mapper=|/x", "-D -Xclang -B/x/", "-include -Xassembler -wrapper /x",
    "-I -Xlinker -specs=/x", "-L -Xlinker -fplugin=/x.so", "-I@/x", "-D@/x", "-isystem@/x",
    "-include@/x", "-U@/x", "-Wp,-I@/x", "-fopt-info-all=/x", "-fopt-info=/x", "--opt-info-all=/x",
    "--dump-tree-all=/x", "-Wp,-fdump-tree-all=/x", "-fprofile-note=/x", "-Wp,-dumpbase,/x",
    "-da -dumpdir=/x/", "-Wa,-a=/x", "-Wa,-aln=/x", "-Wa,--M,/x", "-Xassembler -a=/x",
    "-Wp,-fopt-info-all=/x", "-mllvm -info-output-file=/x", "-mllvm -load=/x.so",
    "-Xclang -stats-file=/x", "-Xclang -header-include-file -Xclang /x",
    "-serialize-diagnostics /x", "-foptimization-record-file=/x",
    "-fmodules -fmodules-cache-path=/x", "-gen-cdb-fragment-path /x", "-fproc-stat-report=/x",
    "--sysroot=/x", "-gsplit-dwarf", "--debug=split-dwarf", "-Wl,--outp=/x", "-Wl,--outpu,/x",
    "-Wl,--plugi=/x.so", "-Wl,--dependency-fil=/x", "-Wl,--depend=/x", "-Wl,--out-im=/x",
    "-Wl,--error-handling-script=/x", "-Wl,-rpath", "-Xlinker -rpath -lm", "-flto=4", "-u@/x",
    "-T@/x", "-z@/x", "-L -Xlinker -B/x/", "-u -Xlinker -B/x/", "-Wl,-rpath,/x -l -Wl,-x -B/x/",
    "@flags.rsp", "-wrapper", "-ofile", "-MF", "-o",
)  # fmt: skip
PAST_THE_PLAN_BY_NVCC = (
    "-fdevice-time-trace=/x", "--fdevice-time-trace /x", "-I -Xptxas -odir=/x",
    "-keep-dir=/x -save-temps", "-MT x", "-Xcompiler=-Wp -Xcompiler=-fopt-info-all=/x",
    "-run-args=x", "-Xlinker=-o,/x", "-Xlinker=--outp=/x", "-arbin /x",
    "-Xnvlink=--register-link-binaries=/x", "-Xnvlink=-time=/x", "-Xcudafe=--gen_c_file_name=/x",
    "-Xfatbin=--create=/x", "-idp=/x/", "-Xarchive=x", "-I=@/x", "-include=@/x",
)  # fmt: skip


@pytest.mark.parametrize("text", TAKEN)
def test_ordinary_flags_are_taken(text: str) -> None:
    flags.check("op", tuple(text.split()))


@pytest.mark.parametrize("text", TAKEN_BY_NVCC)
def test_ordinary_nvcc_flags_are_taken(text: str) -> None:
    flags.check_nvcc("op", tuple(text.split()))


@pytest.mark.parametrize(("text", "named"), REFUSED.items())
def test_a_refused_flag_is_named_with_the_reason(text: str, named: str) -> None:
    with pytest.raises(SpecError) as caught:
        flags.check("op", tuple(text.split()))
    assert caught.value.what == f"op op: the flag {named!r} is not allowed"
    assert caught.value.why


def is_taken(text: str, *, nvcc: bool = False) -> bool:
    try:
        (flags.check_nvcc if nvcc else flags.check)("op", tuple(text.split()))
    except SpecError:
        return False
    return True


def test_a_flag_that_reaches_past_the_plan_is_refused() -> None:
    assert [text for text in PAST_THE_PLAN if is_taken(text)] == []
    assert [text for text in PAST_THE_PLAN_BY_NVCC if is_taken(text, nvcc=True)] == []


def test_a_value_belongs_to_its_option() -> None:
    found = [(o.name, o.value) for o in flags.host_options(("-I", "-Xlinker", "-DX", "-Wl,-x,y"))]
    assert found == [("-I", "-Xlinker"), ("-D", "X"), ("-Wl", "-x,y")]


def test_a_value_of_nvcc_asks_for_no_relocatable_code() -> None:
    assert not flags.is_relocatable(("-I", "-dc"))
    assert flags.is_relocatable(("-rdc", "true"))
    assert flags.remove_relocatable(("-I", "-dc", "-rdc", "true", "-dc")) == ("-I", "-dc")
