"""Whether a library's device code runs on the GPUs that are here, and how well."""

from __future__ import annotations

from opkiln.loading import archs
from opkiln.loading.fit import Fit
from opkiln.model import CUDA
from opkiln.toolchain import torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from opkiln.loading.loader import Op

_WAYS = ("exact", "binary", "generic", "ptx")  # the best first


def judge(op: Op, manifest: Mapping[str, Any]) -> Fit:
    """The rank, or why no device here runs it. Raises what ``loading.archs.wanted`` does."""
    target, images = manifest["target"], tuple(manifest["needs"]["images"])
    made = ";".join(target["archs"])
    if not archs.known(op.spec.backend, tuple(target["archs"]), images):
        return Fit(f"its code is for {made}, which this opkiln does not know")
    if not archs.kept(op, tuple(target["archs"])):
        return Fit(f"it is for {made}, of which the op's filter keeps less")
    way, device = archs.way_of(op, tuple(target["archs"]), images)
    if not way:
        return Fit(f"its code is for {made}, which does not run on {device}")
    if op.spec.backend == CUDA and (reason := _old_driver(manifest["toolchain"], way)):
        return Fit(reason)
    return Fit("", (_WAYS.index(way), len(target["archs"]), -len(manifest["needs"]["cpu"])))


def _old_driver(toolchain: Mapping[str, str], way: str) -> str:
    """The driver must know the runtime in the library; translating PTX takes one as new as it."""
    from opkiln.accelerator import nvidia

    made = toolchain.get("nvcc", "")
    driver = nvidia.devices(archs.memory()).cuda
    if not driver or not made:
        return ""
    here, needs = torch_sdk.release(driver), torch_sdk.release(made)
    if here[0] < needs[0]:
        return f"it is built with CUDA {made}, and the driver here takes CUDA up to {driver}"
    if way == "ptx" and here < needs:
        return (
            f"only its PTX fits the GPU, which is of CUDA {made}, and the driver here takes PTX "
            f"up to CUDA {driver}"
        )
    return ""
