"""Each op gets its own architectures, each flag once, by whatever way its package is built.

One package has three ops with different filters. The toolkit that builds it has an nvcc that writes
down its arguments and then runs the real one, so the command lines and what came of them are both
looked at.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from pathlib import Path

import pytest
from sample.toolkit import arch_words, source_of
from sample.workshop import ASKED, OPS, Built, Workshop

from opkiln.base.build_model import Plan
from opkiln.base.model import ABI_NONE, CPU, CUDA, PLAIN
from opkiln.builder import CUDAOpBuilder, get_default_compute_capabilities
from opkiln.building import asking
from opkiln.decision.terms import BUILD, Request
from opkiln.errors import LoadError, SpecError
from opkiln.machine.arch import cuda
from opkiln.machine.binary import elf
from opkiln.machine.binary.fatbin import images
from opkiln.machine.devices import nvidia
from opkiln.plan.plan import anchors, command
from opkiln.settings import override

NEWEST = ("sm_90a", "sm_100f", "compute_100f")
IMAGES = {
    "ampere_up": ("sm_80", "sm_86", *NEWEST),
    "hopper_up": NEWEST,
    "anywhere": ("sm_75", "sm_80", "sm_86", *NEWEST),
}


def flags_of(names: tuple[str, ...]) -> list[str]:
    return [f"-gencode=arch=compute_{name.partition('_')[2]},code={name}" for name in names]


# In full: one after the other is held by the orders of plans below, each of several processes does
# what one does, and the flags that torch's BuildExtension is handed are held below.
WAYS = ("jit", "parallel", *(
    pytest.param(each, marks=pytest.mark.full)
    for each in ("serial", "processes", "build_extension", "build_extension_with_ninja")
))  # fmt: skip


@pytest.fixture(scope="module", params=WAYS)
def built(request: pytest.FixtureRequest, shop: Workshop) -> Built:
    """The package, built in one of the ways."""
    return shop.built(request.param)


def test_each_compile_line_holds_exactly_its_ops_flags_each_once(built: Built) -> None:
    lines = {source_of(line): line for line in built.compiles}
    assert len(lines) == len(built.compiles) == len(IMAGES)
    for name, wanted in IMAGES.items():
        assert sorted(arch_words(lines[f"{name}.cu"])) == sorted(flags_of(wanted))


def test_each_library_contains_exactly_those_images(built: Built) -> None:
    assert {name: images(path) for name, path in built.libraries.items()} == IMAGES


def test_the_environment_is_byte_for_byte_what_it_was(built: Built) -> None:
    assert built.environments
    for before, after in built.environments:
        assert "TORCH_CUDA_ARCH_LIST" in before
        assert after == before


def test_no_library_needs_a_cuda_runtime_or_a_cuda_torch(built: Built) -> None:
    assert built.libraries
    for path in built.libraries.values():
        needed = elf.read(path).needed
        assert not [name for name in needed if "cuda" in name or "torch" in name or "c10" in name]


@pytest.mark.full  # test_nvcc.py and test_cuda_builds.py compile with it
def test_the_machines_own_nvcc_gives_the_same_bytes_as_the_recording_one(shop: Workshop) -> None:
    own = shop.built("resolved_with_the_machines_own")
    assert own.compiles == []
    assert {name: images(path) for name, path in own.libraries.items()} == IMAGES
    recorded = shop.built("parallel")
    for name, path in own.libraries.items():
        assert Path(path).read_bytes() == Path(recorded.libraries[name]).read_bytes()


def test_what_looks_at_the_environment_sees_a_variable_that_was_set(shop: Workshop) -> None:
    for body in ("os.environ['TORCH_CUDA_ARCH_LIST'] = '8.0'", "os.putenv('NEW', '1')"):
        shop.finish(shop.start(body, shop.variables(shop.base)))
        ((before, after),) = shop.environments()
        assert before != after


def test_what_looks_for_arch_flags_finds_every_spelling() -> None:
    line = ["-gencode", "arch=compute_80,code=sm_80", "-arch=sm_90", "--gpu-architecture", "sm_86",
            "-code=sm_90,compute_90", "--generate-code=arch=compute_75,code=lto_75", "-O3",
            "-I/arch/sm_90", "-o", "/x/sm_90.o", "-DNDEBUG", "-arch", "native"]  # fmt: skip
    dull = ["-O3", "-I/arch/sm_90", "-o", "/x/sm_90.o", "-DNDEBUG"]
    assert arch_words(line) == [word for word in line if word not in dull]


# Without building


@pytest.fixture
def at(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> type:
    """This process, with the compilers known and the list set: the module of the ops."""
    for name, value in shop.variables(shop.store()).items():
        if name.startswith(("OPKILN_", "TORCH_CUDA")) and value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(shop.package.where))
    import cuda_ops.op

    return cuda_ops.op


def planned(builder: CUDAOpBuilder) -> Plan:
    op = builder.op()
    return asking.plan_here(Request(op, BUILD))


def arch_flags(builder: CUDAOpBuilder) -> list[str]:
    """The arch flags of all of a plan's command lines."""
    plan = planned(builder)
    places = anchors(plan, "/stage")
    return [word for step in plan.steps for word in arch_words(list(command(step, places).argv))]


