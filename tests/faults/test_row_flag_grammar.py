"""Row 33: a list of flags is refused, or nothing is read, started or written unseen.

The lists are drawn from the option tables of the compilers that are here, with values that name
files, programs, plugins, lists of words and other options. Each list that is taken is compiled and
linked for real, by the commands of a plan, under the observer, while strace notes each program and
each file. What strace sees outside the toolchain and the build's directory, the observer refuses.
Lists that were once taken are in unit/test_flags.py.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import option_tables
import pytest
from loaders import returning, write
from sample.tracing import Call, calls, strace

from opkiln.base.build_model import DeviceCompiler, Plan, Target, Toolchain
from opkiln.base.model import ABI_NONE, CPU, CUDA, PLAIN, OpSpec
from opkiln.building import observed
from opkiln.building.observing import observer
from opkiln.errors import SpecError, StepRefused
from opkiln.plan import plan as plans

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = pytest.mark.row(33)

SEED = 17
LISTS = 10_000
# Of a hundred lists, so many are for each compiler. nvcc takes a second for each.
SHARES = {"g++": 62, "clang++": 20, "clang++-15": 16, "nvcc": 2}


class Drawn(NamedTuple):
    """A list of flags for the compile, and one for the link."""

    compiler: str
    compile: tuple[str, ...]
    link: tuple[str, ...]


class Place(NamedTuple):
    """The directory of a test: hostile programs and files, a source, and stages."""

    hostile: Path
    source: Path
    stages: Path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """For flags with which nothing is run."""
    tmp_path = tmp_path_factory.mktemp("grammar")
    hostile = tmp_path / "hostile"
    text = f"#!/bin/sh\ntouch {hostile}/canary\nexit 1\n"
    for directory in ("", "usr/bin", "bin"):
        for name in ("evil", "cc1plus", "as", "ld", "collect2", "g++", "ld.gold", "lto-wrapper"):
            script = write(hostile / directory / name, text)
            script.chmod(0o755)
    write(hostile / "flags", f"x -fplugin={hostile}/evil.so -B{hostile}/\n")
    write(hostile / "dumps", f"x -fdump-tree-all={hostile}/canary\n")
    write(hostile / "specs", f"*cc1plus:\n-fplugin={hostile}/evil.so\n")
    build_plugin(hostile)
    shutil.copytree(hostile, tmp_path / "copy")
    stages = tmp_path / "stages"
    stages.mkdir()
    write(tmp_path / "src" / "op.cu", "__global__ void kernel() {}\n")
    return Place(hostile, write(tmp_path / "src" / "op.cpp", returning(33)), stages)


@pytest.fixture
def place(prepared: Place) -> Place:
    """With all that is hostile in it as it was at first."""
    shutil.rmtree(prepared.hostile)
    shutil.copytree(prepared.hostile.with_name("copy"), prepared.hostile)
    return prepared


def build_plugin(hostile: Path) -> None:
    """A library that leaves a trace wherever it is loaded: into a compiler or a linker."""
    text = """
        #include <fcntl.h>
        int plugin_is_GPL_compatible;
        __attribute__((constructor)) void load(void) {{ open("{path}", O_CREAT | O_WRONLY, 0600); }}
    """.format(path=hostile / "canary")
    source = write(hostile.parent / "evil.c", text)
    argv = ["g++", "-x", "c", "-shared", "-fPIC", "-o", str(hostile / "evil.so"), str(source)]
    subprocess.run(argv, check=True)


def planned(compiler: str, drawn: Drawn, place: Place) -> Plan:
    """The plan of an op with these flags. Raises SpecError."""
    cuda = compiler == "nvcc"
    found = shutil.which("g++" if cuda else compiler)
    assert found is not None
    device = None
    if cuda:
        nvcc = os.path.realpath(shutil.which("nvcc") or "nvcc")
        home = os.path.dirname(os.path.dirname(nvcc))
        device = DeviceCompiler(
            family="nvcc", path=nvcc, home=home, version="", identity="", archs=("9.0",),
            accepts=frozenset(("--objdir-as-tempdir",)), include_dirs=(), library_dirs=(),
        )  # fmt: skip
    spec = OpSpec(
        name="op", distribution="pkg", root=str(place.source.parent),
        sources=("op.cu",) if cuda else ("op.cpp",), kind=PLAIN, abi=ABI_NONE,
        cxx_args=() if cuda else drawn.compile, device_args=drawn.compile if cuda else (),
        ldflags=drawn.link, backend=CUDA if cuda else CPU, vectorize=False,
    )  # fmt: skip
    target = Target(
        spec.backend, "linux", os.uname().machine, "", (), "none", archs=("9.0",) if cuda else ()
    )
    toolchain = Toolchain(
        family="clang" if compiler.startswith("clang") else "gcc", cxx=found, version="",
        machine="", identity="", accepts=frozenset(), include_dirs=(), device=device,
    )  # fmt: skip
    return plans.make(spec, target, toolchain)


WATCHED = (
    "execve,open,openat,creat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,link,linkat,"
    "symlink,symlinkat,truncate"
)
PROGRAMS = re.compile(
    r"/usr/bin/(\S*g\+\+\S*|\S*clang\S*|\S*as|\S*ld(\.\w+)?|sh|dash|python3\S*)\Z|"
    r"/bin/(sh|dash)\Z|/usr/lib/(gcc|llvm-\d+|cuda)\S*\Z|/usr/libexec/gcc/\S*\Z|"
    r"/usr/local/cuda\S*\Z|/usr/local/bin/nvcc\Z"
)


def strays(log: Path, place: Place, first: str) -> list[Call]:
    """The calls that started a program outside the toolchain or wrote outside the stages."""
    found = []
    for call in calls(log):
        if call.failed or call.path == first:
            continue
        if call.name == "execve":
            if not PROGRAMS.match(os.path.realpath(call.path)) and not PROGRAMS.match(call.path):
                found.append(call)
        elif call.writes and not inside(call.path, place):
            found.append(call)
    return found


def inside(path: str, place: Place) -> bool:
    if not os.path.isabs(path):  # relative to the stage that the compiler runs in
        return not os.path.normpath(path).startswith("..")
    return os.path.normpath(path).startswith((str(place.stages) + "/", "/dev/", "/proc/"))


# What the C library reads for itself: it calls none of the functions that the observer replaces.
OF_LIBC = ("/etc/ld.so.cache", "/usr/share/zoneinfo", "/usr/lib/locale")


class Outcome(NamedTuple):
    """What a list of flags did."""

    built: bool
    strays: list[Call]  # by strace
    refused: bool  # by the observer
    kept: bool  # False: it is known that something was not observed
    unseen: list[str]  # files that strace saw read, and the observer not


def run(plan: Plan, place: Place, stage: Path, log: Path) -> Outcome:
    """Run the steps of a plan, until one fails or is refused."""
    stage.mkdir()
    memory = (str(place.stages),)
    library = observer.library(memory, plan.toolchain, str(place.stages))
    assert library
    places = plans.anchors(plan, str(stage))
    base = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(stage), "TMPDIR": str(stage)}
    # A link needs nvcc's libraries.
    steps = plan.steps if plan.target.backend == CPU else plan.steps[:-1]
    found: list[Call] = []
    unseen: list[str] = []
    for step in steps:
        argv = plans.command(step, places).argv
        variables = observed.environment(plan, library, str(stage), step.output)
        given = [word for name, value in variables.items() for word in ("-E", f"{name}={value}")]
        watched = [*strace(log)[:-1], f"trace={WATCHED}", *given]
        try:
            done = subprocess.run(
                [*watched, *argv], cwd=stage, env=base, stdin=subprocess.DEVNULL, check=False,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            done = 1
        found += strays(log, place, argv[0])
        try:
            look = observed.read_step(plan, step, str(stage), argv[0], memory)
        except StepRefused:
            return Outcome(built=False, strays=found, refused=True, kept=False, unseen=unseen)
        if look is None or not look.tells_all_of(step.output):
            return Outcome(built=not done, strays=found, refused=False, kept=False, unseen=unseen)
        unseen += unobserved(log, look, stage)
        if done:
            return Outcome(built=False, strays=found, refused=False, kept=False, unseen=unseen)
    return Outcome(built=True, strays=found, refused=False, kept=True, unseen=unseen)


def unobserved(log: Path, look: observed.StepRecord, stage: Path) -> list[str]:
    """Files outside the stage that strace saw opened, and the observer not."""
    seen = look.seen
    told = (seen.read, seen.loaded, seen.listed, seen.directories, seen.found, seen.written)
    real = {os.path.realpath(path) for each in told for path in each}
    opened = {
        os.path.realpath(os.path.join(stage, call.path))
        for call in calls(log)
        if call.name in ("open", "openat") and not call.failed
    }
    own = (os.path.dirname(stage), "/proc", "/dev", "/sys")
    return sorted(path for path in opened - real if not path.startswith((*own, *OF_LIBC)))


class Generator:
    """Draws lists of flags from the option tables of the compilers here."""

    def __init__(self, hostile: Path) -> None:
        self.random = random.Random()
        self.here = [name for name in SHARES if shutil.which(name)]
        self.names = {"g++": sorted(option_tables.gcc_names())}
        for clang in ("clang++", "clang++-15"):  # the second is hipcc's
            if clang in self.here:
                self.names[clang] = sorted(option_tables.clang_names(clang))
        if "nvcc" in self.here:
            nvcc = option_tables.nvcc()
            both = [(f"--{long}", f"-{short}") for long, (short, _) in nvcc.items()]
            self.names["nvcc"] = sorted({each for pair in both for each in pair})
        separate = option_tables.gcc_help() | option_tables.clang_help()
        self.valued = {
            compiler: [
                name
                for name in names
                if (name[-1] == "=" or name in separate or "-info" in name)
                and not name.startswith(("--param", "-W", "-m", "--machine", "--warn"))
            ]
            for compiler, names in self.names.items()
        }
        self.linker = sorted(option_tables.linker())
        usage = option_tables.said("as", "--help")
        self.assembler = sorted(set(re.findall(r"--?[\w-]+", usage)))
        # Those that the usage gives a file, a directory or a list of parts: "-o OBJFILE".
        of_files = r"(?m)^ *(--?[\w-]+)(?:[ =]<?[A-Z]*(?:FILE|DIR)|\[sub-option)"
        self.assembler_files = sorted(set(re.findall(of_files, usage)))
        self.values = (
            f"{hostile}/canary", f"{hostile}/", str(hostile), f"{hostile}/evil.so",
            f"{hostile}/evil", f"|{hostile}/evil", f"@{hostile}/flags", f"{hostile}/specs",
            "1", "2", "x", "all", "none", "canary", "c++17", "..", "../canary", "-", f"=${hostile}",
            f"-o{hostile}/canary", f"-B{hostile}/", f"-fplugin={hostile}/evil.so", "-Xlinker",
            "-Xclang", "x=y", "+sve", "native", "generic", "0", "16", "default", "fast", "true",
        )  # fmt: skip

    def list(self) -> Drawn:
        """The next list."""
        compiler = self.random.choices(self.here, [SHARES[name] for name in self.here])[0]
        words: list[str] = []
        links: list[str] = []
        for _ in range(self.random.choice((1, 1, 1, 1, 2, 3))):
            words += self.atom(compiler)
        if compiler != "nvcc":
            for _ in range(self.random.choice((0, 0, 0, 1, 1, 1))):
                of_linker = self.random.random() < 0.7
                links += self.linked() if of_linker else self.atom(compiler)
        return Drawn(compiler, tuple(filter(None, words)), tuple(filter(None, links)))

    def atom(self, compiler: str) -> list[str]:
        """An option in one of its forms, or an option that is passed on."""
        draw = self.random.random()
        if draw < 0.08:
            often = self.random.random() < 0.5
            names = self.assembler_files if often else self.assembler
            part = self.formed(self.random.choice(names))
            return [f"-Wa,{','.join(part)}"]
        if draw < 0.16:
            part = self.formed(self.option("g++"))
            return [f"-Wp,{','.join(part)}"]
        if draw < 0.24:
            passing = self.random.choice(
                ("-Xclang", "-Xpreprocessor", "-Xassembler", "-mllvm", "-Xcompiler", "-Xptxas")
            )
            part = self.formed(self.option(compiler))
            return [word for each in part for word in (passing, each)]
        return self.formed(self.option(compiler))

    def option(self, compiler: str) -> str:
        """An option of a compiler. Two of three take a value, and not just a number or a word."""
        valued = self.valued[compiler]
        often = valued and self.random.random() < 0.67
        return self.random.choice(valued if often else self.names[compiler])

    def linked(self) -> list[str]:
        """An option for the linker, perhaps abbreviated."""
        name = self.random.choice(self.linker)
        if len(name) > 3 and self.random.random() < 0.4:
            name = name[: self.random.randrange(2, len(name))]
        dashes = "-" if len(name) == 1 or self.random.random() < 0.3 else "--"
        part = self.formed(dashes + name)
        if self.random.random() < 0.5:
            return [f"-Wl,{','.join(part)}"]
        return [word for each in part for word in ("-Xlinker", each)]

    def formed(self, name: str) -> list[str]:
        """An option alone, or with a value in one of the ways that values are written."""
        if self.random.random() < 0.25 and not name.endswith("="):
            return name.split()
        value = self.random.choice(self.values[:8] if self.random.random() < 0.5 else self.values)
        if name.endswith("=") and self.random.random() < 0.8:
            return [name + value]
        forms = ([f"{name.rstrip('=')}={value}"], [name, value], [name + value])
        return [word for each in self.random.choice(forms) for word in each.split()]


@pytest.fixture(scope="module")
def generator(prepared: Place) -> Generator:
    return Generator(prepared.hostile)


def test_a_drawn_list_is_refused_or_does_nothing_unseen(
    place: Place, generator: Generator, tmp_path: Path, cases: Cases, note: Callable[[str], None]
) -> None:
    generator.random.seed(SEED)
    log = tmp_path / "log"
    by_name = by_observer = unkept = built = tried = 0
    for number in cases(LISTS, one_in=160):
        drawn = generator.list()
        tried += 1
        try:
            plan = planned(drawn.compiler, drawn, place)
        except SpecError:
            by_name += 1
            continue
        stage = place.stages / str(number)
        outcome = run(plan, place, stage, log)
        by_observer += outcome.refused
        unkept += outcome.built and not outcome.kept
        built += outcome.kept
        assert outcome.refused or not outcome.strays, (drawn, outcome)
        assert not outcome.unseen, (drawn, outcome.unseen)
        shutil.rmtree(stage)
        if outcome.strays:
            shutil.rmtree(place.hostile)
            shutil.copytree(place.hostile.with_name("copy"), place.hostile)
    note(
        f"{tried} lists of flags: {by_name} refused by name, {by_observer} by the observer, "
        f"{built} built and kept, {unkept} built and not kept"
    )
    # A check that refuses everything, or commands that all fail, would prove nothing.
    assert tried - by_name > tried // 20
    assert built > (tried - by_name) // 10


@pytest.mark.parametrize(
    "flags",
    [("-fopt-info-all={dir}/canary", "-O3"), ("-wrapper", "{dir}/evil"), ("-I@{dir}/dumps",),
     ("-Wa,-a={dir}/canary",), ("-B{dir}/",)],
    ids=" ".join,
)  # fmt: skip
def test_the_observer_refuses_what_a_hostile_flag_does(
    flags: tuple[str, ...], place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans.flags, "check", lambda *_: None)
    given = tuple(word.replace("{dir}", str(place.hostile)) for word in flags)
    plan = planned("g++", Drawn("g++", given, ()), place)
    outcome = run(plan, place, place.stages / tmp_path.name, tmp_path / "log")
    assert outcome.strays
    assert outcome.refused


# What a rule of the check keeps out. Each is taken out of a list before the check sees it, as if
# its rule were missing. The seed draws such a list soon, with the options of gcc 12.
HOLES = {
    "a plugin of the compiler": (r"-fplugin=", 4),
    "a list of optimizations": (r"--?f?opt-info", 91),
    "a file of words": (r"@|-[IDU]@", 2),
    "the assembler's listing": (r"-Wa,-a", 6),
    "where programs are looked for": (r"-B|--prefix=", 30),
    "the linker's outputs": (r"-Wl,--?(dep|out|Map|plugin)", 45),
    "dumps of the compiler": (r"--?f?dump-", 18),
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_hole_in_the_check_is_found_by_the_drawn_lists(
    hole: str,
    place: Place,
    generator: Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    note: Callable[[str], None],
) -> None:
    (pattern, seed), check = HOLES[hole], plans.flags.check
    generator.random.seed(seed)
    log = tmp_path / "log"
    strace(log)

    def blind(op: str, flags: tuple[str, ...], variable: str = "") -> None:
        check(op, tuple(word for word in flags if not re.match(pattern, word)), variable)

    passed = 0
    # Most make no difference, and what is drawn depends on the gcc.
    for number in range(20 * LISTS):
        drawn = generator.list()
        if drawn.compiler != "g++" or not any(
            re.match(pattern, word) for word in (*drawn.compile, *drawn.link)
        ):
            continue  # the hole makes no difference to it
        stage = place.stages / f"{tmp_path.name}-{number}"
        with monkeypatch.context() as patch:
            patch.setattr(plans.flags, "check", blind)
            try:
                plan = planned("g++", drawn, place)
            except SpecError:
                continue
        passed += 1
        outcome = run(plan, place, stage, log)
        if outcome.strays:
            assert outcome.refused
            note(f"{hole}: found by list {number + 1}, the {passed}. that got through")
            return
    pytest.fail(f"{passed} lists got through the hole, and none did harm")
