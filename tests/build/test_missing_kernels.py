"""A library must register what its op declares: who loads one that does not is told, every time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from sample import child
from sample.package import Package

from opkiln.building import loadtest
from opkiln.errors import FallbackWarning, LoadError, LoadTestError, SpecError
from opkiln.loading import register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from opkiln.builder import OpBuilder

SOURCE = "csrc/stable.cpp"
AXPY = '  m.impl("axpy", TORCH_BOX(&axpy));\n'

LOAD = """
import sys, warnings, torch
from importlib import import_module
from opkiln.errors import OpkilnError
builder = import_module(sys.argv[1] + ".op").StableBuilder
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    try:
        print("served by", builder().load().who(torch.ones(1)))
    except OpkilnError as error:
        print("refused:", error.what)
for each in seen:
    print("warned:", str(each.message).replace("\\n", " "))
"""


@pytest.fixture
def stable(package: Callable[..., Package]) -> Package:
    return package("stable")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    """One whose library registers its kernels for another namespace."""
    with pytest.MonkeyPatch.context() as patch:
        packages = tmp_path_factory.mktemp("packages")
        patch.syspath_prepend(str(packages))
        made = Package("stable", packages, "elsewhere_stable")
        made.edit(SOURCE, "IMPL(SAMPLE_NAMESPACE, CPU", "IMPL(elsewhere, CPU")
        yield made


def implementing(package: Package, names: Sequence[str]) -> OpBuilder:
    """A builder of the op whose author says which functions have kernels."""
    base = type(package.builder())
    methods = {"kernels": lambda _: names, "__module__": base.__module__}
    made: OpBuilder = type("StableBuilder", (base,), methods)()
    return made


def process(package: Package, **env: str) -> str:
    """What a fresh process prints that loads the op and calls ``who``."""
    return child.run(LOAD, package.name, path=[package.where], env=env, bare=False).strip()


def test_a_library_that_registers_nothing_is_refused_in_every_process(elsewhere: Package) -> None:
    refused = [process(elsewhere, OPKILN_MODE="native") for _ in range(2)]
    name = elsewhere.name
    missing = f"no CPU kernel for {name}::who, {name}::axpy, {name}::scale_"
    assert refused == [f"refused: op stable: its library registers {missing}"] * 2
    for _ in range(2):
        served, warned = process(elsewhere).split("\n")
        assert served == "served by 0"
        assert missing in warned
        assert "there is a kernel for elsewhere::axpy" in warned


def test_one_missing_kernel_among_several_is_named_unless_it_is_left_to_the_reference(
    stable: Package,
) -> None:
    stable.edit(SOURCE, AXPY, "")
    with pytest.raises(LoadTestError) as caught:
        stable.builder().jit_load()
    assert caught.value.what.endswith(f"registers no CPU kernel for {stable.name}::axpy")
    assert 'm.impl("axpy", TORCH_BOX(&axpy));' in caught.value.hint
    with pytest.warns(FallbackWarning, match=f"no CPU kernel for {stable.name}::axpy"):
        assert stable.load().who(torch.ones(1)) == 0
    functions = implementing(stable, ("who", "scale_")).jit_load()
    x = torch.ones(2)
    assert functions.who(x) == 1
    assert functions.axpy(x, x, 3.0).tolist() == [4.0, 4.0]


@pytest.mark.parametrize(("names", "said"), [
    (("who", "axpi"), "names axpi, which is not declared"), ((), "names no function"),
])  # fmt: skip
def test_kernels_must_be_functions_that_are_declared(
    names: Sequence[str], said: str, stable: Package
) -> None:
    with pytest.raises(SpecError, match=said):
        implementing(stable, names).load()


def test_an_entry_that_nobody_has_checked_is_refused_by_everyone_who_opens_it(
    elsewhere: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries for other machines are published without being loaded."""
    with monkeypatch.context() as patch:
        patch.setattr(loadtest.LoadTest, "check", lambda _self: None)
        for _ in range(2):
            with pytest.raises(LoadError, match="registers no CPU kernel"):
                elsewhere.builder().jit_load()
    # In another process it is found, and refused twice: by its receipt, and by the full search.
    for _ in range(2):
        out = process(elsewhere, OPKILN_MODE="native")
        assert out.startswith("refused: op stable: its library registers no CPU kernel")


def test_the_check_asks_for_each_function_and_takes_any_key_of_the_backend(
    stable: Package,
) -> None:
    assert stable.load().who(torch.ones(1)) == 1
    op = stable.builder().op()
    on_cuda, on_xpu = (op._replace(spec=op.spec._replace(backend=b)) for b in ("cuda", "xpu"))
    register.require_kernels(op)
    register.require_kernels(on_xpu)  # SYCL's kernels may be the CPU's
    with pytest.raises(LoadError, match=f"no CUDA kernel for {stable.name}::who"):
        register.require_kernels(on_cuda)
    # A kernel that an edit removes is not served by the version before.
    stable.edit(SOURCE, AXPY, "")
    with pytest.raises(LoadTestError, match="::axpy"):
        stable.builder().load(reload=True)
