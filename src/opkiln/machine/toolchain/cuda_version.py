"""The rule by which a CUDA toolkit fits a torch, its errors, and DeepSpeed's names for it.

Versions with the same CUDA major are compatible, others are not. The functions that DeepSpeed's op
builders call are here under their names, on top of the same rule. Nothing here imports torch: its
CUDA version is read from its files.
"""

from __future__ import annotations

from opkiln.errors import CUDAMismatchException, MissingCUDAException, ToolchainError
from opkiln.machine.toolchain import find, toolkits, torch_sdk
from opkiln.machine.toolchain.torch_sdk import release
from opkiln.settings import origin_of, settings


def misfit(version: str, torch_cuda: str | None) -> str:
    """Why a toolkit of this version cannot build for this torch; empty when it can."""
    reason = find.misfit("CUDA", version, torch_cuda)
    return "" if reason and settings.skip_cuda_check else reason


def install_command(version: str) -> str:
    """The command that installs a toolkit of this version; of any version if it is empty."""
    if not version:
        return "pip install 'opkiln[cuda]'"
    major, minor = release(version)
    if major < 13:  # the wheels of CUDA 12 and older do not contain nvcc
        return f"conda install -c nvidia cuda-toolkit={major}.{minor}"
    # cuda-toolkit pins all its parts. nvcc's own wheel accepts any release of its parts, and ptxas
    # 13.0 does not read what cicc 13.4 writes.
    return f"pip install 'cuda-toolkit[nvcc,cccl,cudart]=={major}.{minor}.*'"


def missing_error(torch_cuda: str | None) -> MissingCUDAException:
    """The error if no toolkit was found."""
    named, origin = origin_of("cuda_home")
    if named:
        what, hint = f"{origin}={named} has no CUDA toolkit", f"unset {origin}"
    else:
        what, hint = "no CUDA toolkit is installed", "pip install 'opkiln[cuda]'"
        if torch_cuda is not None and release(torch_cuda)[0] < 13:
            # The extra would install another major version, which is refused.
            hint = install_command(torch_cuda)
    return MissingCUDAException(what, why=toolkits.list_searched(), hint=hint)


def mismatch_error(torch_cuda: str, why: str) -> CUDAMismatchException:
    """The error if all toolkits have another major version than torch."""
    named, origin = origin_of("cuda_home")
    fix = f"unset {origin}" if named else install_command(torch_cuda)
    return CUDAMismatchException(
        f"no CUDA toolkit here fits torch, which was built with CUDA {torch_cuda}",
        why=why,
        hint=f"{fix}    (or DS_SKIP_CUDA_CHECK=1, at your own risk)",
    )


# The names that DeepSpeed's op builders know


def installed_cuda_version(name: str = "", *, memory: tuple[str, ...] = ()) -> tuple[int, int]:
    """(major, minor) of the toolkit that is nearest to torch's CUDA, even if it does not fit.
    ``name`` is the op, for the error. Raises MissingCUDAException."""
    return _nearest_toolkit(name, memory).release


def assert_no_cuda_mismatch(name: str = "", *, memory: tuple[str, ...] = ()) -> bool:
    """True if a toolkit's CUDA fits torch's, or torch has no CUDA.

    ``name`` is the op, for the error. Raises CUDAMismatchException, MissingCUDAException.
    """
    toolkit, torch_cuda = _nearest_toolkit(name, memory), _torch_cuda()
    reason = misfit(toolkit.record["version"], torch_cuda)
    if reason and torch_cuda is not None:
        why = f"{toolkit.label} ({toolkit.place.origin}): {reason}"
        raise _name_op(name, mismatch_error(torch_cuda, why))
    return True


def get_default_compute_capabilities(*, memory: tuple[str, ...] = ()) -> str:
    """Every architecture that the toolkit's nvcc lists, as ``7.5;8.0;8.6``.

    Raises MissingCUDAException.
    """
    return ";".join(_nearest_toolkit("", memory).record["archs"])


# By major version of CUDA: the releases that fit each other, as DeepSpeed's table of this name.
# Every minor release fits the others of its major version.
cuda_minor_mismatch_ok = {
    major: [f"{major}.{minor}" for minor in range(20)] for major in range(1, 40)
}


def _torch_cuda() -> str | None:
    sdk = torch_sdk.find()
    return None if sdk is None else sdk.cuda


def _nearest_toolkit(name: str, memory: tuple[str, ...]) -> toolkits.Toolkit:
    torch_cuda = _torch_cuda()
    hosts = (each.path for each in find.cxx_candidates() if not each.refused)
    found = toolkits.list_toolkits(memory, next(hosts, ""), ask=True) or []
    works = [each for each in found if not each.record["refused"]]
    if not works:
        error = missing_error(torch_cuda)
        refused = [find.Compiler(each.label, each.place.origin, each.record["refused"])
                   for each in found]  # fmt: skip
        error.why = find.list_refusals(refused) or error.why
        raise _name_op(name, error)
    return min(works, key=lambda each: find.distance(each.record["version"], torch_cuda))


def _name_op(name: str, error: ToolchainError) -> ToolchainError:
    error.what = f"op {name}: {error.what}" if name else error.what
    return error
