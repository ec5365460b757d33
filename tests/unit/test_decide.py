"""The one decision, without a compiler: in which order candidates serve, and what stands in."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from typing import TYPE_CHECKING

import pytest
from sample.decisions import GCC, Compilers, World
from sample.levels import OTHER_LEVELS

from opkiln.base.model import CUDA, ONE_CALL, PROGRAM, XPU, Artifact
from opkiln.decision import decide, receipt, terms
from opkiln.decision.terms import (
    BUILD,
    CACHED,
    LOAD,
    SHIP,
    WOULD_COMPILE,
    WOULD_FAIL,
    WOULD_FALL_BACK,
    Build,
    Reference,
    Refuse,
    Request,
    Serve,
    Summary,
    Trace,
    summary,
)
from opkiln.errors import (
    ArchError,
    BuildError,
    CompilingOff,
    FallbackWarning,
    LoadError,
    ReloadError,
    SealedError,
    SpecError,
    ToolchainError,
    UsageError,
)
from opkiln.loading.explain import look_at
from opkiln.loading.loader import look
from opkiln.machine.facts import Evidence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from opkiln.decision.terms import Outcome


@pytest.fixture
def world(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, unsealed: None) -> World:
    return World(tmp_path, cache, monkeypatch)


def served(outcome: Outcome) -> tuple[str, str]:
    """(the library, where it comes from)."""
    assert isinstance(outcome, Serve), outcome
    return outcome.artifact.path, outcome.artifact.origin


def steps(outcome: Outcome) -> list[tuple[str, str]]:
    return [(each.resort, each.verdict) for each in outcome.trace.candidates]


# What all ranks of a job agreed on


@pytest.fixture
def pin(world: World) -> Iterator[Callable[..., terms.Pin]]:
    yield lambda *given, **named: terms.pin(world.op(), *given, **named)
    terms.release(world.op())


def test_reference_that_ranks_agreed_on_serves_loads_that_take_part(
    world: World, pin: Callable[..., terms.Pin]
) -> None:
    built = world.store(b"built")
    pin(None, "rank 3 cannot use it")
    outcome = decide.decide(world.request(reference=True))
    assert isinstance(outcome, Reference)
    assert outcome.error.what == "all ranks agreed on the reference of op op"
    assert outcome.error.why == "rank 3 cannot use it"
    agreed = ("fallback", "taken", "all ranks of the job agreed on the reference", "")
    assert outcome.trace.candidates == [agreed]
    outcome = decide.decide(world.request())
    assert isinstance(outcome, Refuse)
    assert outcome.error.what == "all ranks agreed on the reference of op op"
    assert outcome.error.why == "the op has no reference\nrank 3 cannot use it"
    assert outcome.error.hint == "opkiln.ensure(...)    # on all ranks, to agree again"
    assert outcome.trace.candidates == [("store", "refused", outcome.error.why, "")]
    for request in (world.request(BUILD), Request(world.op(), agreed=False)):
        assert served(look(request)) == (str(built), "store")


def test_library_that_ranks_agreed_on_serves_as_it_was_or_nothing_does(
    world: World, pin: Callable[..., terms.Pin]
) -> None:
    world.store(b"better")
    library = world.base / "agreed.so"
    library.write_bytes(b"agreed")
    library.chmod(0o700)
    artifact = Artifact(str(library), hashlib.sha256(b"agreed").hexdigest(), "store")
    pin(artifact)
    outcome = decide.decide(world.request())
    assert isinstance(outcome, Serve)
    assert outcome.artifact == artifact
    told = f"all ranks of the job agreed on it, SHA-256 {artifact.sha256[:16]}"
    assert outcome.trace.candidates == [("store", "taken", told, str(library))]
    request = world.request()
    request.cannot_open[str(library)] = LoadError("no", why="undefined symbol")
    library.write_bytes(b"another")
    for refused, why in (
        (decide.decide(request), "undefined symbol"),
        (decide.decide(world.request()), f"{library} has the SHA-256 "),
    ):
        assert isinstance(refused, Refuse)
        assert refused.error.what == (
            "the library of op op that all ranks agreed on cannot be opened here"
        )
        assert refused.error.why.startswith(why)
        assert refused.error.hint == "opkiln.ensure(...)    # on all ranks, to agree again"
        assert refused.trace.candidates == [("store", "refused", refused.error.why, str(library))]


@pytest.mark.parametrize(("origin", "mode", "reason"), [
    ("store", 0o644, ""), ("store", 0o664, "writable by others"),
    ("built", 0o664, "writable by others"), ("layer", 0o664, ""),
    ("layer", 0o646, "writable by everybody"),
])  # fmt: skip
def test_library_that_ranks_agreed_on_is_trusted_as_others_of_its_origin(
    origin: str, mode: int, reason: str, tmp_path: Path
) -> None:
    library = tmp_path / "agreed.so"
    library.write_bytes(b"agreed")
    library.chmod(mode)
    artifact = Artifact(str(library), hashlib.sha256(b"agreed").hexdigest(), origin)
    found = terms.pin_fault(artifact)
    assert found.startswith(f"{library} is {reason}" if reason else "")
    assert bool(found) == bool(reason)
    memory = os.memfd_create("agreed")  # of a bundle; its name is a link
    try:
        os.write(memory, b"agreed")
        assert terms.pin_fault(artifact._replace(path=f"/proc/self/fd/{memory}")) == ""
    finally:
        os.close(memory)
    library.unlink()
    assert terms.pin_fault(artifact) == f"{library}: No such file or directory"


def test_nothing_is_agreed_on_until_it_is_and_after_it_was_released(world: World) -> None:
    terms.release(world.op())
    assert terms.find_pin(world.op()) is None
    assert terms.pin(world.op(), None) == terms.Pin(world.op().spec, None, "", False, None)
    terms.release(world.op())
    assert terms.find_pin(world.op()) is None


def test_op_that_was_declared_anew_is_not_the_one_that_ranks_agreed_on(
    world: World, pin: Callable[..., terms.Pin]
) -> None:
    pin(None, find_change=lambda op: "gradient")
    first = decide.decide(world.request(reference=True))
    pin(None, find_change=lambda op: "")
    assert isinstance(decide.decide(world.request(reference=True)), Reference)
    world.spec = world.spec._replace(cxx_args=("-DOTHER",))
    second = decide.decide(world.request(reference=True))
    for outcome, other in ((first, "gradient"), (second, "set of sources or flags")):
        assert isinstance(outcome, Refuse)
        assert outcome.error.what == "the ranks agreed on another op op"
        assert outcome.error.why == f"it was declared anew since then, with another {other}"
        assert outcome.error.hint == "opkiln.ensure(...)    # on all ranks, to agree again"


# The order


def test_what_the_package_carries_goes_before_a_receipt_and_a_receipt_before_the_search(
    world: World,
) -> None:
    built = world.store(b"built")
    outcome = look(world.request())
    assert served(outcome) == (str(built), "store")
    assert isinstance(outcome, Serve)
    assert outcome.read is not None, "a full search says what it read"
    world.leave_receipt(built)
    outcome = look(world.request())
    assert served(outcome) == (str(built), "store")
    assert isinstance(outcome, Serve)
    assert outcome.read is None
    (candidate,) = outcome.trace.candidates
    assert candidate == ("store", "taken", "nothing it rests on has changed", str(built))
    carried = world.carry(b"carried")
    assert served(look(world.request())) == (str(carried), "prebuilt")


def test_a_build_for_other_machines_looks_at_the_users_own_store_alone(world: World) -> None:
    world.carry()
    built = world.store(b"built")
    world.leave_receipt(built)
    outcome = look(world.request(SHIP))
    assert served(outcome) == (str(built), "store")
    assert isinstance(outcome, Serve)
    assert outcome.read is not None
    assert [each.resort for each in outcome.trace.candidates] == ["store"]


def test_a_build_for_here_takes_what_the_package_carries(world: World) -> None:
    carried = world.carry()
    assert served(look(world.request(BUILD))) == (str(carried), "prebuilt")


def test_mode_source_ignores_what_packages_carry(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.carry()
    monkeypatch.setenv("OPKILN_MODE", "source")
    assert isinstance(look(world.request()), Refuse)


def test_shared_wheels_are_looked_for_on_the_absolute_directories_of_sys_path(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, working = world.base / "site", world.base / "working"
    for place in (site, working):
        world.add(place / "opkiln_prebuilt" / "wheel", str(place).encode())
    working.joinpath("opkiln_prebuilt", "file").write_text("not a layer")
    monkeypatch.chdir(working)
    monkeypatch.setattr(sys, "path", ["", ".", "nowhere", str(site / "none"), *sys.path])
    assert not isinstance(look(world.request()), Serve)
    monkeypatch.setattr(sys, "path", ["", str(site / "none"), str(site), *sys.path])
    path, origin = served(look(world.request()))
    assert path.startswith(f"{site}/opkiln_prebuilt/wheel/v1/ops/dist/op/")
    assert origin == "prebuilt"


def test_what_one_call_compiles_belongs_to_no_package_that_could_carry_it(world: World) -> None:
    world.spec = world.spec._replace(distribution=ONE_CALL)
    found = world.package / "prebuilt/v1/ops" / ONE_CALL / "op"
    found.mkdir(parents=True)
    assert decide._installed_layers(world.spec) == []
    own = world.spec._replace(distribution="dist")
    assert decide._installed_layers(own) == []
    (found.parent.parent / "dist" / "op").mkdir(parents=True)
    assert decide._installed_layers(own) == [str(world.package / "prebuilt/v1")]


def test_an_artifact_that_could_not_be_opened_is_not_remembered_again(world: World) -> None:
    built = world.store()
    world.leave_receipt(built)
    request = world.request()
    request.cannot_open[str(built)] = LoadError("cannot open it", why="undefined symbol: x")
    outcome = look(request)
    assert isinstance(outcome, Refuse)
    assert outcome.trace.candidates[0] == ("store", "refused", "undefined symbol: x", str(built))
    assert "taken" not in {each.verdict for each in outcome.trace.candidates}


# Without anything native


def test_without_compiler_and_entry_the_op_is_refused_with_every_reason(world: World) -> None:
    outcome = look(world.request())
    assert isinstance(outcome, Refuse)
    assert isinstance(outcome.error, ToolchainError)
    assert steps(outcome) == [("store", "none"), ("build", "refused"), ("fallback", "refused")]
    assert outcome.trace.candidates[-1].reason == "the op has no reference"


def test_the_reference_serves_instead_and_is_told(world: World) -> None:
    outcome = look(world.request(reference=True))
    assert isinstance(outcome, Reference)
    assert isinstance(outcome.error, ToolchainError)
    assert outcome.trace.candidates[-1][:3] == (
        "fallback", "taken", "the pure-PyTorch reference serves",
    )  # fmt: skip


def test_the_reference_does_not_stand_in_for_a_mistake(world: World) -> None:
    world.spec = world.spec._replace(sources=())
    outcome = look(world.request(reference=True))
    assert isinstance(outcome, Refuse)
    assert isinstance(outcome.error, SpecError)
    assert outcome.trace.candidates[-1].resort == "target"
    assert outcome.trace.candidates[-1].verdict == "refused"
    assert outcome.trace.candidates[-1].reason.startswith(outcome.error.what)


@pytest.mark.parametrize("kind", [ReloadError, SealedError])
def test_the_reference_does_not_stand_in_for_what_must_be_noticed(
    world: World, kind: type[LoadError]
) -> None:
    request = world.request(reference=True)
    request.build_error = kind("no")
    assert isinstance(look(request), Refuse)


@pytest.mark.parametrize("kind", [BuildError, LoadError, ToolchainError])
def test_the_reference_stands_in_for_a_build_that_failed(
    world: World, kind: type[BuildError]
) -> None:
    request = world.request(reference=True)
    request.build_error = kind("it failed", why="because")
    outcome = look(request)
    assert isinstance(outcome, Reference)
    assert outcome.error is request.build_error
    assert ("build", "refused") in steps(outcome)


def test_an_error_without_a_candidate_is_told_as_the_target(world: World) -> None:
    def told(why: str) -> list[tuple[str, ...]]:
        trace = Trace()
        decide._fall_back(world.request(), LoadError("what", why=why), trace)
        return [each[:3] for each in trace.candidates]

    assert told("why")[0] == ("target", "refused", "what: why")
    assert told("")[0] == ("target", "refused", "what")


def test_what_cannot_be_opened_is_the_error_also_where_it_cannot_be_built_again(
    world: World,
) -> None:
    first = LoadError("op cannot be opened", why="undefined symbol", hint="do this")
    request = world.request(reference=True)
    request.cannot_open["/x.so"] = first
    request.build_error = BuildError("g++ said no", hint="do that")
    outcome = look(request)
    assert isinstance(outcome, Reference)
    error = outcome.error
    assert isinstance(error, LoadError)
    assert error.what == "op cannot be opened"
    assert error.why == "undefined symbol\nand it cannot be built again: g++ said no"
    assert error.hint == "do this"
    assert error.__cause__ is request.build_error
    first.hint = ""
    outcome = look(request)
    assert isinstance(outcome, Reference)
    assert outcome.error.hint == "do that"


def test_an_error_that_is_not_the_builds_stays_what_it_is(world: World) -> None:
    request = world.request()
    request.cannot_open["/x.so"] = LoadError("op cannot be opened")
    outcome = look(request)
    assert isinstance(outcome, Refuse)
    assert isinstance(outcome.error, ToolchainError)


def test_mode_reference_runs_the_reference_although_a_library_is_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = world.carry()
    monkeypatch.setenv("OPKILN_MODE", "reference")
    outcome = look(world.request(reference=True))
    assert isinstance(outcome, Reference)
    assert outcome.error.what == "op op runs as its reference"
    assert outcome.error.why == "OPKILN_MODE=reference"
    assert isinstance(outcome.error, LoadError)
    assert served(look(world.request())) == (str(carried), "prebuilt")
    assert served(look(world.request(BUILD, reference=True)))[0] == str(carried)


def test_code_that_no_gpu_here_can_run_is_refused_for_a_load_and_not_for_a_build(
    world: World,
) -> None:
    world.spec = world.spec._replace(backend=CUDA)
    world.gpus("7.5")
    carried = world.carry(target={"archs": ["9.0"]}, needs={"images": ["sm_90"]})
    outcome = look(world.request(asked="9.0"))
    assert isinstance(outcome, Refuse)
    assert "cannot run on this machine's 7.5" in outcome.error.what
    assert served(look(world.request(BUILD, asked="9.0"))) == (str(carried), "prebuilt")


def test_a_sycl_op_is_refused_where_there_is_no_device_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opkiln.machine.toolchain import libsycl

    world.spec = world.spec._replace(backend=XPU)
    monkeypatch.setattr(
        libsycl, "why_no_device", lambda icd: ("no driver", "install it") if not icd else None
    )
    outcome = look(world.request())
    assert isinstance(outcome, Refuse)
    assert outcome.error.what == "op op has no SYCL device to run on"
    assert (outcome.error.why, outcome.error.hint) == ("no driver", "install it")
    monkeypatch.setenv("OCL_ICD_FILENAMES", "/driver.so")
    outcome = look(world.request())
    assert isinstance(outcome, Refuse)
    assert isinstance(outcome.error, ToolchainError)


def test_to_explain_is_to_look_but_for_mistakes_which_are_raised(world: World) -> None:
    carried = world.carry()
    assert served(look_at(world.request()))[0] == str(carried)
    world.spec = world.spec._replace(name="op2")
    assert isinstance(look_at(world.request()), Refuse)
    world.spec = world.spec._replace(sources=())
    with pytest.raises(UsageError, match="op2"):
        look_at(world.request())


# The policy

MODES = ("auto", "native", "cached", "sealed", "needed", "source", "reference", "check")


@pytest.mark.parametrize("mode", MODES)
def test_policy_follows_the_mode(world: World, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_MODE", mode)
    plain, known = world.request(), world.request(reference=True)
    nothing = f"OPKILN_MODE={mode}: nothing is compiled here"
    assert terms.is_sealed() == (mode == "sealed")
    assert terms.uses_installed() == (mode != "source")
    assert terms.never_compiles() == (nothing if mode in ("cached", "sealed") else "")
    assert terms.why_not_compile(plain) == terms.never_compiles()
    needed = "OPKILN_MODE=needed: an op that has a reference is not compiled here"
    assert terms.why_not_compile(known) == (needed if mode == "needed" else terms.never_compiles())
    told = {"native": "OPKILN_MODE=native: a native version is required",
            "sealed": "opkiln is sealed"}  # fmt: skip
    assert terms.why_no_reference(known) == told.get(mode, "")
    assert terms.why_no_reference(plain) == "the op has no reference"
    assert (
        terms.why_no_reference(world.request(reference=True, native=True))
        == "a native version was asked for"
    )
    assert terms.prefers_reference(known) == (mode == "reference")
    assert not terms.prefers_reference(plain)


@pytest.mark.parametrize("seal", ["error", "warn", "off"])
def test_policy_follows_the_seal(world: World, seal: str) -> None:
    terms.seal(seal)
    known = world.request(reference=True)
    is_error = seal == "error"
    told = "opkiln is sealed: nothing may be compiled any more"
    assert terms.is_sealed() is is_error
    assert terms.never_compiles() == (told if is_error else "")
    assert terms.why_no_reference(known) == ("opkiln is sealed" if is_error else "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if is_error:
            with pytest.raises(SealedError) as raised:
                terms.about_to_compile(world.spec)
            assert raised.value.what == "op op would have to be compiled"
            assert raised.value.why == told
            assert raised.value.hint == "opkiln build op"
        else:
            terms.about_to_compile(world.spec)
    assert [(each.category, str(each.message)) for each in caught] == (
        [(FallbackWarning, "op op is compiled after opkiln was sealed\nhint: opkiln build op")]
        if seal == "warn"
        else []
    )


def test_seal_is_an_error_unless_said_otherwise_and_takes_no_other_word() -> None:
    try:
        terms.seal()
        assert terms.is_sealed()
        with pytest.raises(UsageError, match=r"seal\('on'\): expected 'warn', 'error' or 'off'"):
            terms.seal("on")
        assert terms.is_sealed()
    finally:
        terms.seal("off")


@pytest.mark.parametrize(
    ("mode", "distribution", "hint"),
    [
        ("auto", "package", "opkiln build op"),
        ("native", "package", "opkiln build op"),
        ("source", "package", "opkiln build op"),
        ("cached", "package", "OPKILN_MODE=auto opkiln build op"),
        ("sealed", "package", "OPKILN_MODE=auto opkiln build op"),
        ("auto", ONE_CALL, "run it once before; later runs find it in the cache"),
        ("auto", PROGRAM, "run it once before; later runs find it in the cache"),
        ("cached", ONE_CALL,
         "run it once with OPKILN_MODE=auto before; later runs find it in the cache"),
    ],
)  # fmt: skip
def test_refusal_to_compile_says_how_to_have_it_compiled(
    world: World, mode: str, distribution: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_MODE", mode)
    error = terms.refusal(world.spec._replace(distribution=distribution), "because")
    assert type(error) is (SealedError if mode == "sealed" else CompilingOff)
    assert (error.what, error.why) == ("op op would have to be compiled", "because")
    assert error.hint == hint


def test_nothing_is_compiled_where_the_mode_forbids_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_MODE", "cached")
    outcome = look(world.request())
    assert isinstance(outcome, Refuse)
    assert isinstance(outcome.error, CompilingOff)
    assert ("build", "refused", "OPKILN_MODE=cached: nothing is compiled here", "") in [
        tuple(each) for each in outcome.trace.candidates
    ]


# The request and the outcome in a word


def test_request_that_is_no_load_wants_a_native_version(world: World) -> None:
    assert not world.request().must_be_native
    assert world.request(native=True).must_be_native
    assert world.request(BUILD).must_be_native
    assert world.request(SHIP).must_be_native
    assert Request(world.op()).use == LOAD
    assert not Request(world.op()).must_be_native


def test_request_runs_here_for_a_load_and_is_for_elsewhere_when_shipped_or_crossed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [world.request(use).runs_here for use in (LOAD, BUILD, SHIP)] == [True, False, False]
    assert [world.request(use).for_elsewhere for use in (LOAD, BUILD, SHIP)] == [
        False, False, True,
    ]  # fmt: skip
    monkeypatch.setenv("OPKILN_CPU", OTHER_LEVELS[0])
    assert world.request(BUILD).for_elsewhere


def test_outcome_in_a_word(world: World) -> None:
    trace = Trace()
    trace.add("layer", "refused", "one", "/a")
    trace.add("build", "refused", "two", "/b")
    trace.add("fallback", "refused", "three", "/c")
    artifact = Artifact("/x.so", "0", "store")
    error = LoadError("what")
    plan: object = None
    assert summary(Serve(artifact, trace)) == Summary(CACHED, "", "/x.so")
    assert summary(Build(plan, trace, Evidence())) == Summary(WOULD_COMPILE, "one; two", "")  # type: ignore[arg-type]
    assert summary(Reference(error, trace)) == Summary(WOULD_FALL_BACK, "one; two", "")
    assert summary(Refuse(error, trace)) == Summary(WOULD_FAIL, "one; two", "")
    assert summary(Refuse(error, Trace())) == Summary(WOULD_FAIL, "what", "")
    assert summary(Build(plan, Trace(), Evidence())) == Summary(WOULD_COMPILE, "", "")  # type: ignore[arg-type]
    taken = Trace()
    taken.add("store", "none", "nothing yet", "/n")
    assert summary(Build(plan, taken, Evidence())).reason == "nothing yet"  # type: ignore[arg-type]
    taken.add("store", "taken", "it is there", "/entry")
    assert summary(Serve(artifact, taken)) == Summary(CACHED, "", "/entry")
    assert [CACHED, WOULD_COMPILE, WOULD_FALL_BACK, WOULD_FAIL] == [
        "cached", "would compile", "would fall back", "would fail",
    ]  # fmt: skip


def test_a_request_that_cannot_be_understood_is_refused_as_a_mistake(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_CPU", "abacus")
    world.spec = world.spec._replace(vectorize=True)
    outcome = look(world.request(reference=True))
    assert isinstance(outcome, Refuse)
    assert isinstance(outcome.error, ArchError)
    assert receipt.recall(world.request()) is None


# Many looks at once


def test_looks_of_one_survey_recall_the_compilers_once_and_agree_with_single_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers = Compilers(monkeypatch)
    compilers.remembered = GCC
    library = str(world.store(tools=GCC))
    survey = terms.Survey()
    found = [look(Request(world.op(), survey=survey)) for _ in range(3)]
    assert [served(each) for each in found] == [(library, "store")] * 3
    assert len(compilers.recalled) == 1
    single = look(world.request())
    assert served(single) == (library, "store")
    assert [str(each.trace) for each in found] == [str(single.trace)] * 3
    assert isinstance(found[0], Serve)
    assert found[0].read is not None
    assert not found[0].read.complete, "what a survey read is not noted, so it makes no receipt"