@pytest.mark.parametrize("order", list(itertools.permutations(IMAGES)), ids="-".join)
def test_a_filter_does_not_reach_the_next_op_in_whatever_order(
    at: type, order: tuple[str, ...]
) -> None:
    before = dict(os.environ)
    for name in (*order, *order):
        builder = getattr(at, OPS[name])()
        assert builder.compute_capability_args() == flags_of(IMAGES[name])
        assert arch_flags(builder) == flags_of(IMAGES[name])
        handed = builder.builder().extra_compile_args["nvcc"]
        assert arch_words(handed) == flags_of(IMAGES[name])
    assert dict(os.environ) == before


def test_threads_that_plan_at_once_do_not_see_each_others_filters(at: type) -> None:
    seen: dict[str, list[list[str]]] = {name: [] for name in IMAGES}
    barrier = threading.Barrier(6)

    def work(name: str) -> None:
        barrier.wait()
        for _ in range(5):
            seen[name].append(arch_flags(getattr(at, OPS[name])()))

    threads = [threading.Thread(target=work, args=(name,)) for name in (*IMAGES, *IMAGES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {name: [flags_of(wanted)] * 10 for name, wanted in IMAGES.items()}


def test_a_list_that_changes_between_two_builds_is_seen(
    at: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = at.AmpereUpBuilder
    assert arch_flags(builder()) == flags_of(IMAGES["ampere_up"])
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;9.0")
    assert arch_flags(builder()) == flags_of(("sm_90",))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", ASKED)
    assert arch_flags(builder()) == flags_of(IMAGES["ampere_up"])
    assert arch_flags(builder(backend="cuda", archs="8.9;7.5")) == flags_of(("sm_89",))


def test_a_filter_that_leaves_nothing_is_an_error_that_names_the_list(at: type) -> None:
    with override(cuda_arch_list="7.5;8.0"), pytest.raises(LoadError) as caught:
        planned(at.HopperUpBuilder())
    assert "7.5;8.0" in caught.value.why
    assert "filter removed" in caught.value.why


@pytest.mark.parametrize("answer", [["9.0", "12.0"], ["8.9"], ["sm_120"], [[9, 1]], ["all"], [""]])
def test_a_filter_that_answers_something_new_is_a_spec_error(at: type, answer: list[str]) -> None:
    class Adds(at.AnywhereBuilder):  # type: ignore[name-defined,misc]
        __module__ = at.__name__

        def filter_ccs(self, ccs: list[str]) -> list[str]:
            return answer

    with pytest.raises(SpecError, match="filter_ccs"):
        planned(Adds())
    with pytest.raises(SpecError, match="filter_ccs"):
        Adds().compute_capability_args()


def test_an_author_who_hands_on_compute_capability_args_does_not_double_them(at: type) -> None:
    class HandsOn(at.AmpereUpBuilder):  # type: ignore[name-defined,misc]
        __module__ = at.__name__

        def nvcc_args(self) -> list[str]:
            return ["-O2", "--use_fast_math", *self.compute_capability_args(), "--threads=8"]

    plan = planned(HandsOn())
    words = command(plan.steps[0], anchors(plan, "/stage")).argv
    assert arch_words(list(words)) == flags_of(IMAGES["ampere_up"])
    assert words.count("-O2") == words.count("--use_fast_math") == 1
    assert [word for word in words if word.startswith("--threads")] == ["--threads=1"]
    handed = HandsOn().builder().extra_compile_args["nvcc"]
    assert arch_words(handed) == flags_of(IMAGES["ampere_up"])


REFUSED = (
    ("-gencode=arch=compute_120,code=sm_120",),
    ("-gencode", "arch=compute_80,code=sm_80"),
    ("--generate-code=arch=compute_80,code=sm_80",),
    ("--generate-code", "arch=compute_80,code=sm_80"),
    ("-arch=sm_80",), ("-arch", "sm_80"), ("-arch=native",), ("-arch=all-major",),
    ("--gpu-architecture=sm_80",), ("--gpu-architecture", "sm_80"),
    ("-arch=compute_80", "-code=sm_80"), ("-code=sm_80",), ("--gpu-code=sm_80",),
    ("-Xptxas=-v,-arch=sm_80",), ("-Xptxas", "--gpu-name=sm_80"), ("--ptxas-options=-arch=sm_80",),
)  # fmt: skip


@pytest.mark.parametrize("flags", REFUSED, ids=" ".join)
def test_an_author_does_not_choose_architectures_by_flags(
    at: type, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError, match="is not allowed") as caught:
        planned(type("Chooses", (at.AnywhereBuilder,), {"FLAGS": flags})())
    assert caught.value.hint.startswith("TORCH_CUDA_ARCH_LIST chooses architectures")
    monkeypatch.setenv("CUDAFLAGS", " ".join(flags))
    with pytest.raises(SpecError, match="is not allowed") as caught:
        planned(at.AnywhereBuilder())
    assert caught.value.hint == "unset OPKILN_CUDAFLAGS CUDAFLAGS"


@pytest.mark.parametrize(
    ("name", "asked", "has"),
    [("anywhere", ASKED, False), ("ampere_up", ASKED, True), ("hopper_up", ASKED, True),
     ("anywhere", "8.0;9.0a", True), ("anywhere", "7.5", False), ("hopper_up", "7.5", False)],
)  # fmt: skip
def test_bfloat16_follows_the_list_that_the_filter_left(
    at: type, name: str, asked: str, has: bool
) -> None:
    with override(cuda_arch_list=asked):
        assert getattr(at, OPS[name])().enable_bf16 is has


def test_without_a_list_or_a_device_a_cross_compile_is_for_all_that_nvcc_lists(
    at: type, shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    none = nvidia.NvidiaDevices((), "", "", "", "no GPU in this test")
    monkeypatch.setitem(nvidia._known, "/", none)
    program = shop.real / "bin" / "nvcc"
    listed = subprocess.run(
        [program, "--list-gpu-arch"], check=True, capture_output=True, text=True
    ).stdout.split()
    listed.sort(key=lambda name: int(name.partition("_")[2]))
    defaults = cuda.parse(get_default_compute_capabilities())
    assert [f"compute_{arch.number}" for arch in defaults] == listed
    found = at.AnywhereBuilder().compute_capability_args()
    assert [flag for flag in found if "code=sm_" in flag] == flags_of(
        tuple(name.replace("compute", "sm") for name in listed)
    )
    assert len(found) == len(set(found)) == len(listed) + 1
    assert at.HopperUpBuilder().compute_capability_args("8.0;9.0+PTX") == flags_of(
        ("sm_90", "compute_90")
    )


def test_the_cpu_version_has_no_architecture_at_all(at: type) -> None:
    class Both(CUDAOpBuilder):
        NAME = "both"
        BACKENDS = (CUDA, CPU)
        KIND = PLAIN
        ABI = ABI_NONE
        root = at.AnywhereBuilder().root

        def sources(self) -> list[str]:
            return ["csrc/shared.cpp"] if self.build_for_cpu else ["csrc/anywhere.cu"]

        def filter_ccs(self, ccs: list[str]) -> list[str]:
            raise AssertionError("asked of a CPU build")

    builder = Both(backend=CPU)
    assert builder.build_for_cpu
    assert arch_flags(builder) == []
    assert planned(builder).target.archs == ()
    assert isinstance(builder.builder().extra_compile_args, list)
