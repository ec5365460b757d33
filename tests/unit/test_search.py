"""The full search without a compiler: what is known of one is put in its place."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from sample.decisions import GCC, Compilers, World
from sample.levels import OTHER_LEVELS

from opkiln.base.build_model import DeviceCompiler, Toolchain, TorchSDK
from opkiln.base.model import ABI_STABLE, ABI_TORCH, CUDA
from opkiln.building.asking import ask, plan_here
from opkiln.decision import search, terms
from opkiln.decision.terms import BUILD, LOAD, SHIP, Ask, Build, Fetch, Serve, Trace
from opkiln.errors import (
    BuildError,
    CompilingOff,
    LoadError,
    SpecError,
    ToolchainError,
)
from opkiln.machine.toolchain import choice
from opkiln.plan import plan as plans
from opkiln.settings import LAYOUT

if TYPE_CHECKING:
    from pathlib import Path

    from opkiln.decision.terms import Request
    from opkiln.machine.facts import Evidence

NVCC = DeviceCompiler(
    "nvcc", "/cuda/bin/nvcc", "/cuda", "13.0", "id", ("8.0", "9.0"), frozenset(), (), ()
)
TAKEN = "its sources, flags and compiler are today's"
NO_ENTRY = "no entry for these sources, flags and compiler"


@pytest.fixture
def world(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, unsealed: None) -> World:
    return World(tmp_path, cache, monkeypatch)


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Compilers:
    return Compilers(monkeypatch)


def built_by(world: World, tools: Toolchain, payload: bytes = b"code", **changes: Any) -> Path:
    """Have the store contain what this toolchain would build."""
    return world.store(payload, tools=tools, **changes)


def look(
    request: Request, trace: Trace | None = None
) -> tuple[Serve | Build, list[tuple[str, str, str]]]:
    trace = trace or Trace()
    outcome = search.search(request, trace)
    if isinstance(outcome, Ask):
        ask(request)
        trace.candidates.clear()
        outcome = search.search(request, trace)
    assert isinstance(outcome, Serve | Build)
    assert outcome.trace is trace
    return outcome, [each[:3] for each in trace.candidates]


def served(outcome: Serve | Build) -> str:
    assert isinstance(outcome, Serve), outcome
    assert outcome.artifact.origin == "store"
    return str(outcome.artifact.path)


def evidence(outcome: Serve | Build) -> Evidence:
    """What a receipt of this outcome would rest on."""
    assert isinstance(outcome, Serve), outcome
    assert outcome.read is not None
    return outcome.read


# Compilers that are known


def test_entry_of_the_known_compiler_serves_and_rests_on_that_compiler(
    world: World, compilers: Compilers
) -> None:
    compilers.remembered = GCC
    library = built_by(world, GCC)
    outcome, told = look(world.request())
    assert served(outcome) == str(library)
    assert told == [("store", "taken", TAKEN)]
    assert outcome.trace.candidates[0].subject == str(library.parent)
    assert evidence(outcome).complete
    assert compilers.asked == []


def test_entry_of_another_compiler_does_not_serve_and_a_build_is_planned(
    world: World, compilers: Compilers
) -> None:
    compilers.remembered = GCC
    built_by(world, GCC._replace(identity="another"))
    outcome, told = look(world.request())
    assert isinstance(outcome, Build)
    assert outcome.plan == plans.make(world.spec, world.request().target, GCC)
    assert told == [("store", "none", NO_ENTRY)]
    assert outcome.trace.candidates[0].subject == str(world.cache / LAYOUT)


def test_damaged_entry_is_told_and_passed(world: World, compilers: Compilers) -> None:
    compilers.remembered = GCC
    library = built_by(world, GCC)
    library.write_bytes(b"CODE")
    outcome, told = look(world.request())
    assert isinstance(outcome, Build)
    assert told[0] == ("store", "refused", "damaged: op.so has the wrong digest")
    assert outcome.trace.candidates[0].subject == str(library.parent)


def test_entry_that_could_not_be_opened_is_passed(world: World, compilers: Compilers) -> None:
    compilers.remembered = GCC
    library = built_by(world, GCC)
    request = world.request()
    request.cannot_open[str(library)] = LoadError("no", why="undefined symbol")
    outcome, told = look(request)
    assert isinstance(outcome, Build)
    assert told[0] == ("store", "refused", "undefined symbol")
    assert outcome.trace.candidates[0].subject == str(library)


def test_entry_that_needs_more_than_this_cpu_serves_builds_and_no_loads(
    world: World, compilers: Compilers
) -> None:
    compilers.remembered = GCC
    library = built_by(world, GCC, target={"cpu_features": ["none-such", "more"]})
    outcome, told = look(world.request(LOAD))
    assert isinstance(outcome, Build)
    assert told[0] == ("store", "refused", "needs more, none-such, which this CPU lacks")
    assert outcome.trace.candidates[0].subject == str(library.parent)
    outcome, _ = look(world.request(BUILD))
    assert served(outcome) == str(library)
    assert not evidence(outcome).complete, "a load would refuse it"


def test_cpu_that_was_asked_for_and_is_not_here_is_refused_for_a_load_alone(
    world: World, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.remembered = GCC
    monkeypatch.setenv("OPKILN_CPU", OTHER_LEVELS[0])
    with pytest.raises(LoadError, match="cannot run here"):
        look(world.request(LOAD))
    for use in (BUILD, SHIP):
        outcome, _ = look(world.request(use))
        assert isinstance(outcome, Build)
        assert not outcome.read.complete, "a load would refuse it"


def test_hostile_name_is_refused_before_it_becomes_a_path(
    world: World, compilers: Compilers
) -> None:
    world.spec = world.spec._replace(name="../op")
    with pytest.raises(SpecError):
        look(world.request())


# Compilers that are not known


def test_without_any_compiler_every_build_of_these_sources_serves(
    world: World, compilers: Compilers
) -> None:
    library = world.store()
    outcome, told = look(world.request())
    assert served(outcome) == str(library)
    assert told == [("store", "taken", TAKEN)]
    assert evidence(outcome).complete
    assert str(library.parents[2]) in evidence(outcome).files, "another build may come"
    assert compilers.asked == []


def test_without_any_compiler_an_entry_is_refused_once(world: World, compilers: Compilers) -> None:
    world.store().write_bytes(b"CODE")
    trace = Trace()
    with pytest.raises(ToolchainError):
        look(world.request(), trace)
    assert [each[:2] for each in trace.candidates] == [
        ("store", "refused"), ("store", "none"), ("build", "refused"),
    ]  # fmt: skip


def test_compiler_that_is_there_and_not_known_is_asked_first(
    world: World, compilers: Compilers
) -> None:
    compilers.found, compilers.answer = True, GCC
    world.store()  # of a compiler that may be another
    outcome, told = look(world.request())
    assert isinstance(outcome, Build)
    assert told == [("store", "none", NO_ENTRY)]
    assert outcome.plan.toolchain == GCC
    assert outcome.trace.candidates[0].subject == str(world.cache / LAYOUT)
    request = world.request()
    for given in (compilers.asked[0], *compilers.recalled):
        assert given == (request.store.memory, "cpu", request.target.machine)
    library = built_by(world, GCC, b"its own")
    outcome, told = look(world.request())
    assert served(outcome) == str(library)
    assert told[-1] == ("store", "taken", TAKEN)
    assert not evidence(outcome).complete


def test_compiler_that_cannot_be_used_lets_any_build_serve(
    world: World, compilers: Compilers
) -> None:
    compilers.found = True
    library = world.store()
    outcome, told = look(world.request())
    assert served(outcome) == str(library)
    assert told[-1] == ("store", "taken", TAKEN)
    library.unlink()
    trace = Trace()
    with pytest.raises(ToolchainError):
        look(world.request(), trace)
    assert trace.candidates[-1][:3] == ("build", "refused", "none: one; two")
    compilers.answer = ToolchainError("none")
    trace = Trace()
    with pytest.raises(ToolchainError):
        look(world.request(), trace)
    assert trace.candidates[-1][:3] == ("build", "refused", "none")


@pytest.mark.parametrize("found", [True, False])
def test_where_compiling_is_forbidden_any_build_serves_and_no_compiler_is_asked(
    world: World, compilers: Compilers, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_MODE", "cached")
    compilers.found, compilers.answer = found, GCC
    with pytest.raises(CompilingOff):
        look(world.request())
    library = world.store()
    outcome, _ = look(world.request())
    assert served(outcome) == str(library)
    assert not evidence(outcome).complete, "a compiler that may be used would decide"
    assert compilers.asked == []


def test_build_that_failed_is_not_tried_again(world: World, compilers: Compilers) -> None:
    compilers.remembered = GCC
    request = world.request()
    request.build_error = BuildError("g++ said no")
    trace = Trace()
    with pytest.raises(BuildError, match="g\\+\\+ said no"):
        look(request, trace)
    assert trace.candidates[-1][:3] == ("build", "refused", "g++ said no")


# Layers


def test_listed_layer_serves_where_the_users_own_store_has_nothing(
    world: World, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.remembered = GCC
    shared, nowhere, other = world.base / "shared", world.base / "nowhere", world.base / "other"
    other.mkdir()
    listed = world.add(shared, b"shared")
    monkeypatch.setenv("OPKILN_STORE_LAYERS", f"{nowhere}:{other}:{shared}")
    trace = Trace()
    outcome, _ = look(world.request(), trace)
    assert isinstance(outcome, Serve)
    assert (outcome.artifact.path, outcome.artifact.origin) == (str(listed), "layer")
    assert not evidence(outcome).complete
    names = "OPKILN_STORE_LAYERS names it, and "
    assert [tuple(each) for each in trace.candidates[:2]] == [
        ("layer", "none", f"{names}it does not exist", str(nowhere)),
        ("layer", "none", f"{names}it is not a layer: it has no {LAYOUT}", str(other)),
    ]
    own = built_by(world, GCC, b"own")
    assert served(search.search(world.request(), Trace())) == str(own)


def test_what_was_imported_into_the_users_own_store_serves_by_fit(
    world: World, compilers: Compilers
) -> None:
    compilers.remembered = GCC
    imported = world.add(world.cache, b"imported")
    assert served(look(world.request())[0]) == str(imported)


def test_a_build_for_other_machines_takes_nothing_from_layers(
    world: World, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.remembered = GCC
    world.add(world.base / "shared", b"shared")
    monkeypatch.setenv("OPKILN_STORE_LAYERS", str(world.base / "shared"))
    assert isinstance(look(world.request(SHIP))[0], Build)


# GPUs


@pytest.fixture
def gpu(world: World, compilers: Compilers) -> World:
    world.spec = world.spec._replace(backend=CUDA, sources=("a.cpp",))
    world.gpus("8.6")
    compilers.remembered = GCC._replace(device=NVCC._replace(archs=("8.0", "8.6", "9.0")))
    return world


def entry_for(world: World, compilers: Compilers, *archs: str, **changes: Any) -> Path:
    assert compilers.remembered is not None
    return world.store(tools=compilers.remembered, archs=archs, **changes)


def test_entry_for_other_architectures_serves_the_gpus_here_if_its_code_runs(
    gpu: World, compilers: Compilers
) -> None:
    entry_for(gpu, compilers, "9.0")
    assert isinstance(look(gpu.request())[0], Build)
    wider = entry_for(gpu, compilers, "8.0", "9.0")
    outcome, told = look(gpu.request())
    assert served(outcome) == str(wider)
    assert told[-1] == ("store", "taken", f"{TAKEN}; its code for 8.0;9.0 runs here")
    assert not evidence(outcome).complete, "a build for the very GPU would be better"
    exact = entry_for(gpu, compilers, "8.6")
    outcome, told = look(gpu.request())
    assert served(outcome) == str(exact)
    assert told[-1] == ("store", "taken", TAKEN)
    assert evidence(outcome).complete


@pytest.mark.parametrize("fault", ["damaged", "cannot be opened", "needs another CPU"])
def test_entry_for_other_architectures_serves_where_the_exact_one_cannot(
    gpu: World, compilers: Compilers, fault: str
) -> None:
    lacking = {"target": {"cpu_features": ["none-such"]}} if "CPU" in fault else {}
    exact = entry_for(gpu, compilers, "8.6", **lacking)
    gpu.add(gpu.cache, intent="0" * 40)  # of other flags
    wider = entry_for(gpu, compilers, "8.0", "9.0")
    os.utime(wider.parents[2], (1, 1))  # the oldest, so it is looked at last
    request = gpu.request()
    if fault == "damaged":
        exact.write_bytes(b"CODE")
    if fault == "cannot be opened":
        request.cannot_open[str(exact)] = LoadError("no", why="undefined symbol")
    outcome, told = look(request)
    assert served(outcome) == str(wider)
    assert [each[:2] for each in told] == [("store", "refused"), ("store", "taken")]


def test_list_that_was_named_is_the_one_that_is_wanted(gpu: World, compilers: Compilers) -> None:
    entry_for(gpu, compilers, "8.0", "9.0")
    request = gpu.request(asked="8.6")
    assert isinstance(look(request)[0], Build)


def test_ptx_serves_only_where_nothing_can_be_compiled(
    gpu: World, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ptx = entry_for(gpu, compilers, "7.0+PTX")
    assert isinstance(look(gpu.request())[0], Build)
    monkeypatch.setenv("OPKILN_MODE", "cached")
    assert served(look(gpu.request())[0]) == str(ptx)


def test_op_filter_keeps_what_it_removed_from_coming_back(gpu: World, compilers: Compilers) -> None:
    entry_for(gpu, compilers, "8.0", "8.6", "9.0")

    def without_9(ccs: list[Any]) -> list[Any]:
        return [each for each in ccs if not str(each).startswith("9")]

    assert isinstance(look(gpu.request(rule=without_9))[0], Build)
    assert isinstance(look(gpu.request())[0], Serve)


def test_toolkit_that_cannot_compile_what_was_named_is_told_once_and_raised(
    gpu: World, compilers: Compilers
) -> None:
    trace = Trace()
    with pytest.raises(ToolchainError, match=r"cannot be compiled for 12\.0"):
        search.search(gpu.request(BUILD, asked="12.0"), trace)
    refused = [each for each in trace.candidates if each.verdict == "refused"]
    assert len(refused) == 1
    assert refused[0].resort == "build"
    assert refused[0].reason.startswith("op op cannot be compiled for 12.0: 12.0: the toolkit")
    assert compilers.asked == []


def test_without_device_compiler_an_answer_is_not_remembered(
    gpu: World, compilers: Compilers
) -> None:
    entry_for(gpu, compilers, "8.6")
    compilers.remembered = None
    outcome, _ = look(gpu.request())
    assert not evidence(outcome).complete


# The plan


def test_plan_is_given_whether_or_not_a_build_is_needed(world: World, compilers: Compilers) -> None:
    built_by(world, GCC)
    compilers.answer = GCC
    request = world.request(BUILD)
    assert plan_here(request) == plans.make(world.spec, request.target, GCC)
    assert compilers.asked == [(request.store.memory, "cpu", request.target.machine)]


def test_missing_source_is_a_mistake_in_the_declaration(world: World, compilers: Compilers) -> None:
    compilers.remembered = GCC
    (world.package / "a.cpp").unlink()
    with pytest.raises(SpecError) as raised:
        look(world.request())
    assert raised.value.what == "op op: the source a.cpp does not exist"
    assert raised.value.why == f"sources are looked for in {world.package}"
    assert raised.value.hint == ("check its name; in a wheel, list it in the package's data files")
    (world.package / "a.cpp").mkdir()
    with pytest.raises(SpecError) as raised:
        look(world.request())
    assert raised.value.what == "op op: the source a.cpp is not a regular file"
    world.spec = world.spec._replace(inline=(("a.cpp", "int a;"),))
    assert isinstance(look(world.request())[0], Build)


def test_sources_in_a_zip_cannot_be_compiled_but_a_reference_may_serve(
    world: World, compilers: Compilers
) -> None:
    compilers.remembered = GCC
    archive = world.base / "app.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("package/a.cpp", "int a;")
    world.spec = world.spec._replace(root=f"{archive}/package")
    with pytest.raises(BuildError) as raised:
        look(world.request())
    assert raised.value.what == (f"op op cannot be compiled: its sources are inside {archive}")
    assert raised.value.why == (
        "a compiler reads files on disk, and these are packed in a zip file"
    )
    assert raised.value.hint == (
        "install the package with pip, which unpacks it; do not import the zip"
    )


def test_torch_that_is_missing_or_old_cannot_be_built_against(
    world: World, compilers: Compilers
) -> None:
    target = world.request().target
    stable = world.spec._replace(abi=ABI_STABLE)
    with pytest.raises(BuildError) as raised:
        search.plan_for(stable, target, GCC)
    assert str(raised.value).splitlines() == [
        "op op needs torch to be built", "  torch is not installed", "hint: pip install torch",
    ]  # fmt: skip
    old = GCC._replace(torch=TorchSDK("/torch", "2.9.1", "id", None, None, True))
    with pytest.raises(BuildError) as raised:
        search.plan_for(stable, target, old)
    assert str(raised.value).splitlines() == [
        "op op needs torch 2.10 or later to be built",
        "  torch 2.9.1 lacks the stable ABI's headers",
        "hint: pip install 'torch>=2.10'",
    ]
    assert search.plan_for(world.spec._replace(abi=ABI_TORCH), target, old).toolchain == old


# Remote tiers


@pytest.mark.parametrize("trusted", [True, False])
def test_remote_tiers_are_asked_once_and_only_by_those_who_may(
    trusted: bool, world: World, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.remembered = GCC
    monkeypatch.setenv("OPKILN_REMOTES", "https://tier.example")
    if trusted:
        monkeypatch.setenv("OPKILN_LOCK", str(world.base / "ops.lock"))
    request, trace = world.request(), Trace()
    assert isinstance(search.search(request, trace), Build)
    why = "only a load or a build connects"
    if not trusted:
        why = f"no load asks it: {terms.NOTHING_TRUSTED}"
    not_asked = ("remote", "none", f"not asked: {why}", "https://tier.example")
    assert trace.candidates[1:] == [not_asked]
    told = "" if trusted else f"\nno tier of OPKILN_REMOTES was asked: {terms.NOTHING_TRUSTED}"
    assert terms.refusal(world.spec, "compiling is off").why == f"compiling is off{told}"
    request.fetches = True
    outcome = search.search(request, Trace())
    assert isinstance(outcome, Fetch)
    assert outcome.target == request.target
    request.tiers, trace = Trace(), Trace()
    request.tiers.add("remote", "none", "it has nothing")
    trace.add("prebuilt", "none", "there is none")
    assert isinstance(search.search(request, trace), Build)
    assert [each.reason for each in trace.candidates] == [
        "there is none", "it has nothing", NO_ENTRY,
    ]  # fmt: skip
    for_others, trace = world.request(SHIP), Trace()
    for_others.fetches = True
    assert isinstance(search.search(for_others, trace), Build)
    assert [each.reason for each in trace.candidates] == [NO_ENTRY]


def test_build_of_any_compiler_serves_where_ours_only_stands_in_for_another(
    world: World, compilers: Compilers
) -> None:
    compilers.remembered = GCC
    world.patch.setattr(choice, "stands_in", lambda backend, spec: True)
    library = built_by(world, GCC._replace(identity="another"))
    assert served(look(world.request())[0]) == str(library)
    own = built_by(world, GCC, b"own")
    assert served(look(world.request())[0]) == str(own)
