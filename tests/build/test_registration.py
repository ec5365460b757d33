"""Registration with torch: live replacement, version counters, compiled graphs, opcheck."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample import known, pool
from sample.package import Package

from opkiln.errors import CompileError, FallbackWarning
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    """A stable-ABI op, built once for this file and loaded natively."""
    base = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(base / "packages"))
        patch.setenv("OPKILN_STORE_LAYERS", str(pool.LAYER))
        made = Package("stable", base / "packages", "shared_stable")
        with override(cache_dir=str(known.make_store(base / "cache")), progress="off"):
            made.builder().jit_load()
        pool.add(base / "cache")
        yield made


@pytest.fixture
def native(shared: Package) -> Any:
    """Its functions."""
    functions = shared.builder().load()
    assert functions.who(torch.ones(1)) == 1
    return functions


@pytest.fixture
def stable(package: Callable[..., Package]) -> Package:
    return package("stable")


@pytest.fixture
def light(package: Callable[..., Package]) -> Package:
    return package("stable", "light")


def referred(package: Package) -> list[str]:
    """The calls that the reference has got."""
    found: list[str] = importlib.import_module(f"{package.name}.reference").calls
    return found


def falling_back(package: Package, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setenv("OPKILN_MODE", "cached")
        with pytest.warns(FallbackWarning):
            return package.load()


def test_the_op_exists_before_and_without_any_library(
    stable: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = falling_back(stable, monkeypatch)
    x = torch.ones(4)
    assert functions.who(x) == 0
    functions.scale_(x, 3.0)
    assert x.tolist() == [3.0] * 4
    assert torch.equal(getattr(torch.ops, stable.name).axpy(x, x, 1.0), 2 * x)
    assert "who, axpy, scale_" in repr(functions)


def test_the_native_kernel_replaces_the_reference_live_also_in_a_graph_compiled_before(
    stable: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = falling_back(stable, monkeypatch)
    x, y = torch.arange(4.0), torch.ones(4)
    op = getattr(torch.ops, stable.name).axpy

    def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return op(a, b, 2.0)  # type: ignore[no-any-return]

    backends = ("aot_eager", "inductor")
    graphs = [torch.compile(model, fullgraph=True, backend=backend) for backend in backends]
    for graph in graphs:
        assert torch.equal(graph(x, y), 2 * x + y)
    before = len(referred(stable))
    assert before >= len(graphs)
    held = functions.axpy  # what a caller may have kept

    assert stable.load().who(x) == 1

    for call in (*graphs, lambda a, b: held(a, b, 2.0)):
        assert torch.equal(call(x, y), 2 * x + y)
    assert functions.who(x) == 1
    assert len(referred(stable)) == before, "the reference was called after the replacement"


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_a_mutated_tensor_shows_in_its_version_and_a_stale_gradient_is_caught(
    kind: str, native: Any, stable: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = native if kind == "native" else falling_back(stable, monkeypatch)
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    loss = (hidden * hidden).sum()  # saves `hidden` for the backward pass
    version = hidden._version
    with torch.no_grad():
        functions.scale_(hidden, 2.0)
    assert hidden._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_each_mutation_counts_once_natively(native: Any) -> None:
    x = torch.ones(3)
    for expected in (1, 2, 3):
        native.scale_(x, 2.0)
        assert x._version == expected
    native.scale_(x=x, by=2.0)
    assert x._version == 4
    assert x.tolist() == [16.0] * 3


def test_an_op_that_only_reads_bumps_nothing(native: Any) -> None:
    x = torch.ones(3)
    native.axpy(x, x, 2.0)
    assert x._version == 0


def test_opcheck_passes_for_what_returns_and_for_what_mutates(native: Any) -> None:
    torch.library.opcheck(native.axpy, (torch.randn(8), torch.randn(8), 0.5))
    torch.library.opcheck(native.scale_, (torch.randn(8), 0.5))


def test_a_mutating_op_compiles_whole(native: Any, shared: Package) -> None:
    op = getattr(torch.ops, shared.name).scale_

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        op(x, 2.0)
        return x + 1

    x = torch.ones(3)
    assert step(x).tolist() == [3.0] * 3
    assert x.tolist() == [2.0] * 3


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch: the kernel is being overridden
def test_an_edited_kernel_is_swapped_in_by_a_reload_and_an_undone_edit_swapped_back(
    stable: Package,
) -> None:
    functions = stable.load()
    x = torch.ones(1)
    assert functions.who(x) == 1
    stable.edit("csrc/stable.cpp", "kWho = 1", "kWho = 2")
    assert functions.who(x) == 1, "nothing changes without being asked"
    assert stable.builder().load(reload=True).who(x) == 2
    assert functions.who(x) == 2
    assert stable.builder().load().who(x) == 2
    stable.edit("csrc/stable.cpp", "kWho = 2", "kWho = 1")
    assert stable.builder().load(reload=True).who(x) == 1


def test_a_reload_that_does_not_compile_raises_and_leaves_the_kernel_in_place(
    light: Package,
) -> None:
    x = torch.ones(1)
    assert light.load().who(x) == 1
    light.edit("csrc/light.cpp", "#include <opkiln/op.h>", "#include <oops.h>")
    for _ in range(2):
        with pytest.raises(CompileError, match="does not compile"):
            light.builder().load(reload=True)
    assert light.builder().load().who(x) == 1


def test_a_builder_that_is_declared_anew_is_not_mistaken_for_the_old_one(light: Package) -> None:
    x = torch.ones(1)
    assert light.load().who(x) == 1
    light.edit("csrc/light.cpp", "kWho = 1", "kWho = WHO")
    assert light.builder(FLAGS=("-DWHO=7",)).load().who(x) == 7
