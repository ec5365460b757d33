"""Which architectures an op is wanted for: who says so, what a toolkit serves, what runs here."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
from sample.decisions import World
from sample.levels import X86_64, X86_V1

from opkiln.base.build_model import DeviceCompiler, Target, Toolchain
from opkiln.base.model import CPU, CUDA, ONE_CALL, ROCM, Op
from opkiln.decision import archs
from opkiln.decision.archs import Wanted
from opkiln.errors import ArchError, ArchWarning, LoadError, OpkilnError, ToolchainError
from opkiln.machine.devices import amd, nvidia
from opkiln.machine.toolchain import choice
from opkiln.settings import LAYOUT, override

if TYPE_CHECKING:
    from pathlib import Path

NVCC = DeviceCompiler(
    "nvcc", "/cuda/bin/nvcc", "/cuda", "13.0", "id", ("8.0", "9.0", "10.0"), frozenset(), (), ()
)
GCC = Toolchain("gcc", "/usr/bin/g++", "12", X86_64, "id", frozenset(), (), device=NVCC)


@pytest.fixture
def world(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path, cache, monkeypatch)
    world.spec = world.spec._replace(backend=CUDA)
    world.gpus()
    monkeypatch.setattr(archs, "_told", set())
    return world


def amd_gpus(patch: pytest.MonkeyPatch, *names: str) -> None:
    gpus = tuple(amd.AmdGPU(index, name, 64, "stand-in", 0) for index, name in enumerate(names))
    found = amd.AmdDevices(gpus, "" if gpus else "there is no AMD GPU driver here")
    patch.setattr(amd, "devices", lambda: found)


def without_8(ccs: list[Any]) -> list[Any]:
    return [each for each in ccs if not str(each).startswith("8")]


# Who says so


def test_cpu_op_wants_no_architecture(world: World) -> None:
    world.spec = world.spec._replace(backend=CPU)
    assert archs.find_wanted(world.op(asked="9.0")) == Wanted()


def test_call_goes_before_the_setting_and_the_setting_before_the_devices(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.gpus("9.0", "10.0", "9.0")
    assert archs.find_wanted(world.op()) == Wanted(("9.0", "10.0"), (), "native", "devices", True)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0")
    assert archs.find_wanted(world.op()) == Wanted(
        ("8.0", "9.0"), (), "8.0 9.0", "TORCH_CUDA_ARCH_LIST", False
    )
    assert archs.find_wanted(world.op(asked="10.0a")) == Wanted(
        ("10.0a",), (), "10.0a", "call", False
    )
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", " Native ")
    assert archs.find_wanted(world.op()).native
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "native;8.0")
    found = archs.find_wanted(world.op())
    assert (found.archs, found.native) == (("8.0", "9.0", "10.0"), False)


def test_devices_of_amd_are_asked_for_rocm(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.spec = world.spec._replace(backend=ROCM)
    amd_gpus(monkeypatch, "gfx942", "gfx90a")
    assert archs.find_wanted(world.op()) == Wanted(
        ("gfx90a", "gfx942"), (), "native", "devices", True
    )
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx1100")
    assert archs.find_wanted(world.op()).archs == ("gfx1100",)


@pytest.mark.parametrize(
    ("backend", "name", "why", "example"),
    [
        (CUDA, "CUDA", "the driver shows none", "9.0"),
        (ROCM, "ROCm", "there is no AMD GPU driver here", "gfx90a"),
    ],
)
def test_without_device_and_list_there_is_nothing_to_build_for(
    world: World, backend: str, name: str, why: str, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    amd_gpus(monkeypatch)
    world.spec = world.spec._replace(backend=backend)
    what = f"op op has no {name} architecture to be built for"
    with pytest.raises(LoadError) as raised:
        archs.find_wanted(world.op())
    assert raised.value.what == what
    assert raised.value.why == f"{why}, and no list of architectures is set"
    hint = f"opkiln build op --target {backend}:{example}    # for a machine with one"
    assert raised.value.hint == hint
    with pytest.raises(LoadError) as raised:
        archs.find_wanted(world.op(asked=" NATIVE "))
    assert (raised.value.what, raised.value.hint) == (what, hint)
    assert raised.value.why == f"the call asks for native, and {why}"
    world.spec = world.spec._replace(distribution=ONE_CALL)
    with pytest.raises(LoadError) as raised:
        archs.find_wanted(world.op())
    variable = {CUDA: "OPKILN_CUDA_ARCH_LIST", ROCM: "PYTORCH_ROCM_ARCH"}[backend]
    assert raised.value.hint == f"export {variable}={example}"


def test_setting_that_asks_for_native_without_a_device_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_CUDA_ARCH_LIST", "native")
    with pytest.raises(LoadError) as raised:
        archs.find_wanted(world.op())
    assert raised.value.why == ("OPKILN_CUDA_ARCH_LIST asks for native, and the driver shows none")


def test_list_that_means_nothing_is_told_with_its_variable(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArchError) as raised:
        archs.find_wanted(world.op(asked="9.x"))
    called = raised.value
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.x")
    with pytest.raises(ArchError) as raised:
        archs.find_wanted(world.op())
    assert raised.value.what == f"TORCH_CUDA_ARCH_LIST: {called.what}"
    assert raised.value.why == called.why
    assert raised.value.hint == "export TORCH_CUDA_ARCH_LIST=9.0"


def test_filter_removes_and_an_empty_rest_is_told(world: World) -> None:
    op = world.op(asked="8.0;8.6;9.0", rule=without_8)
    assert archs.find_wanted(op) == Wanted(("9.0",), ("8.0", "8.6"), "8.0;8.6;9.0", "call", False)
    world.gpus("8.0", "8.6")
    with pytest.raises(LoadError) as raised:
        archs.find_wanted(world.op(rule=without_8))
    assert raised.value.what == "op op has no CUDA architecture to be built for"
    assert raised.value.why == (
        "this machine asks for 8.0;8.6, and the op's filter removed 8.0;8.6"
    )
    assert raised.value.hint == "opkiln arch --op op all"


def test_all_is_what_the_toolkit_lists(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def choose(memory: tuple[str, ...], backend: str) -> Toolchain:
        asked.append((memory, backend))
        return GCC

    monkeypatch.setattr(choice, "recall", lambda memory, backend: None)
    monkeypatch.setattr(choice, "choose", choose)
    assert archs.find_wanted(world.op(asked="ALL")).archs == ("8.0", "9.0", "10.0+PTX")
    assert asked == [(archs.memory(), CUDA)]
    monkeypatch.setattr(choice, "recall", lambda memory, backend: GCC)
    assert archs.find_wanted(world.op(asked="all-major")).archs == ("8.0", "9.0", "10.0+PTX")
    assert len(asked) == 1, "what is remembered is not asked again"


def test_what_was_asked_is_remembered_in_a_private_store_alone(world: World) -> None:
    assert archs.memory() == ()
    root = world.cache / LAYOUT
    root.mkdir(mode=0o700)
    assert archs.memory() == (str(root / "toolchains"),)
    for path in (root, world.cache):
        path.chmod(0o777)
        assert archs.memory() == ()
        path.chmod(0o700)


# Devices


def test_why_there_is_no_device(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    amd_gpus(monkeypatch)
    assert archs.why_no_device(CUDA) == "the driver shows none"
    assert archs.why_no_device(ROCM) == "there is no AMD GPU driver here"
    assert archs.why_no_device(CPU) == ""
    world.gpus("9.0")
    amd_gpus(monkeypatch, "gfx90a")
    assert archs.why_no_device(CUDA) == ""
    assert archs.why_no_device(ROCM) == ""
    some = nvidia._known["/"]._replace(why="a second GPU does not answer")
    monkeypatch.setitem(nvidia._known, "/", some)
    assert archs.why_no_device(CUDA) == ""


def test_nothing_is_asked_where_neither_a_setting_nor_a_device_speaks(world: World) -> None:
    assert archs.lacks_targets(CUDA)
    assert not archs.lacks_targets(ROCM)
    with override(cuda_arch_list="9.0"):
        assert not archs.lacks_targets(CUDA)
    world.gpus("9.0")
    assert not archs.lacks_targets(CUDA)


def test_a_device_may_be_used_unless_it_is_hidden(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not archs.may_use_device(CUDA)
    amd_gpus(monkeypatch)
    assert not archs.may_use_device(ROCM)
    amd_gpus(monkeypatch, "gfx90a")
    assert archs.may_use_device(ROCM)
    world.gpus("9.0")
    assert archs.may_use_device(CUDA)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not archs.may_use_device(CUDA)


# What a toolkit can serve


def fitted(world: World, *wanted: str, native: bool = False, backend: str = CUDA,
           tools: Toolchain = GCC, **op: Any) -> tuple[str, ...]:  # fmt: skip
    target = Target(backend, "linux", X86_64, X86_V1, (), "none", archs=wanted)
    world.spec = world.spec._replace(backend=backend)
    needs = Wanted(wanted, native=native)
    found = archs.fit_target(world.op(**op), needs, target, tools)
    assert found == target._replace(archs=found.archs)
    return tuple(found.archs)


def test_toolkit_that_has_everything_changes_nothing(world: World) -> None:
    assert fitted(world, "8.0", "9.0+PTX") == ("8.0", "9.0+PTX")
    assert fitted(world) == ()
    assert fitted(world, "7.0", tools=GCC._replace(device=None)) == ("7.0",)


def test_architecture_that_was_named_and_cannot_be_compiled_is_an_error(world: World) -> None:
    with pytest.raises(ToolchainError) as raised:
        fitted(world, "7.0", "9.0", "12.0")
    error = raised.value
    assert error.what == "op op cannot be compiled for 7.0;12.0"
    assert error.why.splitlines() == [
        "7.0: the toolkit has no 7.0; its oldest is 8.0",
        "12.0: the toolkit has no 12.0; its newest is 10.0",
        "the toolkit is CUDA 13.0, /cuda",
    ]
    assert error.hint == "export OPKILN_CUDA_ARCH_LIST='9.0'"
    with pytest.raises(ToolchainError) as raised:
        fitted(world, "7.0", "8.0", "9.0", asked="7.0;8.0;9.0")
    assert raised.value.hint == "opkiln build op --target cuda:8.0,9.0"
    with pytest.raises(ToolchainError) as raised:
        fitted(world, "12.0")
    assert raised.value.hint == "export OPKILN_CUDA_ARCH_LIST='10.0'"


def test_variant_that_the_toolkit_was_tried_with_and_refused_is_an_error(world: World) -> None:
    tried = GCC._replace(device=NVCC._replace(accepts=frozenset(["90a"])))
    assert fitted(world, "9.0a", tools=tried) == ("9.0a",)
    with pytest.raises(ToolchainError, match=r"cannot be compiled for 10\.0a"):
        fitted(world, "10.0a", tools=tried)


def test_rocm_compiler_without_a_list_is_believed_and_with_one_is_held_to_it(
    world: World,
) -> None:
    hipcc = NVCC._replace(family="hipcc", archs=(), home="/rocm", version="7.0")
    assert fitted(world, "gfx90a", backend=ROCM, tools=GCC._replace(device=hipcc)) == ("gfx90a",)
    listed = GCC._replace(device=hipcc._replace(archs=("gfx942",)))
    with pytest.raises(ToolchainError) as raised:
        fitted(world, "gfx90a", backend=ROCM, native=True, tools=listed)
    assert raised.value.what == "op op cannot be compiled for gfx90a"
    assert raised.value.why.splitlines()[-1] == "the toolkit is ROCm 7.0, /rocm"
    assert raised.value.hint == "export PYTORCH_ROCM_ARCH='gfx942'"


def test_gpu_that_is_newer_than_the_toolkit_gets_what_it_can_run_and_one_warning(
    world: World,
) -> None:
    world.gpus("9.0", "12.0")
    tools = GCC._replace(device=NVCC._replace(version="13.0.48"))
    with pytest.warns(ArchWarning) as told:
        assert fitted(world, "9.0", "12.0", native=True, tools=tools) == ("9.0", "10.0+PTX")
    (warning,) = told
    assert str(warning.message).startswith("op op: ")
    assert str(warning.message).endswith(
        "\nhint: install a newer CUDA 13 toolkit: pip install -U 'opkiln[cuda]'"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitted(world, "9.0", "12.0", native=True) == ("9.0", "10.0+PTX")


def test_ptx_is_for_drivers_that_are_as_new_as_the_toolkit(world: World) -> None:
    world.gpus("10.3", driver="13.0")
    one = archs.archs_for_devices(archs.grammar(CUDA).parse("10.3"), NVCC)
    assert [str(each) for each in one[0]] == ["10.0+PTX"]
    world.gpus("10.3", driver="12.8")
    other = archs.archs_for_devices(archs.grammar(CUDA).parse("10.3"), NVCC)
    assert [str(each) for each in other[0]] == ["10.0"]
    assert len(other[1]) == 1
    assert archs.archs_for_devices(archs.grammar(CUDA).parse("9.0"), NVCC)[1] == ()


def told(error: OpkilnError) -> tuple[str, str, str]:
    return error.what, error.why, error.hint


def why_not_for(arch: str) -> tuple[str, str, str]:
    """What is told of a card that the toolkit does not serve."""
    with pytest.raises(ArchError) as cause:
        archs.archs_for_devices(archs.grammar(CUDA).parse(arch), NVCC)
    return told(cause.value)


def test_old_card_that_nobody_may_use_is_left_out_and_one_that_is_used_is_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.gpus("6.1", "9.0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.warns(ArchWarning, match="it is left out"):
        assert fitted(world, "6.1", "9.0", native=True) == ("9.0",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ToolchainError) as raised:
        fitted(world, "6.1", "9.0", native=True)
    assert told(raised.value) == why_not_for("6.1")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # which of the two that is, nobody knows
    with pytest.raises(ToolchainError):
        fitted(world, "6.1", "9.0", native=True)


def test_machine_of_old_cards_alone_is_told_the_last_ones_reason(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.gpus("6.1", "7.0", "9.0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(ToolchainError) as raised:
        fitted(world, "6.1", "7.0", native=True)
    assert told(raised.value) == why_not_for("7.0")


# What runs here


def test_coverage_is_that_of_the_worst_gpu_that_may_be_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert archs.coverage(CUDA, ("9.0",)) == ""
    world.gpus("8.6", "9.0")
    assert archs.coverage(CUDA, ("8.6", "9.0")) == "exact"
    assert archs.coverage(CUDA, ("8.0", "9.0")) == "binary"
    assert archs.coverage(CUDA, ("8.0+PTX",)) == "ptx"
    assert archs.coverage(CUDA, ("9.0",)) == ""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert archs.coverage(CUDA, ("9.0",)) == "exact"
    monkeypatch.delenv("CUDA_DEVICE_ORDER")  # which of the two that is, nobody knows
    assert archs.coverage(CUDA, ("8.6", "9.0")) == ""
    amd_gpus(monkeypatch, "gfx90a")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert archs.coverage(ROCM, ("gfx90a",)) == "exact"
    assert archs.coverage(ROCM, ("gfx942",)) == ""


def test_way_of_a_library_on_the_gpus_here_is_that_of_the_worst(world: World) -> None:
    def way(*built: str, images: tuple[str, ...] = ()) -> tuple[str, str]:
        return archs.way_of(CUDA, Wanted(("8.6", "9.0"), native=True), built, images)

    world.gpus("8.6", "9.0")
    assert way("8.6", "9.0") == ("exact", "8.6")
    assert way("8.0", "9.0") == ("binary", "8.6")
    assert way("8.6+PTX") == ("ptx", "9.0")
    assert way("9.0") == ("", "8.6")
    assert way("9.0", images=("sm_86", "sm_90")) == ("exact", "8.6")
    world.gpus("9.0")  # the only one that this process may use
    assert way("9.0") == ("exact", "9.0")
    world.gpus()  # a build for here, where the driver hides what is wanted
    assert way("8.6") == ("", "9.0")


def test_way_of_a_library_for_what_was_asked_by_name(world: World) -> None:
    def way(asked: str, *built: str) -> str:
        return archs.way_of(CUDA, Wanted((asked,)), built, ())[0]

    world.gpus("8.0")  # which does not matter
    assert way("9.0", "9.0") == "exact"
    assert way("9.0", "8.0+PTX") == ""
    assert way("8.6", "8.0") == "binary"
    assert way("9.0a", "9.0") == ""
    assert way("9.0a", "9.0a") == "exact"
    assert way("9.0a", "9.0a+PTX") == "exact"
    assert way("9.0+PTX", "9.0") == ""
    assert way("9.0+PTX", "9.0+PTX") == "exact"
    assert archs.way_of(ROCM, Wanted(("gfx90a",)), ("gfx90a",), ("ignored",))[0] == "exact"


def test_known_is_what_this_grammar_can_read() -> None:
    assert archs.knows_all(CUDA, ("9.0",), ("sm_90",))
    assert archs.knows_all(CUDA, ("9.0",), ())
    assert not archs.knows_all(CUDA, ("9.0z",), ("sm_90",))
    assert not archs.knows_all(CUDA, ("9.0",), ("lto_90",))
    assert archs.knows_all(ROCM, ("gfx90a",), ("anything",))
    assert not archs.knows_all(ROCM, ("fancy",), ())


def test_kept_is_what_the_filter_leaves_whole(world: World) -> None:
    plain, op = Op(world.spec), Op(world.spec, None, without_8)
    assert archs.keeps_all(plain, ("8.0",))
    assert not archs.keeps_all(plain, ())
    assert archs.keeps_all(op, ("9.0",))
    assert not archs.keeps_all(op, ("8.0", "9.0"))
    assert not archs.keeps_all(op, ())


def test_code_that_a_gpu_here_cannot_run_is_refused_for_a_load(world: World) -> None:
    def required(*wanted: str, origin: str, rule: Any = None) -> None:
        needs = Wanted(wanted, asked="what was asked", origin=origin)
        archs.require_coverage(world.op(rule=rule), needs)

    world.gpus("8.6", "9.0")
    required(origin="call")
    required("8.0+PTX", origin="call")
    with pytest.raises(LoadError) as raised:
        required("8.0", "8.6", origin="TORCH_CUDA_ARCH_LIST")
    assert raised.value.what == "op op for 8.0;8.6 cannot run on this machine's 9.0"
    assert raised.value.why == "TORCH_CUDA_ARCH_LIST asks for what was asked"
    assert raised.value.hint == "export OPKILN_CUDA_ARCH_LIST=native"
    with pytest.raises(LoadError) as raised:
        required("9.0", origin="call", rule=without_8)
    assert raised.value.what == "op op for 9.0 cannot run on this machine's 8.6"
    assert raised.value.why == (
        "the call asks for what was asked, of which the op's filter left 9.0"
    )
    assert raised.value.hint == ""
