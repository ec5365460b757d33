"""All checks, in the order in which a person would look, and the loop that runs them."""

from __future__ import annotations

from opkiln.errors import OpkilnError, SettingError
from opkiln.report.doctor import devices, host, ops, places, selfcheck, store, torch_side
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
    """A check of something that only compiling needs: it passes if nothing may be compiled."""

    def judged(here: Here) -> Outcome:
        found = check(here)
        if found.verdict in (WARN, FAIL) and here.never_compiles:
            return passed(joined(found.evidence, f"not needed: {here.never_compiles}"))
        return found

    return judged


CHECKS: dict[str, Check] = {
    "python": host.python,
    "python headers": to_compile(host.python_headers),
    "system": host.system,
    "settings": host.settings_values,
    "variable names": host.misspelt_variables,
    "kept-away variables": host.kept_away_variables,
    "compiler": to_compile(host.compiler),
    "c++ runtime": to_compile(host.runtime),
    "launcher": to_compile(host.launcher),
    "ninja": host.ninja,
    "torch": torch_side.version,
    "torch devices": torch_side.devices,
    "torch libraries": torch_side.libraries,
    "torch c++ abi": torch_side.cxx_abi,
    "openmp": torch_side.openmp,
    "cuda toolkit": to_compile(devices.cuda_toolkit),
    "nvcc host compiler": to_compile(devices.nvcc_host_compiler),
    "cuda driver": devices.cuda_driver,
    "cuda arch list": devices.cuda_arch_list,
    "cuda gpus": devices.cuda_gpus,
    "rocm": to_compile(devices.rocm_toolkit),
    "rocm gpus": devices.rocm_gpus,
    "sycl": to_compile(devices.sycl_toolkit),
    "sycl device": devices.sycl_device,
    "accelerator": devices.accelerator,
    "ops": ops.ops,
    "prebuilt": ops.prebuilt,
    "store": store.place,
    "store owner": store.owner,
    "store mode": store.mode,
    "store space": store.space,
    "store inodes": store.inodes,
    "store noexec": store.noexec,
    "store layers": store.layers,
    "store clock": store.clock,
    "store leftovers": store.leftovers,
    "remote tiers": store.remotes,
    "tmpdir": places.tmpdir,
    "tmpdir noexec": places.tmpdir_noexec,
    "tmpdir space": places.tmpdir_space,
    "shared memory": places.shared_memory,
    "cpus": places.budget_cpus,
    "memory": places.budget_memory,
    "budget": places.budget_sharing,
}

BUILDS: dict[str, Check] = {
    "self-check cpu": selfcheck.cpu,
    "self-check torch": selfcheck.torch,
    "self-check cuda": selfcheck.cuda,
    "self-check rocm": selfcheck.rocm,
    "self-check xpu": selfcheck.xpu,
}


def examine(*, build: bool = True) -> Iterator[Finding]:
    """Run every check in turn; with ``build``, the self-check last. Never raises."""
    here = Here()
    for name, check in (CHECKS | (BUILDS if build else {})).items():
        yield Finding(name, *outcome(check, here))


def outcome(check: Check, here: Here) -> Outcome:
    """The outcome of a check. If a check raises, that is a failure, too."""
    try:
        return check(here)
    except SettingError as error:
        return skipped(f"not possible while {error.what}")  # `settings` reports that
    except OpkilnError as error:
        return failed(joined(error.what, *error.why.splitlines()), copyable(error.hint))
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}")
