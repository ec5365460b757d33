"""``prebuilt-load``: as ``warm-load``, but of an op that a wheel was installed with.

The wheel has cpu_adam for this CPU; nothing may be compiled, and the store is empty.
"""

from __future__ import annotations

import os
import sys

from children import Caches, Workspace, finish, load
from measured import Failure, Row

from measure import Options, warm_load
from measure.warm_load import FLOOR, OPKILN, Times, overhead, sample_of

NAME = "prebuilt-load"
WHO = {OPKILN: "opkiln", FLOOR: "floor: load_library"}
WHAT = {OPKILN: "cpu_adam of a wheel", FLOOR: "the same file"}


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """Import, load and both together, and the load beyond the bare one."""
    try:
        caches = installed(workspace)
        times = _measure(options, caches)
    except Failure as failure:
        return [Row(NAME, "opkiln", "cpu_adam of a wheel", None, str(failure))]
    table: list[Row] = []
    for peer, who in WHO.items():
        table += [
            Row(NAME, who, "import", sample_of(times[peer], "import")),
            Row(NAME, who, f"load ({WHAT[peer]})", sample_of(times[peer], "load")),
        ]
    return table + overhead(NAME, times, warm_load.loaded_library(caches))


def installed(workspace: Workspace) -> Caches:
    """Caches of their own, which are empty, with the wheel on the path. Raises Failure."""
    out, site = workspace.root / "wheel", workspace.root / "wheel-site"
    build = ["-m", "opkiln", "build", "cpu_adam", "--target", "cpu", "--wheel", str(out)]
    finish([sys.executable, *build], workspace.warm)
    (wheel,) = out.glob("*.whl")
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--upgrade"]
    finish([sys.executable, *pip, "--target", str(site), str(wheel)], workspace.warm)
    before = workspace.warm.environment().get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [str(site), before]))
    added = {**workspace.warm.added, "PYTHONPATH": path, "OPKILN_MODE": "cached"}
    return Caches(workspace.root / "prebuilt", added)


def _measure(options: Options, caches: Caches) -> Times:
    for peer in WHO:  # the first notes its file for the second; bytecode written, pages cached
        load(peer, caches)
    path = warm_load.loaded_library(caches)
    if "opkiln_prebuilt" not in path.parts:
        raise Failure(f"{path.name} was not loaded from the wheel")
    times: Times = {peer: [] for peer in WHO}
    for _ in range(options.times(11, 3)):
        for peer, taken in times.items():
            taken.append(load(peer, caches))
    return times
