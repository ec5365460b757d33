"""All checks in the order in which a person would look, and the one loop that runs them."""

from __future__ import annotations

from opkiln.errors import OpkilnError, SettingError
from opkiln.report.doctor import (
    accelerator,
    budget,
    compilers,
    cuda,
    ops,
    places,
    prebuilt,
    rocm,
    selfcheck,
    store,
    sycl,
    system,
    torch_side,
    variables,
)
from opkiln.report.doctor.finding import (
    FAIL,
    WARN,
    Finding,
    Outcome,
    copyable,
    failed,
    joined,
    passed,
    skipped,
)
from opkiln.report.doctor.here import Here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Check = Callable[[Here], Outcome]


def to_compile(check: Check) -> Check:
    """A check of what only compiling needs: where nothing may compile, it finds nothing wrong."""

    def judged(here: Here) -> Outcome:
        found = check(here)
        if found.verdict in (WARN, FAIL) and here.never_compiles:
            return passed(joined(found.evidence, f"not needed: {here.never_compiles}"))
        return found

    return judged


CHECKS: dict[str, Check] = {
    "python": system.python,
    "python headers": to_compile(system.python_headers),
    "system": system.system,
    "settings": variables.values,
    "variable names": variables.misspelt,
    "kept-away variables": variables.kept_away,
    "compiler": to_compile(compilers.compiler),
    "c++ runtime": to_compile(compilers.runtime),
    "launcher": to_compile(compilers.launcher),
    "ninja": compilers.ninja,
    "torch": torch_side.version,
    "torch devices": torch_side.devices,
    "torch libraries": torch_side.libraries,
    "torch c++ abi": torch_side.cxx_abi,
    "openmp": torch_side.openmp,
    "cuda toolkit": to_compile(cuda.toolkit),
    "nvcc host compiler": to_compile(cuda.host_compiler),
    "cuda driver": cuda.driver,
    "cuda arch list": cuda.arch_list,
    "cuda gpus": cuda.gpus,
    "rocm": to_compile(rocm.toolkit),
    "rocm gpus": rocm.gpus,
    "sycl": to_compile(sycl.toolkit),
    "sycl device": sycl.device,
    "accelerator": accelerator.chosen,
    "ops": ops.importable,
    "prebuilt": prebuilt.installed,
    "store": store.place,
    "store owner": store.owner,
    "store mode": store.mode,
    "store space": store.space,
    "store inodes": store.inodes,
    "store noexec": store.noexec,
    "store layers": store.layers,
    "store clock": store.clock,
    "store leftovers": store.leftovers,
    "tmpdir": places.tmpdir,
    "tmpdir noexec": places.tmpdir_noexec,
    "tmpdir space": places.tmpdir_space,
    "shared memory": places.shared_memory,
    "cpus": budget.cpus,
    "memory": budget.memory,
    "budget": budget.sharing,
}

BUILDS: dict[str, Check] = {
    "self-check cpu": selfcheck.cpu,
    "self-check torch": selfcheck.torch,
    "self-check cuda": selfcheck.cuda,
    "self-check rocm": selfcheck.rocm,
    "self-check xpu": selfcheck.xpu,
}


def examine(*, build: bool = True) -> Iterator[Finding]:
    """Run every check, one after the other; with ``build``, the self-check last. Never raises."""
    here = Here()
    for name, check in (CHECKS | (BUILDS if build else {})).items():
        yield Finding(name, *outcome(check, here))


def outcome(check: Check, here: Here) -> Outcome:
    """What a check comes to. One that raises has found a fault that it does not know."""
    try:
        return check(here)
    except SettingError as error:
        return skipped(f"cannot be told while {error.what}")  # which `settings` reports
    except OpkilnError as error:
        return failed(joined(error.what, *error.why.splitlines()), copyable(error.hint))
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}")
