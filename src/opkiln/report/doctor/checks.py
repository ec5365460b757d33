"""All checks, in the order in which a person would look, and the loop that runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from opkiln.decision import terms
from opkiln.report.doctor import devices, directories, host, ops, selfcheck, torch_side
from opkiln.report.doctor.terms import (
    FAIL,
    PASS,
    SKIP,
    WARN,
    Check,
    Diagnosis,
    Facts,
    join,
    passed,
    run_check,
)
from opkiln.report.layout import columns, count, paint


def compile_check(check: Check) -> Check:
    """A check of something that only compiling needs. It passes if nothing may be compiled."""

    def check_or_pass(here: Facts) -> Diagnosis:
        found = check(here)
        if found.verdict in (WARN, FAIL) and (never := terms.never_compiles()):
            return passed(join(found.evidence, f"not needed: {never}"))
        return found

    return check_or_pass


CHECKS: dict[str, Check] = {
    "python": host.python,
    "python headers": compile_check(host.python_headers),
    "system": host.system,
    "settings": host.settings_values,
    "variable names": host.misspelt_variables,
    "kept-away variables": host.kept_away_variables,
    "compiler": compile_check(host.compiler),
    "c++ runtime": compile_check(host.runtime),
    "launcher": compile_check(host.launcher),
    "ninja": host.ninja,
    "torch": torch_side.version,
    "torch devices": torch_side.devices,
    "torch libraries": torch_side.libraries,
    "torch c++ abi": torch_side.cxx_abi,
    "openmp": torch_side.openmp,
    "cuda toolkit": compile_check(devices.cuda_toolkit),
    "nvcc host compiler": compile_check(devices.nvcc_host_compiler),
    "cuda driver": devices.cuda_driver,
    "cuda arch list": devices.cuda_arch_list,
    "cuda gpus": devices.cuda_gpus,
    "rocm": compile_check(devices.rocm_toolkit),
    "rocm gpus": devices.rocm_gpus,
    "sycl": compile_check(devices.sycl_toolkit),
    "sycl device": devices.sycl_device,
    "accelerator": devices.accelerator,
    "ops": ops.ops,
    "prebuilt": ops.prebuilt,
    "store": directories.place,
    "store owner": directories.owner,
    "store mode": directories.mode,
    "store space": directories.space,
    "store inodes": directories.inodes,
    "store noexec": directories.noexec,
    "store layers": directories.layers,
    "store clock": directories.clock,
    "store leftovers": directories.leftovers,
    "remote tiers": directories.remotes,
    "tmpdir": directories.tmpdir,
    "tmpdir noexec": directories.tmpdir_noexec,
    "tmpdir space": directories.tmpdir_space,
    "shared memory": directories.shared_memory,
    "cpus": host.budget_cpus,
    "memory": host.budget_memory,
    "budget": host.budget_sharing,
}

BUILDS: dict[str, Check] = {
    "self-check cpu": selfcheck.cpu,
    "self-check torch": selfcheck.torch,
    "self-check cuda": selfcheck.cuda,
    "self-check rocm": selfcheck.rocm,
    "self-check xpu": selfcheck.xpu,
}


def examine(*, build: bool = True) -> Iterator[tuple[str, Diagnosis]]:
    """Run every check in turn; with ``build``, the self-check last. Never raises."""
    here = Facts()
    for name, check in (CHECKS | (BUILDS if build else {})).items():
        yield name, run_check(check, here)


# As text: one line for each diagnosis, and below it the command that fixes the fault

_LOOKS = {PASS: "good", SKIP: "weak", WARN: "strong", FAIL: "bad"}


def line(check: str, found: Diagnosis, names: Iterable[str], *, width: int | None = None) -> str:
    """One diagnosis. ``names`` are those of all checks: they give the width of the column.

    With a ``width``, the evidence is wrapped. The command is not, so that it can be copied.
    """
    longest = max(map(len, names))
    verdict = paint(found.verdict, _LOOKS[found.verdict])
    shown = columns([(verdict, check.ljust(longest), found.evidence)], width=width)
    if not found.command:
        return shown
    return f"{shown}\n{'':<{longest + 8}}{paint('fix:', 'strong')} {found.command}"


def worst(verdicts: Collection[str]) -> str:
    """The worst verdict. A skipped check is not a fault: it counts as PASS."""
    return next((verdict for verdict in (FAIL, WARN) if verdict in verdicts), PASS)


def summary(verdicts: Iterable[str]) -> str:
    """The number of checks with each verdict."""
    number = Counter(verdicts)
    failures, warnings = count(number[FAIL], "failure"), count(number[WARN], "warning")
    return f"{failures}, {warnings}, {number[PASS]} passed, {number[SKIP]} skipped"
