"""``deepspeed-on-opkiln``: ``CPUAdamBuilder().load()`` of DeepSpeed, by itself and on opkiln.

Fresh processes that have torch. Cold is the first load with empty caches; warm ones take turns.
"""

from __future__ import annotations

from children import Workspace, load
from measured import Bar, Failure, Row, Sample

from measure import Options

NAME = "deepspeed-on-opkiln"
ALONE, ON_OPKILN = "deepspeed_cpu_adam", "deepspeed_on_opkiln"
WHO = {ALONE: "DeepSpeed", ON_OPKILN: "opkiln: DeepSpeed on it"}
COLD, WARM = 1 / 10, 1 / 100


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """Cold and warm loads of both, with the bars on opkiln's share of DeepSpeed's time."""
    try:
        cold = {ALONE: _cold_alone(workspace), ON_OPKILN: _cold(options, workspace)}
        warm = _warm(options, workspace)
    except Failure as failure:
        return [Row(NAME, "all", "cpu_adam", None, str(failure))]
    return [*_pair("cold load", cold, COLD), *_pair("warm load", warm, WARM)]


def _cold_alone(workspace: Workspace) -> Sample:
    """Once: it takes a minute. The run's first load was one, where the caches were empty then."""
    fresh = workspace.fresh
    taken = workspace.first_load(ALONE) if fresh else workspace.cold_load(ALONE)
    return Sample((taken["load"],), "s")


def _cold(options: Options, workspace: Workspace) -> Sample:
    taken = [workspace.cold_load(ON_OPKILN)["load"] for _ in range(options.times(3, 1))]
    return Sample(tuple(taken), "s")


def _warm(options: Options, workspace: Workspace) -> dict[str, Sample]:
    for peer in WHO:
        workspace.first_load(peer)
        load(peer, workspace.warm)  # once more: bytecode written, pages cached
    repeats = {ALONE: options.times(3, 1), ON_OPKILN: options.times(11, 3)}
    times: dict[str, list[float]] = {peer: [] for peer in WHO}
    for turn in range(max(repeats.values())):
        for peer in WHO:
            if turn < repeats[peer]:
                times[peer].append(load(peer, workspace.warm)["load"] * 1e3)
    return {peer: Sample(tuple(taken), "ms") for peer, taken in times.items()}


def _pair(what: str, samples: dict[str, Sample], share: float) -> list[Row]:
    ratio = samples[ON_OPKILN].median / samples[ALONE].median
    bar = Bar(share, ratio, f"<= 1/{round(1 / share)}")
    return [
        Row(NAME, WHO[ON_OPKILN], f"cpu_adam, {what}", samples[ON_OPKILN]),
        Row(NAME, WHO[ALONE], f"cpu_adam, {what}", samples[ALONE], ratio=ratio, bar=bar),
    ]
